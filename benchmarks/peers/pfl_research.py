"""pfl-research: FederatedAveraging on a SimulatedBackend with a PyTorchModel, in one process."""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from clock import Clock, arguments
from pfl.aggregate.base import get_num_datapoints_weight_name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch_models import build
from workloads import LR, WORKLOADS, block, data


class Classifier(nn.Module):
    """A network with the two functions that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        total = F.cross_entropy(self.net(x), y, reduction="sum").item()
        return {"loss": Weighted(total, len(y))}


class Ticker(TrainingProcessCallback):
    """Tells the clock after every round and stops when time is up."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.metric = get_num_datapoints_weight_name(Population.TRAIN)

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        samples = int(aggregate_metrics[self.metric].weighted_value)
        return self.clock.tick(samples), Metrics()


def federated(workload: str) -> FederatedDataset:
    """Clients drawn at random, or all in turn where all of them train in every round."""
    w = WORKLOADS[workload]
    x, y = (torch.from_numpy(part) for part in data(workload)[:2])
    blocks = [block(workload, i) for i in range(w.clients)]
    users = {i: PyTorchTensorDataset((x[own], y[own])) for i, own in enumerate(blocks)}
    kind = "random" if w.cohort < w.clients else "minimize_reuse"
    return FederatedDataset(users.__getitem__, get_user_sampler(kind, list(users)))


def main() -> None:
    workload, seconds, threads = arguments()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (what pfl draws from)
    w, clock = WORKLOADS[workload], Clock(seconds)
    net, clients = Classifier(build(w.model)), federated(workload)
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(10**9, 10**9, w.cohort, None),  # rounds, rounds between evaluations
        SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        PyTorchModel(net, torch.optim.SGD, central),
        NNTrainHyperParams(local_batch_size=w.batch, local_num_epochs=1, local_learning_rate=LR),
        callbacks=[Ticker(clock)],
        send_metrics_to_platform=False,
    )
    clock.report("pfl-research", version("pfl"), workload, threads)


if __name__ == "__main__":
    main()
