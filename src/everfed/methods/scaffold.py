"""SCAFFOLD. Karimireddy et al., Stochastic Controlled Averaging, 2020.

    local step   y <- y - eta (g_i(y) - c_i + c)
    afterwards   c_i+ = g_i(x)                              (option I, full batch)
                 c_i+ = c_i - c + (x - y_K) / (K eta)       (option II)
    server       x <- x + mean (y_K - x),   c <- c + (S/N) mean (c_i+ - c_i)

K is each client's own number of steps. Control variates describe one task's gradients, so by
default all of them start at zero again when a task ends.
"""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass
from torch import Tensor, addcdiv, tensor, zeros_like

from everfed.errors import EverfedError
from everfed.local import Affine, Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout


@dataclass(frozen=True)
class Scaffold(Part):
    """Control variates against client drift."""

    reduces = {"dc": "sum"}
    noisy = False  # clients keep their true variates
    option: Literal[1, 2] = 2
    reset: bool = True

    def check(self, local: Local) -> None:
        if self.option == 2 and not local.plain:
            raise EverfedError(
                "SCAFFOLD's option 2 reads the gradient off plain SGD steps: set local.optimizer = "
                "'sgd' without momentum, weight decay or clipping, or use option = 1"
            )

    @property
    def bounded(self) -> bool:
        return self.reset

    @property
    def lasting(self) -> bool:
        return not self.reset

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"c": zeros_like(w)}

    def client_init(self, w: Tensor) -> State:
        return {"c": zeros_like(w), "task": tensor(0, device=w.device)}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, {"c": s["c"]}

    def _own(self, c: Context) -> Tensor:
        stale = c.mine["task"] != c.task
        if not self.reset or not stale.any():
            return c.mine["c"]
        return c.mine["c"].masked_fill(stale.unsqueeze(-1), 0)

    def affine(self, c: Context) -> Affine:
        return Affine(c.down["c"] - self._own(c))

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        own, task = self._own(c), c.mine["task"] * 0 + c.task
        if self.option == 1:
            dc = c.gradient(c.start).sub_(own)
        else:
            dc = addcdiv(-c.down["c"], c.start - w, c.lr * c.steps)
        return update, {"dc": dc}, {"c": own + dc, "task": task}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        c, before = s["c"], int(s.get("population", r.population))
        if before != r.population:  # c is the mean of all c_i, and those who are new are at 0
            c = c * (before / r.population)
        return update, {"c": c + r["dc"] / r.population, "population": tensor(r.population)}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return {"c": zeros_like(w)} if self.reset else s


@register("Karimireddy et al. 2020")
def scaffold(option: Literal[1, 2] = 2, reset: bool = True, average: Average = "uniform") -> Method:
    """Control variates that take the client drift out of local steps.

    Args:
        option: a client's new variate: 1 its gradient at the model received, 2 read off its steps.
        reset: set all variates to zero at a task's end.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Scaffold(option, reset), average=average, name="scaffold")
