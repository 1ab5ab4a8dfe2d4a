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


def scattered(
    gradients: NDArray[np.float64], clients: NDArray[np.int64], rounds: NDArray[np.int64]
) -> Drift:
    """Estimate drifts where each round has clients of its own: gradients (n, d) at the same model,
    with the client and the round of each. Clients that never come back count as time drift.

    Less the means of rounds with n and m clients, of whom k are in both, products of a client's
    two gradients are G^2 (1 - 1/n - 1/m + k/(n m)).
    """
    at, sizes = np.unique(rounds, return_inverse=True, return_counts=True)[1:]
    mean = np.zeros((len(sizes), gradients.shape[1]))
    np.add.at(mean, at, gradients)
    mean /= sizes[:, None]
    products = gradients - mean[at]
    products = products @ products.T
    same = np.trace(products) / max((1 - 1 / sizes[at]).sum(), 1)
    who = np.unique(clients, return_inverse=True)[1]
    present = np.zeros((len(sizes), who.max() + 1))
    present[at, who] = 1
    common = (present @ present.T)[at][:, at]
    n = sizes[at].astype(np.float64)
    factor = 1 - 1 / n[:, None] - 1 / n + common / np.outer(n, n)
    pairs = (clients[:, None] == clients) & (at[:, None] != at)
    client = products[pairs].sum() / factor[pairs].sum() if factor[pairs].sum() > 0 else 0.0
    return Drift(float(max(client, 0.0)), float(max(same - client, 0.0)))
