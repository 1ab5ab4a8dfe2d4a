"""Splits of labelled samples over clients."""

from __future__ import annotations

import numpy as np

from everfed.chance import rng
from everfed.errors import EverfedError


def split(
    labels: np.ndarray, parts: int, alpha: float | None, seed: int, purpose_id: int = 0
) -> list[np.ndarray]:
    """Disjoint positions that cover all labels: equal random parts, or Dirichlet label skew."""
    if len(labels) < parts:
        raise EverfedError(f"{len(labels)} samples cannot be split over {parts} clients")
    random = rng(seed, "split", purpose_id)
    if alpha is None or np.isinf(alpha):
        return [np.sort(p) for p in np.array_split(random.permutation(len(labels)), parts)]
    return dirichlet(labels, parts, alpha, random)


def dirichlet(
    labels: np.ndarray, parts: int, alpha: float, random: np.random.Generator
) -> list[np.ndarray]:
    """Every class is spread over the parts by a draw from a symmetric Dirichlet(alpha).

    The draw is repeated until no part is empty; where that does not come about (few samples, tiny
    alpha) the largest part gives one sample to each empty one.
    """
    if alpha <= 0:
        raise EverfedError(f"alpha must be above 0, not {alpha}")
    by_class = [random.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    for _ in range(100):
        # in log space: for a tiny alpha every gamma draw may underflow to 0
        shares = _dirichlet_rows(len(by_class), parts, alpha, random)
        owner = np.empty(len(labels), dtype=np.int64)
        for ids, share in zip(by_class, shares, strict=True):
            cuts = np.rint(np.cumsum(share)[:-1] * len(ids)).astype(int)
            owner[ids] = np.searchsorted(cuts, np.arange(len(ids)), side="right")
        sizes = np.bincount(owner, minlength=parts)
        if sizes.min() > 0:
            break
    for part in np.flatnonzero(sizes == 0):
        largest = np.bincount(owner, minlength=parts).argmax()
        owner[random.choice(np.flatnonzero(owner == largest))] = part
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=parts))[:-1])


def _dirichlet_rows(rows: int, parts: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    """Dirichlet draws by log-gammas: log G(a) = log G(a + 1) + log(U) / a."""
    logs = np.log(random.gamma(alpha + 1, size=(rows, parts)))
    logs += np.log(random.random((rows, parts))) / alpha
    weights = np.exp(logs - logs.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))
