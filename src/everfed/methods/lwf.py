"""LwF-FL. Learning without Forgetting (Li and Hoiem 2016), federated.

The teacher is the global model at the previous task's end; on the current inputs

    loss = CE + lambda KD_T,    KD_T = - sum_c softmax(u/T)_c log softmax(z/T)_c

over the classes that the teacher knows (all of them in domain-incremental streams). Where classes
arrive task by task, only the new ones compete in CE. lambda = 0 is FedAvg.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.errors import EverfedError
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register


def distillation(z: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of softened outputs, (..., classes) -> (...)."""
    target = (teacher / temperature).softmax(-1)
    return -(target * (z / temperature).log_softmax(-1)).sum(-1)


def need_classes(y: Tensor, who: str) -> None:
    """Raise EverfedError where labels (clients, batch) are not one class a sample."""
    if y.is_floating_point() or y.dim() != 2:
        raise EverfedError(f"{who} needs one class a sample")


def known(z: Tensor, c: Context) -> Tensor:
    """The outputs of classes of earlier tasks, (..., classes) -> (..., known); of all, where the
    label set stays the same."""
    return z if c.known is None else z[..., c.known]


@dataclass(frozen=True)
class Distil(Part):
    """Distillation from the previous task's model on current inputs."""

    once = ("teacher",)
    lam: NonNegativeFloat = 3.0
    temperature: PositiveFloat = 2.0

    @property
    def new_slice(self) -> bool:
        return True

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def loss(self, z: Tensor, x: Tensor, y: Tensor, c: Context) -> Tensor:
        if "teacher" not in c.down:
            return z.new_zeros(y.shape[:2])
        need_classes(y, "distillation")
        teacher = c.logits(c.down["teacher"], x)
        return self.lam * distillation(known(z, c), known(teacher, c), self.temperature)

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return {"teacher": w}


@register("Li and Hoiem 2016")
def lwf(
    lam: NonNegativeFloat = 3.0, temperature: PositiveFloat = 2.0, average: Average = "samples"
) -> Method:
    """Distillation from the previous task's model.

    Args:
        lam: weight of the distillation.
        temperature: how much both models' outputs are softened.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Distil(lam, temperature), average=average, name="lwf")
