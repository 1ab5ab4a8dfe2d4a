"""Avalanche's continual methods on the sequences that benchmarks/avalanche.py has made.

python avalanche_.py FOLDER: reads FOLDER/sequences.npz and FOLDER/runs.json; prints, run by run, a
line with the accuracy on each task after each task.
"""

# ruff: noqa: E402

import importlib.abc
import importlib.machinery
import json
import random
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

#: imported for data sets, logs and meters, none of which is used here
UNUSED = (
    "GPUtil", "gdown", "matplotlib", "pytorchcv", "qpsolvers", "sklearn", "torch.utils.tensorboard",
    "torchmetrics", "torchvision", "wandb",
)  # fmt: skip


class Package(MagicMock):
    """Stands for a package that is not installed."""

    __path__: Sequence[str] = ()


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each of them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        wanted = name.startswith(UNUSED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> Any:
        return Package(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Unused())

import numpy as np
import torch
import torch.nn.functional as F
from avalanche.benchmarks import nc_benchmark
from avalanche.models import IncrementalClassifier, NCMClassifier, TrainEvalModel
from avalanche.training.plugins import (
    AGEMPlugin,
    EvaluationPlugin,
    EWCPlugin,
    LwFPlugin,
    ReplayPlugin,
    SupervisedPlugin,
)
from avalanche.training.supervised import ICaRL
from avalanche.training.supervised.icarl import _ICaRLPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Labelled(TensorDataset):
    """Samples with the labels where Avalanche looks for them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.targets = y.tolist()


class Tasks:
    """The tasks of one sequence: with labels of their own (it `grows`), or all with the same."""

    def __init__(self, arrays: Any, name: str) -> None:
        self.arrays, self.name = arrays, name
        x = torch.from_numpy(arrays[f"{name} x"]).float().mul_(1 / 255)
        y = torch.from_numpy(arrays[f"{name} y"])
        tasks = range(int(arrays[f"{name} tasks"]))
        train, test = (
            [torch.from_numpy(arrays[f"{name} {kind} {k}"]) for k in tasks]
            for kind in ("train", "test")
        )
        self.train = [Labelled(x[ids], y[ids]) for ids in train]
        self.test = [Labelled(x[ids], y[ids]) for ids in test]
        self.classes = [y[ids].unique() for ids in train]
        self.grows = len(self.classes[0]) < len(y.unique())

    def benchmark(self) -> Any:
        """The same for Avalanche."""
        if not self.grows:
            return nc_benchmark(
                self.train, self.test, len(self.train), task_labels=False, shuffle=False,
                one_dataset_per_exp=True, class_ids_from_zero_in_each_exp=True,
            )  # fmt: skip
        whole = [
            Labelled(*(torch.cat(own) for own in zip(*(d.tensors for d in sets), strict=True)))
            for sets in (self.train, self.test)
        ]
        order = torch.cat(self.classes).tolist()
        return nc_benchmark(*whole, len(self.train), task_labels=False, fixed_class_order=order)

    def orders(self, benchmark: Any, seed: int) -> list[np.ndarray]:
        """everfed's batches of each task, (epochs, batches, batch), as places in the experience,
        which Avalanche sorts by class."""
        places = [np.argsort(own) for own in benchmark.train_exps_patterns_assignment]
        return [own[self.arrays[f"{self.name} order {seed} {k}"]] for k, own in enumerate(places)]

    def head(self, width: int, classes: int) -> nn.Module:
        """The last layer; classes that have not been met do not compete."""
        if self.grows:
            return IncrementalClassifier(width, initial_out_features=classes)
        return nn.Linear(width, classes)

    def among_new(self, z: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy among the classes of each sample's task."""
        task = torch.zeros(z.shape[1], dtype=torch.long)
        for k, own in enumerate(self.classes):
            task[own] = k
        return F.cross_entropy(z.masked_fill(task[y].unsqueeze(1) != task, -torch.inf), y)


class BySample(EWCPlugin):
    """EWC with an importance of squared gradients of single samples, not of batches' means."""

    def compute_importances(
        self, model: Any, criterion: Any, optimizer: Any, dataset: Any, device: Any,
        batch_size: int, num_workers: int = 0,
    ) -> Any:  # fmt: skip
        return super().compute_importances(model, criterion, optimizer, dataset, device, 1)


class Order(SupervisedPlugin):
    """Every epoch takes the batches of a list that was made elsewhere."""

    def __init__(self, tasks: list[np.ndarray]) -> None:
        super().__init__()
        self.epochs = (epoch for task in tasks for epoch in task)

    def before_training_epoch(self, strategy: Any, **_: Any) -> None:
        data = strategy.adapted_dataset
        batches = next(self.epochs).tolist()
        strategy.dataloader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate_fn)


