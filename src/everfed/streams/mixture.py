"""Clients that draw new samples every round, from mixtures that change with time.

Correlated drift (Towards Federated Learning on Time-evolving Heterogeneous Data, Assumption 7): the
drifts of a client's rounds s and t have the correlation alpha^|s - t|. Here the client's shares of
the classes follow a stationary process with exactly that correlation, built as in Pitt, Chatfield
and Walker, Constructing First Order Stationary Autoregressive Models via Latent Processes, 2002:

    p_1 ~ Dirichlet(a),   n_t ~ Multinomial(m, p_t-1),   p_t ~ Dirichlet(a + n_t).

Dirichlet(a) is the distribution of every p_t: given n_t, p_t is drawn as p_t-1 is distributed. With
A the sum of a and alpha = m / (A + m), the mean is linear in the last shares,

    E[p_t | p_t-1] = (a + m p_t-1) / (A + m) = (1 - alpha) a / A + alpha p_t-1,

so cov(p_s, p_t) = alpha^|s - t| cov(p_1, p_1). For an alpha between two whole m, one of the two is
drawn, with chances for which m / (A + m) is alpha in the mean. A client's gradient at a fixed model
is linear in p_t, so its drift inherits the correlation.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.partition import dirichlet_row, kinds
from everfed.streams.stream import Stream, one_of, positive

#: clients whose shares are kept at a time
KEPT = 1000


@dataclass(frozen=True, eq=False)
class Mixture(Stream):
    """Every round a client draws `size` samples from pools, by its shares of that round."""

    data: Data
    clients: int
    rounds: int
    size: int
    #: training samples, some for each share
    pools: tuple[np.ndarray, ...]
    seed: int | None = None

    @abstractmethod
    def shares(self, client: int, round_: int) -> np.ndarray:
        """A client's shares of the pools in a round, (pools,)."""

    def block(self, client: int, round_: int) -> int:
        return round_

    def samples(self, client: int, round_: int) -> np.ndarray:
        random = rng(self.seed or 0, "mixture", round_, client)
        wanted = random.multinomial(self.size, self.shares(client, round_))
        drawn = [
            random.choice(pool, n, replace=bool(n > len(pool)))
            for pool, n in zip(self.pools, wanted, strict=True)
        ]
        return np.concatenate(drawn)

    def seeded(self, seed: int) -> Stream:
        return self if self.seed is not None else replace(self, seed=seed)

    def describe(self) -> dict[str, Any]:
        known = {"data": self.data.name, "size": self.size, "seed": self.seed}
        return super().describe() | known


@dataclass(frozen=True, eq=False)
class Drifting(Mixture):
    """Shares of classes that change gradually; see `drifting`."""

    correlation: float = 0.9
    alpha: float = 0.1
    client_alpha: float | None = None

    def mean(self, client: int) -> np.ndarray:
        """The shares round which a client's change, (classes,)."""
        sizes = np.array([len(pool) for pool in self.pools])
        common = sizes / sizes.sum()
        if self.client_alpha is None or math.isinf(self.client_alpha):
            return np.asarray(common)
        random = rng(self.seed or 0, "client's mixture", client)
        own = dirichlet_row(self.client_alpha * len(sizes) * common, random)
        # never is hardly ever: the concentrations of a Dirichlet must be above 0
        own = np.maximum(own, 1e-9)
        return np.asarray(own / own.sum())

    @cached_property
    def _walks(self) -> dict[int, np.ndarray]:
        return {}

    def shares(self, client: int, round_: int) -> np.ndarray:
        if client not in self._walks:
            if len(self._walks) == KEPT:
                self._walks.clear()
            random = rng(self.seed or 0, "drift", client)
            a = self.alpha * len(self.pools) * self.mean(client)
            self._walks[client] = walk(a, self.correlation, self.rounds, random)
        row: np.ndarray = self._walks[client][round_]
        return row

    def describe(self) -> dict[str, Any]:
        keys = ("correlation", "alpha", "client_alpha")
        return super().describe() | {key: getattr(self, key) for key in keys}


