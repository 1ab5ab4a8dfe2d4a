"""What a stream does, before anything is trained: sizes, label skew, drift of labels and inputs.

All numbers are estimates from the training samples of the clients and rounds looked at:

    label skew      mean over clients of TV(p_i, p), of a client's labels and all clients' labels
    label drift     TV(p, p') and JS(p, p') of all clients' labels, this task's and the one before
    round drift     mean of TV(p, p') of all clients' labels, in consecutive moments of a task
    client drift    mean over clients of TV(p_i, p_i') of consecutive data sets, beginning with the
                    last of the task before
    input drift     |m - m'| / sqrt(tr S): distance of mean inputs, this task's and the one before,
                    over the root of the inputs' total variance within a task; what sampling alone
                    adds to the squared distance is subtracted

Of cohorts as a run would draw them (`cohorts`):

    period drift    mean of TV(p, p') of the labels of consecutive rounds' cohorts
    client drift    mean of TV(p_i, p) of a client's labels and its cohort's

TV is the total variation distance (0 equal, 1 disjoint), JS the Jensen-Shannon divergence in bits.
Finite samples alone give a TV above 0: `chance` is its mean over draws of the same sizes from one
common distribution. In a stream that mixes domains (`Stream.counted`), labels are domains here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from everfed.chance import rng
from everfed.round import draw_cohort
from everfed.streams.labels import tally
from everfed.streams.stream import Stream

#: clients, moments and (for inputs) samples of a task that are looked at
CLIENTS, MOMENTS, SAMPLES = 200, 120, 2000
#: draws for what chance gives: of a whole task, and of each of many clients
DRAWS, FEW = 20, 3


@dataclass(frozen=True)
class Estimate:
    """A distance, and what chance alone gives; NaN where there is nothing to compare."""

    value: float = math.nan
    chance: float = math.nan


@dataclass(frozen=True)
class Task:
    """One task's numbers."""

    name: str
    rounds: int
    moments: int  #: rounds looked at, in which some client's data are new
    samples: float  #: of all clients, mean over moments
    sizes: tuple[float, float, float]  #: least, median, most samples of a client
    skew: Estimate
    labels: Estimate  #: TV to the task before
    js: float
    round: Estimate  #: TV of consecutive moments
    client: Estimate
    inputs: float


@dataclass(frozen=True)
class Cohorts:
    """The labels of the first rounds' cohorts."""

    size: float  #: clients in a cohort, mean
    period: Estimate
    client: Estimate

    def __str__(self) -> str:
        return (
            f"Cohorts of {self.size:.3g}. Period drift: the labels of one round's cohort and the "
            f"next differ by {self.period.value:.2f} ({self.period.chance:.2f}). Client drift: a "
            f"client's labels differ from its cohort's by {self.client.value:.2f} "
            f"({self.client.chance:.2f})."
        )


@dataclass(frozen=True)
class Look:
    """What was seen of a stream."""

    tasks: list[Task]
    rounds: list[int]  #: the moments
    clients: list[int]
    held: np.ndarray  #: (moments, clients, classes or domains) samples
    names: list[str]  #: of the classes or domains
    counted: str  #: "class" or "domain"
    times: list[int]  #: rounds in which it was asked who is online
    there: np.ndarray  #: (times, clients), whether

    @property
    def classes(self) -> bool:
        """Whether labels are classes."""
        return bool(self.held.shape[2] > 1)

    @property
    def online(self) -> tuple[int, int]:
        """Least and most clients that are there."""
        count = self.there.sum(1)
        return int(count.min()), int(count.max())


