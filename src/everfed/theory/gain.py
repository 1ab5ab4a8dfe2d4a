"""The gain of FedEve where rounds differ by chance alone (not in the paper).

Let S clients be drawn anew in every round, their updates independent with variance V, and u their
mean with weights p_k; a = sum_k p_k^2, 1/S for equal clients. Then u has the variance a V, and in
the long run M, which moves by kappa (u - M), that of a V kappa / (2 - kappa), so that on average

    sigma_Q^2 = |u - M|^2 / (S d)             = 2 a V / ((2 - kappa) S d)
    sigma_R^2 = sum_k |u_k - u|^2 / (S^2 d)   = V (S - 2 + a S) / (S^2 d)

V cancels. A filter at rest has kappa^2 = (1 - kappa) sigma_Q^2 / sigma_R^2, which makes

    (2 - kappa) kappa^2 = (1 - kappa) 2 a S / (S - 2 + a S)
"""

from __future__ import annotations

import numpy as np

from everfed.errors import EverfedError


def by_chance(clients: float, effective: float | None = None) -> float:
    """The gain for `clients` in a round that count as `effective` = 1/a equal ones.

    >>> [round(by_chance(clients), 2) for clients in (10, 100)]
    [0.3, 0.1]
    """
    if not clients > 1 or not 1 <= (effective or clients) <= clients:
        raise EverfedError("needs two clients or more, and 1 <= effective <= clients")
    a = 1 / (effective or clients)
    b = 2 * a * clients / (clients - 2 + a * clients)
    # at 0 the left side is below the right one, at 1 above it, and it crosses once
    roots = np.roots([-1.0, 2.0, b, -b])
    return float(next(root.real for root in roots if 0 < root.real < 1))
