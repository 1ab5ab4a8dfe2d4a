"""FedAvg. McMahan et al., Communication-Efficient Learning of Deep Networks, 2017.

    w <- w + eta_g * sum_i p_i (w_i - w),    p_i = n_i / sum n  or  1 / S

FedAvg is the empty method; the server's rate eta_g is a part. Where classes arrive task by task, it
is also what continual learning calls fine-tuning: `among` says which classes a sample of a new one
competes with in the loss. With "new" outputs of earlier classes are left as they are, and much less
is forgotten; EWC, LwF and the methods that distil have their loss in that form.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.method import Average, Method, Part, Reduced, State
from everfed.methods.registry import register


@dataclass(frozen=True)
class ServerRate(Part):
    """Scales the server's step; "1/task" divides by the task's number (from 1)."""

    stage = 3
    rate: PositiveFloat | Literal["1/task"] = 1.0

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        rate = 1 / (r.task + 1) if self.rate == "1/task" else self.rate
        return update * rate, s


@dataclass(frozen=True)
class NewClasses(Part):
    """Where classes arrive task by task, samples of new ones compete among these alone."""

    @property
    def new_slice(self) -> bool:
        return True


@register("McMahan et al. 2017")
def fedavg(
    server_lr: PositiveFloat = 1.0,
    among: Literal["seen", "new"] = "seen",
    average: Average = "samples",
) -> Method:
    """The mean of the clients' models.

    Args:
        server_lr: the server's step along the mean update.
        among: classes that compete in the loss of a new one's sample, where classes arrive task by
            task: all "seen" so far, or the "new" ones alone, as in EWC and LwF.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    parts: list[Part] = [] if server_lr == 1 else [ServerRate(server_lr)]
    parts += [NewClasses()] if among == "new" else []
    return Method(*parts, average=average, name="fedavg")
