"""Running a method on a stream: `run` and `resume`, and what a run gives back."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import math
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from everfed import metrics, past
from everfed.boundaries import Boundaries
from everfed.chance import torch_seed
from everfed.client import ClientProgram
from everfed.compute import Compute, choose
from everfed.compute.base import LossFunction, cross_entropy
from everfed.data.table import Data
from everfed.engines import pool
from everfed.engines.local import LocalEngine, workers_for
from everfed.errors import EverfedError
from everfed.folder import Checkpoint, RunFolder
from everfed.late import Late
from everfed.ledger import Ledger
from everfed.local import Local
from everfed.loggers import Begun, Logger, Loggers
from everfed.method import Method, State, check_state
from everfed.metrics import Record, Summary
from everfed.records import Loaded
from everfed.round import Engine, Events, Federation, Rounds
from everfed.streams import labels
from everfed.streams.sites import Sites
from everfed.streams.stream import Stream
from everfed.vector import Layout, load
from everfed.version import version

Precision = Literal["float32", "bf16"]
Grouping = Literal["auto", "batched", "single"]


class Interrupted(EverfedError):
    """Stopped on request; all that was done is saved."""

    exit_code = 130


@dataclass(frozen=True)
class Progress:
    """Where a run is, told after every round."""

    round: int  #: rounds done
    rounds: int  #: in all
    task: str  #: its name
    accuracy: float | None  #: mean over the tasks seen so far
    warnings: tuple[str, ...] = ()  #: what went wrong in the round


@dataclass
class Run:
    """A finished run: `acc`, `bwt`, `matrix`, `records`, and the trained `model`."""

    records: list[Record]  #: every measurement: round, task, metric, value
    tasks: tuple[str, ...]  #: names of the tasks
    vector: Tensor  #: the trained parameters, (d,)
    model: nn.Module  #: the trained module, on the CPU, in evaluation mode
    engine: str  #: what computed it
    folder: Path | None = None  #: where it is kept
    notes: tuple[str, ...] = ()  #: on the data, and what was found when the run was resumed
    warnings: tuple[str, ...] = ()  #: the first of what went wrong in rounds

    @property
    def matrix(self) -> np.ndarray:
        """Accuracy on task j after task i, (tasks, tasks)."""
        return metrics.matrix(self.records, tasks=len(self.tasks))

    @property
    def summary(self) -> Summary:
        """All measures at once."""
        return metrics.summarise(self.records, len(self.tasks))

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
        """Accuracy lost on earlier tasks: -BWT."""
        return metrics.forgetting(self.matrix)

    @property
    def worst_drop(self) -> float:
        """The largest loss of accuracy on one earlier task (negative)."""
        return metrics.worst_drop(self.matrix)

    @property
    def prequential(self) -> float:
        """Mean accuracy on each task before it was trained on."""
        return metrics.prequential(self.matrix)

    def __repr__(self) -> str:
        lost = sum(1 for r in self.records if r["metric"] == "lost_round")
        told = f", {lost} rounds lost: see its warnings" if lost else ""
        return f"Run(acc={self.acc:.3f}, bwt={self.bwt:.3f}, tasks={', '.join(self.tasks)}{told})"


def run(
    method: Method,
    stream: Stream,
    model: nn.Module | Callable[[], nn.Module],
    *,
    local: Local | None = None,
    sample: int | None = None,
    late: Late | None = None,
    boundaries: Boundaries | None = None,
    seed: int = 0,
    loss: LossFunction = cross_entropy,
    folder: str | Path | None = None,
    resume: bool = False,
    test_every: int = 1,
    information_loss: bool = False,
    workers: int | Literal["auto"] = "auto",
    grouping: Grouping = "auto",
    precision: Precision = "float32",
    device: str = "auto",
    checkpoint_seconds: float = 5.0,
    on_round: Callable[[Progress], None] | None = None,
    loggers: Sequence[Logger] = (),
    config: dict[str, Any] | None = None,
    engine: Callable[[ClientProgram], Engine] | None = None,
) -> Run:
    """Train `model` with `method` on `stream`.

    >>> import everfed as ef
    >>> stream = ef.streams.domains(ef.data.digits(["plain", "inverted"]), rounds=2)
    >>> run(ef.methods.fedavg(), stream, ef.models.mlp(64, 32, 10), sample=4).matrix.shape
    (2, 2)

    Args:
        method: one of `everfed.methods`, a sum of them, or a `Method` of parts.
        stream: who holds which samples in which round.
        model: a module, or what builds one (then its weights are drawn from the seed).
        local: how clients train.
        sample: clients drawn each round; None: all that are online.
        late: how often clients' replies are late or lost; None: never.
        boundaries: who tells the method where tasks begin; None: the stream.
        seed: decides every random choice.
        loss: takes outputs and targets and gives one loss a sample, (samples,).
        folder: where to keep the run; None: only in memory.
        resume: go on with the run in `folder`, bit-identical to one that was never interrupted.
        test_every: rounds from test to test.
        information_loss: record how far a method's approximations of past objectives are from them
            (CFL); in simulation only, and costly: gradients over all data that are approximated.
        workers: processes that train clients.
        grouping: train clients one by one ("single") or many at a time ("batched").
        precision: of the model's numbers.
        device: as torch names it, or "auto".
        checkpoint_seconds: shortest time between two checkpoints.
        on_round: told after every round where the run is.
        loggers: of `everfed.loggers`; they get a copy of the records.
        config: the configuration to keep in the folder, for `everfed resume`.
        engine: makes another engine than the local one.
    """
    settings = Local() if local is None else local
    check(
        method, stream, local=settings, sample=sample, late=late, boundaries=boundaries, seed=seed,
        test_every=test_every, information_loss=information_loss, workers=workers,
        grouping=grouping, precision=precision,
    )  # fmt: skip
    if information_loss and engine is not None:
        raise EverfedError(
            "information_loss needs past data, which stay at the sites: it is for simulation"
        )
    stream = stream.seeded(seed)
    check_stream(stream)
    if boundaries:
        method = boundaries.watching(method)
    with surroundings():
        program = prepare(method, stream, model, settings, seed, loss, precision, grouping, device)
        program.announced = not (boundaries and boundaries.found)
        compute = program.compute
        what = {
            "method": method.describe(),
            "seed": seed,
            "stream": stream.describe(),
            "data": stream.data.fingerprint,
            "tasks": list(stream.tasks),
            "local": dataclasses.asdict(settings),
            "sample": sample,
            "parameters": compute.layout.d,
            "precision": precision,
            "test_every": test_every,
            "information_loss": information_loss or None,
            "late": _given(late, Late()),
            "boundaries": _given(boundaries, Boundaries()),
        }
        about = {
            "everfed": version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "config": config,
            "layout": {
                "weights": compute.layout.describe(),
                "buffers": compute.buffer_layout.describe(),
            },
            "task_rounds": [stream.length(k) for k in range(len(stream.tasks))],
            "head": stream.head,
            "stateless": stream.stateless,
        }
        place, found, notes = _place(folder, resume, what, about, stream)
        if _tests_on_training(stream):
            notes.append("tests are on samples that clients train on: give the data test samples")
        if engine is None:
            made, meta = _local_engine(program, workers, sample, found, notes)
        else:
            made, meta = engine(program), {}
        private = place is not None and bool(method.using("seal"))
        ledger = Ledger(place.path / "asked" if place and private else None)
        session = Session(
            Rounds(
                method,
                stream,
                settings,
                made,
                sample,
                seed,
                ledger,
                late or Late(),
                boundaries or Boundaries(),
            ),
            made,
            place,
            meta,
            test_every,
            checkpoint_seconds,
            on_round,
            config is not None or (place is not None and place.config().get("config") is not None),
            Loggers(list(loggers), stream.tasks),
            program if information_loss else None,
            compute.device,
        )
        session.told = list(notes)
        finished = False
        try:
            fed, records = session.start(compute, found)
            home = place.path if place else None
            given = Loaded(home or Path(), what, []).settings | {"seed": seed}
            name = f"{method.name}-seed{seed}"
            session.loggers.start(Begun(name, home, given, stream.tasks, fed.round))
            session.play(fed, records)
            records = place.records() if place else records
            finished = True
        finally:
            session.loggers.close(finished)
            made.close()
            if place:
                place.close()
        trained = copy.deepcopy(compute.module).cpu()
        for layout, vector in ((compute.layout, fed.w), (compute.buffer_layout, fed.buffers)):
            load(trained, layout, vector.cpu())
        return Run(
            records, stream.tasks, fed.w, trained.eval(), made.describe(), home,
            (*stream.data.notes, *notes), (*session.warnings, *session.loggers.told()),
        )  # fmt: skip


def _given(settings: Any, default: Any) -> dict[str, Any] | None:
    """Settings for a run's folder; None where they are as ever."""
    return None if settings in (None, default) else dataclasses.asdict(settings)


