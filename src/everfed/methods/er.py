"""ER. Experience replay from a ring memory (Chaudhry et al. 2019, On Tiny Episodic Memories in
Continual Learning), federated (Erg-FL).

Every client keeps a ring memory, and every step takes as many samples of it as of the current data:

    step along  1/2 (grad CE(batch) + grad CE(memory batch))

The memory holds `memory` samples, shared evenly by the client's data sets (tasks) and their
classes, or so many of each (`per_task`); of each the newest replace the oldest. Samples of the
current data set are kept, but not replayed while it lasts, so with one data set (and in the first
task) this is FedAvg.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, State
from everfed.methods.registry import register


@dataclass(frozen=True)
class Rehearsal(Part):
    """A ring memory of the data sets a client has met, for the parts that replay it."""

    remembers = ("ids",)
    memory: PositiveInt = 400
    per_task: bool = False

    def client_init(self, w: Tensor) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return {"ids": none, "block": none}

    def past(self, c: Context) -> np.ndarray:
        """Where in one client's memory the samples of its other data sets are."""
        return np.flatnonzero(c.mine["block"].numpy() != c.block)

    def draw(self, c: Context, size: int, *purpose: int) -> np.ndarray:
        """Where some of them are, for a step: at most `size`, none twice."""
        turn = (*(purpose or (0,)), c.part)  # two parts of a method draw each their own
        random = rng(c.seed, "memory batch", c.round, c.client, c.step, *turn)
        return memory.uniform(self.past(c), size, random)

    def batches(self, c: Context, *purpose: int) -> list[np.ndarray]:
        """A memory batch of every client: at most as many samples as a batch has."""
        return [
            own.mine["ids"].numpy()[self.draw(own, own.local.batch, *purpose)] for own in c.each()
        ]

    def about(self, w: Tensor, ids: np.ndarray, c: Context) -> State:
        """What else is kept of samples, one row each, when they enter the memory."""
        return {}

    def remember(self, w: Tensor, c: Context) -> State:
        old, fresh = self.past(c), rng(c.seed, "ring", c.round, c.client).permutation(c.ids)
        if self.per_task:
            fresh = fresh[memory.ring(c.labels(fresh), self.memory)]
        block = np.concatenate([c.mine["block"][old].numpy(), np.full(len(fresh), c.block)])
        most = self.memory * (len(np.unique(block)) if self.per_task else 1)
        labels = c.labels(np.concatenate([c.mine["ids"][old].numpy(), fresh]))
        kept = memory.ring(block * (labels.max() + 1) + labels, c.fits(most))
        old, fresh = old[kept[kept < len(old)]], fresh[kept[kept >= len(old)] - len(old)]
        new = {"ids": torch.from_numpy(fresh), "block": torch.full((len(fresh),), c.block)}
        new |= self.about(w, fresh, c)
        return {key: torch.cat([c.mine[key][old], value]) for key, value in new.items()}


@dataclass(frozen=True)
class Replay(Rehearsal):
    """Every batch is doubled by samples of the memory."""

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        if any(part.components for part in parts):
            raise EverfedError("er changes batches, which a table of gradients takes as they are: "
                               "set iag = false")  # fmt: skip

    def replay(self, batch: np.ndarray, c: Context) -> np.ndarray:
        drawn = c.mine["ids"].numpy()[self.draw(c, len(batch))]
        # a memory smaller than a batch goes round, so that it counts the same
        return np.concatenate([batch, np.resize(drawn, len(batch))]) if len(drawn) else batch


@register("Chaudhry et al. 2019")
def er(memory: PositiveInt = 400, per_task: bool = False, average: Average = "samples") -> Method:
    """Experience replay: every batch is half current samples, half samples of a ring memory.

    Args:
        memory: samples that a client keeps in all, shared by its data sets and their classes.
        per_task: keep as many of each data set, as C-FLAG does.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Replay(memory, per_task), average=average, name="er")
