"""NCCL-FL. Han et al., On the Convergence of Continual Learning with Adaptive Methods, 2023, as the
C-FLAG paper compares with it; reconstructed from there, we could not read the original.

Every client steps along the gradient f of a memory batch and g of the current batch (ER's ring),
with rates that adapt to their agreement Lambda = <f, g>:

    w <- w - alpha' f - beta' g
    Lambda > 0:   alpha' = alpha,                          beta' = (1 - L alpha) Lambda / (L |g|^2)
    Lambda <= 0:  alpha' = alpha (1 - Lambda / |f|^2),     beta' = alpha

These are C-FLAG's rates with one client and one step, with its guards: beta' <= clip * alpha and
alpha' <= 1/L. Without a memory it is FedAvg.
"""

from __future__ import annotations

import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.local import Local
from everfed.method import Average, Context, Method
from everfed.methods.cflag import Rates
from everfed.methods.er import Rehearsal
from everfed.methods.registry import register


@dataclass(frozen=True)
class AdaptiveSteps(Rehearsal):
    """Steps along the memory's and the current gradient, at rates that adapt."""

    alpha: PositiveFloat | None = None
    lipschitz: PositiveFloat = 5.0
    clip: PositiveFloat = 1.0

    def check(self, local: Local) -> None:
        self._rates.check("NCCL", self.alpha or local.lr)

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        own = g.clone()  # the next gradient is computed where this one lies
        batches = self.batches(c)
        f, alpha, one = c.gradient(w, batches), self.alpha or c.lr, own.new_ones(1, 1)
        alpha_now, beta_now = self._rates(f, own, alpha, alpha, one, one)
        there = torch.tensor([[len(batch) > 0] for batch in batches], device=own.device)
        return torch.where(there, (alpha_now * f + beta_now * own) / c.lr, own)

    @property
    def _rates(self) -> Rates:
        return Rates(self.lipschitz, "average", self.clip)


@register("Han et al. 2023 (reconstructed)")
def nccl(
    alpha: PositiveFloat | None = None,
    lipschitz: PositiveFloat = 5.0,
    clip: PositiveFloat = 1.0,
    memory: PositiveInt = 400,
    per_task: bool = False,
    average: Average = "samples",
) -> Method:
    """Steps along a memory batch's and the current gradient, at rates that adapt.

    Args:
        alpha: the step along the memory's gradient; left out: the learning rate.
        lipschitz: the paper's L; it needs alpha < 1/lipschitz.
        clip: the largest rate along the current gradient, in alphas; inf takes the guards away.
        memory: samples that a client keeps in all, shared by its data sets and their classes.
        per_task: keep as many of each data set, as C-FLAG does.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(
        AdaptiveSteps(memory, per_task, alpha, lipschitz, clip), average=average, name="nccl"
    )
