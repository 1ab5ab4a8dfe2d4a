"""FedProx. Li et al., Federated Optimization in Heterogeneous Networks, 2020.

    local loss + mu/2 |w - w_t|^2,    w_t the model received this round

so the gradient gains mu (w - w_t). mu = 0 is FedAvg.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from everfed.local import Affine
from everfed.method import Average, Context, Method, Part
from everfed.methods.registry import register


@dataclass(frozen=True)
class Prox(Part):
    """Pulls local training to the model received this round."""

    mu: NonNegativeFloat = 0.1

    def affine(self, c: Context) -> Affine:
        return Affine(-self.mu * c.start, pull=self.mu)


@register("Li et al. 2020")
def fedprox(mu: NonNegativeFloat = 0.1, average: Average = "samples") -> Method:
    """FedAvg with a pull of local training to the model received.

    Args:
        mu: strength of the pull.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Prox(mu), average=average, name="fedprox")
