"""The terms of a real federation: who must be there, and how long to wait."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Terms:
    """Section [flower] of a configuration."""

    #: tells the states of several federations at the same sites apart
    name: str = "federation"
    #: sites that must be connected before a round begins
    sites: PositiveInt = 2
    #: seconds to wait for them
    wait: Seconds = 600.0
    #: seconds that clients have for an answer
    deadline: Seconds = 600.0
    #: share of a cohort that must have answered
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    #: how often clients that did not answer are asked again before a round fails
    retries: NonNegativeInt = 2
    #: seconds from the beginning of a round to that of the next, at least
    every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    #: rounds after its own in which an answer that missed the deadline still counts, less (see
    #: [late]); until then its client is not asked again
    late: NonNegativeInt = 0
    #: whether the server sees only sums of clients' uploads (Flower's SecAgg+)
    secure: bool = False
    #: what uploads are masked in: no number of theirs may be larger
    range: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    #: seconds between looks for answers
    poll: Seconds = 0.2
    #: where the server keeps the run
    folder: str = "~/.everfed/run"
    #: where sites keep their states
    store: str = "~/.everfed/sites"

    @property
    def life(self) -> float:
        """Seconds until an answer can no longer count, and its message may be forgotten."""
        return self.deadline + self.late * max(self.deadline, self.every)


class Pace:
    """When a round may begin: some seconds after the last one did."""

    def __init__(self, every: float) -> None:
        self.every, self.round, self.next = every, -1, 0.0

    def wait(self, round_: int) -> None:
        """Wait for the time at which a round may begin; one that has begun goes on."""
        if round_ == self.round:
            return
        while (left := self.next - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        self.round, self.next = round_, time.monotonic() + self.every
