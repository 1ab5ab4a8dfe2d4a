"""`everfed bench`: training samples per second on fixed workloads, without evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from everfed import __version__, models
from everfed.chance import rng
from everfed.client import ClientProgram
from everfed.compute import choose
from everfed.data.table import Data, arrays
from everfed.engines.local import LocalEngine, workers_for
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Method
from everfed.methods import METHODS
from everfed.round import Federation, Rounds
from everfed.runs import Precision, surroundings
from everfed.streams.stream import Stream


class Blocks(Stream):
    """Client i holds the i-th block of samples; blocks may overlap, so that a million clients need
    no million samples. With `tasks` there is a second task after one round, of other blocks."""

    def __init__(
        self, data: Data, sizes: np.ndarray, rounds: int = 10**9, tasks: bool = False
    ) -> None:
        self.data, self.sizes, self.rounds = data, sizes, rounds
        self.clients = len(sizes)
        self.task_rounds = (1, rounds - 1) if tasks else None
        room = len(data.train) - sizes
        self.starts = (np.arange(len(sizes), dtype=np.int64) * 7919) % (room + 1)

    def samples(self, client: int, round_: int) -> np.ndarray:
        size = self.sizes[client]
        start = (self.starts[client] + self.task(round_) * size) % (len(self.data.train) - size + 1)
        return np.arange(start, start + size)


@dataclass(frozen=True)
class Workload:
    """A federation to be timed."""

    name: str
    what: str
    shape: tuple[int, ...]
    classes: int
    sizes: Callable[[], np.ndarray]
    sample: int
    batch: int
    model: models.Recipe

    def stream(self, tasks: bool = False) -> Blocks:
        """Random inputs: speed does not depend on them."""
        random = rng(0, "bench")
        sizes = self.sizes()
        n = int(min(sizes.sum(), 20_000))
        x = random.standard_normal((n, *self.shape), dtype=np.float32)
        return Blocks(arrays(x, random.integers(0, self.classes, n)), sizes, tasks=tasks)


def natural_sizes(clients: int) -> np.ndarray:
    """Lognormal numbers of samples around 100, between 20 and 400."""
    drawn = rng(0, "sizes").lognormal(np.log(100), 0.5, clients)
    return np.clip(drawn, 20, 400).astype(np.int64)


WORKLOADS = {
    "W1": Workload(
        "W1", "LeNet5, 1x28x28, 62 classes, 10 of 1000 clients of 20 to 400 samples, batch 20",
        (1, 28, 28), 62, lambda: natural_sizes(1000), 10, 20, models.lenet(1, 28, 62),
    ),
    "W2": Workload(
        "W2", "MLP 784-200-10, 7 clients of 285 samples, all sampled, batch 32",
        (1, 28, 28), 10, lambda: np.full(7, 285), 7, 32, models.mlp(784, 200, 10),
    ),
    "W3": Workload(
        "W3", "ResNet-18 (GroupNorm), 3x32x32, 4 clients of 64 samples, batch 32",
        (3, 32, 32), 10, lambda: np.full(4, 64), 4, 32, models.resnet18(3, 10),
    ),
}  # fmt: skip


@dataclass
class Bench:
    """A workload that is set up and can be timed round by round."""

    rounds: Rounds
    fed: Federation
    engine: LocalEngine

    def time(self, seconds: float, least: int = 2) -> tuple[float, float]:
        """Samples per second and seconds per round, over whole rounds for about that long."""
        stream, first, began = self.rounds.stream, self.fed.round, time.perf_counter()
        while self.fed.round < first + least or time.perf_counter() - began < seconds:
            self.rounds.play(self.fed)
        spent = time.perf_counter() - began
        played = range(first, self.fed.round)
        cohorts = [(self.rounds.draw(r, self.rounds.sample)[0], r) for r in played]
        done = sum(len(stream.samples(client, r)) for cohort, r in cohorts for client in cohort)
        return done / spent, spent / len(played)


def prepare(
    workload: Workload,
    method: Method | None = None,
    *,
    workers: int | None = None,
    precision: Precision = "float32",
    stream: Stream | None = None,
    **options: Any,
) -> Bench:
    """Set a workload up; `workers` None is what a run would choose."""
    chosen = method or Method()
    held = stream or workload.stream()
    torch.manual_seed(0)
    device = torch.device("cpu")
    grouping = options.get("grouping", "auto")
    compute = choose(workload.model(), held.data.x[0], device, precision, grouping)
    local = Local(lr=0.01, batch=workload.batch)
    program = ClientProgram(chosen, compute, held, held.data, local, 0)
    engine = LocalEngine(program, workers or workers_for(program, workload.sample))
    w = compute.weights()
    states = [part.init(w, compute.layout) for part in chosen.parts]
    fed = Federation(w, compute.read_buffers(), states)
    return Bench(Rounds(chosen, held, local, engine, workload.sample, 0), fed, engine)


def measure(workload: Workload, seconds: float = 3.0, **options: Any) -> tuple[float, float, str]:
    """Samples per second, seconds per round, and what the engine chose."""
    with surroundings():
        bench = prepare(workload, **options)
        try:
            bench.time(0.2, least=2)
            speed, per_round = bench.time(seconds)
            return speed, per_round, bench.engine.describe()
        finally:
            bench.engine.close()


def rows(
    names: Sequence[str] | None, seconds: float, precision: str, method: str, workers: int | None
) -> Iterator[dict[str, Any]]:
    """One measurement a workload, as plain values."""
    if precision not in get_args(Precision):
        raise EverfedError(f"precision must be float32 or bf16, not {precision!r}")
    if method not in METHODS:
        raise EverfedError(f"no method {method!r}; 'everfed list' names them")
    for name in names or WORKLOADS:
        if name not in WORKLOADS:
            raise EverfedError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    for name in names or WORKLOADS:
        work = WORKLOADS[name]
        options = {"method": METHODS[method].build(), "precision": precision, "workers": workers}
        speed, per_round, engine = measure(work, seconds, **options)
        yield {
            "peer": "everfed",
            "version": __version__,
            "workload": name,
            "what": work.what,
            "method": method,
            "samples_per_second": speed,
            "seconds_per_round": per_round,
            "engine": engine,
        }


def sentence(row: dict[str, Any]) -> str:
    """A measurement for people."""
    return (
        f"{row['workload']} {row['what']}\n   {row['method']}: {row['samples_per_second']:,.0f} "
        f"samples/s, {1000 * row['seconds_per_round']:.1f} ms a round, {row['engine']}"
    )