def look(stream: Stream, seed: int) -> Look:
    """Look at a stream of one seed."""
    stream = stream.seeded(seed)
    clients = _some(stream.clients, CLIENTS)
    times = _some(stream.rounds, 10 * MOMENTS)
    there = np.array([_there(stream, clients, at) for at in times])
    moments = _moments(stream, clients, dict(zip(times, there, strict=True)))
    cache: dict[tuple[int, int], np.ndarray] = {}

    nothing = tally(stream, np.zeros(0, dtype=np.int64))

    def at(round_: int) -> list[np.ndarray]:
        """What each client holds; nothing, where it is not online."""
        out = []
        for client, online in zip(clients, _there(stream, clients, round_), strict=True):
            key = (client, stream.block(client, round_))
            if online and key not in cache:
                cache[key] = tally(stream, stream.samples(client, round_))
            out.append(cache[key] if online else nothing)
        return out

    held = np.array([at(round_) for round_ in moments])
    of_task = np.array([stream.task(round_) for round_ in moments])
    random = rng(seed, "look")
    tasks: list[Task] = []
    before: tuple[np.ndarray, np.ndarray | None] | None = None
    for k, name in enumerate(stream.tasks):
        mine = held[of_task == k]
        start = int(np.argmax(of_task == k))
        inputs = _inputs(stream, moments[start : start + len(mine)], clients)
        pooled = mine.sum((0, 1))
        sizes = mine.sum(2)
        sizes = sizes[sizes > 0] if sizes.any() else sizes.ravel()
        labels, js, moved = Estimate(), math.nan, math.nan
        if before is not None:
            labels = change(pooled, before[0], random)
            js = jensen_shannon(pooled, before[0])
            moved = shift(inputs, before[1])
        tasks.append(
            Task(
                name=name,
                rounds=stream.length(k),
                moments=len(mine),
                samples=float(mine.sum((1, 2)).mean()),
                sizes=(float(sizes.min()), float(np.median(sizes)), float(sizes.max())),
                skew=_skew(mine, random),
                labels=labels,
                js=js,
                round=_drift(mine.sum(1, keepdims=True), random),
                client=_drift(held[max(0, start - 1) : start + len(mine)], random),
                inputs=moved,
            )
        )
        before = pooled, inputs
    rows = stream.data.tasks if stream.counted == "domain" else range(held.shape[2])
    names = [str(row) for row in rows]
    return Look(
        tasks, [t + 1 for t in moments], clients, held, names, stream.counted,
        [t + 1 for t in times], there,
    )  # fmt: skip


def cohorts(stream: Stream, sample: int | None, seed: int, rounds: int = MOMENTS) -> Cohorts | None:
    """What the cohorts of a run's first rounds hold; None where labels are not classes."""
    stream = stream.seeded(seed)
    held = []
    for at in range(min(rounds, stream.rounds)):
        cohort, _ = draw_cohort(stream, stream.online(at), at, sample, seed)
        own = [tally(stream, stream.samples(client, at)) for client in cohort]
        held.append(np.array(own) if own else np.zeros((1, 1), dtype=np.int64))
    held = [own for own in held if own.shape[1] > 1 and own.sum()]
    if not held:
        return None
    most, random = max(map(len, held)), rng(seed, "cohorts")
    same = np.array([np.pad(own, ((0, most - len(own)), (0, 0))) for own in held])
    period = _drift(same.sum(1, keepdims=True), random, still=True)
    if math.isnan(period.value):  # a single round
        period = Estimate(0.0, 0.0)
    size = float(np.mean([(own.sum(1) > 0).sum() for own in held]))
    return Cohorts(size, period, _skew(same, random))


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Between two rows of counts, as distributions.

    >>> total_variation(np.array([1, 1, 0]), np.array([0, 2, 2]))
    0.5
    """
    return 0.5 * float(np.abs(a / a.sum() - b / b.sum()).sum())


def jensen_shannon(a: np.ndarray, b: np.ndarray) -> float:
    """Between two rows of counts, as distributions, in bits.

    >>> jensen_shannon(np.array([3, 0]), np.array([0, 5]))
    1.0
    """
    if len(a) < 2 or not a.sum() or not b.sum():
        return math.nan
    p, q = a / a.sum(), b / b.sum()
    middle = (p + q) / 2

    def relative(r: np.ndarray) -> float:
        known = r > 0
        return float((r[known] * np.log2(r[known] / middle[known])).sum())

    return (relative(p) + relative(q)) / 2


def shift(x: np.ndarray | None, before: np.ndarray | None) -> float:
    """The distance of two samples' means over the root of their total variance."""
    if x is None or before is None or min(len(x), len(before)) < 2:
        return math.nan
    n, m = len(x), len(before)
    variance = ((n - 1) * x.var(0, ddof=1).sum() + (m - 1) * before.var(0, ddof=1).sum()) / (
        n + m - 2
    )
    if variance <= 0:
        return math.nan
    gap = float(((x.mean(0) - before.mean(0)) ** 2).sum() / variance)
    return math.sqrt(max(0.0, gap - 1 / n - 1 / m))


