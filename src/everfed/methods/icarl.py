"""iCaRL-FL. Rebuffi et al., iCaRL: Incremental Classifier and Representation Learning, 2017,
federated.

At a task's end every client keeps exemplars of its data, class by class in herding order (the order
in which their mean feature stays closest to the class mean), memory / (classes kept) of each; what
it kept before is cut from the end of its order. Training is on current samples and exemplars with

    loss = CE + lambda KD_T(z, u)    u the outputs of the previous task's global model

CE over all classes seen, KD as in LwF. Classes are predicted by the model's outputs ("head") or,
as in the original, by the nearest class mean of unit features ("means"). For these each client
sends, class by class, the sum over its samples and exemplars of its model's unit features. Where
labels stay and inputs change, a class of each data set has its own exemplars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.compute.base import Seen
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.lwf import Distil
from everfed.methods.registry import register
from everfed.prototypes import nearest, renewed, uploads


class Teacher(Distil):
    """LwF's teacher, with all classes in competition."""

    @property
    def new_slice(self) -> bool:
        return False


@dataclass(frozen=True)
class Exemplars(Part):
    """Replay of exemplars in herding order."""

    remembers = ("ids",)
    memory: PositiveInt = 400

    def client_init(self, w: Tensor) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return {"ids": none, "block": none}

    def data(self, ids: np.ndarray, c: Context) -> np.ndarray:
        return np.concatenate([ids, c.mine["ids"][c.mine["block"] != c.block].numpy()])

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        others = c.mine["block"] != c.block
        old, block = c.mine["ids"][others].numpy(), c.mine["block"][others].numpy()
        labels, own = c.labels(old), c.labels(c.ids)
        groups = block * (1 + max([*labels, *own])) + labels
        classes, most = np.unique(own), c.fits(self.memory)
        quota = max(1, most // (len(np.unique(groups)) + len(classes)))
        kept = memory.first(groups, quota)
        new = memory.herding(c.ids, own, c.features(w, c.ids), dict.fromkeys(classes, quota))
        ids = np.concatenate([old[kept], new])[:most]
        block = np.concatenate([block[kept], np.full(len(new), c.block)])[:most]
        return {}, {"ids": torch.from_numpy(ids), "block": torch.from_numpy(block)}


@dataclass(frozen=True)
class NearestMean(Exemplars):
    """Exemplars, and classes predicted by the nearest mean of features."""

    reduces = {"sums": "sum", "counts": "sum"}
    noisy = False

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        ids = [np.concatenate([own.ids, own.mine["ids"].numpy()]) for own in c.each()]
        return update, uploads(w, ids, c, directions=True), {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update, renewed(s, r["sums"], r["counts"])

    def predict(self, s: State, seen: Seen, forward: Callable[[Tensor], Seen]) -> Tensor:
        return nearest(seen.features, s["means"], s["seen"]) if s else seen.z


@register("Rebuffi et al. 2017")
def icarl(
    memory: PositiveInt = 400,
    lam: NonNegativeFloat = 1.0,
    temperature: PositiveFloat = 2.0,
    predict: Literal["head", "means"] = "head",
    average: Average = "samples",
) -> Method:
    """Herded exemplars, distillation from the previous task's model, nearest means if wanted.

    Args:
        memory: exemplars that a client keeps in all, shared by the classes of its data sets.
        lam: weight of the distillation.
        temperature: how much both models' outputs are softened.
        predict: by the model's outputs, or by the nearest class mean of features.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    kept = NearestMean(memory) if predict == "means" else Exemplars(memory)
    return Method(kept, Teacher(lam, temperature), average=average, name="icarl")
