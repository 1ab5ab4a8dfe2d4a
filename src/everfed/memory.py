"""Which samples a client keeps: pure choices on indices."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

#: what gives way when sets outgrow a budget: all alike, or the one least recently met
Evict = Literal["shrink", "oldest"]


def allotted(sizes: list[int], budget: int, evict: Evict) -> list[int]:
    """How many samples each set keeps, sets given from the least to the most recently met: one
    after another goes from the largest set (the oldest of equals), or all from the oldest.

    >>> allotted([100, 100, 40], 150, "shrink"), allotted([100, 100, 40], 150, "oldest")
    ([55, 55, 40], [10, 100, 40])
    """
    kept = list(sizes)
    while (excess := sum(kept) - budget) > 0:
        if evict == "shrink":
            kept[kept.index(max(kept))] -= 1
        else:
            oldest = next(k for k, size in enumerate(kept) if size)
            kept[oldest] -= min(kept[oldest], excess)
    return kept


def uniform(ids: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """At most `size` samples, uniformly without replacement."""
    if len(ids) <= size:
        return ids
    return ids[np.sort(random.choice(len(ids), size, replace=False))]


def class_balanced(
    ids: np.ndarray, labels: np.ndarray, size: int, random: np.random.Generator
) -> np.ndarray:
    """At most `size` samples, as evenly over the classes as there are samples of each."""
    order = random.permutation(len(ids))
    # each sample's rank within its class: taking the lowest ranks goes round the classes
    rank = np.empty(len(ids), dtype=np.int64)
    for c in np.unique(labels):
        own = order[labels[order] == c]
        rank[own] = np.arange(len(own))
    return ids[np.sort(order[np.argsort(rank[order], kind="stable")][:size])]


def quotas(labels: np.ndarray, size: int) -> dict[int, int]:
    """Each class's part of `size`, in proportion to its share (largest remainders)."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * min(size, len(labels)) / len(labels)
    take = np.floor(exact).astype(int)
    for k in np.argsort(take - exact, kind="stable")[: min(size, len(labels)) - take.sum()]:
        take[k] += 1
    return {int(c): int(k) for c, k in zip(classes, take, strict=True)}


def herding_order(features: Tensor, count: int) -> list[int]:
    """Rows whose running mean stays closest to the mean of all; none is chosen twice.

    >>> herding_order(torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0]]), 3)
    [3, 2, 1]
    """
    mean, total = features.mean(0), torch.zeros_like(features[0])
    free = torch.ones(len(features), dtype=torch.bool)
    chosen: list[int] = []
    for k in range(1, min(count, len(features)) + 1):
        distance = (mean - (features + total) / k).square().sum(1).cpu()
        best = int(distance.masked_fill(~free, torch.inf).argmin())
        chosen.append(best)
        free[best] = False
        total = total + features[best]
    return chosen


def first_of_classes(ids: np.ndarray, labels: np.ndarray, size: int) -> np.ndarray:
    """The first samples of every class, quotas by class share: herding cut from its end."""
    places = [np.flatnonzero(labels == c)[:k] for c, k in quotas(labels, size).items()]
    first: np.ndarray = ids[np.concatenate(places)]
    return first


def herding(ids: np.ndarray, labels: np.ndarray, features: Tensor, size: int) -> np.ndarray:
    """Herding class by class on features of unit length, quotas by class share."""
    unit = features / features.norm(dim=1, keepdim=True).clamp(min=1e-12)
    picks: list[np.ndarray] = []
    for c, quota in quotas(labels, size).items():
        own = np.flatnonzero(labels == c)
        picks.append(ids[own[herding_order(unit[torch.from_numpy(own)], quota)]])
    return np.concatenate(picks) if picks else ids[:0]
