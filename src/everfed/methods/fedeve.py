"""FedEve. On Bridging the Client Drift and Period Drift for Cross-device Federated Learning.

The server predicts the cohort's update from its momentum M, the cohort observes it, and a Kalman
gain fuses both (eqs. 12-13; M and u here in the sign of updates):

    send          w + eta_g M
    sigma_Q^2     |M - u|^2 / (S d)                  period drift
    sigma_R^2     sum_k |u_k - u|^2 / (S^2 d)        client drift
    kappa         (sigma^2 + sigma_Q^2) / (sigma^2 + sigma_Q^2 + sigma_R^2)
    M <- M + kappa (u - M),   w <- w + eta_g M,   sigma^2 <- (1 - kappa) (sigma^2 + sigma_Q^2)

With `gain` "layer" all of it is done for each layer by itself. The cohort's spread follows from
sums alone, so the method works under secure aggregation.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, ones_like, split, stack, tensor, where, zeros, zeros_like

from everfed.method import Average, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout

QMode = Literal["innovation", "update"]
Gain = Literal["model", "layer"]


@dataclass(frozen=True)
class FedEve(Part):
    """A Kalman filter between the server's prediction and the cohort's observation.

    `q_mode` "update" takes sigma_Q from |u|^2, as a public implementation does.
    """

    stage = 4
    spread = True
    server_lr: PositiveFloat = 1.0
    q_mode: QMode = "innovation"
    reset: bool = False
    gain: Gain = "model"

    @property
    def bounded(self) -> bool:
        return self.reset

    @property
    def layered(self) -> bool:
        return self.gain == "layer"

    def init(self, w: Tensor, layout: Layout) -> State:
        sizes = tensor(layout.pieces() if self.layered else [len(w)])
        zero = zeros(len(sizes), dtype=w.dtype, device=w.device)
        return {"m": zeros_like(w), "sizes": sizes} | dict.fromkeys(
            ("var", "gain", "period", "client"), zero
        )

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w.add(s["m"], alpha=self.server_lr), {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        sizes = s["sizes"].to(update)
        surprise = update - s["m"] if self.q_mode == "innovation" else update
        total = stack([part @ part for part in split(surprise, s["sizes"].tolist())])
        period, client = total / (r.n * sizes), r.spread_beside(update).to(update) / r.n
        prior = s["var"] + period
        gain = where(prior + client > 0, prior / (prior + client), ones_like(prior))
        each = gain.repeat_interleave(s["sizes"].to(gain.device)) if self.layered else gain
        m = s["m"].lerp(update, each)
        found = {"var": (1 - gain) * prior, "gain": gain, "period": period, "client": client}
        return self.server_lr * m, {"m": m, "sizes": s["sizes"]} | found

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        if not self.reset:
            return s
        return {key: v if key == "sizes" else zeros_like(v) for key, v in s.items()}

    def metrics(self, s: State) -> dict[str, float]:
        share = s["sizes"].to(s["gain"]) / s["sizes"].sum()
        names = {"kalman_gain": "gain", "period_drift": "period", "client_drift": "client"}
        return {name: float(share @ s[key]) for name, key in names.items()}


@register("FedEve: On Bridging the Client Drift and Period Drift")
def fedeve(
    server_lr: PositiveFloat = 1.0,
    q_mode: QMode = "innovation",
    reset: bool = False,
    gain: Gain = "model",
    average: Average = "samples",
) -> Method:
    """A Kalman filter between the server's prediction and the cohort's update.

    Args:
        server_lr: the server's step along the momentum.
        q_mode: period drift from the surprise ("innovation", the paper's) or from the whole update.
        reset: forget momentum and variance at a task's end.
        gain: one for the whole "model" (the paper's), or one for every "layer".
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(FedEve(server_lr, q_mode, reset, gain), average=average, name="fedeve")
