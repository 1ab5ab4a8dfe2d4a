"""Client-level differential privacy. McMahan et al., Learning Differentially Private Recurrent
Language Models, 2018 (DP-FedAvg), for any method whose uploads are averaged or summed.

All that a client uploads in an exchange, as one vector v, is cut to norm C:

    v <- v min(1, C / |v|)

local: every client adds N(0, (z C)^2) to its own v; what the server makes of it is as private.
central: the server adds N(0, (z C)^2) to the sum over the cohort, which is N(0, (z C / n)^2) on a
mean of n clients that count the same. Where a method reads the cohort's spread (FedEve), sum |u|^2
is one more release, with N(0, (z C^2)^2).

Each release is a Gaussian mechanism with noise multiplier z; epsilon at `delta` is composed by
Renyi divergences (Google's dp-accounting) over all rounds played, lost ones too. An exchange that a
crash makes the server repeat counts each time it was begun; so does, with local noise, each time
that clients are asked again because an answer was lost. Epsilon holds for a client whose uploads
are left out (the cohort's size is public), whoever takes part: nothing is gained from sampling.
Losses stay at home. The noise's key comes from the system's generator; `secret = False` takes it
from the run's seed, which everybody knows: for experiments only.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, tensor

from everfed.chance import torch_seed
from everfed.errors import EverfedError
from everfed.local import Fraction, Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@lru_cache(maxsize=4096)
def epsilon(noise: float, releases: int, delta: float) -> float:
    """The privacy loss of that many Gaussian releases."""
    from dp_accounting import dp_event, rdp  # an extra, and slow to import

    accountant = rdp.RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise), releases)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class Privacy(Part):
    """Uploads of bounded norm, and Gaussian noise."""

    clip: PositiveFloat = 1.0
    noise: NonNegativeFloat = 1.0
    where: Literal["central", "local"] = "central"
    delta: Fraction = 1e-5
    secret: bool = True

    @property
    def bounded(self) -> bool:
        return False  # it only counts what others release at a boundary

    def check(self, local: Local) -> None:
        if self.noise and find_spec("dp_accounting") is None:
            raise EverfedError("to account for privacy: pip install 'everfed[privacy]'")

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        if average != "uniform":
            raise EverfedError("privacy needs clients that count the same: average = 'uniform'")
        for part in parts:
            if not part.noisy:
                raise EverfedError(
                    f"privacy cuts and blurs all that {type(part).__name__} uploads, which is then "
                    "of no use: it does not go with this method"
                )
        for part in parts if self.where == "central" else ():
            apart = part.has("aggregate") or part.has("screen")
            if apart or "stack" in part.reduces.values():
                kind = type(part).__name__
                raise EverfedError(
                    f"{kind} looks at single clients' uploads: it needs privacy's where = 'local'"
                )

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"releases": tensor(0), "boundaries": tensor(0)}

    def seal(self, uploads: State, c: Context) -> State:
        if "buffers" in uploads and uploads["buffers"].numel():
            raise EverfedError("running statistics cannot be made private: use GroupNorm")
        squares = [v.double().reshape(len(v), -1).square().sum(1) for v in uploads.values()]
        norm = sum(squares, torch.zeros(())).sqrt()
        factor = self.clip / norm.clamp(min=self.clip)
        out = {k: v * factor.to(v).view(-1, *[1] * (v.dim() - 1)) for k, v in uploads.items()}
        if self.where == "central":
            return out
        for key, value in out.items():
            for row, client in enumerate(c.clients):
                chance = torch_seed(c.seed, f"privacy {key}", c.round, client)
                out[key][row] = value[row] + self._noise(value[row], self.clip, chance)
        return out

    def receive(self, values: State, n: int, means: frozenset[str], chance: int) -> State:
        if self.where == "local":
            return values
        out = {}
        for k, (key, value) in enumerate(sorted(values.items())):
            bound = self.clip**2 if key == "squares" else self.clip
            scale = bound / n if key in means else bound
            out[key] = value + self._noise(value, scale, chance + k)
        return out | ({"plain": n * out["update"]} if "plain" in out else {})

    def _noise(self, like: Tensor, scale: float, chance: int) -> Tensor:
        # torch's own generator takes 32 bits of a seed, which can be tried out
        key = secrets.randbits(128) if self.secret else chance
        drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(like.shape)
        return (torch.from_numpy(drawn) * (self.noise * scale)).to(like)

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        extra = int(r.spread is not None and self.where == "central")
        releases = (r.round + 1) * (r.exchanges + extra)
        if self.secret:  # on other noise a repeated release is another one
            releases += r.repeated * (1 + extra) + (r.again if self.where == "local" else 0)
        return update, s | {"releases": tensor(releases)}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return s | {"boundaries": s["boundaries"] + int(r.n > 0)}

    def metrics(self, s: State) -> dict[str, float]:
        releases = int(s["releases"] + s["boundaries"])
        return {"epsilon": epsilon(self.noise, releases, self.delta)} if self.noise else {}


@register("McMahan et al. 2018")
def privacy(
    clip: PositiveFloat = 1.0,
    noise: NonNegativeFloat = 1.0,
    where: Literal["central", "local"] = "central",
    delta: Fraction = 1e-5,
    secret: bool = True,
) -> Method:
    """Differential privacy of clients: uploads of bounded norm, and Gaussian noise.

    Args:
        clip: C, the norm to which all that a client uploads in an exchange is cut.
        noise: z, the noise's standard deviation in units of `clip`; 0: none, and no privacy.
        where: "central": the server adds noise to the sum; "local": every client to its upload.
        delta: at which epsilon is recorded.
        secret: whether the noise comes from the system's generator; false: from the run's seed, so
            that runs repeat, for experiments only.
    """
    part = Privacy(clip, noise, where, delta, secret)
    return Method(part, average="uniform", name="privacy")
