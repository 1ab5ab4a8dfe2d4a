"""Your own torch Dataset, with a client and a task for every sample: two machines whose sensors are
replaced half way."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

import everfed as ef


class Vibrations(Dataset[tuple[Tensor, int]]):
    """Sine waves of two frequencies; the new sensor (task 1) turns the sign."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 2, (n,), generator=g)
        self.machine = torch.randint(0, 2, (n,), generator=g)
        self.sensor = (torch.arange(n) >= n // 2).long()
        time = torch.linspace(0, 6.28, 32)
        phase = torch.rand(n, 1, generator=g)
        clean = torch.sin((1 + self.label[:, None]) * time + phase)
        noise = 0.3 * torch.randn(n, 32, generator=g)
        self.wave = (clean + noise) * (1 - 2 * self.sensor[:, None])

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        return self.wave[k], int(self.label[k])


def main() -> ef.Run:
    train, test = Vibrations(600, seed=1), Vibrations(200, seed=2)
    data = ef.data.from_dataset(
        train,
        test,
        client=train.machine.numpy(),
        task=train.sensor.numpy(),
        test_task=test.sensor.numpy(),
        tasks=["old sensor", "new sensor"],
    )
    stream = ef.streams.given(data, rounds=8)
    return ef.run(ef.methods.lwf(lam=1), stream, ef.models.mlp(32, 32, 2), seed=0)


if __name__ == "__main__":
    run = main()
    print(run)
    print(run.matrix.round(2))
