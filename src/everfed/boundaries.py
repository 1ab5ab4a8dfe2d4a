"""Boundaries of tasks that nobody announces, found from what the server sees anyway.

In every round s = log(mean training loss) + log(|mean update| / learning rate). Within a task both
fall, and when data change both jump. With m the mean of s over the last rounds of the task, and
sigma the deviation of s - m over all rounds without an alarm, a task begins where

    s - m > max(jump, deviations sigma)

The model from before that round is then the one at the end of the task that is over.
"""

from __future__ import annotations

import torch
from pydantic import ConfigDict, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from everfed.errors import EverfedError
from everfed.method import Method, State
from everfed.streams.stream import Stream

#: rounds of a task before an alarm, and of all tasks before their deviation counts
LEAST = 3


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Boundaries:
    """Section [boundaries] of a configuration: whether a method finds the tasks itself.

    >>> boundaries, seen, alarms = Boundaries(detect=True), {}, []
    >>> for loss in (1.0, 0.8, 0.7, 0.6, 0.6, 2.0, 1.0):
    ...     seen, surprise = boundaries.watch(seen, loss, 0.1)
    ...     alarms.append(surprise > 1)
    >>> alarms
    [False, False, False, False, False, True, False]
    """

    #: find the beginnings of tasks instead of being told
    detect: bool = False
    #: rounds that a round is compared with
    window: PositiveInt = 8
    #: how much log(loss) + log(|update| / rate) must rise at least
    jump: NonNegativeFloat = 0.5
    #: and by how many deviations of its usual change
    deviations: NonNegativeFloat = 2.0

    def check(self, method: Method, stream: Stream) -> None:
        """Raise where tasks cannot be found."""
        if self.detect and stream.head != "shared":
            raise EverfedError(
                "boundaries.detect: classes that arrive task by task are announced by their labels"
            )
        if self.detect and method.using("close"):
            raise EverfedError(
                f"boundaries.detect: at a task's end {method.name} asks clients about its data, "
                "which are gone when the end is found"
            )

    def watch(self, seen: State, loss: float | None, way: float) -> tuple[State, float]:
        """What is known after a round of that loss (None: clients keep it to themselves) and way,
        and how surprising it was: above 1 a task has begun."""
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
