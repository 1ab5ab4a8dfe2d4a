"""Your own stream: say who holds which samples when. Here labels drift smoothly round the circle of
classes, and every client is offline at night, a third of the time."""

import numpy as np

import everfed as ef


class Seasons(ef.Stream):
    def __init__(self, data: ef.data.Data, clients: int = 6, rounds: int = 24) -> None:
        self.data, self.clients, self.rounds = data, clients, rounds

    def samples(self, client: int, round_: int) -> np.ndarray:
        labels = self.data.y[self.data.train].numpy()
        season = 10 * round_ / self.rounds  # the class in the middle of what is seen now
        apart = np.abs((labels - season + 5) % 10 - 5)
        mine = self.data.train % self.clients == client
        return self.data.train[mine & (apart < 2)]

    def block(self, client: int, round_: int) -> int:
        return round_

    def online(self, round_: int) -> np.ndarray:
        return np.array([i for i in range(self.clients) if (i + round_) % 3])


def main() -> tuple[ef.Run, ef.Run]:
    stream = Seasons(ef.data.digits(["plain"]))
    local = ef.Local(lr=0.1, epochs=2)

    def run(method: ef.Method) -> ef.Run:
        return ef.run(method, stream, ef.models.mlp(64, 64, 10), local=local, sample=3, seed=0)

    return run(ef.methods.fedavg()), run(ef.methods.cfl_coreset(size=20))


if __name__ == "__main__":
    plain, replay = main()
    print(f"FedAvg {plain.acc:.2f}, with core sets {replay.acc:.2f}")
