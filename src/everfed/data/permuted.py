"""Permuted images: every task is the same data with its pixels in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.join import drawn, open_first
from everfed.data.table import Data
from everfed.errors import EverfedError


def permute(data: Data, *, tasks: PositiveInt = 5, seed: int = 0) -> Data:
    """A data set as `tasks` domains: the first as it is, then each with one order of its inputs'
    values, the same for all samples (a pixel's channels stay together). Inputs are copied.

    >>> from everfed.data import digits
    >>> permute(digits(["plain"]), tasks=3)
    Data(permuted digits: 4311 train, 1080 test, 1x8x8, 10 classes, tasks plain, order 1, order 2)

    Args:
        data: samples; a task column is given up.
        tasks: how many there are.
        seed: of the orders.
    """
    if tasks < 1:
        raise EverfedError(f"tasks must be at least 1, not {tasks}")
    ids = np.concatenate([data.train, data.test])
    x = data.x[torch.from_numpy(ids)]
    flat = x.flatten(2) if x.dim() == 4 else x.flatten(1).unsqueeze(1)
    orders = [rng(seed, "pixels", k).permutation(flat.shape[2]) for k in range(1, tasks)]
    views = [x, *(flat[:, :, torch.from_numpy(order)].view_as(x) for order in orders)]
    begins = len(ids) * np.arange(tasks)[:, None]
    return replace(
        data,
        name=f"permuted {data.name}",
        x=torch.cat(views),
        y=data.y[torch.from_numpy(ids)].repeat(tasks),
        train=(begins + np.arange(len(data.train))).reshape(-1),
        test=(begins + np.arange(len(data.train), len(ids))).reshape(-1),
        task=np.repeat(np.arange(tasks), len(ids)),
        client=None if data.client is None else np.tile(data.client[ids], tasks),
        tasks=("plain", *(f"order {k}" for k in range(1, tasks))),
    )


def permuted(
    source: str | list[str] = "mnist",
    folder: str | Path | None = None,
    *,
    tasks: PositiveInt = 5,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
    seed: int = 0,
) -> Data:
    """Permuted MNIST, or any data set of the data folder: every task has another order of pixels.

    Args:
        source: the name of a data set as `join` takes it, or an .npz file; of a list, the first
            that is there.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        tasks: how many; the first has the pixels as they are.
        limit: training samples of a task, drawn once; left out: all.
        test_limit: test samples of a task, likewise.
        seed: of the orders.
    """
    data = open_first(source, folder)
    some = replace(data, train=drawn(data.train, limit), test=drawn(data.test, test_limit))
    return permute(some, tasks=tasks, seed=seed)