def walk(a: np.ndarray, correlation: float, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Shares that are Dirichlet(a) in every round and have the correlation correlation^k between
    rounds that lie k apart, (rounds, classes).

    >>> walk(np.ones(3), 0.5, 4, np.random.default_rng(0)).sum(1)
    array([1., 1., 1., 1.])
    """
    total = float(a.sum())
    low = math.floor(total * correlation / (1 - correlation))
    below, above = low / (total + low), (low + 1) / (total + low + 1)
    # the chance of low + 1; of numbers so large that it makes no difference, none
    raised = (correlation - below) / (above - below) if above > below else 0.0
    out = np.empty((rounds, len(a)))
    out[0] = dirichlet_row(a, random)
    for t in range(1, rounds):
        counts = random.multinomial(low + (random.random() < raised), out[t - 1])
        out[t] = dirichlet_row(a + counts, random)
    return out


def drifting(
    data: Data,
    *,
    clients: int = 8,
    correlation: float = 0.9,
    alpha: float = 0.1,
    client_alpha: float | None = None,
    size: int = 100,
    rounds: int = 100,
    seed: int | None = None,
) -> Stream:
    """Gradual change: every client's label mixture wanders, with a given correlation from round to
    round. Each round it draws new samples by its mixture of that round. Samples without classes are
    mixed from ten blocks in their order.

    >>> from everfed.data import digits
    >>> drifting(digits(["plain"]), clients=4, size=50, rounds=10).samples(0, 0).shape
    (50,)

    Args:
        data: samples; a task column is ignored.
        clients: how many there are.
        correlation: of a client's mixture (its deviation from the mean) with that of the round
            before; 0: a new one each round, near 1: slow change. Between rounds that lie k apart it
            is correlation^k.
        alpha: Dirichlet concentration of every class in a client's mixture: small is skewed.
        client_alpha: the same for the mixture that a client has in the long run; left out: the
            data's own for all clients.
        size: samples of a client in a round.
        rounds: how many there are.
        seed: of the mixtures and the draws; left out: the run's seed.
    """
    positive(clients=clients, size=size, rounds=rounds)
    if not 0 <= correlation < 1:
        raise EverfedError(f"correlation must be at least 0 and below 1, not {correlation}")
    for name, value in {"alpha": alpha, "client_alpha": client_alpha}.items():
        if value is not None and not value > 0:
            raise EverfedError(f"{name} must be above 0, not {value}")
    kind = kinds(data, 10)
    if alpha * len(np.unique(kind)) / (1 - correlation) > 1e18:  # whole numbers end there
        raise EverfedError(
            f"alpha = {alpha:g} and correlation = {correlation:g} are a mixture that never "
            "changes: use the stream 'static'"
        )
    pools = tuple(data.train[kind == k] for k in np.unique(kind))
    return Drifting(data, clients, rounds, size, pools, seed, correlation, alpha, client_alpha)


Shape = Literal["smooth", "abrupt"]


@dataclass(frozen=True, eq=False)
class Periodic(Mixture):
    """Day and night; see `periodic`."""

    counted: Literal["class", "domain"] = "class"
    day: tuple[str, ...] = ()
    period: int = 20
    shape: Shape = "smooth"
    zones: int = 1

    def shares(self, client: int, round_: int) -> np.ndarray:
        at = (round_ / self.period + client % self.zones / self.zones) % 1
        day = (1 + math.cos(2 * math.pi * at)) / 2 if self.shape == "smooth" else float(at < 0.5)
        return np.array([day, 1 - day])

    def describe(self) -> dict[str, Any]:
        keys = ("period", "shape", "zones")
        own = {key: getattr(self, key) for key in keys}
        return super().describe() | own | {"day": list(self.day)}


def periodic(
    data: Data,
    *,
    clients: int = 8,
    period: int = 20,
    shape: Shape = "smooth",
    day: Sequence[int | str] | None = None,
    zones: int = 1,
    size: int = 100,
    rounds: int = 100,
    seed: int | None = None,
) -> Stream:
    """Day and night: two kinds of data take turns, two groups of classes or two groups of domains.
    Each round a client draws new samples of both, by the time of its day.

    >>> from everfed.data import digits
    >>> stream = periodic(digits(["plain"]), period=20, shape="abrupt", size=50)
    >>> [int(stream.data.y[stream.samples(0, t)].max()) for t in (0, 10)]
    [4, 9]

    Args:
        data: samples with classes, or with a task column.
        clients: how many there are.
        period: rounds of a day and a night together.
        shape: "smooth": the share of the day's data is a cosine; "abrupt": all day, then all night.
        day: classes (numbers) or domains (names) of the day, all others are the night's; left out:
            the data's first domain, or without several domains the first half of the classes.
        zones: time zones over a whole day, to which clients belong in turn; 1: the same for all.
        size: samples of a client in a round.
        rounds: how many there are.
        seed: of the draws; left out: the run's seed.
    """
    positive(clients=clients, period=period, zones=zones, size=size, rounds=rounds)
    one_of("shape", shape, Shape)
    column, names = _column(data, day)
    for name in day or ():
        if str(name) not in names:
            raise EverfedError(
                f"{data.name} has no {name!r} for the day; it has {', '.join(names)}"
            )
    first = names[:1] if column is data.task else names[: len(names) // 2]
    lit = [names.index(str(name)) for name in (first if day is None else day)]
    pools, held = (
        (ids[np.isin(column[ids], lit)], ids[~np.isin(column[ids], lit)])
        for ids in (data.train, data.test)
    )
    for when, pool, test in zip(("day", "night"), pools, held, strict=True):
        if not len(pool) or not len(test):
            raise EverfedError(f"{data.name}: the {when} has no training or no test samples")
    kind: Literal["class", "domain"] = "domain" if column is data.task else "class"
    told = tuple(names[k] for k in lit)
    return Periodic(data, clients, rounds, size, pools, seed, kind, told, period, shape, zones)


def _column(data: Data, day: Sequence[int | str] | None) -> tuple[np.ndarray, list[str]]:
    """What tells day from night, classes or domains: of every sample, and all their names."""
    domains = isinstance(day[0], str) if day else len(data.tasks) > 1
    if domains and data.task is not None:
        return data.task, list(data.tasks)
    if domains or not data.classes or data.y.dim() > 1:
        what = "task column" if domains else "classes or domains to tell day from night"
        raise EverfedError(f"{data.name} has no {what}")
    return data.y.numpy(), [str(k) for k in range(data.classes)]
