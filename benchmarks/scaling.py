"""How everfed's cost grows: clients, cohort, model size, workers, methods, start-up, checkpoints.

Prints Markdown and saves docs/scaling.png. Ratios are of measurements made in turn in one run.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import everfed as ef
from everfed import bench

ROOT = Path(__file__).parent.parent
REPEATS = 3
W1, W2 = bench.WORKLOADS["W1"], bench.WORKLOADS["W2"]
#: what a method may cost beside FedAvg, in words
REASONS = {
    "special": "server only",
    "fedeve": "server only, and the cohort's spread",
    "fedavgm": "server only",
    "fedadam": "server only",
    "fedprox": "one more vector operation a step; the step is not fused into the gradient",
    "scaffold": "two vector operations a step, client states",
    "mimelite": "a full gradient at the model received, a third of an epoch's work and more",
    "cfl_coreset": "nothing to replay within one task; choosing the core set",
    "cfl_regularization": "a full gradient and a Fisher pass at the client's final model",
    "cflag": "a full gradient before and a table of all batches' gradients at the start",
}


def in_turn(jobs: dict[Any, Callable[[], float]]) -> dict[Any, float]:
    """The medians of measurements that are repeated in turn, after a first one that is dropped."""
    found: dict[Any, list[float]] = {key: [] for key in jobs}
    for job in jobs.values():
        job()
    for _ in range(REPEATS):
        for key, job in jobs.items():
            found[key].append(job())
    return {key: statistics.median(values) for key, values in found.items()}


def section(title: str, columns: str, rows: list[str], *after: str) -> list[str]:
    """A heading, a table with its first column to the left, and what follows it."""
    rule = "|---|" + "---:|" * (columns.count("|") - 2)
    return [f"## {title}", "", columns, rule, *rows, "", *after]


def round_time(workload: bench.Workload, seconds: float = 1.5, **options: Any) -> float:
    return bench.measure(workload, seconds, **options)[1]


def population() -> list[str]:
    """Round time at 10 of 1e3 to 1e6 clients; memory and set-up at the largest."""
    sizes = (10**3, 10**4, 10**5, 10**6)
    works = {n: replace(W1, sizes=lambda n=n: bench.natural_sizes(n)) for n in sizes}
    times = in_turn({n: lambda w=w: round_time(w, workers=1) for n, w in works.items()})
    code = (
        "import resource, time; t = time.perf_counter(); import everfed.bench as b\n"
        "from dataclasses import replace\n"
        "w = replace(b.WORKLOADS['W1'], sizes=lambda: b.natural_sizes(10**6))\n"
        "x = b.prepare(w, workers=1); x.rounds.play(x.fed)\n"
        "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, gigabytes = map(float, done.stdout.split())
    rows = [f"| {n:,} | {1000 * t:.1f} | {t / times[10**3]:.2f} |" for n, t in times.items()]
    return section(
        "Clients in the population (W1, 10 a round, one worker)",
        "| clients | ms a round | to 1,000 |",
        rows,
        f"A million clients: {seconds:.1f} s from the start of Python to the first round's end, "
        f"{gigabytes:.2f} GB at the most.",
        "",
    )


def cohort(axis: Any) -> list[str]:
    """Time and memory of a round of 10 to 1000 clients."""
    rows, times = [], {}
    for n in (10, 100, 1000):
        work = replace(W1, sample=n)
        times[n] = round_time(work, 0.1, workers=1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        rows.append(f"| {n} | {1000 * times[n]:.0f} | {1000 * times[n] / n:.1f} | {peak:.2f} |")
    axis.loglog(list(times), list(times.values()), "o-", label="clients in the cohort (W1)")
    columns = "| clients a round | ms a round | ms a client | peak GB of the process so far |"
    return section("Clients in the cohort (W1, one worker)", columns, rows)


def model_size(axis: Any) -> list[str]:
    """Seconds a round of MLPs from 1e4 to 1e7 parameters."""
    rows, times = [], {}
    for hidden in (13, 126, 1230, 12500):
        work = replace(W2, model=ef.models.mlp(784, hidden, 10))
        d = 784 * hidden + hidden + hidden * 10 + 10
        times[d] = round_time(work, 1.0, workers=1)
        rows.append(f"| {d:,} | {1000 * times[d]:.1f} | {1e9 * times[d] / d / 1995:.3f} |")
    axis.loglog(list(times), list(times.values()), "s-", label="parameters (W2)")
    columns = "| parameters | ms a round | ns a parameter and sample |"
    return section("Parameters (W2 with other hidden widths, one worker)", columns, rows)


def workers() -> list[str]:
    """One worker and two."""
    rows = []
    for name, work in (("W1", W1), ("W2", W2)):
        jobs = {k: lambda w=work, k=k: round_time(w, workers=k) for k in (1, 2)}
        times = in_turn(jobs)
        one, two = 1000 * times[1], 1000 * times[2]
        rows.append(f"| {name} | {one:.1f} | {two:.1f} | {one / two:.2f} |")
    return section("Workers", "| | ms, 1 worker | ms, 2 workers | speed-up |", rows)


def methods() -> list[str]:
    """Each method's round beside FedAvg's."""
    columns: dict[str, dict[str, float]] = {}
    for title, work in (("W1", W1), ("W2", W2)):
        jobs = {
            name: lambda w=work, n=name: round_time(
                w, 1.0, method=ef.methods.METHODS[n].build(), workers=1
            )
            for name in ("fedavg", *REASONS)
        }
        columns[title] = in_turn(jobs)
    rows = [
        f"| {name} | {columns['W1'][name] / columns['W1']['fedavg']:.2f} | "
        f"{columns['W2'][name] / columns['W2']['fedavg']:.2f} | {why} |"
        for name, why in REASONS.items()
    ]
    columns = "| method | W1 | W2 | what it does more |"
    return section("Methods: time of a round relative to FedAvg", columns, rows)


def start_up() -> list[str]:
    """The command line's help, and the demo's first round."""

    def spent(*words: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "everfed", *words], capture_output=True, check=True)
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(99))
        quick = ("--set", "stream.rounds=1", "--set", "data.domains=['plain']")
        times = in_turn(
            {
                "help": lambda: spent("--help"),
                "run": lambda: spent("run", *quick, "--folder", f"{folder}/{next(count)}"),
            }
        )
    return [
        "## Start-up",
        "",
        f"`everfed --help`: {times['help']:.2f} s. A run of a single round of the demo's stream, "
        f"from the start of Python to the table and the figure: {times['run']:.1f} s.",
        "",
    ]


def records() -> list[str]:
    """The demo with and without a folder."""
    stream = ef.streams.domains(ef.data.digits(), clients=8, alpha=0.3, rounds=10)
    local = ef.Local(lr=0.2, epochs=5)

    def go(folder: str | None) -> float:
        began = time.perf_counter()
        ef.run(
            ef.methods.fedavg(), stream, ef.models.mlp(64, 128, 10), sample=4, local=local,
            folder=folder, workers=1,
        )  # fmt: skip
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(99))
        times = in_turn({"none": lambda: go(None), "folder": lambda: go(f"{folder}/{next(count)}")})
    share = 100 * (times["folder"] / times["none"] - 1)
    return ["## Records and checkpoints", "", f"{share:+.1f} % of the demo's FedAvg run.", ""]


def main() -> None:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    lines = [*population(), *cohort(axis), *model_size(axis), *workers(), *methods()]
    lines += [*start_up(), *records()]
    axis.set_ylabel("seconds a round")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "scaling.png", dpi=120)
    print("\n".join([*lines, "![Time of a round](scaling.png)"]))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
