"""FedProto. Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, 2022.

A prototype is a class's mean of the features phi that the last layer is fed with. After training a
client sends the sums of its own model's features, class by class; the server makes the prototypes

    C_j = sum_i sum_{x in D_ij} phi_i(x) / sum_i |D_ij|

(a class that nobody in the round holds keeps its older one) and sends them back, and clients train

    loss = CE + lambda |phi(x) - C_y|^2 / width

The paper's clients keep their own models and exchange prototypes only; here the models are averaged
as well, as everywhere in everfed. lambda = 0 is FedAvg.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.lwf import need_classes
from everfed.methods.registry import register
from everfed.prototypes import renewed, uploads


@dataclass(frozen=True)
class Prototypes(Part):
    """Features are pulled to the global mean of their class."""

    reduces = {"sums": "sum", "counts": "sum"}
    noisy = False
    lam: NonNegativeFloat = 1.0

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def feature_loss(self, features: Tensor, y: Tensor, c: Context) -> Tensor:
        if not c.down:
            return features.new_zeros(y.shape[:2])
        need_classes(y, "fedproto")
        distance = (features - c.down["means"][y]).square().mean(-1)
        return self.lam * distance * c.down["seen"][y]

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        return update, uploads(w, [own.ids for own in c.each()], c), {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update, renewed(s, r["sums"], r["counts"])


@register("Tan et al. 2022")
def fedproto(lam: NonNegativeFloat = 1.0, average: Average = "samples") -> Method:
    """Features are pulled to the clients' common mean of their class.

    Args:
        lam: strength of the pull.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Prototypes(lam), average=average, name="fedproto")
