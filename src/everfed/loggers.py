"""Records to TensorBoard, MLflow or Weights & Biases as well, behind one small interface.

The records in a run's folder are the truth; these are copies for those who look elsewhere. A logger
that fails is switched off with a warning: it never stops a run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from everfed.errors import EverfedError
from everfed.metrics import Record

Name = Literal["tensorboard", "mlflow", "wandb"]


@dataclass(frozen=True)
class Begun:
    """What a logger is told of a run."""

    name: str  #: method and seed
    folder: Path | None
    settings: Mapping[str, Any]  #: flat, for a table of parameters
    tasks: Sequence[str]
    round: int  #: rounds done before: above 0 in a resumed run


class Logger(Protocol):
    """Takes a run's records as they come."""

    def start(self, begun: Begun) -> None:
        """A run begins or goes on."""
        ...

    def write(self, values: Mapping[str, float], step: int) -> None:
        """The numbers of one round (from 1)."""
        ...

    def close(self, finished: bool) -> None:
        """The run has come to its end, or was stopped."""
        ...


@dataclass
class TensorBoard:
    """Event files, in the run's folder unless said otherwise."""

    folder: str | Path | None = None
    _writer: Any = None

    def start(self, begun: Begun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        own = begun.folder / "tensorboard" if begun.folder else Path("tensorboard") / begun.name
        # rounds after the checkpoint that a run goes back to are dropped from the charts
        purge = begun.round + 1 if begun.round else None
        self._writer = SummaryWriter(str(self.folder or own), purge_step=purge)
        lines = [f"    {key} = {value}" for key, value in begun.settings.items()]
        self._writer.add_text("settings", "\n".join(lines))

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, finished: bool) -> None:
        self._writer.close()


@dataclass
class MLflow:
    """A run of an experiment; where, MLflow's own settings say (MLFLOW_TRACKING_URI)."""

    experiment: str = "everfed"
    _client: Any = None
    _run: str = ""

    def start(self, begun: Begun) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        kept = begun.folder / "mlflow-run" if begun.folder else None
        if begun.round and kept and kept.exists():
            self._run = kept.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        where = found.experiment_id if found else self._client.create_experiment(self.experiment)
        self._run = self._client.create_run(where, run_name=begun.name).info.run_id
        if kept:
            kept.write_text(self._run)
        for key, value in begun.settings.items():
            self._client.log_param(self._run, _plain(key), str(value)[:500])

    def write(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_plain(name), value, now, step) for name, value in values.items()]
        for k in range(0, len(metrics), 1000):  # as many as one request may hold
            self._client.log_batch(self._run, metrics=metrics[k : k + 1000])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


@dataclass
class WandB:
    """A run of a project; WANDB_MODE=offline keeps it on this machine."""

    project: str = "everfed"
    _run: Any = None

    def start(self, begun: Begun) -> None:
        import wandb

        kept = begun.folder / "wandb-run" if begun.folder else None
        before = kept.read_text().strip() if begun.round and kept and kept.exists() else None
        self._run = wandb.init(
            project=self.project, name=begun.name, config=dict(begun.settings), id=before,
            resume="allow" if before else None, dir=begun.folder,
        )  # fmt: skip
        if kept:
            kept.write_text(self._run.id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))


#: class and the module that it needs
KNOWN: dict[Name, tuple[Callable[[], Logger], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


def named(name: Name) -> Logger:
    """A logger by its name in a configuration."""
    build, module = KNOWN[name]
    if find_spec(module) is None:
        raise EverfedError(f"{name} is not installed: pip install 'everfed[{name}]'")
    return build()


@dataclass
class Loggers:
    """All loggers of a run. One that fails is left out from then on."""

    loggers: list[Logger]
    tasks: Sequence[str]
    warnings: list[str] = field(default_factory=list)

    def start(self, begun: Begun) -> None:
        self._each(lambda logger: logger.start(begun))

    def write(self, records: Sequence[Record]) -> None:
        if self.loggers and records:
            values, step = numbers(records, self.tasks), records[0]["round"] + 1
            self._each(lambda logger: logger.write(values, step))

    def close(self, finished: bool) -> None:
        self._each(lambda logger: logger.close(finished))

    def told(self) -> list[str]:
        """Warnings since the last time."""
        new, self.warnings = self.warnings, []
        return new

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:
                self.loggers.remove(logger)
                first = (str(error).splitlines() or [type(error).__name__])[0]
                self.warnings.append(f"{type(logger).__name__} is switched off: {first}")


def numbers(records: Sequence[Record], tasks: Sequence[str]) -> dict[str, float]:
    """A round's records as named numbers; tests are named by their task.

    >>> numbers([{"round": 0, "task": 0, "metric": "accuracy", "value": 0.5, "on": 0}], ["plain"])
    {'accuracy/plain': 0.5}
    """
    out: dict[str, float] = {}
    for r in records:
        if r["value"] is None or r["metric"] == "labels" or r.get("end"):
            continue
        if "on" in r:
            out[f"{r['metric']}/{tasks[r['on']]}"] = float(r["value"])
        elif r["metric"].startswith("mb_"):  # a task's end adds to its last round's traffic
            out[r["metric"]] = out.get(r["metric"], 0.0) + r["value"]
        else:
            out.setdefault(r["metric"], float(r["value"]))
    return out


def _plain(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250] or "_"
