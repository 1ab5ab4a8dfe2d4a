"""DER++. Buzzega et al., Dark Experience for General Continual Learning, 2020, federated.

A client keeps samples in ER's ring memory, and with each the outputs u that its model had for it
when it was stored. Beside the current batch every step takes two memory batches:

    loss = CE(batch) + alpha |z(x') - u'|^2 / outputs + beta CE(x'', y'')

alpha = beta = 0 is FedAvg, and so is the first task. beta = 0 is DER.
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, zeros

from everfed.method import Average, Context, Method, State
from everfed.methods.er import Rehearsal
from everfed.methods.registry import register


def squared_error(z: Tensor, u: Tensor) -> Tensor:
    """The mean over outputs, (samples, ...) -> (samples,)."""
    return (z - u).square().flatten(1).mean(1)


@dataclass(frozen=True)
class DarkReplay(Rehearsal):
    """Replay of stored outputs and of labels."""

    alpha: NonNegativeFloat = 0.1
    beta: NonNegativeFloat = 0.5

    def client_init(self, w: Tensor) -> State:
        return super().client_init(w) | {"outputs": zeros(0).to(w)}

    def about(self, w: Tensor, ids: np.ndarray, c: Context) -> State:
        return {"outputs": c.outputs(w, ids)}

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        own = g.clone()  # the next gradient is computed where this one lies
        drawn = [(one, self.draw(one, c.local.batch, 1)) for one in c.each()]
        ids = [one.mine["ids"].numpy()[at] for one, at in drawn]
        outputs = [one.mine["outputs"][at] for one, at in drawn]
        dark = c.gradient(w, ids, squared_error, outputs)
        return own + self.alpha * dark + self.beta * c.gradient(w, self.batches(c, 2))


@register("Buzzega et al. 2020")
def derpp(
    alpha: NonNegativeFloat = 0.1,
    beta: NonNegativeFloat = 0.5,
    memory: PositiveInt = 400,
    per_task: bool = False,
    average: Average = "samples",
) -> Method:
    """Dark experience replay: a ring memory of samples, their labels and the outputs of then.

    Args:
        alpha: weight of the distance to the stored outputs.
        beta: weight of the loss on the stored labels; 0 is DER.
        memory: samples that a client keeps in all, shared by its data sets and their classes.
        per_task: keep as many of each data set, as C-FLAG does.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(DarkReplay(memory, per_task, alpha, beta), average=average, name="derpp")
