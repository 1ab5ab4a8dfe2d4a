"""Clients that join and leave, and sleep: any stream, with only some of its clients online.

With a period a client that has joined is there with a chance that follows its own time of day,

    p(t) = night + (1 - night) (1 + cos 2 pi (t / period + zone / zones)) / 2.

Where zones hold different data (`by` "labels"), a round's clients are one-sided, and another way in
every part of the day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.streams.labels import counts
from everfed.streams.regimes import Regimes
from everfed.streams.sites import Sites
from everfed.streams.stream import Stream

#: client -> the rounds in which it is there: pairs of the first one and the one after the last
Schedule = Mapping[NonNegativeInt, Sequence[tuple[NonNegativeInt, NonNegativeInt]]]


By = Literal["turn", "labels"]


@dataclass(frozen=True)
class Day:
    """The hours in which clients are there."""

    period: int  #: rounds of a day
    night: float  #: the chance of being there at its darkest
    zones: int
    by: By

    def chance(self, zone: np.ndarray, round_: int) -> np.ndarray:
        """Of being there in a round, by zone."""
        hour = round_ / self.period + zone / self.zones
        light = (1 + np.cos(2 * np.pi * hour)) / 2
        return np.asarray(self.night + (1 - self.night) * light)


class Present(Stream):
    """A stream whose clients come and go; see `present`."""

    def __init__(
        self,
        stream: Stream,
        schedule: Schedule,
        start: float,
        join: float,
        leave: float,
        day: Day | None,
        seed: int | None,
    ) -> None:
        self.stream, self.schedule, self.seed = stream, dict(schedule), seed
        self.start, self.join, self.leave, self.day = start, join, leave, day
        self.data, self.clients, self.rounds = stream.data, stream.clients, stream.rounds
        self.task_rounds, self.stateless = stream.task_rounds, stream.stateless
        self.head, self.task_classes = stream.head, stream.task_classes
        self.counted, self.draws = stream.counted, stream.draws
        #: a round, and who was there by chance
        self._last = (0, self._draw(0) < start)

    # as in the stream itself ---------------------------------------------------------------------
    @property
    def tasks(self) -> tuple[str, ...]:
        return self.stream.tasks

    def task(self, round_: int) -> int:
        return self.stream.task(round_)

    def length(self, task: int) -> int:
        return self.stream.length(task)

    def samples(self, client: int, round_: int) -> np.ndarray:
        return self.stream.samples(client, round_)

    def block(self, client: int, round_: int) -> int:
        return self.stream.block(client, round_)

    def test(self, task: int) -> np.ndarray:
        return self.stream.test(task)

    # who is there ----------------------------------------------------------------------------
    def online(self, round_: int) -> np.ndarray:
        there = self._by_chance(round_).copy()
        if self.day is not None:
            awake = rng(self.seed or 0, "awake", round_).random(self.clients)
            there &= awake < self.day.chance(self._zones, round_)
        for client, times in self.schedule.items():
            there[client] = any(first <= round_ < end for first, end in times)
        before = self.stream.online(round_)
        ids = np.flatnonzero(there)
        return ids if before is None else np.intersect1d(ids, before)

    @cached_property
    def _zones(self) -> np.ndarray:
        """Every client's time zone."""
        assert self.day is not None
        everyone = np.arange(self.clients)
        if self.day.by == "turn":
            return everyone % self.day.zones
        held = (counts(self.data, self.stream.samples(client, 0)) for client in range(self.clients))
        commonest = np.fromiter((own.argmax() for own in held), np.int64, self.clients)
        return commonest * self.day.zones // self.data.classes

    def _by_chance(self, round_: int) -> np.ndarray:
        """Goes on from the round that was asked for last, or from the first."""
        at, there = self._last
        if round_ < at:
            at, there = 0, self._draw(0) < self.start
        for t in range(at + 1, round_ + 1):
            there = self._draw(t) < np.where(there, 1 - self.leave, self.join)
        self._last = (round_, there)
        return there

    def _draw(self, round_: int) -> np.ndarray:
        return rng(self.seed or 0, "present", round_).random(self.clients)

    def seeded(self, seed: int) -> Stream:
        own = seed if self.seed is None else self.seed
        inner = self.stream.seeded(seed)
        return Present(inner, self.schedule, self.start, self.join, self.leave, self.day, own)

    def describe(self) -> dict[str, Any]:
        schedule = {
            str(client): [list(t) for t in times] for client, times in self.schedule.items()
        }
        rates = {"start": self.start, "join": self.join, "leave": self.leave, "seed": self.seed}
        day = {} if self.day is None else asdict(self.day)
        return self.stream.describe() | {"present": {"schedule": schedule} | rates | day}


