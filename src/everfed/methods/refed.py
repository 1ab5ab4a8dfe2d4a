"""ReFed, and SR-FDIL after it. Li et al., Towards Efficient Replay in Federated Incremental
Learning, 2024; Li et al., SR-FDIL: Synergistic Replay for Federated Domain-Incremental Learning,
2024.

A client trains on its current data and a cache of earlier samples, one shuffled set. At a task's
end it updates a personal model v on the finished and the cached data, held near the global model w,
and caches the samples whose gradients along that way are largest:

    v <- v - eta (grad f(v) + q (v - w)),    q = (1 - lambda) / (2 lambda)
    I(x) = sum_{p=1..s} 1/p |grad l_x(v_p)|,    v_p after step p

SR-FDIL scores the samples for all clients, too, by the global model:

    score = m I(x) / sum I + (1 - m) G(x) / sum G,    G(x) = |grad l_x(w)|

which is reconstructed from what others say of it: we could not read its paper. Its client
selection is left out. m = 1 is ReFed. In the first task both are FedAvg.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.method import Average, Context, Method, Part, State
from everfed.methods.registry import register

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


def pull_strength(lam: float) -> float:
    """q, the pull of the personal model to the global one."""
    return (1 - lam) / (2 * lam)


def importance(norms: Tensor) -> Tensor:
    """I of each sample from its gradient norms along the way: (steps, samples) -> (samples,)."""
    return norms.div(torch.arange(1, len(norms) + 1).to(norms).unsqueeze(1)).sum(0)


def shares(scores: Tensor) -> Tensor:
    """Scores that add up to 1."""
    return scores / scores.sum().clamp(min=1e-12)


@dataclass(frozen=True)
class Informative(Part):
    """Replay of the samples that a personal model finds most informative."""

    remembers = ("ids",)
    memory: PositiveInt = 400
    lam: PositiveShare = 0.5
    steps: PositiveInt = 10
    mix: Share = 1.0

    def client_init(self, w: Tensor) -> State:
        return {"ids": torch.zeros(0, dtype=torch.int64), "v": w}

    def data(self, ids: np.ndarray, c: Context) -> np.ndarray:
        return np.concatenate([ids, c.mine["ids"].numpy()])

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        ids = np.concatenate([c.mine["ids"].numpy(), c.ids])
        v, norms = c.mine["v"], []
        for _ in range(self.steps):
            v = v - c.lr * (c.gradient(v, ids) + pull_strength(self.lam) * (v - w))
            norms.append(c.norms(v, ids))
        score = importance(torch.stack(norms))
        if self.mix < 1:
            score = self.mix * shares(score) + (1 - self.mix) * shares(c.norms(w, ids))
        best = score.argsort(descending=True, stable=True)[: c.fits(self.memory)].cpu()
        return {}, {"ids": torch.from_numpy(ids)[best], "v": v}


@register("Li et al. 2024")
def refed(
    memory: PositiveInt = 400,
    lam: PositiveShare = 0.5,
    steps: PositiveInt = 10,
    average: Average = "samples",
) -> Method:
    """Replay of the samples with the largest gradients on a personal model's way.

    Args:
        memory: samples that a client keeps in all.
        lam: how personal the model is: 1 trains on the client's data alone, near 0 is global.
        steps: full-batch steps of the personal model at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Informative(memory, lam, steps), average=average, name="refed")


@register("Li et al. 2024 (reconstructed)")
def sr_fdil(
    memory: PositiveInt = 400,
    mix: Share = 0.5,
    lam: PositiveShare = 0.5,
    steps: PositiveInt = 10,
    average: Average = "samples",
) -> Method:
    """ReFed with samples that matter to the global model as well.

    Args:
        memory: samples that a client keeps in all.
        mix: weight of the client's own score; 1 is ReFed.
        lam: how personal the model is: 1 trains on the client's data alone, near 0 is global.
        steps: full-batch steps of the personal model at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Informative(memory, lam, steps, mix), average=average, name="sr_fdil")