def _local_engine(
    program: ClientProgram,
    workers: int | Literal["auto"],
    sample: int | None,
    found: Checkpoint | None,
    notes: list[str],
) -> tuple[Engine, dict[str, Any]]:
    """The local engine, as it was when the run began, and what to know of it for resuming."""
    grouping, clients = program.compute.name, program.stream.clients
    before = (found.meta["workers"], found.meta["grouping"]) if found else None
    count = workers if workers != "auto" else None
    cohort = min(sample or clients, clients)
    count = count or (before[0] if before else workers_for(program, cohort))
    engine = LocalEngine(program, min(count, max(cohort, pool.cores())))
    if before and before != (engine.count, grouping):
        notes.append(
            f"begun with {before[0]} worker(s), {before[1]}; going on with {engine.count}, "
            f"{grouping}: the results are equal up to rounding, not to the last bit"
        )
    return engine, {"workers": engine.count, "grouping": grouping}


@dataclass
class Session:
    """One process's work on a run."""

    rounds: Rounds
    engine: Engine
    folder: RunFolder | None
    meta: dict[str, Any]
    test_every: int
    checkpoint_seconds: float
    on_round: Callable[[Progress], None] | None
    configured: bool  #: whether the command line can resume it
    loggers: Loggers
    recalls: ClientProgram | None  #: whose information loss is measured
    device: torch.device

    def __post_init__(self) -> None:
        self.changed: set[int] = set()
        self.saved_at = time.monotonic()
        self.stop = False
        self.warnings: list[str] = []
        self.guess = _loss_of_guessing(self.engine.program)
        self.told: list[str] = []  #: what is to be told with the first round

    def start(self, compute: Compute, found: Any) -> tuple[Federation, list[Record]]:
        """A fresh state, or that of a checkpoint; and records, where they are not in a folder."""
        if found:
            assert self.folder is not None
            fed = found.fed
            self.rounds.ledger.go_on(fed.asked)
            self.folder.cut_records(found.meta["records"])
            fed.w, fed.buffers = fed.w.to(compute.device), fed.buffers.to(compute.device)
            fed.last = None if fed.last is None else fed.last.to(compute.device)
            fed.parts, fed.late = (_on_device(own, fed.w) for own in (fed.parts, fed.late))
            fed.clients = {i: _on_device(own, fed.w) for i, own in fed.clients.items()}
            if found.meta["done"]:
                self.folder.append(self._prolong(fed))
            return fed, []
        w = compute.weights()
        parts = [part.init(w, compute.layout) for part in self.rounds.method.parts]
        for part, state in zip(self.rounds.method.parts, parts, strict=True):
            check_state(part, "init", state)
        return Federation(w, compute.read_buffers(), parts), []

    def _prolong(self, fed: Federation) -> list[Record]:
        """The boundary after what used to be the last round, where a task has been added since."""
        stream, at = self.rounds.stream, fed.round - 1
        added = fed.round < stream.rounds and stream.last_of_task(at)
        if not added or self.rounds.boundaries.found:
            return []
        return self._lines(at, stream.task(at), self.rounds.end_task(fed))

    def play(self, fed: Federation, records: list[Record]) -> None:
        """All rounds that are left."""
        stream = self.rounds.stream
        with self._stoppable():
            while fed.round < stream.rounds:
                began = time.perf_counter()
                at, task = fed.round, stream.task(fed.round)
                events = self.rounds.play(fed)
                self._doubt(events)
                new = self._lines(at, task, events) + self._labels(at, task, events.cohort)
                new += self._information_loss(fed, at, task, events.cohort)
                accuracy = None
                if (at + 1) % self.test_every == 0 or stream.last_of_task(at):
                    new += self._test(fed, at, task, range(task + 1), end=False)
                    seen = [r["value"] for r in new if r["metric"] == "accuracy" and "on" in r]
                    accuracy = float(np.mean(seen)) if seen else None
                if stream.last_of_task(at):
                    new += self._end_task(fed, at, task, new)
                took = _line(at, task, "seconds", time.perf_counter() - began)
                new.append(took | {"peak_mb": peak_mb(self.device)})
                self._keep(fed, records, new)
                self._tell(fed, task, accuracy, events)
                if self.stop:
                    self._save(fed)
                    raise Interrupted(self._how_to_go_on(fed))
            self._save(fed)

    def _doubt(self, events: Events) -> None:
        """Warn, once, of training that has left all bounds and not yet reached infinity."""
        loss = events.values.get("train_loss")
        if self.guess is not None and loss is not None and loss > 10 * self.guess:
            events.warnings.append(
                f"the clients' training loss is {loss:.3g}, and that of guessing {self.guess:.2g}: "
                "a smaller learning rate helps (local.lr)"
            )
            self.guess = None

    def _lines(self, at: int, task: int, events: Events) -> list[Record]:
        self.changed |= events.changed
        return [_line(at, task, key, value) for key, value in events.values.items()]

    def _labels(self, at: int, task: int, cohort: list[int]) -> list[Record]:
        """What the cohort's clients hold, where it is known here."""
        stream = self.rounds.stream
        if isinstance(stream, Sites) or not cohort:
            return []
        held = labels.held(stream, cohort, at)
        return [{"round": at, "task": task, "metric": "labels", "value": held}]

    def _information_loss(
        self, fed: Federation, at: int, task: int, cohort: list[int]
    ) -> list[Record]:
        if self.recalls is None:
            return []
        lost = past.information_loss(self.recalls, fed, cohort, at)
        return [] if lost is None else [_line(at, task, "information_loss", lost)]

    def _test(
        self, fed: Federation, at: int, task: int, on: Sequence[int], end: bool
    ) -> list[Record]:
        held = [(j, self.rounds.stream.test(j)) for j in on]
        on, sets = [j for j, ids in held if len(ids)], [ids for _, ids in held if len(ids)]
        out = []
        asked = (fed.w, fed.buffers, sets, task, fed.parts)
        results = self.engine.evaluate(*asked) if sets else []
        for j, found in zip(on, results, strict=True):
            extra = {"on": j} | ({"end": True} if end else {})
            known = {key: value for key, value in found.items() if key == "loss" or value == value}
            out += [_line(at, task, key, value) | extra for key, value in known.items()]
        return out

    def _end_task(
        self, fed: Federation, at: int, task: int, measured: list[Record]
    ) -> list[Record]:
        """The row of the accuracy matrix, then the boundary itself."""
        out = [dict(r) | {"end": True} for r in measured if "on" in r]
        stream = self.rounds.stream
        if stream.head == "shared":  # unseen tasks have an accuracy too where labels are shared
            out += self._test(fed, at, task, range(task + 1, len(stream.tasks)), end=True)
        if fed.round < stream.rounds and not self.rounds.boundaries.found:
            out += self._lines(at, task, self.rounds.end_task(fed))
        return out

    def _keep(self, fed: Federation, records: list[Record], new: list[Record]) -> None:
        self.loggers.write(new)
        if self.folder is None:
            records += new
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
        said = [*events.warnings, *self.loggers.told()]
        warnings = (*self.told, *(f"round {fed.round}: {text}" for text in said))
        self.told = []
        self.warnings += warnings[: max(0, 20 - len(self.warnings))]
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
        if self.configured:
            return f"{done}; go on with: everfed resume {self.folder.path}"
        return f"{done}; go on with everfed.run(..., folder={str(self.folder.path)!r}, resume=True)"


