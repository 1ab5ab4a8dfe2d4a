"""Information loss: how far approximations of past objectives are from the objectives themselves.

Towards Federated Learning on Time-evolving Heterogeneous Data, Definition 3.1 and Figure 3: with
f_i the objective of a client in a past round and f~_i what a method keeps of it,

    mean over the approximations in use of |grad f_i(w) - grad f~_i(w)|,    w the server's model

This needs the past data, so it can be measured in simulation only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from everfed.client import Ask, ClientProgram, Job, Phase
from everfed.method import State
from everfed.round import Federation


class Past:
    """What clients held in past rounds, and gradients of what they minimised then, at w; see
    `everfed.method.Recall`."""

    def __init__(self, program: ClientProgram, w: Tensor, buffers: Tensor, round_: int) -> None:
        self.program, self.w, self.buffers, self.round = program, w, buffers, round_
        self.layout = program.compute.layout

    def samples(self, client: int, round_: int) -> np.ndarray:
        return np.asarray(self.program.stream.samples(client, round_))

    def replayed(
        self, client: int, block: int, kept: np.ndarray | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        back, stream = range(self.round, -1, -1), self.program.stream
        at = next(t for t in back if stream.block(client, t) == block)
        return self.gradient(self.samples(client, at), at), self.gradient(kept, at)

    def gradient(self, samples: np.ndarray | tuple[Tensor, Tensor], round_: int) -> Tensor:
        ids = samples if isinstance(samples, np.ndarray) else self.program.lay_beside([samples])[0]
        nothing: list[State] = [{} for _ in self.program.method.parts]
        task = self.program.stream.task(round_)
        ask = Ask("train", round_, task, 0.0, self.w, self.buffers, nothing)
        self.program.compute.load_buffers(self.buffers)
        phase = Phase(self.program, ask, [Job(0, ids, nothing, ids)], alone=True)
        return phase.gradient(self.w, ids, train=False)


def information_loss(
    program: ClientProgram, fed: Federation, cohort: list[int], round_: int
) -> float | None:
    """The information loss of the method's parts for a round's cohort; None: nothing is kept."""
    past = Past(program, fed.w, fed.buffers, round_)
    norms: list[Tensor] = []
    for k, (part, state) in enumerate(zip(program.method.parts, fed.parts, strict=True)):
        mine: Mapping[int, State] = {i: fed.clients[i][k] for i in cohort if i in fed.clients}
        norms += [(exact - kept).norm() for exact, kept in part.recall(state, mine, past)]
    return float(torch.stack(norms).mean()) if norms else None
