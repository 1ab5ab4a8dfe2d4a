"""The four drift regimes of FedEve's Appendix B.2 as a stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from everfed.chance import rng
from everfed.data import Data
from everfed.round import draw_cohort
from everfed.streams import Stream
from everfed.streams.partition import lda

REGIMES = ("iid", "period", "client", "both")


@dataclass(frozen=True, eq=False)
class Regime(Stream):
    """Equal clients, `sample` of them a round. "period": skewed clients, whose cohort's samples are
    pooled and dealt out anew; "client": the other way round; "both": skewed clients as they are."""

    data: Data
    kind: str
    clients: int = 100
    sample: int = 10
    rounds: int = 60
    alpha: float = 0.01  #: of each class
    seed: int | None = None

    @property
    def stateless(self) -> bool:  # type: ignore[override]
        return self.kind in ("period", "client")

    @cached_property
    def _parts(self) -> list[np.ndarray]:
        random = rng(self.seed or 0, "regime")
        if self.kind in ("iid", "client"):
            cut = random.permutation(self.data.train)
            return np.array_split(cut[: len(cut) // self.clients * self.clients], self.clients)
        return self._skewed(self.data.train, self.clients, random)

    def _skewed(self, ids: np.ndarray, parts: int, random: np.random.Generator) -> list[np.ndarray]:
        labels = self.data.y[torch.as_tensor(ids)].numpy()
        return [ids[own] for own in lda(labels, parts, self.alpha, random, prior=False)]

    @lru_cache(maxsize=2)  # noqa: B019 - streams live as long as tests
    def _dealt(self, round_: int) -> dict[int, np.ndarray]:
        """The cohort's samples after they were dealt out anew."""
        cohort, _ = draw_cohort(self, None, round_, self.sample, self.seed or 0)
        pool = np.concatenate([self._parts[client] for client in cohort])
        random = rng(self.seed or 0, "deal", round_)
        if self.kind == "period":
            dealt = np.array_split(random.permutation(pool), len(cohort))
        else:
            dealt = self._skewed(pool, len(cohort), random)
        return dict(zip(cohort, dealt, strict=True))

    def block(self, client: int, round_: int) -> int:
        return round_ if self.stateless else 0

    def samples(self, client: int, round_: int) -> np.ndarray:
        if self.stateless:
            return self._dealt(round_).get(client, self._parts[client])
        return self._parts[client]

    def seeded(self, seed: int) -> Stream:
        return replace(self, seed=seed) if self.seed is None else self

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"kind": self.kind, "alpha": self.alpha, "seed": self.seed}
