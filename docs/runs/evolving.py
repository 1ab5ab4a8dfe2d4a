"""Labels that change from round to round, as in the CFL paper: Fashion-MNIST in 210 skewed parts,
30 for each of 7 clients; in every round a client holds one of its own, drawn anew. No tasks.

Needs fashion_mnist.npz (x_train, y_train, x_test, y_test) in the data folder.
"""

from __future__ import annotations

import numpy as np

import everfed as ef
from everfed.chance import rng
from everfed.streams.partition import split

METHODS = {
    "fedavg": ef.methods.fedavg(),
    "fedavgm": ef.methods.fedavgm(beta=0.5),
    "fedeve": ef.methods.fedeve(),
    "cfl_regularization": ef.methods.cfl_regularization(),
    "cfl_coreset": ef.methods.cfl_coreset(size=100),
}
SEEDS = (0, 1, 2)


class Evolving(ef.Stream):
    def __init__(self, data: ef.data.Data, seed: int = 0, rounds: int = 100) -> None:
        self.data, self.clients, self.rounds, self.seed = data, 7, rounds, seed
        labels = data.y[data.train].numpy()
        self.parts = [data.train[part] for part in split(labels, 210, 0.1, seed)]

    def block(self, client: int, round_: int) -> int:
        return int(rng(self.seed, "part", round_, client).integers(30))

    def samples(self, client: int, round_: int) -> np.ndarray:
        return self.parts[30 * client + self.block(client, round_)]

    def seeded(self, seed: int) -> Evolving:
        return Evolving(self.data, seed, self.rounds)


def runs() -> dict[str, list[ef.Run]]:
    stream = Evolving(ef.data.npz("fashion_mnist.npz"))
    model, local = ef.models.mlp(784, 200, 10), ef.Local(lr=0.05)

    def run(method: ef.Method, seed: int) -> ef.Run:
        return ef.run(method, stream, model, local=local, seed=seed, test_every=100, workers=1)

    return {name: [run(method, seed) for seed in SEEDS] for name, method in METHODS.items()}
