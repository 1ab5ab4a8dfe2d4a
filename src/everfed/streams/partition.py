"""Splits of labelled samples over clients."""

from __future__ import annotations

import numpy as np
import torch

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError


def kinds(data: Data, blocks: int) -> np.ndarray:
    """Classes of the training samples; where there are none, as many blocks in their order."""
    y = data.y[torch.as_tensor(data.train)]
    if y.is_floating_point() or y.dim() > 1:
        return np.arange(len(y)) * blocks // len(y)
    return np.asarray(y.numpy())


def split(
    labels: np.ndarray, parts: int, alpha: float | None, seed: int, purpose_id: int = 0
) -> list[np.ndarray]:
    """Disjoint positions that cover all labels: equal random parts, or Dirichlet label skew."""
    if len(labels) < parts:
        raise EverfedError(f"{len(labels)} samples cannot be split over {parts} clients")
    random = rng(seed, "split", purpose_id)
    if alpha is None or np.isinf(alpha):
        return [np.sort(p) for p in np.array_split(random.permutation(len(labels)), parts)]
    return dirichlet(labels, parts, alpha, random)


def dirichlet(
    labels: np.ndarray, parts: int, alpha: float, random: np.random.Generator
) -> list[np.ndarray]:
    """Every class is spread over the parts by a draw from a symmetric Dirichlet(alpha).

    The draw is repeated until no part is empty; where that does not come about (few samples, tiny
    alpha) the largest part gives one sample to each empty one.
    """
    if alpha <= 0:
        raise EverfedError(f"alpha must be above 0, not {alpha}")
    by_class = [random.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    for _ in range(100):
        # in log space: for a tiny alpha every gamma draw may underflow to 0
        shares = _dirichlet_rows(len(by_class), parts, alpha, random)
        owner = np.empty(len(labels), dtype=np.int64)
        for ids, share in zip(by_class, shares, strict=True):
            cuts = np.rint(np.cumsum(share)[:-1] * len(ids)).astype(int)
            owner[ids] = np.searchsorted(cuts, np.arange(len(ids)), side="right")
        sizes = np.bincount(owner, minlength=parts)
        if sizes.min() > 0:
            break
    for part in np.flatnonzero(sizes == 0):
        largest = np.bincount(owner, minlength=parts).argmax()
        owner[random.choice(np.flatnonzero(owner == largest))] = part
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=parts))[:-1])


def lda(
    labels: np.ndarray,
    parts: int,
    alpha: float,
    random: np.random.Generator,
    *,
    size: int | None = None,
    prior: bool = True,
) -> list[np.ndarray]:
    """Disjoint parts of exactly `size` positions (by default all there are, in equal parts).

    Latent Dirichlet allocation, Towards Federated Learning on Time-evolving Heterogeneous Data,
    Algorithm 6, corrected: a part draws class shares from a Dirichlet over the classes that are not
    used up, with concentrations alpha x the class's share of all data, or (`prior` False) alpha
    each; then one class after another by these shares, and a sample of it. A class that is used up
    leaves the draw, and the shares of the others are scaled up. Shares are kept as logarithms: for
    small alphas all that remain may be as good as zero.

    >>> labels = np.repeat(np.arange(10), 60)
    >>> found = lda(labels, 7, 0.1, np.random.default_rng(0))
    >>> [len(part) for part in found], len(np.unique(np.concatenate(found)))
    ([85, 85, 85, 85, 85, 85, 85], 595)
    """
    size = len(labels) // parts if size is None else size
    if size < 1 or parts * size > len(labels):
        raise EverfedError(f"{len(labels)} samples are too few for {parts} parts of {size or 1}")
    alpha = min(alpha, 1e300)
    values, counts = np.unique(labels, return_counts=True)
    pools = [random.permutation(np.flatnonzero(labels == value)) for value in values]
    left = counts.copy()
    concentration = alpha * counts / len(labels) if prior else np.full(len(values), alpha)
    out = []
    for _ in range(parts):
        open_ = np.flatnonzero(left)
        logs = _log_gamma(concentration[open_], random)
        part: list[np.ndarray] = []
        need = size
        while need:
            shares = np.exp(logs - logs.max())
            drawn = random.choice(len(open_), need, p=shares / shares.sum())
            # up to and with the first draw that uses a class up
            places = [(np.flatnonzero(drawn == j), left[c]) for j, c in enumerate(open_)]
            used = [own[has - 1] for own, has in places if len(own) >= has]
            drawn = drawn[: min(used) + 1] if used else drawn
            for j, taken in enumerate(np.bincount(drawn, minlength=len(open_))):
                c = open_[j]
                part.append(pools[c][left[c] - taken : left[c]])
                left[c] -= taken
            need -= len(drawn)
            stay = left[open_] > 0
            open_, logs = open_[stay], logs[stay]
        out.append(random.permutation(np.concatenate(part)))
    return out


def _log_gamma(a: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Logarithms of gamma draws, which for a tiny `a` would underflow: G(a) = G(a + 1) U^(1/a)."""
    a = np.clip(a, 1e-300, 1e300)  # beyond that the logarithms overflow
    return np.asarray(np.log(random.gamma(a + 1)) + np.log(random.random(a.shape)) / a)


def dirichlet_row(a: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One draw from Dirichlet(a), for concentrations however small."""
    logs = _log_gamma(a, random)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _dirichlet_rows(rows: int, parts: int, alpha: float, random: np.random.Generator) -> np.ndarray:
    logs = _log_gamma(np.full((rows, parts), alpha), random)
    weights = np.exp(logs - logs.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))
