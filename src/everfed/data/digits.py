"""scikit-learn's 8x8 handwritten digits as a sequence of domains: real data, no download."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data, arrays, names
from everfed.errors import EverfedError


def _rotated(x: np.ndarray) -> np.ndarray:
    return np.rot90(x, axes=(1, 2)).copy()


def _occluded(x: np.ndarray) -> np.ndarray:
    """A band over two rows at a random height, and noise."""
    random = rng(0, "occluded")
    out = x + random.normal(0, 0.15, x.shape)
    top = random.integers(0, 7, len(x))
    for offset in (0, 1):
        out[np.arange(len(x)), top + offset] = 0.5
    return np.clip(out, 0, 1)


DOMAINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda x: x,
    "inverted": lambda x: 1 - x,
    "rotated": _rotated,
    "occluded": _occluded,
    "flipped": lambda x: x[:, :, ::-1].copy(),
}


def digits(domains: Sequence[str] = ("plain", "inverted", "rotated", "occluded")) -> Data:
    """1,797 digits in each of the given domains, a fifth of them held out (the same in all).

    >>> digits(["plain"])
    Data(digits: 1437 train, 360 test, 1x8x8, 10 classes, tasks plain)

    Args:
        domains: some of plain, inverted, rotated, occluded and flipped, in order.
    """
    from sklearn.datasets import load_digits

    domains = names(domains)
    if not domains:
        raise EverfedError(f"name at least one digit domain of {', '.join(DOMAINS)}")
    for domain in domains:
        if domain not in DOMAINS:
            raise EverfedError(f"no digit domain {domain!r}; there are {', '.join(DOMAINS)}")
    images, labels = load_digits(return_X_y=True)
    x = images.reshape(-1, 8, 8) / 16
    order = rng(0, "digits split").permutation(len(x))
    train, test = order[360:], order[:360]

    def stack(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        views = np.stack([DOMAINS[domain](x)[ids] for domain in domains])
        k = len(domains)
        inputs = views.reshape(-1, 1, 8, 8).astype(np.float32)
        return inputs, np.tile(labels[ids], k), np.repeat(np.arange(k), len(ids))

    (xs, ys, task), (xt, yt, test_task) = stack(train), stack(test)
    return arrays(
        xs, ys, test=(xt, yt), task=task, test_task=test_task, tasks=domains, name="digits"
    )
