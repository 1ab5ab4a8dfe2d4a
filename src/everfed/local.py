"""How a client trains on its own data: optimiser, learning rate, epochs and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.chance import rng
from everfed.errors import EverfedError, plain

Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@plain
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Local:
    """Settings of the local phase, the same for every client.

    >>> Local(lr=0.1, epochs=2).rate(round_=0, rounds=10)
    0.1
    """

    lr: Annotated[float, Field(gt=0, le=1e20, allow_inf_nan=False)] = 0.05  #: learning rate
    epochs: PositiveInt = 1  #: passes over the client's data in a round
    #: a fixed number of optimiser steps instead of `epochs`
    steps: PositiveInt | None = None
    batch: PositiveInt = 32  #: samples in a step
    #: begins anew with every client and round
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Fraction = 0.0  #: of sgd
    nesterov: bool = False  #: Nesterov's form of the momentum
    weight_decay: NonNegativeFloat = 0.0  #: pull of all weights to 0
    #: Adam's and AdamW's moments
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8  #: Adam's and AdamW's smallest divisor
    #: largest norm of the gradient that is stepped along
    clip: Positive | None = None
    #: learning rate over rounds: lr, lr * decay^round, a cosine to 0, or lr / sqrt(round + 1)
    schedule: Literal["constant", "exponential", "cosine", "sqrt"] = "constant"
    #: of the exponential schedule
    decay: Annotated[float, Field(gt=0, le=1)] = 0.96
    #: start the schedule anew at every task
    reset: bool = True
    #: largest size of all samples, inputs and labels, that a client may keep for a method's memory
    memory_bytes: Annotated[int, Field(gt=0)] | None = None

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise EverfedError("local.nesterov needs local.momentum > 0")
        if self.momentum and self.optimizer != "sgd":
            raise EverfedError("local.momentum is for sgd; adam and adamw take local.betas")

    @property
    def plain(self) -> bool:
        """Whether a step is w - lr * gradient and nothing else."""
        return self.optimizer == "sgd" and not (self.momentum or self.weight_decay or self.clip)

    def rate(self, round_: int, rounds: int) -> float:
        """The learning rate of one round; `rounds` is the schedule's length."""
        match self.schedule:
            case "exponential":
                return self.lr * self.decay**round_
            case "cosine":
                return self.lr * 0.5 * (1 + math.cos(math.pi * round_ / max(1, rounds)))
            case "sqrt":
                return self.lr / math.sqrt(round_ + 1)
        return self.lr


@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class Affine:
    """A change of gradients that stays the same for a local phase: g -> scale g + pull w + shift.

    `shift` is (d,) or (clients, d).
    """

    shift: Tensor
    scale: float = 1.0
    pull: float = 0.0

    def __call__(self, g: Tensor, w: Tensor) -> Tensor:
        """The changed gradient, in place; g and w: (clients, d)."""
        if self.scale != 1:
            g.mul_(self.scale)
        if self.pull:
            g.add_(w, alpha=self.pull)
        return g.add_(self._rows(self.shift, g))

    def after(self, first: Affine) -> Affine:
        """Both changes as one."""
        shift = self.scale * first.shift + self.shift
        return Affine(shift, self.scale * first.scale, self.scale * first.pull + self.pull)

    def rests(self, start: Tensor) -> bool:
        """Whether it is a pull to `start`, (d,): what is there, and no gradient moves, stays."""
        return torch.equal(self.shift, -self.pull * start)

    def to(self, start: Tensor) -> Affine:
        """The same pull to another point."""
        return Affine(-self.pull * start, self.scale, self.pull)

    def fuse(self, lr: float) -> tuple[float, Callable[[Tensor], Tensor]] | None:
        """The step w - lr (scale g + pull w + shift) as a plain step and one more pass over w.

        With t = lr pull it is (1 - t) (w - rate g) - lr shift, rate = lr scale / (1 - t): the rate,
        and what finishes the step in place. None where t is too near to 1 or beyond.
        """
        t = lr * self.pull
        if t > 0.5:
            return None
        if t == 0:
            return lr * self.scale, lambda w: w.sub_(self._rows(self.shift, w), alpha=lr)
        travel = self.shift * -lr

        def finish(w: Tensor) -> Tensor:
            return torch.add(self._rows(travel, w), w, alpha=1 - t, out=w)

        return lr * self.scale / (1 - t), finish

    def _rows(self, v: Tensor, w: Tensor) -> Tensor:
        """Of clients that still train; those with fewer steps lie at the end."""
        return v if v.dim() == 1 else v[: len(w)]


