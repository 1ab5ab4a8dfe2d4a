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

import numpy as np
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


def kept(s: State) -> dict[int, int]:
    """How many series the server has of each round t: rows of "ht" and "ct", of clients "it" (and
    "lt", what each lost), which are never copied from state to state."""
    # in the order of rounds, whatever order a checkpoint has: sums depend on it
    return dict(sorted((int(key[1:]), len(rows)) for key, rows in s.items() if key[0] == "h"))


@dataclass(frozen=True)
class Taylor(Part):
    """Second-order memories of past objectives, compressed to two vectors."""

    reduces = {"h": "stack", "c": "stack", "lost": "stack"}
    stage = 0
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
        entries, now = kept(s), 1.0
        if not entries:
            return w, {}
        p = dict.fromkeys(entries, 1 / sum(entries.values()))
        if self.weights != "beta":
            past, now = self._weights(s)
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
            h, g = c.hutchinson(w, self.probes, since), c.gradient(w, train=False)
        h = h.clamp_(min=0) if self.clamp else h
        constant = g.addcmul_(h, w, value=-1)
        uploads = {"h": _take(h, slots), "c": _take(constant, slots)}
        if self.weights == "auto":
            start = c.start.expand_as(w)
            exact = c.gradient(start, train=False)
            uploads["lost"] = sq(_take(h * start + constant - exact, slots))
        return update, uploads, {}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        new = {"h": r["h"], "c": r["c"], "i": torch.tensor(r.clients)}
        if self.weights == "auto":
            new["l"] = r["lost"]
        every = s | {f"{v}{r.round}": value for v, value in new.items()}
        latest, room = {"cuts": s["cuts"]}, self.buffer
        for t, n in reversed(kept(every).items()):
            if room > 0:
                latest |= {f"{v}{t}": every[f"{v}{t}"][-room:] for v in new}
            room -= n
        if self.weights == "auto":
            latest["drifts"] = self._estimate(latest, r.w)
        return update, latest

    def _estimate(self, s: State, w: Tensor) -> Tensor:
        """D^2 and R^2 from the kept series, at w; errors of the series drift from round to round
        as well, so they are taken off."""
        at = torch.cat([w[start:stop] for start, stop in s["cuts"].tolist()])
        entries = kept(s)
        gradients = torch.cat([s[f"h{t}"] * at + s[f"c{t}"] for t in entries]).double()
        clients = torch.cat([s[f"i{t}"] for t in entries])
        rounds = np.repeat(list(entries), list(entries.values()))
        drift = scattered(gradients.cpu().numpy(), clients.numpy(), rounds)
        lost = float(torch.cat([s[f"l{t}"] for t in entries]).mean())
        return torch.tensor([max(drift.time - lost, 0.0), lost], dtype=torch.float64)

    def _weights(self, s: State) -> tuple[float, float]:
        """Of each past round and of the one that comes next, Theorem 4.1."""
        d2, r2 = s["drifts"].tolist() if self.weights == "auto" else (self.d2, self.r2)
        return independent(len(kept(s)) + 1, d2, r2)

    def recall(
        self, s: State, mine: Mapping[int, State], past: Recall
    ) -> Iterator[tuple[Tensor, Tensor]]:
        slots = [slot for slot, _ in chosen(self.layers, past.layout)]
        w = _take(past.w, slots)
        for t in kept(s):
            for client, h, c in zip(s[f"i{t}"].tolist(), s[f"h{t}"], s[f"c{t}"], strict=True):
                exact = past.gradient(past.samples(client, t), t)
                yield _take(exact, slots), h * w + c

    def metrics(self, s: State) -> dict[str, float]:
        if self.weights == "beta":
            return {}
        past, now = self._weights(s)
        found = {"weight_past": past, "weight_now": now}
        if self.weights == "auto":
            found["time_drift"], found["series_loss"] = s["drifts"].tolist()
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
