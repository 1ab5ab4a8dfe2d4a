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
        if not len(self.past(c)):
            return w
        epoch = c.scratch.setdefault("epoch", 0)
        c.scratch["epoch"] += int(c.epoch_ends)
        before: Tensor = c.scratch["before"]
        return before.lerp(w, float(c.local.epochs ** (-epoch / 2)))

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        ids = c.mine["ids"].reshape(-1)[self.past(c)].numpy()
        ids = rng(c.seed, "memory epoch", c.round, c.client).permutation(ids)
        v = c.start.expand_as(w)
        for k in range(0, len(ids), c.local.batch):
            v = v - c.lr * c.gradient(v, ids[k : k + c.local.batch])
        return update + (v - c.start), {}, {}


@register("On the Convergence of Continual Federated Learning (the released code)")
def cflag_code(memory: PositiveInt = 100, average: Average = "uniform") -> Method:
    """C-FLAG's released code: projected steps, and an epoch on the memory beside them.

    Args:
        memory: samples that a client keeps of each task.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Released(memory, True), average=average, name="cflag_code")
