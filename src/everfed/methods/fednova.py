"""FedNova. Wang et al., Tackling the Objective Inconsistency Problem, 2020.

    d_i = (w - w_i) / (eta |a_i|),    tau_eff = sum_i p_i |a_i|
    w <- w - tau_eff eta sum_i p_i d_i
    |a| = tau                                                  (SGD, tau steps)
          (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)    (momentum rho)
          (1 - (1 - eta mu)^tau) / (eta mu)                    (proximal mu)

Clients upload (w_i - w) / |a_i| and |a_i|; eta cancels. Equal step counts give FedAvg.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.fedprox import Prox
from everfed.methods.registry import register


@dataclass(frozen=True)
class Nova(Part):
    """Updates normalised by how much work each client did; `mu` is that of a Prox beside it."""

    stage = 2
    reduces = {"a": "mean"}
    noisy = False
    mu: NonNegativeFloat = 0.0

    def check(self, local: Local) -> None:
        if local.optimizer != "sgd" or local.nesterov or (self.mu and local.momentum):
            raise EverfedError("FedNova is known for sgd with momentum or with mu, not for this")

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        mu = sum(part.mu for part in parts if isinstance(part, Prox))
        if mu != self.mu:
            raise EverfedError(
                f"FedNova must know the proximal strength: use fednova(mu={mu:g}), do not add "
                "fedprox to it"
            )

    def norm(self, steps: Tensor, lr: float, momentum: float) -> Tensor:
        """|a| after that many steps."""
        if momentum:
            geometric = momentum * (1 - momentum**steps) / (1 - momentum)
            return (steps - geometric) / (1 - momentum)
        if self.mu:
            return (1 - (1 - lr * self.mu) ** steps) / (lr * self.mu)
        return steps

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        a = self.norm(c.steps, c.lr, c.local.momentum)
        return update / a, {"a": a}, {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update * r["a"], s


@register("Wang et al. 2020")
def fednova(mu: NonNegativeFloat = 0.0, average: Average = "samples") -> Method:
    """FedAvg for clients that do unequal numbers of steps.

    Args:
        mu: strength of a FedProx pull, which is added.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    parts = (Prox(mu), Nova(mu)) if mu else (Nova(),)
    return Method(*parts, average=average, name="fednova")