def _loss_of_guessing(program: ClientProgram) -> float | None:
    """That of a model that takes all classes for equally likely; None where losses are others."""
    classes = program.data.classes
    own = any(program.hooks[hook] for hook in ("loss", "feature_loss", "weigh"))
    return None if own or classes < 2 or program.loss is not cross_entropy else math.log(classes)


def _line(at: int, task: int, metric: str, value: float) -> Record:
    """One record; what is not a finite number is null, as JSON has none."""
    known = value if math.isfinite(value) else None
    return {"round": at, "task": task, "metric": metric, "value": known}


def peak_mb(device: torch.device) -> float | None:
    """The most memory held so far: of the GPU, else of this process (which trains, too)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1e6 if sys.platform == "darwin" else most * 1024 / 1e6


def _on_device(states: list[State], w: Tensor) -> list[State]:
    """States as they were before they were saved: vectors with the model, indices on the CPU."""
    return [
        {k: v.to(w.device) if v.is_floating_point() or v.dim() == 0 else v for k, v in s.items()}
        for s in states
    ]


@contextmanager
def surroundings() -> Iterator[None]:
    """One torch thread a worker, and torch's global generator as it was afterwards."""
    _keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Have glibc use freed memory again, up to 1 GB: by default a vector of more than 32 MB is
    a new mapping each time, and its page faults are a tenth of a ResNet's round in bf16."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):  # not in musl
        for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            libc.mallopt(option, 2**30)