PLUGINS: dict[str, Callable[..., Any]] = {
    "EWC": EWCPlugin,
    "EWC by sample": BySample,
    "LwF": LwFPlugin,
    "Replay": ReplayPlugin,
    "AGEM": AGEMPlugin,
    "exemplars": _ICaRLPlugin,
}


def strategy(run: dict[str, Any], sequence: Tasks, benchmark: Any, weights: list[Tensor]) -> Any:
    """Avalanche's strategy of a run, with the first weights: two matrices with their biases."""
    features = nn.Sequential(nn.Linear(*weights[0].T.shape), nn.ReLU())
    head = sequence.head(*weights[2].T.shape)
    settings = {
        "optimizer": torch.optim.SGD([*features.parameters(), *head.parameters()], lr=run["lr"]),
        "train_mb_size": run["batch"],
        "train_epochs": run["epochs"],
        "eval_mb_size": 1000,
        "evaluator": EvaluationPlugin(),
    }
    with torch.no_grad():
        for own, value in zip([*features.parameters(), *head.parameters()], weights, strict=True):
            own.copy_(value)
    if "ICaRL" in run["settings"]:
        own = {"buffer_transform": None, "fixed_memory": True} | run["settings"]["ICaRL"]
        return ICaRL(feature_extractor=features, classifier=head, **own, **settings)
    plugins = {name: PLUGINS[name](**own) for name, own in run["settings"].items()}
    if not plugins.keys() & {"Replay", "exemplars"}:  # these make batches of their own
        plugins["order"] = Order(sequence.orders(benchmark, run["seed"]))
    model: nn.Module = nn.Sequential(features, head)
    if "exemplars" in plugins:
        model = TrainEvalModel(features, head, NCMClassifier(normalize=True))
    loss = sequence.among_new if run["among_new"] and sequence.grows else F.cross_entropy
    return SupervisedTemplate(
        model=model, criterion=loss, plugins=list(plugins.values()), **settings
    )


@torch.no_grad()
def accuracies(model: nn.Module, sequence: Tasks, after: int) -> list[float]:
    """On each task's test samples, among the classes met so far; NaN for tasks to come."""
    model.eval()
    met = torch.cat(sequence.classes[: after + 1]).unique()
    out = [float("nan")] * len(sequence.test)
    for k, own in enumerate(sequence.test[: after + 1]):
        x, y = own.tensors
        out[k] = (met[model(x)[:, met].argmax(1)] == y).float().mean().item()
    return out


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    arrays = np.load(folder / "sequences.npz")
    sequences = {str(name): Tasks(arrays, str(name)) for name in arrays["names"]}
    for run in json.loads((folder / "runs.json").read_text()):
        sequence, seed = sequences[run["sequence"]], run["seed"]
        weights = [torch.from_numpy(arrays[f"weights {seed} {k}"]) for k in range(4)]
        random.seed(seed)
        torch.manual_seed(seed)
        benchmark = sequence.benchmark()
        learner = strategy(run, sequence, benchmark, weights)
        matrix = []
        for k, experience in enumerate(benchmark.train_stream):
            learner.train(experience)
            matrix.append(accuracies(learner.model, sequence, k))
        print(json.dumps({"matrix": matrix, "version": version("avalanche-lib")}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
