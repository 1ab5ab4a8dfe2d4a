"""FedAdagrad, FedAdam, FedYogi. Reddi et al., Adaptive Federated Optimization, 2021.

m <- beta1 m + (1 - beta1) u
v <- v + u^2                                      (Adagrad)
     beta2 v + (1 - beta2) u^2                    (Adam)
     v - (1 - beta2) u^2 sign(v - u^2)            (Yogi)
w <- w + eta_g m / (sqrt(v) + tau),    v_0 = tau^2, no bias correction
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, full_like, zeros_like

from everfed.local import Fraction
from everfed.method import Average, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@dataclass(frozen=True)
class ServerAdaptive(Part):
    """An adaptive optimiser on the server."""

    stage = 4
    kind: Literal["adagrad", "adam", "yogi"] = "adam"
    server_lr: PositiveFloat = 0.01
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    tau: PositiveFloat = 1e-3
    reset: bool = False

    @property
    def bounded(self) -> bool:
        return self.reset

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"m": zeros_like(w), "v": full_like(w, self.tau**2)}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        m = self.beta1 * s["m"] + (1 - self.beta1) * update
        u2, v = update.square(), s["v"]
        match self.kind:
            case "adagrad":
                v = v + u2
            case "adam":
                v = self.beta2 * v + (1 - self.beta2) * u2
            case "yogi":
                v = v - (1 - self.beta2) * u2 * (v - u2).sign()
        return self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return self.init(w, Layout(())) if self.reset else s


@register("Reddi et al. 2021")
def fedadagrad(
    server_lr: PositiveFloat = 0.1,
    tau: PositiveFloat = 1e-3,
    reset: bool = False,
    average: Average = "samples",
) -> Method:
    """Adagrad on the server.

    Args:
        server_lr: the server's step; what matters most.
        tau: added to the root of the second moment, which begins at its square.
        reset: forget the moments at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = ServerAdaptive("adagrad", server_lr, beta1=0.0, tau=tau, reset=reset)
    return Method(part, average=average, name="fedadagrad")


@register("Reddi et al. 2021")
def fedadam(
    server_lr: PositiveFloat = 0.01,
    beta1: Fraction = 0.9,
    beta2: Fraction = 0.99,
    tau: PositiveFloat = 1e-3,
    reset: bool = False,
    average: Average = "samples",
) -> Method:
    """Adam on the server.

    Args:
        server_lr: the server's step; what matters most.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to the root of the second moment, which begins at its square.
        reset: forget the moments at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = ServerAdaptive("adam", server_lr, beta1, beta2, tau, reset)
    return Method(part, average=average, name="fedadam")


@register("Reddi et al. 2021")
def fedyogi(
    server_lr: PositiveFloat = 0.01,
    beta1: Fraction = 0.9,
    beta2: Fraction = 0.99,
    tau: PositiveFloat = 1e-3,
    reset: bool = False,
    average: Average = "samples",
) -> Method:
    """Yogi on the server.

    Args:
        server_lr: the server's step; what matters most.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to the root of the second moment, which begins at its square.
        reset: forget the moments at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = ServerAdaptive("yogi", server_lr, beta1, beta2, tau, reset)
    return Method(part, average=average, name="fedyogi")