def prepare(
    method: Method,
    stream: Stream,
    model: nn.Module | Callable[[], nn.Module],
    local: Local,
    seed: int,
    loss: LossFunction = cross_entropy,
    precision: Precision = "float32",
    grouping: Grouping = "auto",
    device: str = "auto",
) -> ClientProgram:
    """The client program with the model's first weights, once it is known that the model fits."""
    compute = _compute(model, stream, seed, precision, grouping, device)
    data = stream.data.to(compute.device, compute.dtype)
    _check_model(compute, stream, data, loss)
    return ClientProgram(method, compute, stream, data, local, seed, loss)


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
        module = model() if callable(model) else model
    if not isinstance(module, nn.Module):
        raise EverfedError(f"the model must be an nn.Module or build one, not {module!r}")
    return choose(module, stream.data.x[0], _device(device), precision, grouping)


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise EverfedError(f"device {name!r} cannot be used here: {first}") from None
    return device


def check(
    method: Method,
    stream: Stream,
    *,
    local: Local,
    sample: int | None,
    late: Late | None,
    boundaries: Boundaries | None,
    seed: int,
    test_every: int,
    information_loss: bool,
    workers: int | str,
    grouping: str,
    precision: str,
    **others: Any,
) -> None:
    """Raise EverfedError where `run` could not begin with these, as far as that is known without
    the model; `others` of its options do not matter."""
    for option, given, kind in (
        ("local", local, Local), ("late", late, Late), ("boundaries", boundaries, Boundaries),
    ):  # fmt: skip
        if given is not None and not isinstance(given, kind):
            raise EverfedError(f"{option} must be an everfed.{kind.__name__}, not {given!r}")
    if not isinstance(method, Method):
        raise EverfedError(f"the method must be a Method, such as methods.fedavg(), not {method!r}")
    if not isinstance(stream, Stream):
        raise EverfedError(f"the stream must be a Stream, not {type(stream).__name__}")
    for name, value, least in (("seed", seed, 0), ("test_every", test_every, 1)):
        if not _whole(value) or value < least:
            raise EverfedError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if sample is not None and (not _whole(sample) or sample < 1):
        raise EverfedError(f"sample must be a whole number of at least 1, not {sample!r}")
    if sample is not None and sample > stream.clients:
        raise EverfedError(f"sample is {sample}, but the stream has {stream.clients} clients")
    if sample is not None and stream.draws is not None and sample < stream.draws:
        raise EverfedError(
            f"the stream draws cohorts of {stream.draws} itself, and shares their data out among "
            f"all of them: leave out sample, or set the stream's cohort to {sample}"
        )
    if (sample or stream.clients) < method.least:
        raise EverfedError(
            f"{method.name} needs {method.least} clients a round, and {sample or stream.clients} "
            "take part: raise sample, or lower what the method guards against"
        )
    if stream.stateless and method.needs.client_state:
        raise EverfedError(
            f"{method.name} needs clients that keep a state, and in this stream a client is "
            "another one in every round"
        )
    for name, word, known in (
        ("precision", precision, get_args(Precision)),
        ("grouping", grouping, get_args(Grouping)),
    ):
        if word not in known:
            raise EverfedError(f"{name} must be one of {', '.join(known)}, not {word!r}")
    for part in method.parts:
        part.check(local)
    if boundaries:
        boundaries.check(method, stream)
    if information_loss and boundaries and boundaries.found:
        raise EverfedError("information_loss needs to know the past data sets: announce the tasks")
    if workers == "auto":
        return
    if not _whole(workers) or int(workers) < 1:
        raise EverfedError(f"workers must be 'auto' or at least 1, not {workers!r}")
    if int(workers) > 1 and not pool.available():
        raise EverfedError("more than one worker needs Linux; use workers = 1")


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_stream(stream: Stream) -> None:
    """What can be known of a stream before it is played."""
    name = type(stream).__name__
    if stream.clients < 1 or stream.rounds < 1:
        raise EverfedError(f"{name} needs at least one client and one round")
    if stream.task_rounds is not None and sum(stream.task_rounds) != stream.rounds:
        raise EverfedError(
            f"{name}: task_rounds add up to {sum(stream.task_rounds)}, rounds are {stream.rounds}"
        )
    if len(stream.tasks) != len(stream.task_rounds or (1,)):
        raise EverfedError(f"{name} names {len(stream.tasks)} tasks, not one for each it has")
    if stream.head not in ("shared", "class", "task"):
        raise EverfedError(f"{name}.head must be shared, class or task, not {stream.head!r}")
    if stream.head != "shared" and len(stream.task_classes or ()) != len(stream.tasks):
        raise EverfedError(f"{name}.head is {stream.head!r}: give task_classes for every task")
    for task, title in enumerate(stream.tasks):
        if not len(stream.test(task)) and not isinstance(stream, Sites):
            raise EverfedError(f"{name}: task {title!r} has no test samples")


