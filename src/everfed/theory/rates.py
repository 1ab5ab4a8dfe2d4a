"""Rounds to reach an accuracy. Towards Federated Learning on Time-evolving Heterogeneous Data,
Table 1 with Theorems 4.1, 4.4, 4.7 and Proposition 4.3.

With sigma^2 the gradients' noise, c = 1 + A^2 + B^2, H = |w_0 - w*|^2, N clients, K local steps,

    mu > 0:  T = L c / mu  +  sigma^2 / (mu N K eps)  +  V / (mu eps)
    mu = 0:  T = c H / eps  +  sigma^2 H / (N K eps^2)  +  V H / eps^2

    V = G^2 + D^2                          FedAvg
    V = G^2 + D^2 R^2 / (D^2 + R^2)        CFL; with D^2 - F^2 for D^2 where drifts correlate
    V = M R^2 / (M + R^2), M = G^2 + D^2   CFL, clients that are seen once

These are orders: compare them with each other, do not read them as rounds. CFL comes to eps + phi
only, with phi a bias that grows with the information loss R^2; FedAvg's phi is 0. The bounds need
`largest_rate`. Errata: c has max(A^2, C^2) beside B^2 where drifts correlate (C bounds time drift);
the theorem's bound on the rate is twice the proof's, and the smaller is taken; the non-convex rate
needs L^2 < 1/2 even without drift and so says nothing, and there is none here. Of the earlier works
in the table, Khaled et al.'s mu in the convex column is left out (mu = 0 there), and Yin et al.'s
row, which grows with mu, is not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from everfed.errors import EverfedError


@dataclass(frozen=True)
class Constants:
    """What a bound depends on; squares are variances over all coordinates."""

    epsilon: float  #: the accuracy to reach
    clients: int = 1  #: N, in a round
    steps: int = 1  #: K, of a client in a round
    noise: float = 0.0  #: sigma^2 of a stochastic gradient
    client: float = 0.0  #: G^2, client drift
    time: float = 0.0  #: D^2, time drift
    loss: float = 0.0  #: R^2, squared information loss
    correlation: float = 0.0  #: F^2, bound of the drift's correlation
    smooth: float = 1.0  #: L
    convex: float = 0.0  #: mu; 0: convex, but not strongly
    distance: float = 1.0  #: H, the squared distance from start to optimum
    growth: float = 0.0  #: A^2 + B^2 (with C^2 for A^2 if larger): drift that grows with gradients

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = {"epsilon": 1e-300, "clients": 1, "steps": 1, "smooth": 1e-300}.get(name, 0)
            if not value >= least:
                raise EverfedError(f"{name} must be {'above' if least < 1 else 'at least'} "
                                   f"{round(least)}, not {value}")  # fmt: skip
        if self.convex > self.smooth:
            raise EverfedError("mu must not be larger than L")


def _lost(time: float, loss: float) -> float:
    """What is left of a drift's variance after optimal weights, for t without end."""
    return time * loss / (time + loss) if time + loss else 0.0


#: V of the paper's own bounds, method by method
VARIANCE: dict[str, Callable[[Constants], float]] = {
    "FedAvg": lambda k: k.client + k.time,
    "CFL": lambda k: k.client + _lost(max(k.time - k.correlation, 0.0), k.loss),
    "CFL, clients seen once": lambda k: _lost(k.client + k.time, k.loss),
}


def rounds(method: str, k: Constants) -> float:
    """The order of rounds that a method of VARIANCE needs.

    >>> round(rounds("FedAvg", Constants(0.1, time=4.0, client=0.25)), 6)
    435.0
    >>> round(rounds("CFL", Constants(0.1, time=4.0, client=0.25, loss=1.0)), 6)
    115.0
    """
    variance = VARIANCE[method](k) + k.noise / (k.clients * k.steps)
    if k.convex:
        return k.smooth * (1 + k.growth) / k.convex + variance / (k.convex * k.epsilon)
    return k.distance * ((1 + k.growth) / k.epsilon + variance / k.epsilon**2)


def earlier(k: Constants) -> dict[str, float]:
    """The orders of earlier works' bounds, as Table 1 carries them over to data that evolve
    (L = H = 1 there); only those that cover the case, strongly convex or not."""
    e, nk, noise, drift = k.epsilon, k.clients * k.steps, k.noise, k.client + k.time
    spread, c, mu = sqrt(k.client) + sqrt(k.time), 1 + k.growth, k.convex
    if mu:
        return {
            "SGD": noise / (mu * nk * e) + 1 / mu,
            "FedAvg, Li et al.": noise / (mu**2 * nk * e) + drift * k.steps / (mu**2 * e),
            "FedAvg, Khaled et al.": (noise + drift) / (mu * nk * e)
            + (sqrt(noise) + spread) / (mu * sqrt(e)) + k.clients * k.growth / mu,
            "FedAvg, Karimireddy et al.": noise / (mu * nk * e) + spread / (mu * sqrt(e)) + c / mu,
            "FedAvg, Woodworth et al.": sqrt(c) / (k.steps * sqrt(mu * e)) + noise * c / (nk * e**2)
            + spread / (mu * sqrt(e)) + sqrt(noise) / (mu * sqrt(k.steps * e)),
        }  # fmt: skip
    return {
        "SGD": noise / (nk * e**2) + 1 / e,
        "FedAvg, Khaled et al.": (noise + drift) / (nk * e**2) + (sqrt(noise) + spread) / e**1.5
        + k.clients * k.growth / e,
        "FedAvg, Karimireddy et al.": noise / (nk * e**2) + spread / e**1.5 + c * drift / e,
        "FedAvg, Woodworth et al.": c / (k.steps * e) + noise * c / (nk * e**2)
        + spread * c / e**1.5 + sqrt(noise) * c / sqrt(k.steps * e**1.5),
    }  # fmt: skip


def largest_rate(k: Constants) -> float:
    """The largest local learning rate for which the bounds hold.

    >>> round(largest_rate(Constants(0.1)), 6)  # (sqrt 7 - 2) / 12
    0.053813
    """
    c = 1 + k.growth
    return (sqrt(3 + 4 * c) - sqrt(4 * c)) / (12 * k.steps * k.smooth * sqrt(c))
