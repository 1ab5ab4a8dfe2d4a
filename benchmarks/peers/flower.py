"""Flower: run_simulation with its message API and FedAvg strategy.

THREADS is the number of CPUs that Ray gets; a client takes one of them, with one torch thread, so
that as many clients as THREADS train at a time.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
import torch.nn.functional as F
from clock import Clock, arguments
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset
from torch_models import build
from workloads import LR, WORKLOADS, block, data


class TimeIsUp(Exception):
    """Ends the strategy's loop."""


class Timed(FedAvg):
    """FedAvg that tells the clock after every aggregation."""

    def __init__(self, clock: Clock, cohort: int, clients: int) -> None:
        super().__init__(
            fraction_train=cohort / clients,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=clients,
        )
        self.clock, self.cohort = clock, cohort

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        aggregated = super().aggregate_train(server_round, replies)
        sizes = [r.content["metrics"]["num-examples"] for r in replies if r.has_content()]
        if len(sizes) < self.cohort:
            raise RuntimeError(f"{self.cohort - len(sizes)} clients of a round failed")
        if self.clock.tick(sum(sizes)):
            raise TimeIsUp
        return aggregated


def client_app(workload: str) -> ClientApp:
    """Clients that load the model, train an epoch on their partition, and send it back."""
    app, w = ClientApp(), WORKLOADS[workload]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        own = block(workload, int(context.node_config["partition-id"]))
        x, y = (torch.from_numpy(part[own]) for part in data(workload)[:2])
        loader = DataLoader(TensorDataset(x, y), batch_size=w.batch, shuffle=True)
        model = build(w.model)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        trained = 0
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            trained += len(labels)
        arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": trained})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def server_app(workload: str, clock: Clock) -> ServerApp:
    """A server that runs rounds until the time is up."""
    app, w = ServerApp(), WORKLOADS[workload]

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(build(w.model).state_dict())
        with suppress(TimeIsUp):
            Timed(clock, w.cohort, w.clients).start(grid, arrays, num_rounds=10**9)

    return app


def main() -> None:
    workload, seconds, threads = arguments()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock(seconds)
    run_simulation(
        server_app(workload, clock),
        client_app(workload),
        num_supernodes=WORKLOADS[workload].clients,
        backend_config={
            "init_args": {"num_cpus": threads},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    clock.report("flower", version("flwr"), workload, threads)


if __name__ == "__main__":
    main()
