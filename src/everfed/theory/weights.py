"""Optimal weights of past rounds (CFL, Theorem 4.1)."""

from __future__ import annotations


def independent(t: int, drift: float, loss: float) -> tuple[float, float]:
    """Weights of each past round and of the present one in round t (from 1).

    `drift` is the time drift's variance D^2, `loss` the squared information loss R^2. They minimise
    D^2 sum p^2 + R^2 (1 - p_t)^2 under sum p = 1.

    >>> [round(p, 6) for p in independent(4, drift=4, loss=1)]
    [0.210526, 0.368421]
    """
    if t == 1:
        return 0.0, 1.0
    total = t * drift + (t - 1) * loss
    return drift / total, (drift + (t - 1) * loss) / total
