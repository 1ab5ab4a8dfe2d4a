"""Rows in time order, block after block: drift that nobody simulated, with or without labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.stream import Stream, one_of, positive

Cut = Literal["runs", "turns"]


@dataclass(frozen=True, eq=False)
class Blocks(Stream):
    """Every block of time is a task; see `blocks`."""

    data: Data
    clients: int
    blocks: int
    rounds_per_block: int
    held: float
    cut: Cut

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.blocks * self.rounds_per_block

    @property
    def task_rounds(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.rounds_per_block,) * self.blocks

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(f"block {k + 1}" for k in range(self.blocks))

    def _cuts(self, block: int) -> tuple[int, int, int]:
        """Where a block begins, where its tail does, and where it ends."""
        begin, end = (k * len(self.data.y) // self.blocks for k in (block, block + 1))
        return begin, end - max(1, round(self.held * (end - begin))), end

    def samples(self, client: int, round_: int) -> np.ndarray:
        begin, tail, _ = self._cuts(self.task(round_))
        if self.cut == "turns":
            return np.arange(begin + client, tail, self.clients)
        first, last = (begin + k * (tail - begin) // self.clients for k in (client, client + 1))
        return np.arange(first, last)

    def test(self, task: int) -> np.ndarray:
        return np.arange(*self._cuts(task)[1:])

    def describe(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("blocks", "rounds_per_block", "held", "cut")}
        return super().describe() | {"data": self.data.name} | own


def blocks(
    data: Data,
    *,
    clients: int = 8,
    blocks: int = 10,
    rounds: int = 5,
    cut: Cut = "runs",
    held: float = 0.2,
) -> Stream:
    """Time as it was: rows in time order are cut into blocks, one after another, and each block
    into parts for the clients. The end of a block is tested on, later than all that was trained on
    until then. No labels are needed.

    A block is a task: the matrix holds, right of its diagonal, the accuracy on each block before it
    was trained on, and `run.prequential` is the mean of those.

    >>> from everfed.data import arrays
    >>> data = arrays(np.zeros((100, 3)), np.zeros(100), ordered=True)
    >>> stream = blocks(data, clients=2, blocks=5, rounds=1)
    >>> stream.samples(1, 1), stream.test(1)
    (array([28, 29, 30, 31, 32, 33, 34, 35]), array([36, 37, 38, 39]))

    Args:
        data: samples in time order.
        clients: how many there are.
        blocks: how many there are.
        rounds: rounds of each block.
        cut: "runs": a client has a stretch of each block's time; "turns": rows go to the clients in
            turn, so that all see the same time.
        held: share of a block, its end, that is tested on.
    """
    positive(clients=clients, blocks=blocks, rounds=rounds)
    one_of("cut", cut, Cut)
    if not data.ordered:
        raise EverfedError(
            f"{data.name} is not known to be in time order: read it with data.series, or say "
            "arrays(..., ordered=True)"
        )
    if not 0 < held < 1:
        raise EverfedError(f"held must be above 0 and below 1, not {held}")
    made = Blocks(data, clients, blocks, rounds, held, cut)
    least = len(data.y) // blocks
    if least - max(1, round(held * least)) < clients:
        raise EverfedError(
            f"{data.name}: {len(data.y)} rows are too few for {blocks} blocks of {clients} clients"
        )
    return made
