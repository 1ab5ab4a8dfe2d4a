"""FedCurv. Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, 2019.

After training client j has the diagonal Fisher F_j at its model w_j. In later rounds client s
trains on

    loss + lambda sum_{j != s} (w - w_j)' diag(F_j) (w - w_j)

whose gradient gains 2 lambda ((A - F_s) w - (B - F_s w_s)) with A = sum F_j, B = sum F_j w_j: the
server keeps two vectors, and a client takes its own last contribution out of them. A client that
takes part again sends how F_j and F_j w_j changed, so its latest ones replace the older ones.
lambda = 0 is FedAvg.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, zeros_like

from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@dataclass(frozen=True)
class Curv(Part):
    """A pull to the other clients' last models, weighted by their Fisher information."""

    reduces = {"a": "sum", "b": "sum"}
    noisy = False  # clients keep the sums' true terms
    lam: NonNegativeFloat = 0.1

    @property
    def lasting(self) -> bool:
        return True

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"a": zeros_like(w), "b": zeros_like(w)}

    def client_init(self, w: Tensor) -> State:
        return {"a": zeros_like(w), "b": zeros_like(w)}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        others, pulled = c.down["a"] - c.mine["a"], c.down["b"] - c.mine["b"]
        return g.addcmul_(others, w, value=2 * self.lam).sub_(pulled, alpha=2 * self.lam)

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        fisher, _ = c.fisher(w)
        mine = {"a": fisher, "b": fisher * w}
        return update, {key: new - c.mine[key] for key, new in mine.items()}, mine

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update, {key: s[key] + r[key] for key in s}


@register("Shoham et al. 2019")
def fedcurv(lam: NonNegativeFloat = 0.1, average: Average = "samples") -> Method:
    """A pull to the other clients' last models where their Fisher information is large.

    Args:
        lam: strength of the pull.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Curv(lam), average=average, name="fedcurv")
