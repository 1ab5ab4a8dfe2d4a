"""Running a method on a stream: `run` and `resume`, and what a run gives back."""

from __future__ import annotations

import copy
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from everfed import metrics
from everfed.chance import torch_seed
from everfed.client import ClientProgram
from everfed.compute import Compute, choose
from everfed.compute.base import LossFunction, cross_entropy
from everfed.engines import pool
from everfed.engines.local import LocalEngine, workers_for
from everfed.errors import EverfedError
from everfed.folder import RunFolder
from everfed.local import Local
from everfed.method import Method
from everfed.metrics import Record, Summary
from everfed.round import Events, Federation, Rounds
from everfed.streams.stream import Stream
from everfed.vector import load

Precision = Literal["float32", "bf16"]
Grouping = Literal["auto", "batched", "single"]


class Interrupted(EverfedError):
    """Stopped on request; all that was done is saved."""


@dataclass(frozen=True)
class Progress:
    """Where a run is, told after every round."""

    round: int  #: rounds done
    rounds: int
    task: str
    accuracy: float | None  #: mean over the tasks seen so far
    warnings: tuple[str, ...] = ()


@dataclass
class Run:
    """A finished run: `acc`, `bwt`, `matrix`, `records`, and the trained `model`."""

    records: list[Record]
    tasks: tuple[str, ...]
    vector: Tensor
    model: nn.Module
    engine: str
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def matrix(self) -> np.ndarray:
        """Accuracy on task j after task i."""
        return metrics.matrix(self.records)

    @property
    def summary(self) -> Summary:
        return metrics.summarise(self.records)

    @property
    def acc(self) -> float:
        """Mean accuracy over all tasks at the end."""
        return metrics.acc(self.matrix)

    @property
    def bwt(self) -> float:
        """Backward transfer: what became of earlier tasks (negative: forgotten)."""
        return metrics.bwt(self.matrix)

    @property
    def forgetting(self) -> float:
        return metrics.forgetting(self.matrix)

    @property
    def worst_drop(self) -> float:
        return metrics.worst_drop(self.matrix)

    def __repr__(self) -> str:
        return f"Run(acc={self.acc:.3f}, bwt={self.bwt:.3f}, tasks={', '.join(self.tasks)})"


def run(
    method: Method,
    stream: Stream,
    model: nn.Module | Callable[[], nn.Module],
    *,
    local: Local | None = None,
    sample: int | None = None,
    seed: int = 0,
    loss: LossFunction = cross_entropy,
    folder: str | Path | None = None,
    resume: bool = False,
    test_every: int = 1,
    workers: int | Literal["auto"] = "auto",
    grouping: Grouping = "auto",
    precision: Precision = "float32",
    device: str = "auto",
    checkpoint_seconds: float = 5.0,
    on_round: Callable[[Progress], None] | None = None,
    config: dict[str, Any] | None = None,
) -> Run:
    """Train `model` with `method` on `stream`.

    `sample` clients are drawn each round (None: all that are online). `loss` takes outputs and
    targets and gives one loss a sample. With a `folder` the run is kept on disk, checkpointed
    every `checkpoint_seconds`, and goes on where it was with `resume=True` (bit-identical to a run
    that was never interrupted).

    >>> import everfed as ef
    >>> stream = ef.streams.domains(ef.data.digits(["plain", "inverted"]), rounds=2)
    >>> run(ef.methods.fedavg(), stream, ef.models.mlp(64, 32, 10), sample=4).matrix.shape
    (2, 2)
    """
    settings = local or Local()
    stream = stream.seeded(seed)
    _check(method, stream, settings, sample, seed, test_every, workers)
    with surroundings():
        compute = _compute(model, stream, seed, precision, grouping, device)
        _check_labels(compute, stream, loss)
        data = stream.data.to(compute.device, compute.dtype)
        program = ClientProgram(method, compute, stream, data, settings, seed, loss)
        what = {
            "method": method.describe(),
            "seed": seed,
            "stream": stream.describe(),
            "local": dataclasses.asdict(settings),
            "sample": sample,
            "parameters": compute.layout.d,
            "precision": precision,
            "test_every": test_every,
        }
        place, found, notes = _place(folder, resume, what, config)
        chosen = (found.meta["workers"], found.meta["grouping"]) if found else None
        if chosen and chosen[1] != compute.name:
            notes.append(f"the run was begun with {chosen[1]}, and goes on with {compute.name}")
        cohort = min(sample or stream.clients, stream.clients)
        count = workers if workers != "auto" else None
        count = count or (chosen[0] if chosen else workers_for(program, cohort))
        engine = LocalEngine(program, count)
        session = Session(
            Rounds(method, stream, settings, engine, sample, seed),
            engine,
            place,
            {"workers": engine.count, "grouping": compute.name},
            test_every,
            checkpoint_seconds,
            on_round,
        )
        try:
            fed, records = session.start(compute, found)
            session.play(fed, records)
        finally:
            engine.close()
            if place:
                place.close()
        trained = copy.deepcopy(compute.module).cpu()
        for layout, vector in ((compute.layout, fed.w), (compute.buffer_layout, fed.buffers)):
            load(trained, layout, vector.cpu())
        home = place.path if place else None
        said = (*notes, *session.notes)
        return Run(records, stream.tasks, fed.w, trained.eval(), engine.describe(), home, said)


