"""CFL-Generative. Towards Federated Learning on Time-evolving Heterogeneous Data (generated data).

At a round's end a client draws samples that stand for its data set, by Langevin dynamics on an
energy of its own model w, and keeps them instead of data. A label y is one of its own labels,
m_y and s_y are the mean and the deviation of its inputs with that label, and

    E_y(x) = CE(z_w(x), y) + prior |(x - m_y) / s_y|^2 / (2 dim) + tv TV(x)
    x <- clip(x - eta grad E_y(x) + xi),    xi ~ N(0, sigma^2),    x_0 uniform

It trains on its current data together with what it drew for all others. sigma^2 = 2 eta samples
from exp(-E), a smaller one seeks its modes. The paper leaves E open: this one is ours. Where labels
are not classes, m and s are those of all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, Recall, State
from everfed.methods.registry import register

Noise = NonNegativeFloat | Literal["langevin"]


def langevin(
    x: Tensor,
    slope: Callable[[Tensor], Tensor],
    steps: int,
    rate: float,
    sigma: float,
    within: tuple[float, float],
    random: np.random.Generator,
) -> Tensor:
    """`steps` times x <- clip(x - rate slope(x) + N(0, sigma^2)); any shape."""
    low, high = within
    for _ in range(steps):
        noise = torch.from_numpy(random.standard_normal(x.shape)).to(x)
        x = (x - rate * slope(x) + sigma * noise).clamp(low, high)
    return x


def prior(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """|(x - m) / s|^2 / (2 dim) of each sample: (n, ...) -> (n,)."""
    return ((x - mean) / deviation).square().flatten(1).mean(1) / 2


def total_variation(x: Tensor) -> Tensor:
    """Sum of absolute differences of neighbouring pixels: (n, channels, h, w) -> (n,); else 0."""
    if x.dim() != 4:
        return x.new_zeros(len(x))
    return sum(x.diff(dim=k).abs().flatten(1).sum(1) for k in (2, 3))  # type: ignore[return-value]


@dataclass(frozen=True)
class Generated(Part):
    """Replay of samples drawn by Langevin dynamics; clients keep `count` for every data set."""

    count: PositiveInt = 50
    steps: PositiveInt = 100
    rate: PositiveFloat = 0.1
    noise: Noise = 0.01
    prior: NonNegativeFloat = 1.0
    tv: NonNegativeFloat = 1e-3
    #: samples for all data sets together
    budget: PositiveInt = 1000
    evict: memory.Evict = "shrink"

    def client_init(self, w: Tensor) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return {"x": w.new_zeros(0), "y": none, "block": none}

    def generated(self, c: Context) -> tuple[Tensor, Tensor]:
        others = c.mine["block"] != c.block
        return c.mine["x"][others], c.mine["y"][others]

    def remember(self, w: Tensor, c: Context) -> State:
        others = {b: own for b, own in _sets(c.mine).items() if b != c.block}
        sets = others | {c.block: self._draw(w, c)}  # from the least to the most recently met
        left = memory.allotted([len(y) for _, y in sets.values()], self.budget, self.evict)
        cut = {b: (x[:k], y[:k]) for (b, (x, y)), k in zip(sets.items(), left, strict=True)}
        x, y = (torch.cat(parts) for parts in zip(*cut.values(), strict=True))
        block = torch.tensor([b for b, (_, own) in cut.items() for _ in own], dtype=torch.int64)
        return {"x": x, "y": y, "block": block}

    def _draw(self, w: Tensor, c: Context) -> tuple[Tensor, Tensor]:
        """Samples of model w for the client's current data: (count, ...), (count,)."""
        x, y = c.samples(c.ids)
        if not x.is_floating_point():
            raise EverfedError("cfl_generative draws inputs that are floats: use cfl_coreset")
        random = rng(c.seed, "langevin", c.round, c.client)
        picks, kinds = random.integers(len(y), size=self.count), c.labels(c.ids)
        labels = y[torch.from_numpy(picks).to(y.device)]
        stats = {k: torch.std_mean(x[torch.from_numpy(kinds == k)], 0, correction=0)
                 for k in set(kinds[picks].tolist())}  # fmt: skip
        deviation, mean = (
            torch.stack(own) for own in zip(*(stats[k] for k in kinds[picks].tolist()), strict=True)
        )
        # where inputs hardly differ, the prior's pull must not throw x beyond the mean
        least = (self.rate * self.prior / mean[0].numel()) ** 0.5
        deviation = deviation.clamp(min=least or 1.0)

        def slope(x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = c.losses(w, x, labels) + self.prior * prior(x, mean, deviation)
                energy = energy + self.tv * total_variation(x)
                return torch.autograd.grad(energy.sum(), x)[0]

        low, high = float(x.min()), float(x.max())
        start = low + (high - low) * torch.from_numpy(random.random(mean.shape)).to(x)
        sigma = (2 * self.rate) ** 0.5 if self.noise == "langevin" else self.noise
        drawn = langevin(start, slope, self.steps, self.rate, sigma, (low, high), random)
        return drawn, labels.cpu()

    def recall(
        self, s: State, mine: Mapping[int, State], past: Recall
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for client, own in mine.items():
            for block, kept in _sets(own).items():
                yield past.replayed(client, block, kept)


def _sets(mine: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """What a client has drawn by data set, from the least to the most recently met."""
    block = mine["block"]
    return {
        b: (mine["x"][block == b], mine["y"][block == b]) for b in dict.fromkeys(block.tolist())
    }


@register("Towards Federated Learning on Time-evolving Heterogeneous Data")
def cfl_generative(
    count: PositiveInt = 50,
    steps: PositiveInt = 100,
    rate: PositiveFloat = 0.1,
    noise: Noise = 0.01,
    prior: NonNegativeFloat = 1.0,
    tv: NonNegativeFloat = 1e-3,
    budget: PositiveInt = 1000,
    evict: memory.Evict = "shrink",
    average: Average = "uniform",
) -> Method:
    """Replay of samples that a client draws from its own model instead of keeping data.

    Args:
        count: samples drawn for each data set.
        steps: of the Langevin dynamics; each costs a forward and a backward pass.
        rate: length of a step.
        noise: deviation of a step's noise; "langevin": sqrt(2 rate), which samples from the energy.
        prior: weight of the distance to the class's mean input.
        tv: weight of the total variation (images).
        budget: samples that a client keeps in all.
        evict: beyond the budget "shrink" cuts all sets to the same size, "oldest" the set that was
            not met for the longest time first.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = Generated(count, steps, rate, noise, prior, tv, budget, evict)
    return Method(part, average=average, name="cfl_generative")
