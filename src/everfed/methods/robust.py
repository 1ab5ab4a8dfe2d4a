"""Aggregation that single clients cannot turn. Everything that clients upload is aggregated so.

    trimmed    each coordinate's mean without the b largest and the b smallest, b = floor(share n)
    median     the same with all but the middle one or two trimmed       (both Yin et al. 2018)
    krum       the mean over the m clients whose updates are nearest to their n - f - 2 nearest
               neighbours, squared distances summed; m = 1 is Krum, f how many may be bad; it needs
               n >= 2 f + 3                                              (Blanchard et al. 2017)
    bound      the mean of updates that are cut to a norm: min(1, C / |u|) u  (Sun et al. 2019)

Sums become n times the robust mean. median and trimmed count clients the same. `bound` cuts updates
only: what else a method uploads (SCAFFOLD's control variates) is taken as it comes.
"""

from __future__ import annotations

from math import floor
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.errors import EverfedError
from everfed.method import Average, Method, Part, State
from everfed.methods.registry import register

Share = Annotated[float, Field(ge=0, le=0.5)]


class Robust(Part):
    """What aggregates clients' uploads by itself."""

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        for part in parts:
            if part.spread or (part is not self and part.has("aggregate")):
                kind = type(part).__name__
                raise EverfedError(f"{type(self).__name__} does not go with {kind}")


@dataclass(frozen=True)
class Trimmed(Robust):
    """Each coordinate's mean without the extremes; its median where share is 1/2."""

    share: Share = 0.5

    def aggregate(self, uploads: State, weights: Tensor, means: frozenset[str]) -> State:
        n = len(weights)
        cut = min(floor(self.share * n), (n - 1) // 2)
        out = {key: value.sort(0).values[cut : n - cut].mean(0) for key, value in uploads.items()}
        return {key: center if key in means else n * center for key, center in out.items()}


@dataclass(frozen=True)
class Krum(Robust):
    """The mean over the clients that have the nearest neighbours."""

    bad: NonNegativeInt = 1
    keep: PositiveInt = 1

    @property
    def least(self) -> int:
        return 2 * self.bad + 3

    def chosen(self, updates: Tensor) -> Tensor:
        """The rows that are averaged, (keep,)."""
        far = torch.cdist(updates.double(), updates.double()).square().fill_diagonal_(torch.inf)
        scores = far.sort(1).values[:, : len(updates) - self.bad - 2].sum(1)
        return scores.argsort(stable=True)[: self.keep]

    def aggregate(self, uploads: State, weights: Tensor, means: frozenset[str]) -> State:
        if not uploads:
            return {}
        # a probe has no update: all that clients say stands for it
        said = [uploads["update"]] if "update" in uploads else list(uploads.values())
        rows = self.chosen(torch.cat([value.reshape(len(value), -1) for value in said], 1))
        share, n, out = weights[rows] / weights[rows].sum(), len(weights), {}
        for key, value in uploads.items():
            center = torch.tensordot(share, value[rows], 1)
            out[key] = center if key in means else n * value[rows].mean(0)
        return out


@dataclass(frozen=True)
class Bound(Part):
    """Updates of bounded norm."""

    clip: PositiveFloat = 1.0

    def screen(self, uploads: State) -> State:
        if "update" not in uploads:
            return uploads
        norm = torch.linalg.vector_norm(uploads["update"], dim=1, keepdim=True)
        return uploads | {"update": uploads["update"] * (self.clip / norm.clamp(min=self.clip))}


@register("Yin et al. 2018")
def median(average: Average = "samples") -> Method:
    """Each coordinate's median over the clients.

    Args:
        average: of no account to the median, but to what it is added to.
    """
    return Method(Trimmed(), average=average, name="median")


@register("Yin et al. 2018")
def trimmed_mean(share: Share = 0.2, average: Average = "samples") -> Method:
    """Each coordinate's mean without the largest and the smallest share of clients.

    Args:
        share: of clients that is left out at either end.
        average: of no account to the trimmed mean, but to what it is added to.
    """
    return Method(Trimmed(share), average=average, name="trimmed_mean")


@register("Blanchard et al. 2017")
def krum(bad: NonNegativeInt = 1, keep: PositiveInt = 1, average: Average = "samples") -> Method:
    """The mean of the updates that lie nearest to the others.

    Args:
        bad: how many clients may send anything.
        keep: how many updates are averaged: 1 is Krum, more is multi-Krum.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Krum(bad, keep), average=average, name="krum")


@register("Sun et al. 2019")
def norm_bound(clip: PositiveFloat = 1.0, average: Average = "samples") -> Method:
    """The mean of updates that are cut to a norm.

    Args:
        clip: the norm.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Bound(clip), average=average, name="norm_bound")
