"""Measures of a run, from its records alone.

`A[i][j]` is the accuracy on task j after task i. Forgetting here is -BWT (accuracy lost since a
task was learnt); papers that take the best earlier accuracy instead report other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everfed.errors import EverfedError

Record = dict[str, Any]
Matrix = np.ndarray


def matrix(records: Iterable[Record], metric: str = "accuracy", tasks: int = 0) -> Matrix:
    """`A[i][j]` from the evaluations at the tasks' ends; NaN where there was none, or none yet in a
    run of so many `tasks` (those that are to come may not be tested on).

    >>> matrix([{"metric": "accuracy", "task": 0, "on": 0, "value": 0.9, "end": True}])
    array([[0.9]])
    """
    ends = [r for r in records if r["metric"] == metric and r.get("end")]
    size = max([tasks if ends else 0, *(1 + max(r["task"], r["on"]) for r in ends)])
    out = np.full((size, size), np.nan)
    for r in ends:
        out[r["task"], r["on"]] = math.nan if r["value"] is None else r["value"]
    return out


def acc(a: Matrix) -> float:
    """Mean accuracy over all tasks after the last one."""
    return float(np.mean(a[-1])) if len(a) else math.nan


def _changes(a: Matrix) -> np.ndarray:
    """What became of each task but the last: `A[K][i] - A[i][i]`."""
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


def prequential(a: Matrix) -> float:
    """Mean accuracy on each task but the first before it was trained on: first tested, then
    trained, as it is for forecasts. NaN with a single task.

    >>> prequential(np.array([[0.9, 0.5, 0.4], [0.8, 0.9, 0.7], [0.7, 0.8, 0.9]]))
    0.6
    """
    return float(np.mean(np.diag(a, 1))) if len(a) > 1 else math.nan


def auc(scores: np.ndarray, y: np.ndarray) -> float:
    """The share of pairs of a positive and a negative sample in which the positive one has the
    higher score; equal scores count half.

    >>> round(auc(np.array([.9, .4, .4, .3, .1]), np.array([1, 1, 0, 0, 0])), 6)
    0.916667
    """
    positive = y > 0
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return math.nan
    _, which, counts = np.unique(_told(scores), return_inverse=True, return_counts=True)
    places = (np.cumsum(counts) - (counts - 1) / 2)[which]  # equal scores share the middle place
    return float((places[positive].sum() - n * (n + 1) / 2) / (n * m))


def _told(scores: np.ndarray) -> np.ndarray:
    """Scores of which those that are no numbers are below all others."""
    return np.where(np.isnan(scores), -np.inf, scores)


def ranks(scores: np.ndarray, y: np.ndarray, lists: np.ndarray) -> np.ndarray:
    """The place, from 1, of each list's positive sample among its candidates. Of equal scores it
    has the middle place: a model that cannot tell candidates apart is not first by accident.

    >>> ranks(np.array([.2, .9, .1, .5, .5]), np.array([1, 0, 0, 1, 0]), np.array([7, 7, 7, 8, 8]))
    array([2. , 1.5])
    """
    scores, best = _told(scores), np.flatnonzero(y > 0)
    known, which = np.unique(lists[best], return_inverse=True)
    if len(known) != len(best):
        raise EverfedError("every list of candidates needs exactly one positive sample")
    mark = np.empty(len(known))
    mark[which] = scores[best]
    others = np.flatnonzero((y <= 0) & np.isin(lists, known))
    row = np.searchsorted(known, lists[others])
    above = np.bincount(row[scores[others] > mark[row]], minlength=len(known))
    equal = np.bincount(row[scores[others] == mark[row]], minlength=len(known))
    return np.asarray(1 + above + equal / 2)


def hit_rate(places: np.ndarray, k: int) -> float:
    """HR@k: the share of lists whose positive sample is among the first k.

    >>> hit_rate(np.array([1, 3, 7, 12]), 5)
    0.5
    """
    return float(np.mean(places <= k))


def ndcg(places: np.ndarray, k: int) -> float:
    """NDCG@k of lists with one positive sample: the mean of 1 / log2(place + 1), 0 beyond k.

    (FedEve's paper prints the logarithm of the hit instead of the place.)

    >>> round(ndcg(np.array([1, 3, 7, 12]), 10), 6)
    0.458333
    """
    return float(np.mean(np.where(places <= k, 1 / np.log2(places + 1), 0)))


def ranking(scores: np.ndarray, y: np.ndarray, lists: np.ndarray) -> dict[str, float]:
    """All measures of candidates that were given scores."""
    places = ranks(scores, y, lists)
    at = {f"hr@{k}": hit_rate(places, k) for k in (5, 10)}
    return {"auc": auc(scores, y)} | at | {f"ndcg@{k}": ndcg(places, k) for k in (5, 10)}


def rounds_to_best(records: Iterable[Record], metric: str = "accuracy") -> float:
    """Rounds, summed over tasks, until a task's own accuracy was first at its maximum in that task.

    >>> curve = [{"task": 0, "on": 0, "metric": "accuracy", "round": t, "value": v}
    ...          for t, v in enumerate((.5, .7, .7, .6))]
    >>> rounds_to_best(curve)
    2.0
    """
    first: dict[int, int] = {}
    best: dict[int, tuple[float, int]] = {}
    for r in records:
        task, at = r["task"], r["round"]
        first[task] = min(at, first.get(task, at))
        own = r["metric"] == metric and r.get("on") == task and not r.get("end")
        if own and r["value"] is not None and (task not in best or r["value"] > best[task][0]):
            best[task] = (r["value"], at)
    return float(sum(at - first[task] + 1 for task, (_, at) in best.items())) or math.nan


@dataclass(frozen=True)
class Drift:
    """The drift meters of some rounds, as medians; NaN where they were not recorded."""

    period: float  #: how far the mean update turns from round to round: 0 not, 1 a right angle
    sampling: float  #: the turn that drawing clients at random explains, 1 / signal to noise
    client: float  #: share of the clients' updates that cancels in their mean
    signal: float  #: signal to noise of the mean update
    effective: float  #: equal clients that would say as much
    norm: float  #: length of the mean update

    def __str__(self) -> str:
        clients = f"{self.effective:.1f} effective clients"
        if math.isnan(self.signal):
            return f"rounds turn by {self.period:.2f}, {clients}"
        turn = f"rounds turn by {self.period:.2f} ({self.sampling:.2f} explained by sampling)"
        return (
            f"{turn}, {self.client:.2f} of clients' updates is their own, "
            f"signal to noise {self.signal:.2g}, {clients}"
        )


def drift(records: Iterable[Record], since: int = 0) -> Drift | None:
    """What the drift meters say from round `since` on; None where no turn was recorded.

    >>> found = drift([{"metric": "drift_period", "round": t, "value": t / 10} for t in (1, 2, 3)])
    >>> found.period
    0.2
    """
    names = ("drift_period", "signal_to_noise", "drift_client", "effective_clients", "update_norm")
    found: dict[str, list[float]] = {name: [] for name in names}
    for r in records:
        if r["metric"] in found and r["value"] is not None and r["round"] >= since:
            found[r["metric"]].append(r["value"])
    period, signal, client, effective, norm = (
        float(np.median(found[name])) if found[name] else math.nan for name in names
    )
    if math.isnan(period):
        return None
    return Drift(period, explained(signal), client, signal, effective, norm)


def explained(signal: float) -> float:
    """How far the mean updates of cohorts that are drawn at random turn, at a signal to noise.

    >>> explained(4.0), explained(0.5)
    (0.25, 1.0)
    """
    return 1 / max(1.0, signal) if signal == signal else math.nan


@dataclass(frozen=True)
class Summary:
    """One run in numbers."""

    acc: float  #: mean accuracy over all tasks at the end
    bwt: float  #: backward transfer
    forgetting: float  #: -BWT
    worst_drop: float  #: on one earlier task
    rounds_to_best: float  #: summed over tasks
    seconds: float  #: of all rounds, with their tests
    seconds_per_round: float  #: mean, with tests
    mb_sent: float  #: to and from clients
    client_mb: float  #: the most that one client held: model, what comes with it, what it keeps
    memory_mb: float  #: the most that one client kept of samples
    peak_mb: float  #: the most memory that the process (or the GPU) held
    dropped_updates: int  #: clients' updates that could not be used
    lost_rounds: int  #: rounds without any usable update
    empty_clients: int  #: times that a client in a cohort had no samples
    auc: float = math.nan  #: of ranked candidates: area under the curve, mean over tasks
    hr_5: float = math.nan  #: the share of lists whose item is among the first 5
    hr_10: float = math.nan  #: among the first 10
    ndcg_5: float = math.nan  #: the same, weighed by place
    ndcg_10: float = math.nan  #: among the first 10


def summarise(records: Sequence[Record], tasks: int = 0) -> Summary:
    """The measures of one run, of so many tasks in all where that is known."""
    a = matrix(records, tasks=tasks)

    def total(metric: str) -> float:
        return float(sum(r["value"] or 0 for r in records if r["metric"] == metric))

    def most(metric: str, key: str = "value") -> float:
        known = [r.get(key) for r in records if r["metric"] == metric]
        return max((float(v) for v in known if v is not None), default=math.nan)

    rounds = sum(r["metric"] == "seconds" for r in records)

    return Summary(
        acc=acc(a),
        bwt=bwt(a),
        forgetting=forgetting(a),
        worst_drop=worst_drop(a),
        rounds_to_best=rounds_to_best(records),
        seconds=total("seconds"),
        seconds_per_round=total("seconds") / rounds if rounds else math.nan,
        mb_sent=total("mb_down") + total("mb_up"),
        client_mb=most("client_mb"),
        memory_mb=most("memory_mb"),
        peak_mb=most("seconds", "peak_mb"),
        dropped_updates=int(total("dropped_updates")),
        lost_rounds=int(total("lost_round")),
        empty_clients=int(total("empty_clients")),
        auc=acc(matrix(records, "auc", tasks)),
        hr_5=acc(matrix(records, "hr@5", tasks)),
        hr_10=acc(matrix(records, "hr@10", tasks)),
        ndcg_5=acc(matrix(records, "ndcg@5", tasks)),
        ndcg_10=acc(matrix(records, "ndcg@10", tasks)),
    )
