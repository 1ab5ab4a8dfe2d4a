"""The terms of a real federation: who must be there, and how long to wait."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from everfed.disk import write

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
    """When a round may begin: some seconds after the last one did, also in a run that goes on
    after a restart. A file holds which round that was; it was written when the round began."""

    def __init__(self, every: float, file: Path) -> None:
        self.every, self.file = every, file

    def wait(self, round_: int) -> None:
        """Wait for the time at which a round may begin; one that has begun goes on."""
        if not self.every:
            return
        if self.file.exists():
            if self.file.read_text() == str(round_):
                return
            due = time.monotonic() + self.file.stat().st_mtime + self.every - time.time()
            due = min(due, time.monotonic() + self.every)  # a clock may have been set back
            while (left := due - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
        write(self.file, str(round_).encode())
