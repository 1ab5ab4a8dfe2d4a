"""Counts of labels: who holds what, as numbers for records, plots and estimates."""

from __future__ import annotations

from typing import Any

import numpy as np

from everfed.data.table import Data
from everfed.streams.stream import Stream

#: clients, and numbers of single clients, that a round's record of labels may hold
CLIENTS, NUMBERS = 32, 320


def counts(data: Data, ids: np.ndarray) -> np.ndarray:
    """Samples of each class; of all together where labels are not classes."""
    if not data.classes or data.y.dim() > 1:
        return np.array([len(ids)])
    return np.bincount(data.y.numpy()[np.asarray(ids, np.int64)], minlength=data.classes)


def tally(stream: Stream, ids: np.ndarray) -> np.ndarray:
    """Samples of each class, or of each domain where the stream counts those."""
    data = stream.data
    if stream.counted == "class" or data.task is None:
        return counts(data, ids)
    return np.bincount(data.task[ids], minlength=len(data.tasks))


def held(stream: Stream, cohort: list[int], round_: int) -> dict[str, Any]:
    """The cohort's label counts for a record: of all its clients together and, so that records
    stay small, of single ones only with the lowest ids."""
    total = np.zeros(1, dtype=np.int64)
    single: dict[str, dict[str, int]] = {}
    for client in cohort:
        own = counts(stream.data, stream.samples(client, round_))
        total = total + own
        if client < max(1, min(CLIENTS, NUMBERS // len(own))):
            single[str(client)] = _sparse(own)
    return {"all": _sparse(total), "clients": single}


def _sparse(row: np.ndarray) -> dict[str, int]:
    return {str(k): n for k, n in enumerate(row.tolist()) if n}
