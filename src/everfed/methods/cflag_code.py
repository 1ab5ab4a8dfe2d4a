"""C-FLAG as its authors released it, for permuted MNIST: another method than the paper's.

No gradients of the server's, no table of them, one exchange. From the second task on, f the
gradient of a batch of the client's own memory (so many samples of each task), e the epoch of E:

    g <- g - <g, f> / |f|^2 f    where <g, f> < 0        every step, as in A-GEM
    y <- y - lr E^(-e/2) g                               e = 0, 1, ... from y = x
    v <- v - lr f                                        once over the memory, from v = x
    update  (y - x) + (v - x)

and the plain mean of updates. The code's momentum (0.9) and cut of gradients (0.5) are the local
settings `momentum` and `clip`. By reading it, two slips are left out: its optimisers hold on to the
models of a task's first round, so that later steps on current data are lost, and its rate shrinks
on from round to round.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed.chance import rng
from everfed.method import Average, Context, Method, State
from everfed.methods.agem import Projection
from everfed.methods.registry import register


@dataclass(frozen=True)
class Released(Projection):
    """Projected steps that shorten by the epoch, and an epoch on the memory beside them."""

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        c.scratch["before"] = w.clone()
        return super().grad(g, w, c)

    def after(self, w: Tensor, c: Context) -> Tensor:
        before: Tensor = c.scratch["before"]
        if c.step == 0:
            c.scratch["epochs"] = torch.zeros_like(c.n)
            past = [[len(self.past(own)) > 0] for own in c.each()]
            c.scratch["past"] = torch.tensor(past, device=w.device)
        epochs, past = c.scratch["epochs"][: len(w)], c.scratch["past"][: len(w)]
        share = torch.where(past, c.local.epochs ** (-epochs / 2), 1)
        epochs += c.epoch_ends
        return before.lerp(w, share.to(w))

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        ids = [self._past_shuffled(own) for own in c.each()]
        v, batch = c.start.expand_as(w), c.local.batch
        for k in range(0, max(map(len, ids)), batch):
            v = v - c.lr * c.gradient(v, [own[k : k + batch] for own in ids])
        return update + (v - c.start), {}, {}

    def _past_shuffled(self, c: Context) -> np.ndarray:
        ids = c.mine["ids"].numpy()[self.past(c)]
        return rng(c.seed, "memory epoch", c.round, c.client).permutation(ids)


@register("On the Convergence of Continual Federated Learning (the released code)")
def cflag_code(memory: PositiveInt = 100, average: Average = "uniform") -> Method:
    """C-FLAG's released code: projected steps, and an epoch on the memory beside them.

    Args:
        memory: samples that a client keeps of each task.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Released(memory, True), average=average, name="cflag_code")
