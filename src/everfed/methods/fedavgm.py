"""FedAvgM. Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019.

v <- beta v + u,    w <- w + eta_g v         (u the mean update; heavy ball)
                    w <- w + eta_g (u + beta v)   (Nesterov)
"""

from __future__ import annotations

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, zeros_like

from everfed.local import Fraction
from everfed.method import Average, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@dataclass(frozen=True)
class ServerMomentum(Part):
    """Momentum on the server."""

    stage = 4
    beta: Fraction = 0.9
    server_lr: PositiveFloat = 1.0
    nesterov: bool = False
    reset: bool = False

    @property
    def bounded(self) -> bool:
        return self.reset

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"v": zeros_like(w)}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        v = self.beta * s["v"] + update
        step = update + self.beta * v if self.nesterov else v
        return self.server_lr * step, {"v": v}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return {"v": zeros_like(w)} if self.reset else s


@register("Hsu et al. 2019")
def fedavgm(
    beta: Fraction = 0.9,
    server_lr: PositiveFloat = 1.0,
    nesterov: bool = False,
    reset: bool = False,
    average: Average = "samples",
) -> Method:
    """FedAvg with momentum on the server.

    Args:
        beta: how much of the momentum is kept from round to round.
        server_lr: the server's step along the momentum.
        nesterov: Nesterov's form instead of the heavy ball.
        reset: forget the momentum at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = ServerMomentum(beta, server_lr, nesterov, reset)
    return Method(part, average=average, name="fedavgm")