def _tests_on_training(stream: Stream) -> bool:
    """Whether the first client's samples are among those of the first task's test."""
    if isinstance(stream, Sites):
        return False
    return bool(np.isin(stream.samples(0, 0)[:100], stream.test(0)).any())


def _check_model(compute: Compute, stream: Stream, data: Data, loss: LossFunction) -> None:
    """The model takes the data, and its head has an output for every label."""
    x, y = data.take(torch.as_tensor(stream.data.train[:2]), compute.dtype)
    try:
        z = compute.logits(compute.weights(), x)
    except Exception as error:
        shape = "x".join(map(str, x.shape[1:]))
        first = str(error).splitlines()[0]
        hint = "" if x.is_floating_point() else " (whole numbers: make them floats, or embed them)"
        raise EverfedError(
            f"the model does not take inputs of shape {shape}{hint}: {first}"
        ) from error
    if not isinstance(z, Tensor) or z.dim() < 1 or len(z) != len(x):
        raise EverfedError(
            f"the model must give a row of outputs for each of {len(x)} inputs, and gave "
            f"{getattr(z, 'shape', type(z).__name__)}"
        )
    if loss is not cross_entropy:
        got = loss(z, y)
        if not isinstance(got, Tensor) or got.shape != (len(x),):
            found = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise EverfedError(f"loss must give one number a sample, ({len(x)},), not {found}")
        _check_masked(compute, stream, data, loss)
        return
    if y.is_floating_point():
        raise EverfedError(
            f"labels are {data.y.dtype}: give classes as integers (y.astype(int)), and for other "
            "targets run(..., loss=...)"
        )
    classes, outputs = data.classes, z.shape[-1]
    if classes < 2 and outputs < 2:
        raise EverfedError("all labels are 0, and there must be two classes or more to tell apart")
    if classes > outputs:
        raise EverfedError(f"labels go up to {classes - 1}, but the model has {outputs} outputs")
    if z.shape[:-1] != y.shape:
        raise EverfedError(
            f"the model gives outputs of shape {tuple(z.shape)} for labels of shape "
            f"{tuple(y.shape)}: there must be one row of {classes} outputs for every label"
        )
    if stream.head != "shared" and classes != outputs:
        raise EverfedError(
            f"where classes arrive task by task the model needs one output a class, {classes}, "
            f"not {outputs}"
        )