class Optimiser:
    """SGD, Adam or AdamW on the rows of a matrix of models, all at the same step.

    Clients with fewer steps lie at the end and drop out, so each step takes a prefix of the rows.
    The formulas are torch.optim's (tested against it).
    """

    def __init__(self, local: Local) -> None:
        self.local = local
        self.count = 0
        self.m: Tensor | None = None
        self.v: Tensor | None = None

    def step(self, w: Tensor, g: Tensor, lr: float) -> None:
        """w <- w - lr * direction(g), in place; w and g: (clients, d)."""
        s, self.count = self.local, self.count + 1
        if s.clip is not None:
            norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g = g * (s.clip / (norm + 1e-6)).clamp(max=1)
        if s.weight_decay and s.optimizer != "adamw":
            g = g.add(w, alpha=s.weight_decay)
        if s.optimizer == "sgd":
            w.add_(self._momentum(g) if s.momentum else g, alpha=-lr)
            return
        if s.optimizer == "adamw":
            w.mul_(1 - lr * s.weight_decay)
        self._adam(w, g, lr)

    def _momentum(self, g: Tensor) -> Tensor:
        s = self.local
        if self.m is None:
            self.m = g.clone()
        else:
            self.m[: len(g)].mul_(s.momentum).add_(g)
        m = self.m[: len(g)]
        return g.add(m, alpha=s.momentum) if s.nesterov else m

    def _adam(self, w: Tensor, g: Tensor, lr: float) -> None:
        s, (b1, b2) = self.local, self.local.betas
        if self.m is None or self.v is None:
            self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)
        m = self.m[: len(g)].lerp_(g, 1 - b1)
        v = self.v[: len(g)].mul_(b2).addcmul_(g, g, value=1 - b2)
        bias1, bias2 = 1 - b1**self.count, 1 - b2**self.count
        w.addcdiv_(m, (v.sqrt() / math.sqrt(bias2)).add_(s.eps), value=-lr / bias1)


#: whether batches are pieces of a fixed cut, and which: of a batch's size, or single samples
Components = bool | Literal["samples"]


@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True))
class Plan:
    """The batches of one client's local phase."""

    steps: list[np.ndarray]
    per_epoch: int
    #: with components: the pieces of the data, and which of them each step takes
    pieces: list[np.ndarray]
    picks: list[int]


def batches(
    ids: np.ndarray, local: Local, seed: int, round_: int, client: int, components: Components
) -> Plan:
    """Epochs are fresh permutations cut into batches. With `components` the data are cut once, into
    batches or single samples, and every step draws one of the pieces with replacement (incremental
    aggregated gradients)."""
    random, size = rng(seed, "batches", round_, client), local.batch
    per_epoch = -(-len(ids) // size)
    count = local.steps or local.epochs * per_epoch

    def epoch(order: np.ndarray) -> list[np.ndarray]:
        return [order[k : k + size] for k in range(0, len(ids), size)]

    if components:
        order = ids[rng(seed, "components", round_, client).permutation(len(ids))]
        pieces = list(order[:, None]) if components == "samples" else epoch(order)
        picks = random.integers(len(pieces), size=count).tolist()
        return Plan([pieces[j] for j in picks], per_epoch, pieces, picks)
    steps: list[np.ndarray] = []
    while len(steps) < count:
        steps += epoch(ids[random.permutation(len(ids))])
    return Plan(steps[:count], per_epoch, [], [0] * count)
