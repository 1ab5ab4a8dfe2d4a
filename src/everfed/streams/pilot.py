"""The beginning of every task of a stream, for short runs that are to see all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from everfed.streams.stream import Stream


class Pilot(Stream):
    """A stream's first tasks, and of each the first rounds only."""

    def __init__(self, stream: Stream, tasks: int, rounds: int) -> None:
        self.stream, self.data, self.clients = stream, stream.data, stream.clients
        count = min(tasks, len(stream.tasks))
        self.task_rounds = tuple(min(rounds, stream.length(k)) for k in range(count))
        self.rounds = sum(self.task_rounds)
        self.head, self.counted, self.stateless = stream.head, stream.counted, stream.stateless
        self.draws = stream.draws
        self.task_classes = stream.task_classes and stream.task_classes[:count]
        starts = np.cumsum([0, *(stream.length(k) for k in range(count - 1))])
        #: round of the pilot -> round of the stream
        self._at = [
            int(start) + k
            for start, n in zip(starts, self.task_rounds, strict=True)
            for k in range(n)
        ]

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.stream.tasks[: len(self.task_rounds or ())]

    def samples(self, client: int, round_: int) -> np.ndarray:
        return self.stream.samples(client, self._at[round_])

    def block(self, client: int, round_: int) -> int:
        return self.stream.block(client, self._at[round_])

    def online(self, round_: int) -> np.ndarray | None:
        return self.stream.online(self._at[round_])

    def test(self, task: int) -> np.ndarray:
        return self.stream.test(task)

    def known(self, task: int) -> Tensor | None:
        return self.stream.known(task)

    def mask(self, y: Tensor, task: int, new: bool = False) -> Tensor | None:
        return self.stream.mask(y, task, new)

    def seeded(self, seed: int) -> Stream:
        longest = max(self.task_rounds or (self.rounds,))
        return Pilot(self.stream.seeded(seed), len(self.tasks), longest)

    def describe(self) -> dict[str, Any]:
        return self.stream.describe() | {"pilot": list(self.task_rounds or ())}
