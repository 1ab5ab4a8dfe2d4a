"""CFL-Regularization. Towards Federated Learning on Time-evolving Heterogeneous Data.

A past objective is kept as its Taylor series at the client's final model w^:

    f~(w) = f(w^) + g'(w - w^) + 1/2 (w - w^)' diag(h) (w - w^),    grad f~ = g + h (w - w^)

The server keeps the latest 40 of them, of all clients, on the chosen layers. Since

    sum_b p_b (g_b + h_b (w - w^_b)) = H w + c,   H = sum p_b h_b,  c = sum p_b (g_b - h_b w^_b)

clients upload (h, g - h w^) and the server sends the two vectors H and c: exact, and small.
weights = "beta":   loss + sum over layers of beta_l * mean_b f~_b      (the experiments)
weights = "theory": p_t loss + sum_tau p_tau f~_tau, p of Theorem 4.1   (on the chosen layers)
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.fedprox import Prox
from everfed.methods.registry import register
from everfed.theory.weights import independent
from everfed.vector import Layout, Slot

Layers = Literal["top", "all"] | dict[str, float]


def chosen(layers: Layers, layout: Layout) -> list[tuple[Slot, float]]:
    """The regularised slots with their strengths; "top": the last layer 1, the one before 0.1."""
    names = layout.layers()
    if layers == "all":
        layers = dict.fromkeys(names, 1.0)
    elif layers == "top":
        layers = dict(zip(names[-2:], (0.1, 1.0)[-len(names[-2:]) :], strict=True))
    for name in layers:
        if not layout.names(name):
            raise EverfedError(f"the model has no layer {name!r}; it has {', '.join(names)}")
    return [(slot, beta) for name, beta in layers.items() for slot in layout.names(name)]


def kept(s: State) -> dict[int, int]:
    """How many series the server has of each round t: rows of "ht" and "ct", which are never copied
    from state to state."""
    return {int(key[1:]): len(rows) for key, rows in s.items() if key[0] == "h"}


@dataclass(frozen=True)
class Taylor(Part):
    """Second-order memories of past objectives, compressed to two vectors."""

    reduces = {"h": "stack", "c": "stack"}
    curvature: Literal["fisher", "hutchinson"] = "fisher"
    layers: Layers = "top"
    buffer: PositiveInt = 40
    weights: Literal["beta", "theory"] = "beta"
    #: Theorem 4.1's D^2 (time drift) and R^2 (information loss)
    d2: PositiveFloat = 1.0
    r2: NonNegativeFloat = 1.0
    probes: PositiveInt = 10
    clamp: bool = True

    def init(self, w: Tensor, layout: Layout) -> State:
        chosen(self.layers, layout)
        return {}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        if not s:
            return w, {}
        entries, now = kept(s), 1.0
        p = dict.fromkeys(entries, 1 / sum(entries.values()))
        if self.weights == "theory":
            past, now = independent(len(entries) + 1, self.d2, self.r2)
            p = {t: past / n for t, n in entries.items()}  # a round's weight, shared by its entries
        h, c = (torch.stack([p[t] * s[f"{v}{t}"].sum(0) for t in p]).sum(0) for v in "hc")
        return w, {"h": h, "c": c, "now": torch.tensor(now).to(w)}

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        if "h" not in c.down:
            return g
        at = 0
        for slot, beta in chosen(self.layers, c.layout):
            cut, here = slice(slot.start, slot.stop), slice(at, at + slot.stop - slot.start)
            own, strength = g[..., cut], beta
            if self.weights == "theory":
                own, strength = own.mul_(c.down["now"]), 1.0
            own.addcmul_(c.down["h"][here], w[..., cut], value=strength)
            own.add_(c.down["c"][here], alpha=strength)
            at = here.stop
        return g

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        slots = [slot for slot, _ in chosen(self.layers, c.layout)]
        if self.curvature == "fisher":
            h, g = c.fisher(w, since=min(slot.start for slot in slots))
        else:
            h, g = c.hutchinson(w, self.probes), c.gradient(w)
        h = h.clamp_(min=0) if self.clamp else h
        constant = g.addcmul_(h, w, value=-1)

        def take(v: Tensor) -> Tensor:
            return torch.cat([v[..., slot.start : slot.stop] for slot in slots], -1)

        return update, {"h": take(h), "c": take(constant)}, {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        every, latest, room = s | {f"{v}{r.round}": r[v] for v in "hc"}, State(), self.buffer
        for t, n in sorted(kept(every).items(), reverse=True):
            if room > 0:
                latest |= {f"{v}{t}": every[f"{v}{t}"][-room:] for v in "hc"}
            room -= n
        return update, latest

    def metrics(self, s: State) -> dict[str, float]:
        if self.weights != "theory":
            return {}
        past, now = independent(len(kept(s)) + 1, self.d2, self.r2)
        return {"weight_past": past, "weight_now": now}  # of the round that comes next


@register("Towards Federated Learning on Time-evolving Heterogeneous Data")
def cfl_regularization(
    curvature: Literal["fisher", "hutchinson"] = "fisher",
    layers: Layers = "top",
    buffer: PositiveInt = 40,
    weights: Literal["beta", "theory"] = "beta",
    d2: PositiveFloat = 1.0,
    r2: NonNegativeFloat = 1.0,
    probes: PositiveInt = 10,
    clamp: bool = True,
    mu: NonNegativeFloat = 0.0,
    average: Average = "uniform",
) -> Method:
    """Taylor approximations of past objectives.

    Args:
        curvature: "fisher", or "hutchinson" for the Hessian's own diagonal.
        layers: "top" (the last two), "all", or a table of layers with their strengths.
        buffer: Taylor series that the server keeps.
        weights: "beta" (the strengths of the layers) or "theory" (Theorem 4.1).
        d2: for "theory", the time drift's variance.
        r2: for "theory", the squared information loss.
        probes: random vectors for "hutchinson".
        clamp: set negative curvature to 0.
        mu: strength of a FedProx pull, which is added.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    taylor = Taylor(curvature, layers, buffer, weights, d2, r2, probes, clamp)
    parts = (taylor, Prox(mu)) if mu else (taylor,)
    return Method(*parts, average=average, name="cfl_regularization")
