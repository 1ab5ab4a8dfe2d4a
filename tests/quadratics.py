"""Quadratic federations: sample (a, c) has loss 1/2 sum a (w - c)^2, played by the real engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from everfed.client import ClientProgram
from everfed.compute import choose
from everfed.data import arrays
from everfed.engines.local import LocalEngine
from everfed.local import Local
from everfed.method import Method
from everfed.round import Federation, Rounds
from everfed.streams import Stream, given

#: a client: (samples, d) curvatures and (samples, d) minimisers
Client = tuple[np.ndarray, np.ndarray]


class Point(nn.Module):
    """A model that is its parameter vector."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0], self.w - x[:, 1]], 1)


def energy(z: Tensor, y: Tensor) -> Tensor:
    """1/2 sum a (w - c)^2 of each sample."""
    return 0.5 * (z[:, 0] * z[:, 1].square()).sum(-1)


def stream_of(tasks: Sequence[Sequence[Client]], rounds: int) -> Stream:
    """Tasks of clients as a stream; everything is representable in float32."""
    rows, client, task = [], [], []
    for t, clients in enumerate(tasks):
        for i, (a, c) in enumerate(clients):
            rows.append(np.stack([a, c], 1))
            client += [i] * len(a)
            task += [t] * len(a)
    x = np.concatenate(rows).astype(np.float32)
    return given(arrays(x, np.zeros(len(x)), client=client, task=task), rounds=rounds)


class Game:
    """A federation on quadratics, round by round; `fed` holds all its state."""

    def __init__(
        self,
        method: Method,
        tasks: Sequence[Sequence[Client]],
        *,
        rounds: int,
        local: Local,
        sample: int | None = None,
        seed: int = 0,
    ) -> None:
        self.stream = stream_of(tasks, rounds)
        d = tasks[0][0][0].shape[1]
        compute = choose(Point(d), self.stream.data.x[0], torch.device("cpu"), "float32", "auto")
        table = self.stream.data.to(torch.device("cpu"), torch.float64)
        program = ClientProgram(method, compute, self.stream, table, local, seed, energy)
        for part in method.parts:
            part.check(local)
        w = compute.weights()
        states = [part.init(w, compute.layout) for part in method.parts]
        self.fed = Federation(w, compute.read_buffers(), states)
        self.rounds = Rounds(method, self.stream, local, LocalEngine(program, 1), sample, seed)

    def play(self) -> np.ndarray:
        """One round (and the task's end after its last one); the server's model."""
        at = self.fed.round
        self.rounds.play(self.fed)
        if self.stream.last_of_task(at):
            self.rounds.end_task(self.fed)
        return self.fed.w.numpy().copy()

    def play_all(self) -> list[np.ndarray]:
        return [self.play() for _ in range(self.stream.rounds)]


#: METHODS' fixture: f = 1/2 (w-1)^2 with one sample, f = 1/2 2 (w-4)^2 with three
Q2: list[Client] = [
    (np.array([[1.0]]), np.array([[1.0]])),
    (np.array([[2.0]] * 3), np.array([[4.0]] * 3)),
]


def q2(method: Method, rounds: int, steps: int = 2, lr: float = 0.1) -> list[float]:
    """The scalar models of the two-quadratics fixture after each round."""
    game = Game(method, [Q2], rounds=rounds, local=Local(lr=lr, steps=steps, batch=8))
    return [float(w[0]) for w in game.play_all()]
