"""Boundaries of tasks that nobody announces.

By the clients: each compares `samples` of what it holds with as many of what it held when it was
first asked in this task, under the model it has just received. (With what it held the last time,
those who have seen a change would soon outvote the others, and a slow one would go unseen.) If the
two are of one kind, then any number made of a sample is as likely larger in the one as in the
other, whatever the model is. With a and b the losses (or the log-sum-exp of the outputs) of n and m
samples, the statistic of Mann and Whitney

    z = (P(a < b) + P(a = b) / 2 - 1/2) / sqrt((n + m + 1) / (12 n m))

has a deviation of 1. Data have changed where |z| > `change` for either number, and a task begins
where most of the clients that could compare say so. They tell only these two counts.

By the server, from what it sees anyway: in every round s = log(mean training loss)
+ log(|mean update| / learning rate). Within a task both fall, and where data become harder both
jump. With m the mean of s over the last rounds of the task, and sigma the deviation of s - m over
all rounds without an alarm, a task begins where

    s - m > max(jump, deviations sigma)

Either way the round is then played again, as the first one of a task that was announced.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import memory
from everfed.chance import rng
from everfed.errors import EverfedError, plain
from everfed.method import Context, Method, Part, State
from everfed.streams.stream import Stream

#: rounds of a task before the server's alarm, and of all tasks before their deviation counts
LEAST = 3


def shift(old: Tensor, new: Tensor) -> float:
    """Mann and Whitney's statistic of two sets of numbers, in deviations: above 0, the new are
    larger. Ties make it smaller, never larger.

    >>> round(shift(torch.arange(10.0), torch.arange(10.0) + 20), 2)
    3.78
    """
    return float((new[:, None] - old).sign().float().mean()) * most(len(old), len(new))


def most(n: int, m: int) -> float:
    """The largest statistic of n and m numbers, where all of the new are above all of the old."""
    return math.sqrt(3 * n * m / (n + m + 1))


@dataclass(frozen=True)
class Watch(Part):
    """Clients tell whether their data have changed since the task began for them."""

    reduces = {"tested": "sum", "changed": "sum"}
    remembers = ("ids",)
    samples: PositiveInt = 128
    change: PositiveFloat = 4.0

    def client_init(self, w: Tensor) -> State:
        return {"ids": torch.zeros(0, dtype=torch.int64), "task": torch.tensor([-1])}

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        told = [self._compare(own) for own in c.each()]
        tested, changed = torch.tensor(told, dtype=w.dtype, device=w.device).T.unsqueeze(-1)
        return update, {"tested": tested, "changed": changed}, {}

    def remember(self, w: Tensor, c: Context) -> State:
        if int(c.mine["task"]) == c.task and most(len(c.mine["ids"]), self.samples) > self.change:
            return {}
        random, room = rng(c.seed, "watched", c.round, c.client), c.fits(self.samples)
        if most(room, self.samples) <= self.change:
            raise EverfedError(
                f"local.memory_bytes has room for {room} samples to compare with, too few to tell "
                "a change: raise it"
            )
        kept = memory.uniform(c.ids, room, random)
        return {"ids": torch.from_numpy(kept), "task": torch.tensor([c.task])}

    def _compare(self, c: Context) -> tuple[bool, bool]:
        """Whether one client could compare, and whether its data have changed."""
        old = c.mine["ids"].numpy()
        # what is older than the last boundary has changed as all know
        if len(old) == 0 or int(c.mine["task"]) != c.task:
            return False, False
        new = memory.uniform(c.ids, self.samples, rng(c.seed, "compared", c.round, c.client))
        if most(len(old), len(new)) <= self.change:
            return False, False  # so few samples cannot tell
        losses, scores = [], []
        with torch.no_grad():
            for ids in (old, new):
                losses.append(c.losses(c.start, *c.samples(ids)))
                scores.append(c.outputs(c.start, ids).flatten(1).logsumexp(1))
        return True, any(abs(shift(*numbers)) > self.change for numbers in (losses, scores))


@plain
@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Boundaries:
    """Section [boundaries] of a configuration: who tells a method where tasks begin.

    >>> boundaries, seen, alarms = Boundaries(by="server"), {}, []
    >>> for loss in (1.0, 0.8, 0.7, 0.6, 0.6, 2.0, 1.0):
    ...     seen, surprise = boundaries.watch(seen, loss, 0.1)
    ...     alarms.append(surprise > 1)
    >>> alarms
    [False, False, False, False, False, True, False]
    """

    #: who tells: the stream, clients that compare their data, or the server by its own signs
    by: Literal["stream", "clients", "server"] = "stream"
    #: clients: how many samples each keeps to compare with
    samples: PositiveInt = 128
    #: clients: deviations from chance that are a change
    change: PositiveFloat = 4.0
    #: server: rounds that a round is compared with
    window: PositiveInt = 8
    #: server: how much log(loss) + log(|update| / rate) must rise at least
    jump: NonNegativeFloat = 0.5
    #: server: and by how many deviations of its usual change
    deviations: NonNegativeFloat = 2.0

    def __post_init__(self) -> None:
        if most(self.samples, self.samples) <= self.change:
            raise EverfedError(
                f"boundaries.samples = {self.samples} can never differ by boundaries.change = "
                f"{self.change:g} deviations: take more"
            )
        if self.window < LEAST:
            raise EverfedError(f"boundaries.window must be at least {LEAST}, not {self.window}")

    @property
    def found(self) -> bool:
        """Whether tasks are found instead of announced."""
        return self.by != "stream"

    def watching(self, method: Method) -> Method:
        """The method, with clients that compare their data where it is they who tell."""
        if self.by != "clients":
            return method
        watch = Watch(self.samples, self.change)
        return Method(*method.parts, watch, average=method.average, name=method.name)

    def check(self, method: Method, stream: Stream) -> None:
        """Raise where tasks cannot be found."""
        if self.found and stream.head != "shared":
            raise EverfedError(
                "boundaries.by: classes that arrive task by task are announced by their labels: "
                "leave it at 'stream'"
            )
        if self.found and method.using("close"):
            raise EverfedError(
                f"boundaries.by: at a task's end {method.name} asks clients about its data, "
                "which are gone when the end is found: leave it at 'stream'"
            )
        if self.by == "clients" and method.using("seal"):
            raise EverfedError(
                "boundaries.by = 'clients': what clients tell of their data would drown in the "
                "noise of privacy: use 'server'"
            )
        if self.by == "clients" and stream.stateless:
            raise EverfedError(
                "boundaries.by = 'clients' needs clients that remember what they held, and in this "
                "stream a client is another one in every round: use 'server'"
            )

    def told(self, method: Method, values: State) -> float | None:
        """How surprising what the clients tell is, above 1 where most that could compare have other
        data than before; None: they do not tell."""
        for i, part in enumerate(method.parts):
            if isinstance(part, Watch):
                tested, changed = (float(values[f"{i}.{key}"]) for key in ("tested", "changed"))
                return 2 * changed / max(tested, 1.0)
        return None

    def unsaid(self, method: Method, reply: State) -> State:
        """A late reply, without what it tells: that is of data which the client held then."""
        votes = [
            f"{i}.{key}"
            for i, part in enumerate(method.parts)
            if isinstance(part, Watch)
            for key in part.reduces
        ]
        return reply | {key: torch.zeros_like(reply[key]) for key in votes if key in reply}

    def watch(self, seen: State, loss: float | None, way: float) -> tuple[State, float]:
        """What the server knows after a round of that loss (None: clients keep it to themselves)
        and way, and how surprising it was: above 1 a task has begun."""
        known = [value for value in (loss, way) if value is not None]
        now = torch.tensor([max(value, 1e-30) for value in known]).double().log().sum()[None]
        history, changes = (seen.get(key, now[:0]) for key in ("history", "changes"))
        if len(history) < LEAST:
            return {"history": torch.cat([history, now]), "changes": changes}, 0.0
        change = now - history[-self.window :].mean()
        sigma = float(changes.std()) if len(changes) >= LEAST else 0.0
        surprise = float(change) / max(self.jump, self.deviations * sigma, 1e-30)
        if surprise > 1:
            return {"history": now, "changes": changes}, surprise
        history = torch.cat([history, now])[-self.window :]
        return {"history": history, "changes": torch.cat([changes, change])}, surprise
