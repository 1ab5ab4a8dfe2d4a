"""Optimal weights of past rounds. Towards Federated Learning on Time-evolving Heterogeneous Data,
Theorems 4.1, 4.7 and 4.9.

In round t a client minimises p_t f_t + sum_{tau<t} p_tau f~_tau. The weights minimise the variance

    p^T Q p,   Q_ij = D^2 alpha^|i-j| + R^2 [i < t and j < t],   sum p = 1

with D^2 the time drift's variance, alpha its correlation from round to round and R^2 the squared
information loss of an approximated past objective. alpha = 0 is Theorem 4.1, whose weights are

    p_tau = D^2 / (t D^2 + (t-1) R^2),   p_t = (D^2 + (t-1) R^2) / (t D^2 + (t-1) R^2);

Theorem 4.7 puts D^2 - F^2 in the place of D^2 (F^2 bounds the drift's correlation). Table 2 of the
paper follows if its columns D and R are read as D^2 and R^2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def independent(t: int, drift: float, loss: float) -> tuple[float, float]:
    """Weights of each past round and of the present one in round t (from 1), Theorem 4.1.

    `drift` is D^2, `loss` R^2. Without either all rounds are alike.

    >>> [round(p, 6) for p in independent(4, drift=4, loss=1)]
    [0.210526, 0.368421]
    """
    if t == 1:
        return 0.0, 1.0
    if drift == 0 and loss == 0:
        return 1 / t, 1 / t
    total = t * drift + (t - 1) * loss
    return drift / total, (drift + (t - 1) * loss) / total


def bounded(t: int, drift: float, loss: float, correlation: float) -> tuple[float, float]:
    """The same where the drift's correlation is bounded by `correlation` = F^2, Theorem 4.7.

    >>> bounded(4, drift=4, loss=1, correlation=1)
    (0.2, 0.4)
    """
    left = max(0.0, drift - correlation)
    return (0.0, 1.0) if left == 0 and correlation else independent(t, left, loss)


def correlated(t: int, drift: float, loss: float, alpha: float, negative: bool = True) -> Vector:
    """All weights, (t,), of a drift with correlation alpha^|i-j|, Theorem 4.9.

    They may be negative, which is unstable in practice; `negative=False` gives the best weights
    that are not. Time and memory are O(t), because the inverse of alpha^|i-j| is tridiagonal.

    >>> correlated(4, drift=1, loss=1, alpha=0.5).round(4).tolist()
    [0.2632, 0.1316, -0.0789, 0.6842]
    >>> correlated(4, drift=1, loss=1, alpha=0.5, negative=False).round(4).tolist()
    [0.2517, 0.0861, 0.0, 0.6623]
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be at least 0 and below 1, not {alpha}")
    p = np.zeros(t)
    kept = np.arange(t)
    while True:
        p[:] = 0
        p[kept] = _on(kept, t, drift, loss, alpha)
        if negative or (p[kept] >= 0).all():
            return p
        kept = kept[p[kept] > 0]


def _on(rounds: NDArray[np.int64], t: int, drift: float, loss: float, alpha: float) -> Vector:
    """The weights if only these rounds (from 0) may have any: Q^-1 1, scaled; one rank-1 step."""
    past = (rounds < t - 1).astype(np.float64)
    if drift == 0:
        return np.full(len(rounds), 1 / len(rounds)) if loss == 0 else 1 - past
    x, y = _inverse(rounds, alpha, np.ones_like(past)), _inverse(rounds, alpha, past)
    p: Vector = x - y * (loss * (past @ x) / (drift + loss * (past @ y)))
    p /= p.sum()
    return p


def _inverse(rounds: NDArray[np.int64], alpha: float, v: Vector) -> Vector:
    """K^-1 v for K_ij = alpha^|rounds_i - rounds_j|: each pair of neighbours adds its share."""
    r = alpha ** np.diff(rounds).astype(np.float64)
    share = r / (1 - r**2)
    out = v.copy()
    out[:-1] += share * (r * v[:-1] - v[1:])
    out[1:] += share * (r * v[1:] - v[:-1])
    return out
