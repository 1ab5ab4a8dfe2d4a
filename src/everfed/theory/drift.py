"""How much clients' data differ, and how much they change, from gradients at the same model.

Client i's gradient in round t is taken as c_t + delta_i + xi_ti: common to all, the client's own
for good (client drift, G^2 = E|delta|^2), and the client's own in this round (time drift,
D^2 = E|xi|^2, with correlation alpha^l between rounds that lie l apart). Less the mean over N
clients, products of rounds that lie l apart are

    C(l) = (1 - 1/N) (G^2 + D^2 alpha^l).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls


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
    same, *later = products(gradients, 3 if correlated else 1).tolist()
    if not correlated:
        total = (gradients - gradients.mean(1, keepdims=True)).sum(0)
        pairs = float((total**2).sum()) / (clients - 1) - same * rounds  # of unequal rounds
        client = pairs / (rounds * (rounds - 1))
        return Drift(max(client, 0.0), max(same - client, 0.0))
    one, two = same - later[0], later[0] - later[1]  # D^2 (1 - alpha), D^2 alpha (1 - alpha)
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


def products(gradients: NDArray[np.float64], lags: int) -> NDArray[np.float64]:
    """C(l) / (1 - 1/N) of the gradients (rounds, clients, d), for the first lags."""
    rounds, clients, _ = gradients.shape
    r = gradients - gradients.mean(1, keepdims=True)
    sums = [np.einsum("tid,tid->", r[: rounds - lag], r[lag:]) for lag in range(lags)]
    return np.asarray(sums / ((rounds - np.arange(lags)) * (clients - 1)))


def fitted(products: NDArray[np.float64], rounds: int) -> Drift:
    """The drifts that come nearest to all of these products, weighted by how many there were: for
    drift that is slow, or that is seen through noise."""
    lags = np.arange(len(products))
    weights = rounds - lags
    best = (np.inf, Drift(0.0, 0.0))
    for alpha in np.linspace(0, 0.99, 100):
        curve = alpha**lags
        design = np.stack([np.ones_like(curve), curve], 1) * np.sqrt(weights)[:, None]
        (client, time), miss = nnls(design, products * np.sqrt(weights))
        best = min(
            best,
            (miss, Drift(float(client), float(time), float(alpha) if time else 0.0)),
            key=itemgetter(0),
        )
    return best[1]
