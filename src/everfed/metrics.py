"""Measures of a run, from its records alone.

A[i][j] is the accuracy on task j after task i. Forgetting here is -BWT (accuracy lost since a task
was learnt); papers that take the best earlier accuracy instead report other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = dict[str, Any]
Matrix = np.ndarray


def matrix(records: Iterable[Record], metric: str = "accuracy") -> Matrix:
    """A[i][j] from the evaluations at the tasks' ends; NaN where there was none.

    >>> matrix([{"metric": "accuracy", "task": 0, "on": 0, "value": 0.9, "end": True}])
    array([[0.9]])
    """
    ends = [r for r in records if r["metric"] == metric and r.get("end")]
    size = 1 + max((max(r["task"], r["on"]) for r in ends), default=-1)
    out = np.full((size, size), np.nan)
    for r in ends:
        out[r["task"], r["on"]] = r["value"]
    return out


def acc(a: Matrix) -> float:
    """Mean accuracy over all tasks after the last one."""
    return float(np.mean(a[-1])) if len(a) else math.nan


def _changes(a: Matrix) -> np.ndarray:
    """What became of each task but the last: A[K][i] - A[i][i]."""
    return a[-1, :-1] - np.diag(a)[:-1]


def bwt(a: Matrix) -> float:
    """Backward transfer; NaN with a single task."""
    return float(np.mean(_changes(a))) if len(a) > 1 else math.nan


def forgetting(a: Matrix) -> float:
    """Accuracy lost on earlier tasks: -BWT."""
    return -bwt(a)


def worst_drop(a: Matrix) -> float:
    """The largest loss of accuracy on one earlier task (negative)."""
    return float(np.min(_changes(a))) if len(a) > 1 else math.nan


def rounds_to_best(curves: Sequence[Sequence[float]]) -> int:
    """Rounds, summed over tasks, until a task's accuracy was first at its maximum in that task.

    >>> rounds_to_best([(.5, .7, .7, .6), (.2, .4, .3, .5)])
    6
    """
    return sum(int(np.argmax(curve)) + 1 for curve in curves)


def curves(records: Iterable[Record], metric: str = "accuracy") -> list[list[float]]:
    """For each task, its own test accuracy over its own rounds."""
    out: dict[int, list[float]] = {}
    for r in records:
        if r["metric"] == metric and r.get("on") == r["task"] and not r.get("end"):
            out.setdefault(r["task"], []).append(r["value"])
    return [out[task] for task in sorted(out)]


@dataclass(frozen=True)
class Summary:
    """One run in numbers."""

    acc: float
    bwt: float
    forgetting: float
    worst_drop: float
    rounds_to_best: float
    seconds: float
    mb_sent: float
    dropped_updates: int
    lost_rounds: int
    empty_clients: int


def summarise(records: Sequence[Record]) -> Summary:
    """The measures of one run."""
    a = matrix(records)

    def total(metric: str) -> float:
        return float(sum(r["value"] for r in records if r["metric"] == metric))

    return Summary(
        acc=acc(a),
        bwt=bwt(a),
        forgetting=forgetting(a),
        worst_drop=worst_drop(a),
        rounds_to_best=rounds_to_best(curves(records)) or math.nan,
        seconds=total("seconds"),
        mb_sent=total("mb_down") + total("mb_up"),
        dropped_updates=int(total("dropped_updates")),
        lost_rounds=int(total("lost_round")),
        empty_clients=int(total("empty_clients")),
    )
