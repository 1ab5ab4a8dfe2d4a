"""C-FLAG and FedTrack. On the Convergence of Continual Federated Learning Using Incrementally
Aggregated Gradients.

Two exchanges a round. (a) clients upload grad g_i(x) over their current data and grad f_i(x) over a
sample of their memory; (b) the server sends the means grad g and grad f, and clients step

    y <- y - beta (grad g - grad g_i + g')

g' the mean of a table of component gradients, one entry renewed a step (IAG), or the plain batch
gradient. FedTrack averages y. C-FLAG uploads (Eq. 25's form; a_i = sum of g', without beta)

    dx_i = alpha_i grad f + beta_i a_i + beta E (grad g - grad g_i),   x <- x - sum p_i dx_i
    a_i = (x - y_E) / beta - E (grad g - grad g_i),    Lambda_i = <grad f, a_i>
    adaptive, Lambda_i > 0:   alpha_i = alpha,  beta_i = (1 - L alpha) Lambda_i / (L p_i c |a_i|^2)
    adaptive, Lambda_i <= 0:  alpha_i = alpha - beta Lambda_i / |grad f|^2,  beta_i = beta

c = 1 (average case) or the cohort's size (worst). Guards: beta_i <= clip * beta (the rate of the
transference case can be a thousand times beta) and alpha_i <= 1/L; clip = inf is without guards.
The paper scales the last term of dx_i by beta_i, after which corrections no longer cancel:
`printed` does that.

Recorded where there is a memory: clients in transference and in interference, and the forgetting
term that the rates minimise client by client (lower is better)

    Gamma = sum_i p_i (L/2 p_i c beta_i^2 |a_i|^2 - beta_i (1 - L alpha_i) Lambda_i)
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, where

from everfed import memory
from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.local import Affine, Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import dot, sq


@dataclass(frozen=True)
class Track(Part):
    """Local steps along the global gradient, corrected by the change of the own one."""

    reduces = {"g": "mean"}
    stage = 0
    iag: bool = True

    @property
    def components(self) -> bool:
        return self.iag

    @property
    def stateful(self) -> bool:
        return False  # what the probe leaves behind lives until the round's end

    def probe(self, w: Tensor, c: Context) -> tuple[State, State]:
        g = c.gradient(w)
        return {"g": g}, {"g": g}

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        return update, {}, {"g": c.mine["g"][:, :0]}

    def affine(self, c: Context) -> Affine | None:
        return None if self.iag else Affine(c.down["g"] - c.mine["g"])

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        if c.step == 0:  # every entry at x: the table's mean is grad g_i
            c.scratch["table"] = self._table(c)
            c.scratch["direction"] = c.down["g"].expand_as(g).clone()
            return g.copy_(c.down["g"])
        for row, new in enumerate(g):
            j = c.picks[row][c.step]
            share = len(c.pieces[row][j]) / sum(map(len, c.pieces[row]))
            old = c.scratch["table"][row, j]
            c.scratch["direction"][row].add_(new - old, alpha=share)
            old.copy_(new)
        return g.copy_(c.scratch["direction"][: len(g)])

    def _table(self, c: Context) -> dict[tuple[int, int], Tensor]:
        """Those entries that will be renewed, by client and piece."""
        later = {(row, j) for row, picks in enumerate(c.picks) for j in picks[1:]}
        keys = sorted(later, key=lambda key: (-len(c.pieces[key[0]][key[1]]), key))
        found = c.gradient(c.start, [c.pieces[row][j] for row, j in keys]) if keys else ()
        return dict(zip(keys, found, strict=True))


@dataclass(frozen=True)
class Rates:
    """AdapLR: how far to step along the memory's gradient and along the own travel."""

    lipschitz: float
    adaptive: Literal["off", "average", "worst"]
    clip: float

    def check(self, who: str, alpha: float, otherwise: str = "") -> None:
        """Raise EverfedError where the rates would have no sense."""
        if self.adaptive != "off" and self.lipschitz * alpha >= 1:
            raise EverfedError(
                f"{who}'s adaptive rates need alpha < 1/lipschitz, but alpha = {alpha} (the "
                f"learning rate unless set) and lipschitz = {self.lipschitz}: lower one of "
                f"them{otherwise}"
            )

    def __call__(
        self, f: Tensor, a: Tensor, alpha: float, beta: float, p: Tensor, cohort: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(alpha_i, beta_i), each (clients, 1), for f (d,) and a (clients, d)."""
        agree, f2, a2 = dot(f, a), sq(f), sq(a)
        same = torch.ones_like(agree)
        if self.adaptive == "off":
            return alpha * same, beta * same
        many = cohort if self.adaptive == "worst" else torch.ones_like(cohort)
        room = self.lipschitz * p * many * a2
        faster = ((1 - self.lipschitz * alpha) * agree / room).clamp(max=self.clip * beta)
        firmer = (alpha - beta * agree / f2).clamp(max=max(alpha, self._alpha_limit))
        usable = (f2 > 1e-24) & (a2 > 1e-24)
        helps = agree > 0
        alpha_i = where(usable & ~helps, firmer, alpha * same)
        return alpha_i, where(usable & helps, faster, beta * same)

    def forgetting(
        self, f: Tensor, a: Tensor, alpha: Tensor, beta: Tensor, p: Tensor, cohort: Tensor
    ) -> Tensor:
        """Gamma_i of each client with its rates, (clients, 1)."""
        many = cohort if self.adaptive == "worst" else torch.ones_like(cohort)
        own = self.lipschitz / 2 * p * many * beta.square() * sq(a)
        return own - beta * (1 - self.lipschitz * alpha) * dot(f, a)

    @property
    def _alpha_limit(self) -> float:
        return 1 / self.lipschitz if math.isfinite(self.clip) else math.inf


@dataclass(frozen=True)
class CFlag(Track):
    """Gradient tracking, a step along the memory's gradient, and rates against forgetting."""

    reduces = {"g": "mean", "f": "mean", "has": "mean", "gamma": "mean", "helps": "sum"}
    remembers = ("ids",)
    alpha: PositiveFloat | None = None
    lipschitz: PositiveFloat = 5.0
    adaptive: Literal["off", "average", "worst"] = "average"
    clip: PositiveFloat = 1.0
    printed: bool = True
    memory: PositiveInt = 400
    draw: PositiveInt = 200

    def check(self, local: Local) -> None:
        rates = Rates(self.lipschitz, self.adaptive, self.clip)
        rates.check("C-FLAG", self.alpha or local.lr, " or set adaptive = 'off'")

    @property
    def stateful(self) -> bool:
        return True

    def client_init(self, w: Tensor) -> State:
        return {"ids": torch.zeros(0, dtype=torch.int64)}

    def probe(self, w: Tensor, c: Context) -> tuple[State, State]:
        up, mine = super().probe(w, c)
        random = rng(c.seed, "memory draw", c.round, c.client)
        ids = memory.uniform(c.mine["ids"].numpy(), self.draw, random)
        f = c.gradient(w, ids) if len(ids) else torch.zeros_like(w)
        up |= {"f": f, "has": torch.tensor(float(len(ids) > 0)).to(w)}
        return up, mine

    def answer(self, s: State, r: Reduced) -> State:
        if not r["has"]:
            return {"g": r["g"]}
        # the mean over those that have a memory
        total, cohort = torch.tensor(r.weight), torch.tensor(float(r.n))
        return {"g": r["g"], "f": r["f"] / r["has"], "total": total, "cohort": cohort}

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        _, _, mine = super().finish(update, w, c)
        if "f" not in c.down:
            return update, {}, mine
        f, beta = c.down["f"], c.lr
        drift = c.steps * beta * (c.down["g"] - c.mine["g"])
        a = (c.start - w - drift) / beta
        rates = Rates(self.lipschitz, self.adaptive, self.clip)
        p, cohort = c.weight / c.down["total"].to(w), c.down["cohort"].to(w)
        alpha_i, beta_i = rates(f, a, self.alpha or c.lr, beta, p, cohort)
        dx = alpha_i * f + beta_i * a + (beta_i / beta if self.printed else 1) * drift
        gamma = rates.forgetting(f, a, alpha_i, beta_i, p, cohort)
        return -dx, {"gamma": gamma, "helps": (dot(f, a) > 0).to(w)}, mine

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        random = rng(c.seed, "memory", c.task, c.client)
        kept = memory.class_balanced(c.ids, c.labels(c.ids), self.memory, random)
        ids = torch.from_numpy(np.concatenate([c.mine["ids"].numpy(), kept]))
        return {}, {"ids": ids}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        if "gamma" not in r.values:  # no memory yet
            return update, {}
        return update, {"gamma": r["gamma"], "helps": r["helps"], "hurts": r.n - r["helps"]}

    def metrics(self, s: State) -> dict[str, float]:
        names = {"gamma": "gamma", "helps": "transference", "hurts": "interference"}
        return {name: float(s[key]) for key, name in names.items()} if s else {}


@register("On the Convergence of Continual Federated Learning (FedLin with IAG)")
def fedtrack(iag: bool = True, average: Average = "samples") -> Method:
    """Gradient tracking: local steps along the global gradient, in two exchanges.

    Args:
        iag: a table of the batches' gradients, of which each step renews one; false: the gradient
            of the step's batch.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Track(iag), average=average, name="fedtrack")


@register("On the Convergence of Continual Federated Learning")
def cflag(
    alpha: PositiveFloat | None = None,
    lipschitz: PositiveFloat = 5.0,
    adaptive: Literal["off", "average", "worst"] = "average",
    clip: PositiveFloat = 1.0,
    printed: bool = True,
    iag: bool = True,
    memory: PositiveInt = 400,
    draw: PositiveInt = 200,
    average: Average = "samples",
) -> Method:
    """Replay memory with incremental aggregated gradients and adaptive rates.

    Args:
        alpha: the step along the memory's gradient; left out: the learning rate.
        lipschitz: the paper's L; adaptive rates need alpha < 1/lipschitz.
        adaptive: rates of the "average" case, of the "worst" case, or "off".
        clip: the largest adaptive rate, in learning rates; inf takes the guards away.
        printed: scale the drift correction by the adaptive rate, as the paper prints it.
        iag: a table of the batches' gradients, of which each step renews one; false: the gradient
            of the step's batch.
        memory: samples that a client keeps of each task.
        draw: samples of the memory for its gradient in a round.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = CFlag(iag, alpha, lipschitz, adaptive, clip, printed, memory, draw)
    return Method(part, average=average, name="cflag")