def present(
    stream: Stream,
    *,
    schedule: Schedule | None = None,
    start: float = 1.0,
    join: float = 0.0,
    leave: float = 0.0,
    period: PositiveInt | None = None,
    night: float = 0.0,
    zones: PositiveInt = 1,
    by: By = "turn",
    seed: int | None = None,
) -> Stream:
    """In any stream, clients that join late, leave and come back, on a schedule or at random, or
    are there by the time of day. Rounds go on while a client is away: it misses the data of those
    rounds.

    With both rates above 0, in the long run a share of join / (join + leave) is there, each time
    for 1 / leave rounds in the mean.

    >>> from everfed.data import digits
    >>> from everfed.streams import static
    >>> stream = present(static(digits(["plain"]), clients=3), schedule={2: [(10, 20)]})
    >>> stream.online(9).tolist(), stream.online(10).tolist()
    ([0, 1], [0, 1, 2])

    Args:
        stream: who holds what.
        schedule: for a client, pairs of rounds (counted from 0): there from the first one until
            before the second. Clients without an entry come and go at random.
        start: share of the clients that is there in the first round, in the mean.
        join: chance that a client that is away is there in the next round.
        leave: chance that a client that is there is away in the next round.
        period: rounds of a day; of the clients that have joined, those by whose clock it is noon
            are there, and fewer towards midnight (a cosine). Left out: at all hours.
        night: chance that a client is there at its midnight.
        zones: time zones over a whole day; 1: it is noon for all at once.
        by: "turn": clients belong to the zones in turn; "labels": by their commonest class in the
            first round, so that a round's clients hold other data than the next hour's.
        seed: of who comes and goes; left out: the run's seed.
    """
    if isinstance(stream, Sites):
        raise EverfedError("the sites of a federation come and go by themselves: leave out present")
    if isinstance(stream, Regimes) and stream.drift in ("period", "client"):
        raise EverfedError(
            f"present: with drift = {stream.drift!r} a cohort shares out all that it holds, "
            "and what the absent hold, too"
        )
    for name, value in {"start": start, "join": join, "leave": leave, "night": night}.items():
        if not 0 <= value <= 1:
            raise EverfedError(f"present.{name} must be between 0 and 1, not {value}")
    for client, times in (schedule or {}).items():
        if client >= stream.clients:
            raise EverfedError(
                f"present.schedule names client {client}, but there are 0 to {stream.clients - 1}"
            )
        for first, end in times:
            if first >= end:
                raise EverfedError(
                    f"present.schedule: client {client} cannot be there from round {first} until "
                    f"before round {end}"
                )
    if period is None and (night or zones > 1 or by != "turn"):
        raise EverfedError("present.night, zones and by are for a day: give its present.period")
    if by == "labels" and (not stream.data.classes or stream.data.y.dim() > 1):
        raise EverfedError(f"present.by = 'labels': {stream.data.name} has no classes")
    day = None if period is None else Day(period, night, zones, by)
    made = Present(stream, schedule or {}, start, join, leave, day, seed)
    if not start and not join and not len(made.schedule):
        raise EverfedError("present: with start and join at 0 nobody is ever there")
    return made
