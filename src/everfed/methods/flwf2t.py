"""FLwF-2T. Usmanova et al., A Distillation-Based Approach Integrating Continual Learning and
Federated Learning for Pervasive Services, 2021.

From the second task on a client learns from two frozen teachers as well, on its current inputs:

    loss = alpha CE + beta KD_T(own) + (1 - alpha - beta) KD_T(server)

own: the client's own model when it last trained before the task (for a client that comes later,
the first model that it received); server: the model received this round. KD is LwF's, over the
classes of earlier tasks (all of them in domain-incremental streams). Where classes arrive task by
task, only the new ones compete in CE, as in LwF. alpha = 1 is FedAvg, and so is the first task.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, where

from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, State
from everfed.methods.lwf import distillation, need_classes
from everfed.methods.registry import register

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class TwoTeachers(Part):
    """Distillation from the client's own earlier model and from the one received."""

    alpha: Share = 0.5
    beta: Share = 0.25
    temperature: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        if self.alpha + self.beta > 1:
            raise EverfedError(
                f"flwf2t: alpha + beta must not exceed 1, and are {self.alpha} + {self.beta}"
            )

    @property
    def new_slice(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True  # a client sees by the task's number that the one before has ended

    def client_init(self, w: Tensor) -> State:
        return {"newest": w, "task": torch.tensor(-1).to(w.device), "teacher": w}

    def weigh(self, c: Context) -> float:
        return self.alpha if c.task else 1.0

    def loss(self, z: Tensor, x: Tensor, y: Tensor, c: Context) -> Tensor:
        if not c.task:
            return z.new_zeros(y.shape[:2])
        need_classes(y, "distillation")
        own, server = c.logits(self._teacher(c), x), c.logits(c.start, x)
        if c.known is not None:
            z, own, server = z[..., c.known], own[..., c.known], server[..., c.known]
        old = self.beta * distillation(z, own, self.temperature)
        rest = 1 - self.alpha - self.beta
        return old + rest * distillation(z, server, self.temperature)

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        task = torch.full_like(c.mine["task"], c.task)
        return update, {}, {"newest": w, "task": task, "teacher": self._teacher(c)}

    def _teacher(self, c: Context) -> Tensor:
        """Each client's own model of before this task, (clients, d)."""
        before = (c.mine["task"] < c.task).unsqueeze(1)
        return where(before, c.mine["newest"], c.mine["teacher"])


@register("Usmanova et al. 2021")
def flwf2t(
    alpha: Share = 0.5,
    beta: Share = 0.25,
    temperature: PositiveFloat = 2.0,
    average: Average = "samples",
) -> Method:
    """Distillation from two teachers: the client's own earlier model and the one received.

    Args:
        alpha: weight of the loss on the labels, from the second task on.
        beta: weight of the client's own earlier model; the model received has the rest.
        temperature: how much the outputs of teachers and model are softened.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(TwoTeachers(alpha, beta, temperature), average=average, name="flwf2t")
