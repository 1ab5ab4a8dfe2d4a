"""Streams whose samples live at the sites of a real federation: here only the calendar is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt

from everfed.data.table import Array, Data, arrays
from everfed.errors import EverfedError
from everfed.streams.stream import Head, Stream


@dataclass(frozen=True, eq=False)
class Sites(Stream):
    """Tasks one after another; what clients hold, only their sites know."""

    data: Data
    clients: int
    names: tuple[str, ...]
    task_rounds: tuple[int, ...] = ()
    head: Head = "shared"
    task_classes: tuple[tuple[int, ...], ...] | None = None
    #: samples of the server's own to test each task on
    tests: tuple[np.ndarray, ...] = ()

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return sum(self.task_rounds)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.names

    def samples(self, client: int, round_: int) -> np.ndarray:
        raise EverfedError(
            "the samples of this stream live at the sites: run it with 'flwr run', see "
            "docs/deployment.md"
        )

    def test(self, task: int) -> np.ndarray:
        return self.tests[task] if task < len(self.tests) else np.zeros(0, dtype=np.int64)

    def prolongs(self, described: Mapping[str, Any]) -> bool:
        """Where tasks, rounds of the last one or sites are added: what lies behind stays as it
        was."""
        own, rounds = self.describe(), described.get("rounds", [])
        k = len(rounds)
        if set(own) != set(described) or not 0 < k <= len(self.task_rounds):
            return False
        *earlier, last = self.task_rounds[:k]
        own |= {"rounds": [*earlier, min(last, rounds[-1])], "tasks": list(self.names[:k])}
        own["clients"] = min(self.clients, described.get("clients", 0))
        return own == dict(described)

    def describe(self) -> dict[str, Any]:
        known = {"clients": self.clients, "rounds": list(self.task_rounds), "head": self.head}
        return {"stream": "sites", "tasks": list(self.names)} | known


def sites(
    data: Data,
    *,
    clients: PositiveInt = 3,
    rounds: Sequence[PositiveInt] = (10,),
    tasks: Sequence[str] | None = None,
    head: Head = "shared",
    classes: Sequence[Sequence[int]] | None = None,
) -> Stream:
    """Data that live at the sites of a federation: only the calendar is known.

    Args:
        data: what samples look like, `data.sites`.
        clients: sites that are expected.
        rounds: rounds of each task.
        tasks: their names; left out: task 1, task 2, ...
        head: "shared": one label set for all tasks; "class" or "task": classes arrive task by
            task, and compete with all seen, or with those of their own task only.
        classes: with such a head, the classes that each task brings.
    """
    names = tuple(tasks or (f"task {k + 1}" for k in range(len(rounds))))
    if len(names) != len(rounds):
        raise EverfedError(f"there are {len(rounds)} numbers of rounds, but {len(names)} tasks")
    groups = None if classes is None else tuple(tuple(group) for group in classes)
    return Sites(data, clients, names, tuple(rounds), head, groups)


def tested(stream: Stream, tests: Sequence[tuple[Array, Array]]) -> Stream:
    """The stream with the server's own samples to test each task on."""
    if not isinstance(stream, Sites):
        raise EverfedError("the configuration's stream brings its own tests: leave out yours")
    if len(tests) > len(stream.tasks):
        raise EverfedError(f"there are tests of {len(tests)} tasks, but {len(stream.tasks)} tasks")
    whole, places = stream.data, []
    for (x, y), task in zip(tests, stream.tasks, strict=False):
        own = arrays(x, y, name=f"the tests of {task}")
        start = len(whole.x)
        places.append(np.arange(start, start + len(own.x)))
        x_all = torch.cat([whole.x.to(own.x.dtype), own.x])
        whole = replace(whole, x=x_all, y=torch.cat([whole.y, own.y]))
    return replace(stream, data=whole, tests=tuple(places))
