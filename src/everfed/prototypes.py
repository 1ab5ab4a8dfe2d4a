"""Class means of features, from sums that add up over clients."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everfed.method import Context, State
from everfed.vector import unit


def class_sums(features: Tensor, labels: Tensor, classes: int) -> State:
    """Sums of features and numbers of samples, class by class: (samples, width) and (samples,) ->
    (classes, width) and (classes,)."""
    sums = features.new_zeros(classes, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=classes).to(features)
    return {"sums": sums, "counts": counts}


def uploads(w: Tensor, ids: list[np.ndarray], c: Context, *, directions: bool = False) -> State:
    """Class sums of each client's samples under its model, (clients, ...) each; of features, or of
    features of length 1."""
    own = []
    for row, held in zip(w, ids, strict=True):
        features, classes = c.features(row, held), c.outputs(row, held[:1]).shape[-1]
        labels = torch.from_numpy(c.labels(held)).to(features.device)
        own.append(class_sums(unit(features) if directions else features, labels, classes))
    return {key: torch.stack([sums[key] for sums in own]) for key in own[0]}


def renewed(old: State, sums: Tensor, counts: Tensor) -> State:
    """The means of the classes that were seen now, and the old ones of all others."""
    means = sums / counts.clamp(min=1).unsqueeze(1)
    seen = counts > 0
    if not old:
        return {"means": means, "seen": seen.to(means)}
    means = torch.where(seen.unsqueeze(1), means, old["means"])
    return {"means": means, "seen": torch.maximum(old["seen"], seen.to(means))}


def nearest(features: Tensor, means: Tensor, seen: Tensor) -> Tensor:
    """Scores that are highest for the class with the closest mean, all of length 1: (samples,
    width) -> (samples, classes). Classes without a mean are never chosen."""
    scores = -torch.cdist(unit(features.to(means)), unit(means))
    return scores.masked_fill(seen == 0, -torch.inf)
