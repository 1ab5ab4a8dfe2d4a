"""Natural owners: users, writers, sites or shops, each with its own samples, as many as it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.stream import Stream, one_of, positive

Test = Literal["data", "samples", "users"]


@dataclass(frozen=True, eq=False)
class Given(Stream):
    """Samples stay with the user and the task that the data name; see `given`.

    A user's samples are a slice of one array, so that a million users are two arrays.
    """

    data: Data
    rounds_per_task: int
    users: np.ndarray  #: the user that each client is, as in the data's client column
    order: np.ndarray  #: training samples by (task, client)
    starts: np.ndarray  #: where each pair begins in `order`, and the last ends
    held: np.ndarray  #: test samples
    settings: dict[str, Any]

    @property
    def clients(self) -> int:  # type: ignore[override]
        return len(self.users)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.data.tasks if self.data.task is not None else ("all",)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.rounds_per_task * len(self.tasks)

    @property
    def task_rounds(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.rounds_per_task,) * len(self.tasks)

    def samples(self, client: int, round_: int) -> np.ndarray:
        pair = self.task(round_) * self.clients + client
        return self.order[self.starts[pair] : self.starts[pair + 1]]

    @cached_property
    def _tests(self) -> dict[int, np.ndarray]:
        return {}

    def test(self, task: int) -> np.ndarray:
        if self.data.task is None:
            return self.held
        if task not in self._tests:
            self._tests[task] = self.held[self.data.task[self.held] == task]
        return self._tests[task]

    def describe(self) -> dict[str, Any]:
        own = {"data": self.data.name, "tasks": list(self.tasks)} | self.settings
        return super().describe() | own


def given(
    data: Data,
    *,
    rounds: int = 20,
    least: int = 1,
    test: Test = "data",
    share: float = 0.2,
) -> Stream:
    """Natural users: every sample stays with the client (and in the task) that the data name, and
    clients are as large as they are.

    >>> from everfed.data import arrays
    >>> data = arrays(np.zeros((6, 3)), [0, 1, 0, 1, 0, 1], client=[0, 0, 0, 1, 2, 2])
    >>> stream = given(data, least=2)
    >>> stream.clients, stream.samples(1, 0), stream.data.notes
    (2, array([4, 5]), ('1 of 3 users with fewer than 2 samples are left out, 1 samples',))

    Args:
        data: samples with a client column.
        rounds: rounds of each task.
        least: users with fewer training samples take no part; how many is told.
        test: "data": the data's own test samples; "samples": a share of every user's in a task, the
            last ones where the data are in time order, else drawn once; "users": all samples of a
            share of the users, who take no other part. Both are of all samples whose user is known,
            those that the data would test on, too.
        share: of samples or users to test on, with test = "samples" or "users".
    """
    positive(rounds=rounds, least=least)
    one_of("test", test, Test)
    if data.client is None:
        raise EverfedError(f"{data.name} has no client column; use streams.static or domains")
    if not 0 < share < 1:
        raise EverfedError(f"share must be above 0 and below 1, not {share}")
    ids, held = data.train, data.test
    if test != "data":
        if data.lists is not None:
            raise EverfedError(f"{data.name} has candidates to rank for tests: use test = 'data'")
        ids = np.union1d(ids, held[data.client[held] >= 0])
    owners = data.client[ids]
    counts = np.bincount(owners)
    takes_part = counts > 0
    if test == "users":
        there = np.flatnonzero(takes_part)
        drawn = rng(0, "held out users").permutation(there)[: max(1, round(share * len(there)))]
        takes_part[drawn] = False
        held = ids[~takes_part[owners]]
    elif test == "samples":
        groups = owners if data.task is None else data.task[ids] * len(counts) + owners
        last = _last(groups, np.bincount(groups), share, drawn=not data.ordered)
        held, ids, owners = ids[last], ids[~last], owners[~last]
        counts = np.bincount(owners, minlength=len(counts))
    if least > 1:
        small = takes_part & (counts < least)
        few = f"{small.sum()} of {takes_part.sum()} users with fewer than {least}"
        lost = f"{few} samples are left out, {counts[small].sum()} samples"
        if small.any() and lost not in data.notes:
            data = replace(data, notes=(*data.notes, lost))
        takes_part &= counts >= least
    if not takes_part.any():
        raise EverfedError(
            f"{data.name}: no user is left; the largest has {counts.max()} training samples, least "
            f"is {least}"
        )
    inside, users = takes_part[owners], np.flatnonzero(takes_part)
    ids, owners = ids[inside], (np.cumsum(takes_part) - 1)[owners[inside]]
    tasks = len(data.tasks) if data.task is not None else 1
    pair = owners if data.task is None else data.task[ids] * len(users) + owners
    order = np.argsort(pair, kind="stable")
    starts = np.zeros(tasks * len(users) + 1, dtype=np.int64)
    np.cumsum(np.bincount(pair, minlength=len(starts) - 1), out=starts[1:])
    settings: dict[str, Any] = {} if test == "data" else {"test": test, "share": share}
    settings |= {"least": least} if least > 1 else {}
    return Given(data, rounds, users, ids[order], starts, held, settings)


def _last(owners: np.ndarray, counts: np.ndarray, share: float, drawn: bool) -> np.ndarray:
    """Which samples are the last `share` of their owner's, in their order or in one that is drawn;
    an owner of one sample keeps it."""
    at = np.arange(len(owners))
    if drawn:
        at = rng(0, "held out samples").permutation(at)
    order = at[np.argsort(owners[at], kind="stable")]
    place = np.empty(len(owners), dtype=np.int64)
    place[order] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    tested = np.minimum(np.maximum(1, np.rint(share * counts)), counts - 1)
    return np.asarray(place >= (counts - tested)[owners])