def _check_masked(compute: Compute, stream: Stream, data: Data, loss: LossFunction) -> None:
    """An own loss takes the outputs of classes that do not compete, which are -inf."""
    ids = torch.from_numpy(stream.samples(0, 0)[:2])
    if stream.head == "shared" or not len(ids):
        return
    x, y = data.take(ids, compute.dtype)
    z, allowed = compute.logits(compute.weights(), x), stream.mask(y, 0)
    outputs = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
    if not torch.isfinite(loss(outputs, y)).all():
        raise EverfedError(
            "loss is not finite where outputs are -inf, as those of classes that have not been met "
            "are: leave them out of it (label smoothing, for one, does not)"
        )


def _place(
    folder: str | Path | None,
    resume: bool,
    what: dict[str, Any],
    about: dict[str, Any],
    stream: Stream,
) -> tuple[RunFolder | None, Checkpoint | None, list[str]]:
    """The run's folder, the checkpoint to go on from, and notes on damaged ones.

    `what` must be the same when the run is resumed, but for a stream that prolongs the earlier one;
    `about` is kept for readers.
    """
    if folder is None:
        if resume:
            raise EverfedError("resume=True needs the run's folder")
        return None, None, []
    path = Path(folder)
    if not resume:
        return RunFolder.create(path, about | what), None, []
    place = RunFolder.open(path)
    before = place.config()
    longer = stream.prolongs(before.get("stream", {}))
    for key, value in what.items():
        if before.get(key) != _plain(value):
            if longer and key in ("stream", "tasks", "data"):
                continue
            place.close()
            raise EverfedError(
                f"{path} was run with another {key}: {before.get(key)!r}, not {_plain(value)!r}"
            )
    for kind, known in (before.get("layout") or {}).items():
        if Layout.from_names(known).describe() != about["layout"][kind]:
            place.close()
            raise EverfedError(
                f"{path} was run with another model: names, shapes or order of its {kind} differ"
            )
    if longer:
        place.describe(before | what | {"task_rounds": about["task_rounds"]})
    found, notes = place.load()
    if found is None:
        notes.append("there is no usable checkpoint yet: starting from the first round")
        if place.set_aside():
            notes.append("what was recorded before is in records.jsonl.before")
    return place, found, notes


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))
