"""Your own nn.Module: BatchNorm, dropout, anything that maps a batch to outputs."""

import torch
from torch import Tensor, nn

import everfed as ef


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(12 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        h = nn.functional.max_pool2d(h, 2).flatten(1)
        return self.head(self.drop(h))


def main() -> ef.Run:
    stream = ef.streams.domains(ef.data.digits(), clients=8, alpha=0.3, rounds=5)
    local = ef.Local(lr=0.05, epochs=2, momentum=0.9)
    # the class itself: its weights are then drawn from the run's seed
    return ef.run(ef.methods.cfl_coreset(), stream, Net, local=local, sample=4, seed=0)


if __name__ == "__main__":
    run = main()
    print(run, "on", run.engine)
    print(run.matrix.round(2))
    print("a trained module:", type(run.model).__name__, run.model(torch.zeros(1, 1, 8, 8)).shape)
