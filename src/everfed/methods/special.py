"""SPECIAL and SPECIAL-C. Server-Proximal Aggregation for Federated Domain-Incremental Learning.

SPECIAL (eq. 6), theta_{i-1} the model at the end of the previous task, none in the first:

    theta_bar = theta + gamma_G mean_m (theta_m - theta),    gamma_G = 1 / i in task i
    theta <- (theta_bar + lambda theta_{i-1}) / (1 + lambda)

SPECIAL-C does it at the clients, after every local epoch, with 2 lambda (its prox has a 1/2), and
has the same server rate:

    y <- (x + 2 lambda theta_{i-1}) / (1 + 2 lambda)

Under SPECIAL a task moves the model by at most 1/lambda of its per-round steps.

"auto" (not in the paper) goes by how far the first task, of T rounds, has moved the model, as a
share of the first model's length:

    lambda = min(m, 2) / T,   gamma_G = i^-min(m, 1),   m = (|theta_1 - theta_0| / |theta_0|)^3 / 3
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, finfo, full_like, where

from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.fedavg import ServerRate
from everfed.methods.registry import register
from everfed.vector import Layout


def pull(theta: Tensor, anchor: Tensor, lam: float | Tensor) -> Tensor:
    """The proximal step towards the anchor."""
    return (theta + lam * anchor) / (1 + lam)


def moved(first: Tensor, anchor: Tensor) -> Tensor:
    """m, at most 2, from the first model and that at the end of the first task, (d,) each."""
    length = first.norm().clamp(min=finfo(first.dtype).tiny)  # of a model of zeros: m is 2
    share: Tensor = (anchor - first).norm() / length
    return (share.pow(3) / 3).clamp(max=2)


@dataclass(frozen=True)
class MovedRate(Part):
    """The server's rate in later tasks, the smaller the further the first one moved the model."""

    stage = 3

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"first": w.clone()}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update * (r.task + 1) ** -float(s.get("power", 0.0)), s

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return s if "power" in s else {"power": moved(s["first"], w).clamp(max=1)}


@dataclass(frozen=True)
class Anchor(Part):
    """Pulls the server's model to that of the previous task's end, every round."""

    stage = 5
    lam: NonNegativeFloat | Literal["auto"] = 0.25

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"first": w.clone()} if self.lam == "auto" else {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        if "anchor" not in s:
            return update, s
        lam = s["lam"] if self.lam == "auto" else full_like(update[0], self.lam)
        new = pull(r.w + update, s["anchor"], lam)
        told = {"distance": (new - s["anchor"]).norm(), "step": update.norm(), "lam": lam}
        return new - r.w, s | told

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        if self.lam != "auto":
            return {"anchor": w}
        lam = s["lam"] if "lam" in s else moved(s["first"], w) / (r.round + 1)
        return {"anchor": w, "lam": lam}

    def metrics(self, s: State) -> dict[str, float]:
        names = ("distance", "step", "lam")
        return {f"anchor_{name}": float(s[name]) for name in names if name in s}


@dataclass(frozen=True)
class ClientAnchor(Part):
    """Pulls each client's model to the anchor after every local epoch."""

    once = ("anchor",)
    lam: NonNegativeFloat = 0.2

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def after(self, w: Tensor, c: Context) -> Tensor:
        if "anchor" not in c.down:
            return w
        return where(c.epoch_ends, pull(w, c.down["anchor"], 2 * self.lam), w)

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return {"anchor": w}


@register("SPECIAL: Server-Proximal Aggregation")
def special(
    lam: NonNegativeFloat | Literal["auto"] = 0.25,
    server_lr: PositiveFloat | Literal["1/task", "auto"] | None = None,
    average: Average = "uniform",
) -> Method:
    """A server-side anchor at the previous task's model.

    Args:
        lam: strength of the pull to the anchor; "auto": by how far the first task moves the model.
        server_lr: the server's step before the pull; "1/task": 1/k in the k-th task; "auto":
            between that and 1, by how far the first task moves the model; left out: "1/task", or
            "auto" if `lam` is.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    chosen = server_lr or ("auto" if lam == "auto" else "1/task")
    rate = MovedRate() if chosen == "auto" else ServerRate(chosen)
    return Method(rate, Anchor(lam), average=average, name="special")


@register("SPECIAL: Server-Proximal Aggregation")
def special_c(
    lam: NonNegativeFloat = 0.2,
    server_lr: PositiveFloat | Literal["1/task"] = "1/task",
    average: Average = "uniform",
) -> Method:
    """SPECIAL's anchor at the clients.

    Args:
        lam: strength of the pull to the anchor, after every epoch.
        server_lr: the server's step; "1/task": 1/k in the k-th task.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(ServerRate(server_lr), ClientAnchor(lam), average=average, name="special_c")