@dataclass
class Session:
    """One process's work on a run."""

    rounds: Rounds
    engine: LocalEngine
    folder: RunFolder | None
    meta: dict[str, Any]
    test_every: int
    checkpoint_seconds: float
    on_round: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self.changed: set[int] = set()
        self.saved_at = time.monotonic()
        self.stop = False
        self.notes: list[str] = []

    def start(self, compute: Compute, found: Any) -> tuple[Federation, list[Record]]:
        """A fresh state, or that of a checkpoint with the records up to it."""
        if found:
            assert self.folder is not None
            self.folder.cut_records(found.meta["records"])
            fed = found.fed
            fed.w, fed.buffers = fed.w.to(compute.device), fed.buffers.to(compute.device)
            fed.parts = [{k: _place_like(v, fed.w) for k, v in s.items()} for s in fed.parts]
            return fed, self.folder.records()
        w = compute.weights()
        parts = [part.init(w, compute.layout) for part in self.rounds.method.parts]
        return Federation(w, compute.read_buffers(), parts), []

    def play(self, fed: Federation, records: list[Record]) -> None:
        """All rounds that are left."""
        stream = self.rounds.stream
        with self._stoppable():
            while fed.round < stream.rounds:
                began = time.perf_counter()
                at, task = fed.round, stream.task(fed.round)
                events = self.rounds.play(fed)
                new = self._lines(at, task, events)
                accuracy = None
                if (at + 1) % self.test_every == 0 or stream.last_of_task(at):
                    new += self._test(fed, at, task, range(task + 1), end=False)
                    seen = [r["value"] for r in new if r["metric"] == "accuracy"]
                    accuracy = float(np.mean(seen)) if seen else None
                if stream.last_of_task(at):
                    new += self._end_task(fed, at, task, new)
                new.append(_line(at, task, "seconds", time.perf_counter() - began))
                self._keep(fed, records, new)
                self._tell(fed, task, accuracy, events)
                if self.stop:
                    self._save(fed)
                    raise Interrupted(self._how_to_go_on(fed))
            self._save(fed)

    def _lines(self, at: int, task: int, events: Events) -> list[Record]:
        self.changed |= events.changed
        return [_line(at, task, key, value) for key, value in events.values.items()]

    def _test(
        self, fed: Federation, at: int, task: int, on: Sequence[int], end: bool
    ) -> list[Record]:
        sets = [self.rounds.stream.test(j) for j in on]
        out = []
        results = self.engine.evaluate(fed.w, fed.buffers, sets, task)
        for j, (right, loss) in zip(on, results, strict=True):
            extra = {"on": j} | ({"end": True} if end else {})
            if right == right:
                out.append(_line(at, task, "accuracy", right) | extra)
            out.append(_line(at, task, "loss", loss) | extra)
        return out

    def _end_task(
        self, fed: Federation, at: int, task: int, measured: list[Record]
    ) -> list[Record]:
        """The row of the accuracy matrix, then the boundary itself."""
        out = [dict(r) | {"end": True} for r in measured if "on" in r]
        stream = self.rounds.stream
        if stream.head == "shared":  # unseen tasks have an accuracy too where labels are shared
            out += self._test(fed, at, task, range(task + 1, len(stream.tasks)), end=True)
        if fed.round < stream.rounds:
            out += self._lines(at, task, self.rounds.end_task(fed))
        return out

    def _keep(self, fed: Federation, records: list[Record], new: list[Record]) -> None:
        records += new
        if self.folder is None:
            return
        self.folder.append(new)
        if time.monotonic() - self.saved_at >= self.checkpoint_seconds:
            self._save(fed)

    def _save(self, fed: Federation) -> None:
        if self.folder is None:
            return
        done = fed.round >= self.rounds.stream.rounds
        self.folder.save(fed, self.changed, self.meta | {"done": done})
        self.changed = set()
        self.saved_at = time.monotonic()

    def _tell(self, fed: Federation, task: int, accuracy: float | None, events: Events) -> None:
        stream = self.rounds.stream
        warnings = tuple(f"round {fed.round}: {text}" for text in events.warnings)
        self.notes += warnings[: max(0, 20 - len(self.notes))]
        if self.on_round:
            name = stream.tasks[task]
            self.on_round(Progress(fed.round, stream.rounds, name, accuracy, warnings))

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run after the round, with everything saved."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask_to_stop(number: int, frame: Any) -> None:
            if self.stop and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop = True

        before = {s: signal.signal(s, ask_to_stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _how_to_go_on(self, fed: Federation) -> str:
        done = f"stopped after round {fed.round} of {self.rounds.stream.rounds}"
        if self.folder is None:
            return f"{done}; nothing is kept, because the run has no folder"
        return f"{done}; go on with: everfed resume {self.folder.path}"


def _line(at: int, task: int, metric: str, value: float) -> dict[str, Any]:
    number = value if isinstance(value, int) else float(value)
    return {"round": at, "task": task, "metric": metric, "value": number}


def _place_like(value: Tensor, w: Tensor) -> Tensor:
    return value.to(w.device) if value.is_floating_point() else value


@contextmanager
def surroundings() -> Iterator[None]:
    """One torch thread a worker, and torch's global generator as it was afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def _compute(
    model: nn.Module | Callable[[], nn.Module],
    stream: Stream,
    seed: int,
    precision: Precision,
    grouping: Grouping,
    device: str,
) -> Compute:
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model)
    else:
        torch.manual_seed(torch_seed(seed, "initial weights"))
        module = model()
    if not isinstance(module, nn.Module):
        raise EverfedError(f"the model must be an nn.Module or build one, not {type(module)}")
    return choose(module, stream.data.x[0], _device(device), precision, grouping)


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise EverfedError(f"device {name!r} cannot be used here: {first}") from None
    return device


def _check(
    method: Method,
    stream: Stream,
    local: Local,
    sample: int | None,
    seed: int,
    test_every: int,
    workers: int | str,
) -> None:
    for part in method.parts:
        part.check(local)
    if seed < 0:
        raise EverfedError(f"seed must be 0 or more, not {seed}")
    if sample is not None and sample < 1:
        raise EverfedError(f"sample must be at least 1, not {sample}")
    if sample is not None and sample > stream.clients:
        raise EverfedError(f"sample is {sample}, but the stream has {stream.clients} clients")
    if test_every < 1:
        raise EverfedError(f"test_every must be at least 1, not {test_every}")
    if workers == "auto":
        return
    if not isinstance(workers, int) or workers < 1:
        raise EverfedError(f"workers must be 'auto' or at least 1, not {workers!r}")
    if workers > 1 and not pool.available():
        raise EverfedError("more than one worker needs Linux; use workers = 1")


def _check_labels(compute: Compute, stream: Stream, loss: LossFunction) -> None:
    """The model takes the data, and its head has an output for every label."""
    ids = torch.as_tensor(stream.data.train[:1])
    x, y = stream.data.to(compute.device, compute.dtype).take(ids, compute.dtype)
    try:
        z = compute.logits(compute.weights(), x)
    except Exception as error:
        shape = "x".join(map(str, x.shape[1:]))
        first = str(error).splitlines()[0]
        raise EverfedError(f"the model does not take inputs of shape {shape}: {first}") from error
    if loss is not cross_entropy:
        return
    if y.is_floating_point():
        raise EverfedError("labels are not whole numbers: give run(..., loss=...) for them")
    if stream.data.classes > z.shape[-1]:
        raise EverfedError(
            f"labels go up to {stream.data.classes - 1}, but the model has {z.shape[-1]} outputs"
        )


def _place(
    folder: str | Path | None, resume: bool, what: dict[str, Any], config: dict[str, Any] | None
) -> tuple[RunFolder | None, Any, list[str]]:
    """The run's folder, the checkpoint to go on from, and notes on damaged ones."""
    if folder is None:
        if resume:
            raise EverfedError("resume=True needs the run's folder")
        return None, None, []
    path = Path(folder)
    if not resume:
        from everfed import __version__

        about = {"everfed": __version__, "torch": torch.__version__, "config": config} | what
        return RunFolder.create(path, about), None, []
    place = RunFolder.open(path)
    before = place.config()
    for key, value in what.items():
        if before.get(key) != _plain(value):
            place.close()
            raise EverfedError(
                f"{path} was run with another {key}: {before.get(key)!r}, not {_plain(value)!r}"
            )
    found, notes = place.load()
    if found is None:
        notes.append("there is no usable checkpoint yet: starting from the first round")
        place.cut_records(0)
    return place, found, notes


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    import json

    return json.loads(json.dumps(value, default=str))
