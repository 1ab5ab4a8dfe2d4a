"""How much clients' data differ, and how much they change, from gradients at the same model.

Client i's gradient in round t is taken as c_t + delta_i + xi_ti: common to all, the client's own
for good (client drift, G^2 = E|delta|^2), and the client's own in this round (time drift,
D^2 = E|xi|^2, with correlation alpha^l between rounds that lie l apart). Less the mean over N
clients, products of rounds that lie l apart are

    C(l) = (1 - 1/N) (G^2 + D^2 alpha^l).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Drift:
    """Variances over all coordinates."""

    client: float  #: G^2
    time: float  #: D^2
    alpha: float = 0.0  #: the time drift's correlation from one round to the next


def estimate(gradients: NDArray[np.float64], correlated: bool = False) -> Drift:
    """Estimate drifts from gradients of the same clients in successive rounds,
    (rounds, clients, d); without `correlated` rounds are taken as independent.

    >>> random = np.random.default_rng(0)
    >>> found = random.normal(0, 1, (200, 8, 50)) + random.normal(0, 2, (8, 50))
    >>> round(estimate(found).time / 50, 1)
    1.0
    """
    rounds, clients, _ = gradients.shape
    least = 3 if correlated else 2
    if rounds < least or clients < 2:
        raise ValueError(f"drift shows in at least {least} rounds of 2 clients")
    r = gradients - gradients.mean(1, keepdims=True)
    share = clients * (1 - 1 / clients)

    def product(lag: int) -> float:
        n = rounds - lag
        return float(np.einsum("tid,tid->", r[:n], r[lag:]) / (n * share))

    same = product(0)
    if not correlated:
        total = r.sum(0)
        pairs = float((total**2).sum()) - same * rounds * share  # all pairs of unequal rounds
        client = pairs / (rounds * (rounds - 1) * share)
        return Drift(max(client, 0.0), max(same - client, 0.0))
    one, two = same - product(1), product(1) - product(2)  # D^2 (1 - alpha), D^2 alpha (1 - alpha)
    alpha = min(max(two / one, 0.0), 0.999) if one > 0 else 0.0
    time = max(one, 0.0) / (1 - alpha)
    return Drift(max(same - time, 0.0), time, alpha)
