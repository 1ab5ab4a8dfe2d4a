"""CFL-Core-Set. Towards Federated Learning on Time-evolving Heterogeneous Data (core sets).

A client keeps one small set of samples for every data set it has met (replaced when met again) and
trains on its current data together with all others' core sets, one shuffled set:

    p_t = |D_t| / (|D_t| + sum |C_tau|)

naive: uniform without replacement. herding: per class, features of unit length, in the order in
which the running mean stays closest to the class mean, no sample twice (Algorithm 3, corrected).
Where all sets together exceed a budget, they are cut: naive ones at random, herding from the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.chance import rng
from everfed.method import Average, Context, Method, Part, Recall, State
from everfed.methods.registry import register


@dataclass(frozen=True)
class CoreSet(Part):
    """Replay of core sets; clients keep `size` samples of every data set."""

    remembers = ("ids",)
    size: PositiveInt = 100
    choice: Literal["naive", "herding"] = "naive"
    #: samples of all sets together; None: no limit
    budget: PositiveInt | None = None
    evict: memory.Evict = "shrink"

    def client_init(self, w: Tensor) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return {"ids": none, "block": none}

    def data(self, ids: np.ndarray, c: Context) -> np.ndarray:
        others = c.mine["ids"][c.mine["block"] != c.block]
        return np.concatenate([ids, others.numpy()])

    def remember(self, w: Tensor, c: Context) -> State:
        if self.choice == "naive":
            random = rng(c.seed, "core set", c.client, c.block)
            kept = memory.uniform(c.ids, self.size, random)
        else:
            labels = c.labels(c.ids)
            quotas = memory.quotas(labels, self.size)
            kept = memory.herding(c.ids, labels, c.features(w, c.ids), quotas)
        # from the least to the most recently met
        sets = {b: own for b, own in _sets(c.mine).items() if b != c.block} | {c.block: kept}
        sizes = [len(own) for own in sets.values()]
        most = c.fits(sum(sizes) if self.budget is None else self.budget)
        if sum(sizes) > most:
            left = memory.allotted(sizes, most, self.evict)
            cut = zip(sets.items(), left, strict=True)
            sets = {b: self._cut(own, size, b, c) for (b, own), size in cut}
        block = torch.tensor([b for b, own in sets.items() for _ in own], dtype=torch.int64)
        return {"ids": torch.from_numpy(np.concatenate(list(sets.values()))), "block": block}

    def recall(
        self, s: State, mine: Mapping[int, State], past: Recall
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for client, own in mine.items():
            for block, kept in _sets(own).items():
                yield past.replayed(client, block, kept)

    def _cut(self, ids: np.ndarray, size: int, block: int, c: Context) -> np.ndarray:
        if self.choice == "herding":
            return memory.first_of_classes(ids, c.labels(ids), size)
        return memory.uniform(ids, size, rng(c.seed, "cut", c.round, c.client, block))


def _sets(mine: Mapping[str, Tensor]) -> dict[int, np.ndarray]:
    """A client's core sets by data set, from the least to the most recently met."""
    ids, block = mine["ids"].numpy(), mine["block"].numpy()
    return {b: ids[block == b] for b in dict.fromkeys(block.tolist())}


@register("Towards Federated Learning on Time-evolving Heterogeneous Data")
def cfl_coreset(
    size: PositiveInt = 100,
    choice: Literal["naive", "herding"] = "naive",
    budget: PositiveInt | None = None,
    evict: memory.Evict = "shrink",
    average: Average = "uniform",
) -> Method:
    """Replay of a small core set of every data set a client has met.

    Args:
        size: samples kept of each data set.
        choice: "naive" draws them at random, "herding" keeps close to the class means of features.
        budget: samples that a client keeps in all; left out: no limit.
        evict: beyond the budget "shrink" cuts all sets to the same size, "oldest" the set that was
            not met for the longest time first.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(CoreSet(size, choice, budget, evict), average=average, name="cfl_coreset")
