"""Data that change from round to round at every client (the CFL papers' streams)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.partition import kinds, lda
from everfed.streams.stream import Stream, one_of, positive

Split = Literal["one", "two"]
Order = Literal["drawn", "window", "fresh"]


@dataclass(frozen=True, eq=False)
class Evolving(Stream):
    """Every client holds one of its subsets, or a window on all of them; see `evolving`."""

    data: Data
    clients: int
    rounds: int
    subsets: int
    alpha: float
    split: Split
    prior: bool
    order: Order
    stride: int
    seed: int | None = None

    @property
    def stateless(self) -> bool:  # type: ignore[override]
        return self.order == "fresh"

    @cached_property
    def _labels(self) -> np.ndarray:
        return kinds(self.data, self.clients * self.subsets)

    @cached_property
    def _sequences(self) -> np.ndarray:
        """Every client's samples, subset after subset: (clients, subsets * size)."""
        chance = self.seed or 0
        total, size = self.clients * self.subsets, self.size
        cut = partial(lda, alpha=self.alpha, prior=self.prior)
        if self.split == "one":
            parts = cut(self._labels, total, random=rng(chance, "subsets"), size=size)
        else:
            owned = cut(self._labels, self.clients, random=rng(chance, "owners"))
            parts = []
            for i, own in enumerate(owned):
                random = rng(chance, "subsets", i)
                mine = cut(self._labels[own], self.subsets, random=random, size=size)
                parts += [own[part] for part in mine]
        ids: np.ndarray = self.data.train[np.concatenate(parts)]
        return ids.reshape(self.clients, self.subsets * size)

    @property
    def size(self) -> int:
        """Samples of a client in a round."""
        return len(self.data.train) // self.clients // self.subsets

    def block(self, client: int, round_: int) -> int:
        if self.order == "drawn":
            return int(rng(self.seed or 0, "subset", round_, client).integers(self.subsets))
        if self.order == "window":
            return self.stride * round_ % (self.subsets * self.size)
        return round_

    def samples(self, client: int, round_: int) -> np.ndarray:
        if self.order == "fresh":
            random = rng(self.seed or 0, "fresh", round_, client)
            (part,) = lda(self._labels, 1, self.alpha, random, size=self.size, prior=self.prior)
            fresh: np.ndarray = self.data.train[part]
            return fresh
        begin = self.block(client, round_) * (self.size if self.order == "drawn" else 1)
        row: np.ndarray = self._sequences[client]
        return np.take(row, np.arange(begin, begin + self.size), mode="wrap")

    def seeded(self, seed: int) -> Stream:
        return self if self.seed is not None else replace(self, seed=seed)

    def describe(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in
               ("subsets", "alpha", "split", "prior", "order", "stride", "seed")}  # fmt: skip
        return super().describe() | {"data": self.data.name} | own


def evolving(
    data: Data,
    *,
    clients: int = 7,
    subsets: int = 30,
    alpha: float = 0.1,
    rounds: int = 500,
    split: Split = "one",
    prior: bool = False,
    order: Order = "drawn",
    stride: int | None = None,
    seed: int | None = None,
) -> Stream:
    """Label distributions that change every round: training data are cut into subsets with label
    skew, some for each client, and in a round a client holds one of its own (the CFL paper's
    stream). Samples without classes are skewed by blocks in their order.

    >>> from everfed.data import digits
    >>> evolving(digits(["plain"]), clients=4, subsets=5, rounds=10).samples(0, 0).shape
    (71,)

    Args:
        data: samples; a task column is ignored.
        clients: how many there are.
        subsets: of each client.
        alpha: Dirichlet concentration: small is skewed.
        rounds: how many there are.
        split: "one": all data are cut into clients x subsets parts; "two": first over clients, then
            each client's over time, which makes clients one-sided for good.
        prior: whether alpha is the total concentration, shared out by the classes' sizes (far more
            skewed), instead of that of each class.
        order: "drawn": one of its subsets at random each round; "window": a window of a subset's
            length moves over all of them; "fresh": new data from all each round, for clients
            without an identity.
        stride: samples by which a window moves on each round; left out: its length.
        seed: of the split and the draws; left out: the run's seed.
    """
    positive(clients=clients, subsets=subsets, rounds=rounds)
    one_of("split", split, Split)
    one_of("order", order, Order)
    if not 0 < alpha < np.inf:
        raise EverfedError(f"alpha must be above 0 and finite, not {alpha} (1e5 is even)")
    made = Evolving(data, clients, rounds, subsets, alpha, split, prior, order, 0, seed)
    if made.size < 1:
        raise EverfedError(
            f"{data.name}: {len(data.train)} samples are too few for {clients} x {subsets} subsets"
        )
    if stride is not None and (order != "window" or stride < 1):
        raise EverfedError("stride is for order = 'window', and at least 1")
    return replace(made, stride=stride or made.size)
