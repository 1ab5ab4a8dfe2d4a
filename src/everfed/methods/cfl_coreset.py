"""CFL-Core-Set. Towards Federated Learning on Time-evolving Heterogeneous Data (core sets).

A client keeps one small set of samples for every data set it has met (replaced when met again) and
trains on its current data together with all others' core sets, one shuffled set:

    p_t = |D_t| / (|D_t| + sum |C_tau|)

naive: uniform without replacement. herding: per class, features of unit length, in the order in
which the running mean stays closest to the class mean, no sample twice (Algorithm 3, corrected).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.chance import rng
from everfed.method import Average, Context, Method, Part, State
from everfed.methods.registry import register


@dataclass(frozen=True)
class CoreSet(Part):
    """Replay of core sets; clients keep `size` samples of every data set."""

    remembers = ("ids",)
    size: PositiveInt = 100
    choice: Literal["naive", "herding"] = "naive"

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
        others = c.mine["block"] != c.block
        block = torch.full((len(kept),), c.block)
        return {
            "ids": torch.cat([c.mine["ids"][others], torch.from_numpy(kept)]),
            "block": torch.cat([c.mine["block"][others], block]),
        }


@register("Towards Federated Learning on Time-evolving Heterogeneous Data")
def cfl_coreset(
    size: PositiveInt = 100,
    choice: Literal["naive", "herding"] = "naive",
    average: Average = "uniform",
) -> Method:
    """Replay of a small core set of every data set a client has met.

    Args:
        size: samples kept of each data set.
        choice: "naive" draws them at random, "herding" keeps close to the class means of features.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(CoreSet(size, choice), average=average, name="cfl_coreset")
