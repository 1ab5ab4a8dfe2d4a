"""A-GEM. Chaudhry et al., Efficient Lifelong Learning with A-GEM, 2019; federated: every client
projects its own steps against its own memory (ER's ring).

f the gradient of a memory batch, g that of the current one:

    g <- g - <g, f> / |f|^2 f    where <g, f> < 0

so that no step raises the memory batch's loss, to first order. Without a memory it is FedAvg.
"""

from __future__ import annotations

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.method import Average, Context, Method
from everfed.methods.er import Rehearsal
from everfed.methods.registry import register
from everfed.vector import dot, sq


def project(g: Tensor, f: Tensor) -> Tensor:
    """g without its part against f: (..., d) each."""
    return g - (dot(g, f) / sq(f).clamp(min=1e-30)).clamp(max=0) * f


@dataclass(frozen=True)
class Projection(Rehearsal):
    """Steps are projected where they would raise the memory's loss."""

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        own = g.clone()  # the next gradient is computed where this one lies
        return project(own, c.gradient(w, self.batches(c)))


@register("Chaudhry et al. 2019")
def agem(memory: PositiveInt = 400, per_task: bool = False, average: Average = "samples") -> Method:
    """Local steps are projected so that they do not raise a memory batch's loss.

    Args:
        memory: samples that a client keeps in all, shared by its data sets and their classes.
        per_task: keep as many of each data set, as C-FLAG does.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Projection(memory, per_task), average=average, name="agem")
