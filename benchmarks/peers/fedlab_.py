"""FedLab: its standalone pipeline with the serial SGD trainer and the synchronous handler.

The averages of FedLab's own FedAvg handler are not weighted by samples; its classes are extended
by the weights, as FedLab's other algorithms do.
"""

# ruff: noqa: E402

import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.modules["torchvision"] = MagicMock()  # FedLab imports it; nothing here uses it

import torch
from clock import Clock, arguments
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import BaseDataset, FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators
from torch import Tensor
from torch.utils.data import DataLoader
from torch_models import build
from workloads import LR, WORKLOADS, block, data


class Blocks(FedDataset):
    """The clients' blocks of a workload."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        x, y, sizes = data(workload)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.workload, self.num = workload, len(sizes)

    def get_dataset(self, id: int, type: str = "train") -> BaseDataset:
        own = block(self.workload, id)
        return BaseDataset(self.x[own], self.y[own])

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.get_dataset(id), batch_size=batch_size, shuffle=True)


class Trainer(SGDSerialClientTrainer):
    """Uploads the client's number of samples beside its parameters."""

    def train(self, model_parameters: Tensor, train_loader: DataLoader) -> list[Tensor]:
        upload = super().train(model_parameters, train_loader)
        return [*upload, torch.tensor(len(train_loader.dataset))]


class Handler(SyncServerHandler):
    """Averages by the numbers of samples and keeps their sum."""

    samples = 0

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        weights = torch.stack([weight for _, weight in buffer])
        self.set_model(Aggregators.fedavg_aggregate([vector for vector, _ in buffer], weights))
        self.samples = int(weights.sum())


class Pipeline(StandalonePipeline):
    """Tells the clock after every round, instead of evaluating."""

    def __init__(self, handler: Handler, trainer: Trainer, clock: Clock) -> None:
        super().__init__(handler, trainer)
        self.clock = clock

    def evaluate(self) -> None:
        if self.clock.tick(self.handler.samples):
            self.handler.global_round = self.handler.round


def main() -> None:
    workload, seconds, threads = arguments()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    w, clock = WORKLOADS[workload], Clock(seconds)
    model = build(w.model)
    trainer = Trainer(model, w.clients)
    trainer.setup_dataset(Blocks(workload))
    trainer.setup_optim(epochs=1, batch_size=w.batch, lr=LR)
    handler = Handler(model, global_round=10**9, sample_ratio=w.cohort / w.clients)
    Pipeline(handler, trainer, clock).main()
    clock.report("fedlab", version("fedlab"), workload, threads)


if __name__ == "__main__":
    main()
