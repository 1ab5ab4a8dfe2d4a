"""CFL-Regularization. Towards Federated Learning on Time-evolving Heterogeneous Data.

A past objective is kept as its Taylor series at the client's final model w^:

    f~(w) = f(w^) + g'(w - w^) + 1/2 (w - w^)' diag(h) (w - w^),    grad f~ = g + h (w - w^)

The server keeps the latest 40 of them, of all clients, on the chosen layers. Since

    sum_b p_b (g_b + h_b (w - w^_b)) = H w + c,   H = sum p_b h_b,  c = sum p_b (g_b - h_b w^_b)

clients upload (h, g - h w^) and the server sends the two vectors H and c: exact, and small.
weights = "beta":   loss + sum over layers of beta_l * mean_b f~_b      (the experiments)
weights = "theory": p_t loss + sum_tau p_tau f~_tau, p of Theorem 4.1   (on the chosen layers)
weights = "auto":   the same with D^2 and R^2 estimated (not in the paper): every kept series tells
what its round's gradient would be at the server's model, so D^2 is how a client's gradients differ
from round to round there; for R^2 a client measures how wrong its own series is at the model that
it received, one more gradient a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, Recall, Reduced, State
from everfed.methods.fedprox import Prox
from everfed.methods.registry import register
from everfed.theory.drift import scattered
from everfed.theory.weights import independent
from everfed.vector import Layout, Slot, sq

Layers = Literal["top", "all"] | dict[str, NonNegativeFloat]


def chosen(layers: Layers, layout: Layout) -> list[tuple[Slot, float]]:
    """The regularised slots with their strengths; "top": the last block 1, the one before 0.1."""
    if layers == "all":
        return [(slot, 1.0) for slot in layout.slots]
    blocks = layout.blocks()
    if layers == "top":
        layers = dict(zip(blocks[-2:], (0.1, 1.0)[-len(blocks[-2:]) :], strict=True))
    out: dict[Slot, float] = {}
    for name, beta in layers.items():
        slots = layout.names(name)
        if not slots:
            raise EverfedError(f"the model has no layer {name!r}; it has {', '.join(blocks)}")
        if any(slot in out for slot in slots):
            raise EverfedError(f"layers: {name!r} shares parameters with another name of the table")
        out |= dict.fromkeys(slots, beta)
    if not out:
        raise EverfedError(f"layers names none; the model has {', '.join(blocks)}")
    return list(out.items())


@dataclass(frozen=True)
class Taylor(Part):
    """Second-order memories of past objectives, compressed to two vectors."""

    reduces = {"h": "stack", "c": "stack", "lost": "stack"}
    curvature: Literal["fisher", "hutchinson"] = "fisher"
    layers: Layers = "top"
    buffer: PositiveInt = 40
    weights: Literal["beta", "theory", "auto"] = "beta"
    #: Theorem 4.1's D^2 (time drift) and R^2 (information loss)
    d2: PositiveFloat = 1.0
    r2: NonNegativeFloat = 1.0
    probes: PositiveInt = 10
    clamp: bool = True

    def init(self, w: Tensor, layout: Layout) -> State:
        slots = chosen(self.layers, layout)
        return {"cuts": torch.tensor([(slot.start, slot.stop) for slot, _ in slots])}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        if "h" not in s:
            return w, {}
        _, at, entries = torch.unique(s["round"], return_inverse=True, return_counts=True)
        if self.weights != "beta":
            past, now = self._weights(s)
            p = past / entries[at].to(w)  # a round's weight is shared by its entries
        else:
            p, now = torch.full_like(s["h"][:, 0], 1 / len(s["h"])), 1.0
        return w, {"h": p @ s["h"], "c": p @ s["c"], "now": torch.tensor(now).to(w)}

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        if "h" not in c.down:
            return g
        at = 0
        for slot, beta in chosen(self.layers, c.layout):
            cut, here = slice(slot.start, slot.stop), slice(at, at + slot.stop - slot.start)
            own, strength = g[..., cut], beta
            if self.weights != "beta":
                own, strength = own.mul_(c.down["now"]), 1.0
            own.addcmul_(c.down["h"][here], w[..., cut], value=strength)
            own.add_(c.down["c"][here], alpha=strength)
            at = here.stop
        return g

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        slots = [slot for slot, _ in chosen(self.layers, c.layout)]
        since = min(slot.start for slot in slots)
        if self.curvature == "fisher":
            h, g = c.fisher(w, since)
        else:
            h, g = c.hutchinson(w, self.probes, since), c.gradient(w)
        h = h.clamp_(min=0) if self.clamp else h
        constant = g.addcmul_(h, w, value=-1)
        uploads = {"h": _take(h, slots), "c": _take(constant, slots)}
        if self.weights == "auto":
            start = c.start.expand_as(w)
            uploads["lost"] = sq(_take(h * start + constant - c.gradient(start), slots))
        return update, uploads, {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        new = dict(r.values) | {"round": torch.full((len(r["h"]),), r.round)}
        new["client"] = torch.tensor(r.clients)
        kept = {key: torch.cat([s[key], new[key]]) if "h" in s else new[key] for key in new}
        state = {"cuts": s["cuts"]} | {key: value[-self.buffer :] for key, value in kept.items()}
        if self.weights == "auto":
            state["constants"] = self._estimate(state, r.w)
        return update, state

    def _estimate(self, s: State, w: Tensor) -> Tensor:
        """D^2 and R^2 from the kept series, at w; errors of the series drift from round to round
        as well, so they are taken off."""
        at = torch.cat([w[start:stop] for start, stop in s["cuts"].tolist()])
        gradients = (s["h"] * at + s["c"]).double().cpu().numpy()
        drift = scattered(gradients, s["client"].numpy(), s["round"].numpy())
        lost = float(s["lost"].mean())
        return torch.tensor([max(drift.time - lost, 0.0), lost], dtype=torch.float64)

    def _weights(self, s: State) -> tuple[float, float]:
        """Of each past round and of the one that comes next, Theorem 4.1."""
        d2, r2 = s["constants"].tolist() if self.weights == "auto" else (self.d2, self.r2)
        return independent(len(set(s["round"].tolist())) + 1, d2, r2)

    def recall(
        self, s: State, mine: Mapping[int, State], past: Recall
    ) -> Iterator[tuple[Tensor, Tensor]]:
        slots = [slot for slot, _ in chosen(self.layers, past.layout)]
        w = _take(past.w, slots)
        for k in range(len(s.get("h", ()))):
            client, at = int(s["client"][k]), int(s["round"][k])
            exact = past.gradient(past.samples(client, at), at)
            yield _take(exact, slots), s["h"][k] * w + s["c"][k]

    def metrics(self, s: State) -> dict[str, float]:
        if self.weights == "beta":
            return {}
        past, now = self._weights(s)
        found = {"weight_past": past, "weight_now": now}
        if self.weights == "auto":
            found["time_drift"], found["series_loss"] = s["constants"].tolist()
        return found


def _take(v: Tensor, slots: list[Slot]) -> Tensor:
    """The coordinates of some slots: (..., d) -> (..., k)."""
    return torch.cat([v[..., slot.start : slot.stop] for slot in slots], -1)


@register("Towards Federated Learning on Time-evolving Heterogeneous Data")
def cfl_regularization(
    curvature: Literal["fisher", "hutchinson"] = "fisher",
    layers: Layers = "top",
    buffer: PositiveInt = 40,
    weights: Literal["beta", "theory", "auto"] = "beta",
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
        layers: "top" (the last block and, at a tenth, the one before), "all", or a table of names
            of layers or blocks with their strengths.
        buffer: Taylor series that the server keeps.
        weights: "beta" (the strengths of the layers), "theory" (Theorem 4.1) or "auto" (the same,
            with d2 and r2 estimated as training goes on).
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
