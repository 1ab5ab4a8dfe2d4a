"""Your own method is a Part: here, server momentum that forgets at every task boundary, combined
with a client-side pull to the model received that grows with the task's number."""

from dataclasses import dataclass

import torch
from torch import Tensor

import everfed as ef


@dataclass(frozen=True)
class FreshMomentum(ef.Part):
    beta: float = 0.5

    def init(self, w: Tensor, layout: object) -> ef.State:
        return {"v": torch.zeros_like(w)}

    def fold(self, s: ef.State, update: Tensor, r: ef.Reduced) -> tuple[Tensor, ef.State]:
        v = self.beta * s["v"] + update
        return v, {"v": v}

    def task_end(self, s: ef.State, w: Tensor, r: ef.Reduced) -> ef.State:
        return {"v": torch.zeros_like(w)}

    def metrics(self, s: ef.State) -> dict[str, float]:
        return {"momentum_norm": float(s["v"].norm())}


@dataclass(frozen=True)
class GrowingProx(ef.Part):
    mu: float = 0.05

    def grad(self, g: Tensor, w: Tensor, c: ef.Context) -> Tensor:
        return g + self.mu * c.task * (w - c.start)


def main() -> ef.Run:
    stream = ef.streams.domains(ef.data.digits(), clients=8, alpha=0.3, rounds=5)
    method = ef.Method(GrowingProx(0.05), FreshMomentum(0.5), name="mine")
    local = ef.Local(lr=0.2, epochs=5)
    return ef.run(method, stream, ef.models.mlp(64, 64, 10), local=local, sample=4, seed=0)


if __name__ == "__main__":
    run = main()
    print(run)
    print([round(r["value"], 3) for r in run.records if r["metric"] == "momentum_norm"])
