"""The four regimes of drift: client drift and period drift, each alone, both, or none.

On Bridging the Client Drift and Period Drift for Cross-device Federated Learning, Appendix B.2. All
clients hold equally much. In every round a cohort is drawn, and its clients hold

    iid       parts of all data at random
    period    parts of label-skewed data, pooled over the cohort, shuffled and dealt out again:
              rounds differ, clients of one round do not
    client    parts at random, pooled over the cohort and cut again with label skew: clients of one
              round differ, rounds do not
    both      parts with label skew

What is dealt out again is for that round only, and is all that the cohort's own parts hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data
from everfed.errors import EverfedError
from everfed.streams.partition import kinds, lda
from everfed.streams.stream import Stream, one_of, positive

Drift = Literal["iid", "period", "client", "both"]


@dataclass(frozen=True, eq=False)
class Regimes(Stream):
    """A cohort of clients each round, with one kind of drift; see `regimes`."""

    data: Data
    clients: int
    rounds: int
    cohort: int
    drift: Drift
    alpha: float
    prior: bool
    seed: int | None = None

    @property
    def draws(self) -> int:  # type: ignore[override]
        return self.cohort

    @cached_property
    def _labels(self) -> np.ndarray:
        return kinds(self.data, self.clients)

    @cached_property
    def parts(self) -> np.ndarray:
        """Positions in the training data of what each client holds: (clients, size)."""
        size = len(self.data.train) // self.clients
        random = rng(self.seed or 0, "parts")
        if self.drift in ("iid", "client"):
            order = random.permutation(len(self.data.train))
            return order[: self.clients * size].reshape(self.clients, size)
        skewed = lda(self._labels, self.clients, self.alpha, random, size=size, prior=self.prior)
        return np.stack(skewed)

    def online(self, round_: int) -> np.ndarray:
        chosen = rng(self.seed or 0, "regime's cohort", round_)
        return np.sort(chosen.choice(self.clients, self.cohort, replace=False))

    @cached_property
    def _dealt(self) -> dict[int, dict[int, np.ndarray]]:
        """Who holds what in the last round that was asked for."""
        return {}

    def _deal(self, round_: int) -> dict[int, np.ndarray]:
        """The cohort's positions, pooled and cut again."""
        cohort, random = self.online(round_), rng(self.seed or 0, "dealt", round_)
        pool = self.parts[cohort].ravel()
        if self.drift == "period":
            new = random.permutation(pool).reshape(len(cohort), -1)
        else:
            cut = lda(self._labels[pool], len(cohort), self.alpha, random, prior=self.prior)
            new = pool[np.stack(cut)]
        return dict(zip(cohort.tolist(), new, strict=True))

    def block(self, client: int, round_: int) -> int:
        return round_ if self.drift in ("period", "client") else 0

    def samples(self, client: int, round_: int) -> np.ndarray:
        own = self.parts[client]
        if self.drift in ("period", "client"):
            if round_ not in self._dealt:
                self._dealt.clear()
                self._dealt[round_] = self._deal(round_)
            own = self._dealt[round_].get(client, own)
        ids: np.ndarray = self.data.train[own]
        return ids

    def seeded(self, seed: int) -> Stream:
        return self if self.seed is not None else replace(self, seed=seed)

    def describe(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("cohort", "drift", "alpha", "prior", "seed")}
        return super().describe() | {"data": self.data.name} | own


def regimes(
    data: Data,
    *,
    clients: int = 500,
    cohort: int = 10,
    drift: Drift = "both",
    alpha: float = 0.1,
    prior: bool = True,
    rounds: int = 500,
    seed: int | None = None,
) -> Stream:
    """Many clients of equal size, few in a round, with client drift, period drift, both or none
    (FedEve, Appendix B.2). The stream draws the cohort: leave out `sample`. Samples without classes
    are skewed by blocks in their order.

    >>> from everfed.data import digits
    >>> stream = regimes(digits(["plain"]), clients=100, cohort=5, drift="period")
    >>> len(stream.online(0)), stream.samples(3, 0).shape
    (5, (14,))

    Args:
        data: samples; a task column is ignored.
        clients: how many there are. Each holds the same number of samples; what cannot be shared
            out equally is left out.
        cohort: clients in a round.
        drift: "iid": none; "period": the cohort's label-skewed data are pooled and dealt out at
            random in each round; "client": clients' random parts are pooled and cut with label skew
            in each round; "both": clients hold label-skewed parts.
        alpha: Dirichlet concentration of the classes in a part: small is skewed.
        prior: whether alpha is the total concentration, shared out by the classes' sizes, instead
            of that of each class, which is far less skewed.
        rounds: how many there are.
        seed: of the parts and the cohorts; left out: the run's seed.
    """
    positive(clients=clients, cohort=cohort, rounds=rounds)
    one_of("drift", drift, Drift)
    if not 0 < alpha < np.inf:
        raise EverfedError(f"alpha must be above 0 and finite, not {alpha} (1e5 is even)")
    if cohort > clients:
        raise EverfedError(f"a cohort of {cohort} cannot be drawn from {clients} clients")
    if len(data.train) < clients:
        raise EverfedError(
            f"{data.name}: {len(data.train)} samples cannot be split over {clients} clients"
        )
    return Regimes(data, clients, rounds, cohort, drift, alpha, prior, seed)
