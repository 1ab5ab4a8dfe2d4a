"""The federations every simulator is timed on, with numpy alone: FedAvg, SGD, one local epoch."""

from dataclasses import dataclass
from functools import cache

import numpy as np

LR = 0.01
MOST_SAMPLES = 20_000


@dataclass(frozen=True)
class Workload:
    """What one of them looks like; `cohort` clients train in a round."""

    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    cohort: int
    batch: int
    samples: int | None  # of each client; None: lognormal around 100, from 20 to 400

    def sizes(self) -> np.ndarray:
        """How many samples each client has."""
        if self.samples is not None:
            return np.full(self.clients, self.samples)
        drawn = np.random.default_rng(0).lognormal(np.log(100), 0.5, self.clients)
        return np.clip(drawn, 20, 400).astype(np.int64)


WORKLOADS = {
    "W1": Workload("lenet5", (1, 28, 28), 62, 1000, 10, 20, None),
    "W2": Workload("mlp", (784,), 10, 7, 7, 32, 285),
    "W3": Workload("resnet18", (3, 32, 32), 10, 4, 4, 32, 64),
}


@cache
def data(workload: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random inputs and labels, and the clients' numbers of samples."""
    w, random = WORKLOADS[workload], np.random.default_rng(0)
    sizes = w.sizes()
    n = min(int(sizes.sum()), MOST_SAMPLES)
    x = random.standard_normal((n, *w.shape), dtype=np.float32)
    return x, random.integers(0, w.classes, n), sizes


def block(workload: str, i: int) -> slice:
    """The samples of client i; blocks of different clients may overlap."""
    _, y, sizes = data(workload)
    size = int(sizes[i])
    start = i * 7919 % (len(y) - size + 1)
    return slice(start, start + size)
