"""Which samples a client keeps: pure choices on indices; and how much that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from everfed.method import Part, State
from everfed.vector import unit

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


def held_bytes(part: Part, state: State, sample: int) -> int:
    """Size of the samples that a part's client state refers to, each of `sample` bytes."""
    return sample * sum(state[key].numel() for key in part.remembers if key in state)


def uniform(ids: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """At most `size` samples, uniformly without replacement."""
    if len(ids) <= size:
        return ids
    return ids[np.sort(random.choice(len(ids), size, replace=False))]


def ring(groups: np.ndarray, size: int) -> np.ndarray:
    """What `size` slots hold after samples of these groups (classes) have arrived one by one: of
    every group the newest, as evenly over the groups as there are samples. Positions, in order.

    >>> ring(np.array([0, 0, 0, 1]), 3).tolist()
    [1, 2, 3]
    """
    newest = np.arange(len(groups))[::-1]
    age = np.empty(len(groups), dtype=np.int64)
    for g in np.unique(groups):
        own = newest[groups[newest] == g]
        age[own] = np.arange(len(own))
    # taking the youngest of their groups first goes round the groups
    kept: np.ndarray = np.sort(newest[np.argsort(age[newest], kind="stable")][:size])
    return kept


def class_balanced(
    ids: np.ndarray, labels: np.ndarray, size: int, random: np.random.Generator
) -> np.ndarray:
    """At most `size` samples, as evenly over the classes as there are samples of each."""
    arrival = random.permutation(len(ids))[::-1]
    kept: np.ndarray = ids[np.sort(arrival[ring(labels[arrival], size)])]
    return kept


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
    features = features.double().cpu()
    mean, total = features.mean(0), torch.zeros_like(features[0])
    # two samples are equally far from their mean: ties go to the first, whatever rounding says
    tie = 1e-6 * features.square().sum(1).mean()
    free = torch.ones(len(features), dtype=torch.bool)
    chosen: list[int] = []
    for k in range(1, min(count, len(features)) + 1):
        distance = (mean - (features + total) / k).square().sum(1).masked_fill(~free, torch.inf)
        best = int((distance <= distance.min() + tie).nonzero()[0])
        chosen.append(best)
        free[best] = False
        total = total + features[best]
    return chosen


def first_of_classes(ids: np.ndarray, labels: np.ndarray, size: int) -> np.ndarray:
    """The first samples of every class, quotas by class share: herding cut from its end."""
    places = [np.flatnonzero(labels == c)[:k] for c, k in quotas(labels, size).items()]
    first: np.ndarray = ids[np.concatenate(places)]
    return first


def herding(
    ids: np.ndarray, labels: np.ndarray, features: Tensor, quotas: Mapping[int, int]
) -> np.ndarray:
    """Herding on features of unit length, so many samples of each class."""
    directions = unit(features)
    picks: list[np.ndarray] = []
    for c, quota in quotas.items():
        own = np.flatnonzero(labels == c)
        picks.append(ids[own[herding_order(directions[torch.from_numpy(own)], quota)]])
    return np.concatenate(picks) if picks else ids[:0]


def first(groups: np.ndarray, quota: int) -> np.ndarray:
    """Positions of the first `quota` members of each group, in order."""
    kept = [np.flatnonzero(groups == g)[:quota] for g in np.unique(groups)]
    return np.sort(np.concatenate([*kept, np.zeros(0, dtype=np.int64)]))
