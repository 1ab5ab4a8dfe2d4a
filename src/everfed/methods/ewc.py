"""EWC-FL. Elastic weight consolidation (Kirkpatrick et al. 2017), federated.

At a task's end every client computes the diagonal Fisher on its data (the mean of per-sample
squared gradients at the final model); the server merges them:

    F <- decay F + sum_i p_i F_i,    w* <- w
    local loss + lambda/2 sum F (w - w*)^2        so the gradient gains lambda F (w - w*)

lambda F is cut to 1 / lr, with which a step of plain SGD goes all the way back to w*; beyond 2 / lr
steps would swing ever further away from it. lambda = 0 is FedAvg. Where classes arrive task by
task, only the new ones compete in the loss.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register


@dataclass(frozen=True)
class Elastic(Part):
    """A quadratic pull to the last task's model, weighted by the Fisher information."""

    reduces = {"fisher": "mean"}
    once = ("fisher", "star")
    lam: NonNegativeFloat = 100.0
    decay: NonNegativeFloat = 1.0

    @property
    def new_slice(self) -> bool:
        return True

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        if "fisher" not in c.down:
            return g
        if "pull" not in c.scratch:
            c.scratch["pull"] = (self.lam * c.down["fisher"]).clamp_(max=1 / c.lr)
        return g.addcmul_(c.scratch["pull"], w - c.down["star"])

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        return {"fisher": c.fisher(w)[0]}, {}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        if not r.n:
            return s
        old = self.decay * s["fisher"] if s else 0.0
        # noise (of privacy) can make it negative, and a pull a push
        return {"fisher": (old + r["fisher"]).clamp_(min=0), "star": w}


@register("Kirkpatrick et al. 2017")
def ewc(
    lam: NonNegativeFloat = 100.0, decay: NonNegativeFloat = 1.0, average: Average = "samples"
) -> Method:
    """A pull to the last task's model where the Fisher information is large.

    Args:
        lam: strength of the pull.
        decay: how much of the earlier tasks' Fisher information is kept at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Elastic(lam, decay), average=average, name="ewc")
