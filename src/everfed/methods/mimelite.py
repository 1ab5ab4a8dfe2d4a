"""MimeLite with SGD momentum. Karimireddy et al., Breaking the Centralized Barrier, 2021.

    local step   y <- y - eta ((1 - beta) g_i(y) + beta m),    m frozen
    server       w <- mean w_i,   m <- (1 - beta) mean grad f_i(w_t) + beta m

with full-batch gradients at the old model w_t. beta = 0 is FedAvg. (The CFL paper's "momentum
weight 0.01" is read as beta = 0.01; give 0.99 for the other reading.)
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass
from torch import Tensor, zeros_like

from everfed.errors import EverfedError
from everfed.local import Affine, Fraction, Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@dataclass(frozen=True)
class MimeLite(Part):
    """The server's momentum inside local steps."""

    reduces = {"g": "mean"}
    stage = 0
    beta: Fraction = 0.01
    reset: bool = False

    @property
    def bounded(self) -> bool:
        return self.reset

    def check(self, local: Local) -> None:
        if local.optimizer != "sgd" or local.momentum:
            raise EverfedError("MimeLite brings its own momentum: use plain sgd locally")

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"m": zeros_like(w)}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, {"m": s["m"]}

    def affine(self, c: Context) -> Affine:
        return Affine(self.beta * c.down["m"], scale=1 - self.beta)

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        return update, {"g": c.gradient(c.start)}, {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update, {"m": (1 - self.beta) * r["g"] + self.beta * s["m"]}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return {"m": zeros_like(w)} if self.reset else s


@register("Karimireddy et al. 2021")
def mimelite(beta: Fraction = 0.01, reset: bool = False, average: Average = "uniform") -> Method:
    """Server momentum applied in every local step, without client state.

    Args:
        beta: weight of the momentum in a step, and how much of it is kept.
        reset: forget the momentum at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(MimeLite(beta, reset), average=average, name="mimelite")
