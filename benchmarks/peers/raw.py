"""A hand-written FedAvg loop in PyTorch, without a library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from clock import Clock, arguments
from torch import Tensor
from torch_models import build
from workloads import LR, WORKLOADS, block, data


class FedAvg:
    """One model object that every client borrows, and the global weights."""

    def __init__(self, workload: str) -> None:
        self.name, self.workload = workload, WORKLOADS[workload]
        x, y, _ = data(workload)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.model = build(self.workload.model).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}

    def train(self, client: int) -> int:
        """One local epoch from the global weights; how many samples were trained on."""
        self.model.load_state_dict(self.weights)
        own, trained = block(self.name, client), 0
        x, y = self.x[own], self.y[own]
        for batch in torch.randperm(len(y)).split(self.workload.batch):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x[batch]), y[batch]).backward()
            self.optimizer.step()
            trained += len(batch)
        return trained

    def round(self) -> int:
        """Sample clients, train them, average by their samples; the samples trained on."""
        cohort = torch.randperm(self.workload.clients)[: self.workload.cohort].tolist()
        sums: dict[str, Tensor] = {k: torch.zeros_like(v) for k, v in self.weights.items()}
        total = 0
        for client in cohort:
            trained = self.train(client)
            total += trained
            for k, v in self.model.state_dict().items():
                sums[k].add_(v, alpha=trained)
        self.weights = {k: v.div_(total) for k, v in sums.items()}
        return total


def main() -> None:
    workload, seconds, threads = arguments()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    federation, clock = FedAvg(workload), Clock(seconds)
    while not clock.tick(federation.round()):
        pass
    clock.report("raw", torch.__version__, workload, threads)


if __name__ == "__main__":
    main()
