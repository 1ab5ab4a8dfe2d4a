"""Small generator networks that methods train, and what they are trained by.

A generator turns noise into inputs in [0, 1], standardised where the federation's are. Its
parameters are a flat vector, like the model's, so they are sent and saved like everything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from everfed.compute.base import Seen
from everfed.data.table import Inputs
from everfed.errors import EverfedError
from everfed.method import Server
from everfed.vector import Layout


class ChannelsLast(nn.Module):
    """Images as they are, in the order in memory in which what follows takes half the time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Generator:
    """Noise (n, latent) -> inputs (n, *shape): two upsampling convolutions for images (channels,
    height, width), one hidden layer for anything else.

    >>> Generator(Inputs((1, 8, 8)), latent=16, width=4).layout.d
    897
    """

    inputs: Inputs  #: what one looks like
    latent: int  #: numbers of noise for each
    width: int  #: channels of the convolutions; the hidden layer has 16 times as many units

    def network(self) -> nn.Module:
        """Freshly drawn. Its norms take the statistics of the batch, always, so that there are
        parameters and nothing else."""
        shape, k = self.inputs.shape, self.width
        dim = math.prod(shape)
        if len(shape) != 3:
            return nn.Sequential(
                nn.Linear(self.latent, 16 * k), nn.BatchNorm1d(16 * k, track_running_stats=False),
                nn.ReLU(), nn.Linear(16 * k, dim), nn.Sigmoid(), nn.Unflatten(1, shape),
            )  # fmt: skip
        channels, h, w = shape
        quarter, half = (-(-h // 4), -(-w // 4)), (-(-h // 2), -(-w // 2))

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width, track_running_stats=False)

        # the last convolution, the only one at full size, has few channels: it is most of the work
        return nn.Sequential(
            nn.Linear(self.latent, 2 * k * math.prod(quarter)), nn.Unflatten(1, (2 * k, *quarter)),
            ChannelsLast(), norm(2 * k), nn.Upsample(half), nn.Conv2d(2 * k, k, 3, padding=1),
            norm(k), nn.LeakyReLU(0.2), nn.Upsample((h, w)), nn.Conv2d(k, channels, 3, padding=1),
            nn.Sigmoid(),
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        return _built(self)[1]

    def fresh(self, seed: int, like: Tensor) -> Tensor:
        """First parameters, (layout.d,), of the kind and at the place of `like`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.layout.flatten(dict(self.network().named_parameters())).to(like)

    def __call__(self, theta: Tensor, noise: Tensor) -> Tensor:
        """Inputs made by the generator theta, with gradients in it and in the noise."""
        some = noise if len(noise) > 1 else noise.expand(2, -1)  # one sample has no statistics
        network, layout = _built(self)
        made: Tensor = functional_call(network, layout.unflatten(theta), (some,))
        return self.inputs.scaled(made[: len(noise)])


@cache
def _built(generator: Generator) -> tuple[nn.Module, Layout]:
    """The network without numbers, and its layout: building it takes longer than a small batch."""
    with torch.device("meta"):
        network = generator.network()
    return network, Layout.of(network)


def noise(random: np.random.Generator, n: int, latent: int, like: Tensor) -> Tensor:
    """Normal noise, (n, latent)."""
    return torch.from_numpy(random.standard_normal((n, latent))).to(like)


def picks(random: np.random.Generator, n: int, among: int, like: Tensor) -> Tensor:
    """Whole numbers below `among`, (n,), drawn with replacement."""
    return torch.from_numpy(random.integers(among, size=n)).to(like.device)


def among(z: Tensor, classes: Tensor | None) -> Tensor:
    """Outputs of which only these classes' compete: (..., classes); None: all."""
    return z if classes is None else z.masked_fill(~classes.to(z.device), -torch.inf)


def adam(parameters: list[dict[str, object]], lr: float) -> torch.optim.Adam:
    """The optimiser of generators."""
    return torch.optim.Adam(parameters, lr=lr, betas=(0.5, 0.999))


def statistics(seen: Seen) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of every BatchNorm layer: mean and variance of each channel in the batch, and the running
    ones, (channels,) each."""
    out = []
    for x, running_mean, running_variance in seen.normed:
        dims = [k for k in range(x.dim()) if k != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        out.append((mean, variance, running_mean, running_variance))
    return out


def smoothed(x: Tensor) -> Tensor:
    """Images (n, channels, h, w) under a 5x5 Gaussian of deviation 1; all else as it is."""
    if x.dim() != 4:
        return x
    line = torch.exp(-0.5 * torch.arange(-2.0, 3.0).square())
    kernel = torch.outer(line, line).to(x) / line.sum() ** 2
    channels = x.shape[1]
    padded = F.pad(x, (2, 2, 2, 2), mode="replicate")
    return F.conv2d(padded, kernel.expand(channels, 1, 5, 5), groups=channels)


def spoiled(x: Tensor, random: np.random.Generator) -> Tensor:
    """Inputs (n, ...) of which every other has its pixels shuffled, and the rest noise added."""
    flat = x.flatten(1).clone()
    order = torch.from_numpy(random.random(flat.shape)).argsort(1).to(x.device)
    noised = flat + torch.from_numpy(random.standard_normal(flat.shape)).to(flat)
    flat[::2] = flat.gather(1, order)[::2]
    flat[1::2] = noised[1::2]
    return flat.view(x.shape)


def needed(server: Server | None, who: str) -> Server:
    """The server, if a generator can be trained there; else EverfedError."""
    if server is None or not server.classifies:
        raise EverfedError(f"{who} needs one class a sample, and inputs that are floats or bytes")
    return server


def check_inputs(x: Tensor, inputs: Inputs, who: str) -> None:
    """Raise EverfedError where real inputs are not what a generator makes."""
    if not x.is_floating_point() or not inputs.within(x):
        raise EverfedError(
            f"{who} makes inputs that are floats in [0, 1], or standardised ones that were, and a "
            "client's are not: scale them"
        )
