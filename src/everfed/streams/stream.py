"""A stream says who holds what, when: all that everfed asks of changing data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.partition import split

#: shared: one head for all tasks; class: classes arrive task by task and compete with all seen;
#: task: the task's identity is known, only its own classes compete
Head = Literal["shared", "class", "task"]


class Stream(ABC):
    """Who holds which samples in which round. Subclass it and write `samples`; the rest has
    defaults for a single task with everyone online.

    Rounds, tasks and clients count from 0. Everything is computed when asked for.
    """

    data: Data  #: the table that `samples` and `test` give indices of
    clients: int  #: how many there are
    rounds: int  #: how many there are
    #: rounds of each task, in order; their sum is `rounds`
    task_rounds: tuple[int, ...] | None = None
    #: "class" or "task" where classes arrive task by task
    head: Head = "shared"
    #: the classes that each task brings, where they arrive task by task
    task_classes: tuple[tuple[int, ...], ...] | None = None
    #: what `everfed stream` counts: samples of each class, or of each domain
    counted: Literal["class", "domain"] = "class"
    #: clients of a round, where the stream draws them
    draws: int | None = None
    #: whether a client is another one in every round, so that it cannot keep a state
    stateless: bool = False

    def prolongs(self, described: Mapping[str, Any]) -> bool:
        """Whether a run of the stream that `describe` described so may go on with this one."""
        return False

    @abstractmethod
    def samples(self, client: int, round_: int) -> np.ndarray:
        """Indices into `data` of what the client holds."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in order."""
        if self.task_rounds is None:
            return ("all",)
        return tuple(f"task {k + 1}" for k in range(len(self.task_rounds)))

    def task(self, round_: int) -> int:
        """The task of a round."""
        if self.task_rounds is None:
            return 0
        return int(np.searchsorted(np.cumsum(self.task_rounds), round_, side="right"))

    def last_of_task(self, round_: int) -> bool:
        """Whether a task ends with this round."""
        return round_ + 1 == self.rounds or self.task(round_ + 1) != self.task(round_)

    def round_in_task(self, round_: int) -> int:
        """How many rounds of its task came before this one."""
        return round_ - sum((self.task_rounds or ())[: self.task(round_)])

    def length(self, task: int) -> int:
        """Rounds of a task."""
        return self.task_rounds[task] if self.task_rounds else self.rounds

    def block(self, client: int, round_: int) -> int:
        """Which of its data sets the client holds: equal numbers, equal samples."""
        return self.task(round_)

    def online(self, round_: int) -> np.ndarray | None:
        """Clients that can be sampled; None: all."""
        return None

    def test(self, task: int) -> np.ndarray:
        """Indices of the test samples of a task."""
        return self.data.test

    def seeded(self, seed: int) -> Stream:
        """The stream of one seed; a stream without chance is its own."""
        return self

    def describe(self) -> dict[str, Any]:
        """The stream as plain values, for a run's folder."""
        return {"stream": type(self).__name__, "clients": self.clients, "rounds": self.rounds}

    # heads: which outputs compete ------------------------------------------------------------
    def known(self, task: int) -> Tensor | None:
        """Classes of the tasks before this one; None where all tasks share all classes."""
        return None if self.head == "shared" else self._classes(range(task))

    def mask(self, y: Tensor, task: int, new: bool = False) -> Tensor | None:
        """Which outputs compete for samples with labels y: (...) -> (..., classes) or None.

        With `new`, in class-incremental streams only the classes that the task brings (for samples
        of those classes; a replayed sample competes with all seen).
        """
        if self.head == "shared":
            return None
        if self.head == "class":
            seen = self._classes(range(task + 1)).to(y.device)
            if not new:
                return seen.expand(*y.shape, -1)
            fresh = self._classes([task]).to(y.device)
            return torch.where(fresh[y].unsqueeze(-1), fresh, seen)
        return self._same_task.to(y.device)[y]

    def _classes(self, tasks: Iterable[int]) -> Tensor:
        assert self.task_classes is not None
        flags = torch.zeros(self.data.classes, dtype=torch.bool)
        for task in tasks:
            flags[list(self.task_classes[task])] = True
        return flags

    @cached_property
    def _same_task(self) -> Tensor:
        rows = torch.zeros(self.data.classes, self.data.classes, dtype=torch.bool)
        for task, classes in enumerate(self.task_classes or ()):
            rows[list(classes)] = self._classes([task])
        return rows


@dataclass(frozen=True, eq=False)
class TaskStream(Stream):
    """Tasks one after another, each split over the clients once, with label skew.

    `alpha` is the Dirichlet concentration of every class over clients (small: skewed; None: equal
    random parts). `seed` None takes the run's seed.
    """

    data: Data
    clients: int
    rounds_per_task: int
    alpha: float | None
    #: for each task, its training samples and its test samples
    sets: tuple[tuple[np.ndarray, np.ndarray], ...]
    names: tuple[str, ...]
    head: Head = "shared"
    task_classes: tuple[tuple[int, ...], ...] | None = None
    seed: int | None = None
    #: makes the stream again for another seed, where more than the split depends on it
    remake: Any = None

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.rounds_per_task * len(self.sets)

    @property
    def task_rounds(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.rounds_per_task,) * len(self.sets)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.names

    @cached_property
    def _parts(self) -> dict[int, list[np.ndarray]]:
        return {}

    def samples(self, client: int, round_: int) -> np.ndarray:
        task = self.task(round_)
        if task not in self._parts:
            ids = self.sets[task][0]
            labels = self.data.y[torch.as_tensor(ids)].numpy()
            parts = split(labels, self.clients, self.alpha, self.seed or 0, task)
            self._parts[task] = [ids[part] for part in parts]
        return self._parts[task][client]

    def test(self, task: int) -> np.ndarray:
        return self.sets[task][1]

    def seeded(self, seed: int) -> Stream:
        if self.seed is not None:
            return self
        return self.remake(seed) if self.remake else replace(self, seed=seed)

    def describe(self) -> dict[str, Any]:
        return {
            "stream": type(self).__name__,
            "data": self.data.name,
            "tasks": list(self.tasks),
            "clients": self.clients,
            "rounds_per_task": self.rounds_per_task,
            "alpha": self.alpha,
            "head": self.head,
            "seed": self.seed,
        }


def one_of(what: str, value: Any, choices: Any) -> None:
    """Raise EverfedError for a setting that is none of a Literal's values."""
    known = get_args(choices)
    if value not in known:
        raise EverfedError(f"{what} must be one of {', '.join(known)}, not {value!r}")


def positive(**values: int) -> None:
    """Raise EverfedError for a setting that is no whole number, or below 1."""
    for name, value in values.items():
        if not isinstance(value, Integral):
            raise EverfedError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise EverfedError(f"{name} must be at least 1, not {value}")
