"""Drift meters: what a round's uploads say of the data, whatever the method, at no extra traffic.

With client updates u_k, their weights p_k (sum 1) and their mean u, all of one round:

    effective_clients   S = 1 / sum p_k^2                equal clients that would say as much
    drift_client        V / sum p_k |u_k|^2              V = sum p_k |u_k - u|^2, their spread
    signal_to_noise     |u|^2 / (V / (S - 1))            V / (S - 1): the variance of the mean of
                                                         clients that are drawn at random
    drift_period        1 - cos(u, last round's u)       how far the direction has turned
    update_norm         |u|

V is a difference of sums, sum p_k |u_k|^2 - |u|^2, so that no single update is needed. If rounds
differ only because their clients are drawn at random, successive directions turn by 1 /
signal_to_noise: more is a drift of whole rounds, less means that differences cancel in the mean.
The last round's mean is kept folded into 4096 numbers: the turn is right to about 0.02.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from everfed.vector import squares


def of_cohort(update: Tensor, length: float | None, effective: float) -> dict[str, float]:
    """The meters of one round: u, (d,), sum p_k |u_k|^2 (None: not known) and S.

    >>> of_cohort(torch.tensor([3.0, 0.0]), 12.0, 4.0)
    {'effective_clients': 4.0, 'update_norm': 3.0, 'drift_client': 0.25, 'signal_to_noise': 9.0}
    """
    norm_sq = float(squares(update))
    out = {"effective_clients": effective, "update_norm": math.sqrt(norm_sq)}
    if length is None or not 0 < length < math.inf or effective < 1.001:
        return out
    spread = max(0.0, length - norm_sq)
    out["drift_client"] = spread / length
    if spread > 1e-6 * length:  # less is rounding
        out["signal_to_noise"] = norm_sq * (effective - 1) / spread
    return out


def turn(now: Tensor, before: Tensor | None) -> dict[str, float]:
    """The drift from round to round, of (folded) mean updates."""
    if before is None or before.shape != now.shape:
        return {}
    cosine = torch.nn.functional.cosine_similarity(now, before, dim=0)
    return {"drift_period": 1 - float(cosine)}
