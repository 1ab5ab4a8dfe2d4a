"""Replies that come late, or never.

A reply that is tau rounds late counts in the round in which it comes, with its update times
(1 + tau)^-discount (FedBuff has an exponent of 1/2): it was made for an older model. A client whose
reply is under way is not asked for another one. Its state, which is its own, is new at once. A
reply that comes when its task is over is lost, but for changes of what its client keeps, which the
server has to follow (FedCurv's sums).

The fewer answer, the more the mean of their updates depends on who they are. With missing = "zero"
the step is shorter then, the sum of the updates over the number of clients that were asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.chance import rng
from everfed.errors import EverfedError, plain
from everfed.method import Method, State
from everfed.reduce import Reducer, Uploads

Share = Annotated[float, Field(ge=0, le=1)]


@plain
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Late:
    """Section [late] of a configuration: how often replies are late or lost, and what then.

    >>> Late(lost=0.5).draw([0, 1, 2, 3], seed=0, round_=7)
    {0: 0, 1: None, 2: None, 3: None}
    """

    #: chance that a client's reply never comes
    lost: Share = 0.0
    #: chance that it comes late
    chance: Share = 0.0
    #: how many rounds late at most: each number is as likely
    rounds: PositiveInt = 1
    #: an update that comes t rounds late counts (1 + t)^-discount
    discount: NonNegativeFloat = 0.5
    #: clients that do not answer count as the mean of those that do, or as zero: with half of the
    #: answers the server then takes half a step
    missing: Literal["mean", "zero"] = "mean"

    def __post_init__(self) -> None:
        if self.lost + self.chance > 1:
            raise EverfedError("late.lost and late.chance are more than 1 together")

    def draw(self, cohort: Sequence[int], seed: int, round_: int) -> dict[int, int | None]:
        """How many rounds late each client's reply comes; None: never."""
        if not self.lost and not self.chance:
            return dict.fromkeys(cohort, 0)
        out: dict[int, int | None] = {}
        for client in cohort:
            random = rng(seed, "late", round_, client)
            kind, by = random.random(), int(random.integers(1, self.rounds + 1))
            late = by if kind < self.lost + self.chance else 0
            out[client] = None if kind < self.lost else late
        return out

    def factor(self, rounds: int) -> float:
        """What an update counts that is so many rounds late."""
        return float((1 + rounds) ** -self.discount)

    def step(self, mean: Tensor, answered: int, asked: int) -> Tensor:
        """The mean update, or as much of it as clients have answered."""
        if self.missing == "mean" or answered >= asked:
            return mean
        return mean * (answered / asked)


def held(client: int, sent: int, due: int, task: int, reply: Reducer) -> State:
    """One client's reply to a round of a task, to be counted in round `due`; the way back is
    `count`."""
    rows: Uploads = {key: v for key, v in reply.values().items() if key in reply.kinds}
    kept = {key: v if key in reply.stacks else v[None] for key, v in rows.items()}
    at = torch.tensor([client, sent, due, task])
    return kept | {"at": at, "weight": torch.tensor([reply.weight], dtype=torch.float64)}


def follow(reply: State, into: Reducer, method: Method) -> None:
    """Take in what of a reply counts when its task is over."""
    for i, part in enumerate(method.parts):
        for key in part.reduces if part.lasting else ():
            change = reply.get(f"{i}.{key}")
            if change is not None and bool(change.isfinite().all()):
                into.add_to_sum(f"{i}.{key}", change[0])


def count(reply: State, into: Reducer, discount: float) -> str:
    """Take a reply in, its update times `discount`; why it could not be, if so."""
    client = int(reply["at"][0])
    rows = {key: value for key, value in reply.items() if key not in ("at", "weight")}
    rows["update"] = rows["update"] * discount
    return "" if into.add([client], rows, reply["weight"]) else into.dropped[client]
