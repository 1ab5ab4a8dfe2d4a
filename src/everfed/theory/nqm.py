"""The noisy quadratic model. Towards Federated Learning on Time-evolving Heterogeneous Data, §4.3.

f(w) = 1/2 w^T A w + B^T w. The gradient that client i sees in local step k of round t is

    A w + B + delta_i + xi_ti + nu_tik      client drift, time drift, noise

with total variances E|delta|^2 = 0.01, E|nu|^2 = 1e-5 and E|xi|^2 = 0.01 (small round drift, SRD)
or 100 (big, BRD). CFL replays past rounds by their gradients with an error e ~ N(I 1, (I/1000) Id):

    delta_i + p_t xi_t + sum_{tau<t} p_tau (xi_tau + e_tau)

with the weights of Theorem 4.1 at D^2 = E|xi|^2 and R^2 = E|e|^2 = n (I^2 + I/1000), or with both
estimated as training goes on ("auto"). The loss is |A w + B|. Sizes that the paper does not give:
n = 20, 10 clients, 5 local steps, 300 rounds, FedProx's mu = 0.1. A is diagonal: the noise looks
the same from all sides. All seeds and learning rates are simulated at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from everfed.theory.weights import independent

Values = NDArray[np.float64]
CLIENTS, STEPS, DIMENSION, PROX = 10, 5, 20, 0.1
CLIENT_DRIFT, NOISE = 0.01, 1e-5


@dataclass(frozen=True)
class Setting:
    """One of the eight: L in {5, 20}, mu in {1, 0}, small or big round drift."""

    smooth: float  #: L, the largest eigenvalue
    convex: float  #: mu, the smallest
    drift: float  #: E|xi|^2

    @property
    def name(self) -> str:
        size = "SRD" if self.drift < 1 else "BRD"
        return f"{size} {'SL' if self.smooth == 5 else 'LL'}-{'SC' if self.convex else 'GC'}"


SETTINGS = [
    Setting(smooth, convex, drift)
    for drift in (0.01, 100.0)
    for convex in (1.0, 0.0)
    for smooth in (5.0, 20.0)
]


@dataclass(frozen=True)
class Rule:
    """How a client uses its past: not at all, or by CFL with an information loss I."""

    name: str
    prox: float = 0.0
    loss: float | None = None  #: I; None: no past
    weights: Literal["theory", "auto"] = "theory"


FEDAVG, FEDPROX = Rule("FedAvg"), Rule("FedProx", prox=PROX)
CFL, CFL_SMALL, CFL_BIG = (
    Rule(name, loss=loss) for name, loss in (("CFL", 0.0), ("CFL-0.001", 0.001), ("CFL-0.01", 0.01))
)
RULES = [FEDAVG, FEDPROX, CFL, CFL_SMALL, CFL_BIG]


def simulate(
    setting: Setting, rule: Rule, rates: Sequence[float], seeds: int = 20, rounds: int = 300
) -> Values:
    """|A w + B| before every round, (rates, seeds, rounds); inf where training diverges."""
    random = np.random.default_rng(0)
    curvature = np.linspace(setting.convex, setting.smooth, DIMENSION)
    linear, delta = _problems(seeds, random)
    shape = delta.shape
    linear = linear if setting.convex else curvature * linear  # B in A's range
    w = np.full((len(rates), seeds, DIMENSION), 2.0)
    lr = np.asarray(rates)[:, None, None, None]
    past, auto = np.zeros(shape), _Auto(seeds)
    out = np.empty((len(rates), seeds, rounds))
    error = 0.0 if rule.loss is None else rule.loss
    for t in range(1, rounds + 1):
        with np.errstate(over="ignore", invalid="ignore"):
            out[:, :, t - 1] = np.linalg.norm(curvature * w + linear, axis=-1)
        xi = _noise(random, setting.drift, shape)
        e = error + _noise(random, error / 1000 * DIMENSION, shape)
        drift = delta + xi
        if rule.loss is not None:
            constants = [(setting.drift, DIMENSION * (error**2 + error / 1000))] * seeds
            if rule.weights == "auto":
                constants = auto.constants(delta + xi)
            before, now = np.array([independent(t, *own) for own in constants]).T[:, :, None, None]
            drift = delta + now * xi + before * past
            past += xi + e
            auto.see(e)
        w = _round(w, lr, rule.prox, curvature, linear[:, None], drift, random)
    return np.nan_to_num(out, nan=np.inf)


def floor(seeds: int) -> float:
    """|mean delta|, averaged over `simulate`'s problems: where the loss ends if only the clients'
    own drift is left."""
    _, delta = _problems(seeds, np.random.default_rng(0))
    return float(np.linalg.norm(delta.mean(1), axis=-1).mean())


def _problems(seeds: int, random: np.random.Generator) -> tuple[Values, Values]:
    """B before it is brought into A's range, (seeds, d), and the clients' drift."""
    linear = random.standard_normal((seeds, DIMENSION))
    return linear, _noise(random, CLIENT_DRIFT, (seeds, CLIENTS, DIMENSION))


def _round(
    w: Values, lr: Values, prox: float, curvature: Values, linear: Values, drift: Values,
    random: np.random.Generator,
) -> Values:  # fmt: skip
    """Local steps of all clients and their mean; (rates, seeds, d) -> the same."""
    start = w[:, :, None]
    local = np.repeat(start, CLIENTS, 2)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(STEPS):
            gradient = curvature * local + linear + drift + _noise(random, NOISE, drift.shape)
            local = local - lr * (gradient + prox * (local - start))
        mean: Values = local.mean(2)
    return mean


def _noise(random: np.random.Generator, total: float, shape: tuple[int, ...]) -> Values:
    """Gaussian vectors with E|v|^2 = total."""
    drawn: Values = random.standard_normal(shape)
    drawn *= np.sqrt(total / shape[-1])
    return drawn


class _Auto:
    """D^2 and R^2 as clients can see them: gradients at the round's model, less the cohort's mean,
    change from round to round by the time drift alone; an approximation's error is measured on the
    round it was made of. The same estimate as `drift.estimate`, from sums."""

    def __init__(self, seeds: int) -> None:
        self.rounds, self.squares, self.loss = 0, np.zeros(seeds), np.zeros(seeds)
        self.total: Values = np.zeros((seeds, 1, 1))

    def constants(self, gradients: Values) -> list[tuple[float, float]]:
        """Take in this round's gradients, (seeds, clients, d); D^2 and R^2 so far, seed by seed."""
        r = gradients - gradients.mean(1, keepdims=True)
        self.rounds += 1
        self.squares += (r**2).sum((1, 2))
        self.total = self.total + r
        k, share = self.rounds, gradients.shape[1] - 1
        if k < 2:
            return [(1.0, 0.0)] * len(r)
        pairs = ((self.total**2).sum((1, 2)) - self.squares) / (k * (k - 1) * share)
        drift = (self.squares / (k * share) - pairs).clip(min=0)
        return list(zip(drift.tolist(), (self.loss / (k - 1)).tolist(), strict=True))

    def see(self, errors: Values) -> None:
        """Take in the error of this round's approximation."""
        self.loss += (errors**2).sum(-1).mean(-1)
