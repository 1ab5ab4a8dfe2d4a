"""Streams of changing data: domains, classes, natural users, drifting mixtures, time as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.blocks import Blocks, blocks
from everfed.streams.evolving import Evolving, evolving
from everfed.streams.given import Given, given
from everfed.streams.mixture import Drifting, Periodic, drifting, periodic
from everfed.streams.presence import Present, present
from everfed.streams.regimes import Regimes, regimes
from everfed.streams.sites import sites
from everfed.streams.stream import Head, Stream, TaskStream, positive

__all__ = [
    "Blocks", "Drifting", "Evolving", "Given", "Head", "Periodic", "Present", "Regimes", "Stream",
    "TaskStream", "blocks", "classes", "domains", "drifting", "evolving", "given", "periodic",
    "present", "regimes", "sites", "static",
]  # fmt: skip


def domains(
    data: Data,
    *,
    clients: int = 8,
    alpha: float | None = 0.3,
    rounds: int = 10,
    order: Sequence[str] | None = None,
    seed: int | None = None,
) -> Stream:
    """Domain after domain with a fixed label set: task i is the data's i-th task, split over the
    clients with label skew.

    >>> from everfed.data import digits
    >>> domains(digits(), clients=8, rounds=10).tasks
    ('plain', 'inverted', 'rotated', 'occluded')

    Args:
        data: samples with a task column.
        clients: how many there are.
        alpha: Dirichlet concentration of every class over clients: small is skewed, 0.1 very much
            so; None or inf: equal random parts.
        rounds: rounds of each domain.
        order: the domains to play, in order; left out: as the data list them.
        seed: of the split; left out: the run's seed.
    """
    positive(clients=clients, rounds=rounds)
    if data.task is None:
        raise EverfedError(f"{data.name} has no task column; give one, or use streams.static")
    names = tuple(order or data.tasks)
    for name in names:
        if name not in data.tasks:
            raise EverfedError(f"{data.name} has no domain {name!r}; it has {_list(data.tasks)}")
    column = data.task

    def held(ids: np.ndarray) -> list[np.ndarray]:
        return [ids[column[ids] == data.tasks.index(name)] for name in names]

    sets = tuple(zip(held(data.train), held(data.test), strict=True))
    _check_split(data, names, sets, clients, alpha)
    return TaskStream(data, clients, rounds, alpha, sets, names, seed=seed)


def classes(
    data: Data,
    *,
    tasks: int = 5,
    clients: int = 5,
    alpha: float | None = None,
    rounds: int = 20,
    head: Head = "class",
    seed: int | None = None,
) -> Stream:
    """New classes with every task, in an order drawn from the seed.

    >>> from everfed.data import digits
    >>> classes(digits(["plain"]), tasks=5, seed=0).tasks[0]
    'classes 2 7'

    Args:
        data: samples with classes.
        tasks: how many; the number of classes must be a multiple of it.
        clients: how many there are.
        alpha: Dirichlet concentration of every class over clients: small is skewed, 0.1 very much
            so; None or inf: equal random parts.
        rounds: rounds of each task.
        head: "class": all classes seen so far compete, in training and in tests; "task": a sample's
            task is known, and only that task's classes compete.
        seed: of the class order and the split; left out: the run's seed.
    """
    positive(clients=clients, rounds=rounds, tasks=tasks)
    if data.classes % tasks:
        raise EverfedError(f"{data.classes} classes cannot be cut into {tasks} equal tasks")
    if head not in ("class", "task"):
        raise EverfedError(f"head must be 'class' or 'task', not {head!r}")
    if data.y.dim() > 1 or not data.classes:
        raise EverfedError(f"{data.name} has no classes")

    def make(chosen: int) -> TaskStream:
        cut = rng(chosen, "class order").permutation(data.classes).reshape(tasks, -1)
        y = data.y.numpy()

        def held(ids: np.ndarray) -> list[np.ndarray]:
            return [ids[np.isin(y[ids], group)] for group in cut]

        sets = tuple(zip(held(data.train), held(data.test), strict=True))
        names = tuple("classes " + " ".join(map(str, group)) for group in cut)
        groups = tuple(tuple(map(int, group)) for group in cut)
        _check_split(data, names, sets, clients, alpha)
        return TaskStream(data, clients, rounds, alpha, sets, names, head, groups, chosen)

    if seed is not None:
        return make(seed)
    return replace(make(0), seed=None, remake=make)


def static(
    data: Data,
    *,
    clients: int = 10,
    alpha: float | None = 0.3,
    rounds: int = 50,
    seed: int | None = None,
) -> Stream:
    """Data that stand still: one task, split once over the clients with label skew.

    Args:
        data: samples; a task column is ignored.
        clients: how many there are.
        alpha: Dirichlet concentration of every class over clients: small is skewed, 0.1 very much
            so; None or inf: equal random parts.
        rounds: how many there are.
        seed: of the split; left out: the run's seed.
    """
    positive(clients=clients, rounds=rounds)
    sets = ((data.train, data.test),)
    _check_split(data, ("all",), sets, clients, alpha)
    return TaskStream(data, clients, rounds, alpha, sets, ("all",), seed=seed)


def _check_split(
    data: Data,
    names: Sequence[str],
    sets: Sequence[tuple[np.ndarray, np.ndarray]],
    clients: int,
    alpha: float | None,
) -> None:
    """Every task can be split over the clients and tested."""
    for name, (train, test) in zip(names, sets, strict=True):
        if not len(train) or not len(test):
            raise EverfedError(f"{data.name}: task {name!r} has no training or no test samples")
        if len(train) < clients:
            raise EverfedError(
                f"{data.name}: the {len(train)} samples of task {name!r} cannot be split over "
                f"{clients} clients"
            )
    if alpha is None or alpha == math.inf:
        return
    if not alpha > 0:
        raise EverfedError(f"alpha must be above 0, not {alpha}")
    if data.y.is_floating_point() or data.y.dim() > 1:
        raise EverfedError(
            f"{data.name}: labels are {data.y.dtype}, {data.y.dim()}-dimensional, no classes to "
            "skew: give classes as integers, or use alpha = inf (equal parts)"
        )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