def _some(count: int, limit: int) -> list[int]:
    return sorted({int(k) for k in np.linspace(0, count - 1, min(count, limit))})


def _there(stream: Stream, clients: list[int], round_: int) -> np.ndarray:
    """Which of the clients are online."""
    online = stream.online(round_)
    return np.isin(clients, clients if online is None else online)


def _moments(stream: Stream, clients: list[int], there: dict[int, np.ndarray]) -> list[int]:
    """Rounds with new data for some client, or other clients online, and every task's first; some
    of them if many."""
    found: list[int] = []
    last: list[int | None] = []
    for at, online in there.items():
        now = [stream.block(i, at) if o else None for i, o in zip(clients, online, strict=True)]
        if now != last:
            found.append(at)
        last = now
    starts = np.cumsum([0, *(stream.length(k) for k in range(len(stream.tasks) - 1))]).tolist()
    return sorted({found[k] for k in _some(len(found), MOMENTS)} | {int(at) for at in starts})


def _inputs(stream: Stream, moments: list[int], clients: list[int]) -> np.ndarray | None:
    """Some of a task's inputs, flat."""
    held = [
        stream.samples(client, at)
        for at in moments[:: max(1, len(moments) // 5)]
        for client in clients
    ]
    ids = np.unique(np.concatenate(held))
    if not len(ids):
        return None
    ids = ids[_some(len(ids), SAMPLES)]
    x = stream.data.x[torch.as_tensor(ids)]
    return np.asarray(x.reshape(len(ids), -1).to(torch.float32).numpy(), dtype=np.float64)


def _draws(size: int, like: np.ndarray, random: np.random.Generator, draws: int) -> np.ndarray:
    return random.multinomial(size, like / like.sum(), draws)


def _skew(held: np.ndarray, random: np.random.Generator) -> Estimate:
    """Mean distance of clients to all of them, over a task's moments."""
    if held.shape[2] < 2:
        return Estimate()
    values, chance = [], []
    for moment in held:
        pooled = moment.sum(0)
        for own in moment[moment.sum(1) > 0]:
            values.append(total_variation(own, pooled))
            drawn = _draws(int(own.sum()), pooled, random, FEW)
            chance += [total_variation(d, pooled) for d in drawn]
    return _estimate(values, chance)


def _drift(held: np.ndarray, random: np.random.Generator, still: bool = False) -> Estimate:
    """Mean distance of consecutive data sets of each client that change; with `still` those that do
    not change count as well."""
    if held.shape[2] < 2:
        return Estimate()
    values, chance = [], []
    for before, now in pairwise(held):
        for a, b in zip(before, now, strict=True):
            same = np.array_equal(a, b)
            if a.sum() and b.sum() and (still or not same):
                own = Estimate(0.0, 0.0) if same else change(a, b, random, FEW)
                values.append(own.value)
                chance.append(own.chance)
    return _estimate(values, chance)


def change(
    a: np.ndarray, b: np.ndarray, random: np.random.Generator, draws: int = DRAWS
) -> Estimate:
    """Distance of two rows of counts, and what two draws from both together would have."""
    if len(a) < 2 or not a.sum() or not b.sum():
        return Estimate()
    first, second = (_draws(int(own.sum()), a + b, random, draws) for own in (a, b))
    chance = [total_variation(x, y) for x, y in zip(first, second, strict=True)]
    return Estimate(total_variation(a, b), float(np.mean(chance)))


def _estimate(values: list[float], chance: list[float]) -> Estimate:
    return Estimate(float(np.mean(values)), float(np.mean(chance))) if values else Estimate()
