"""How everfed's cost grows: clients, cohort, model size, workers, methods, start-up, checkpoints.

`python benchmarks/scaling.py methods records` measures these sections of docs/benchmarks.md anew
and writes them there; without names all of them. Ratios are of measurements made in turn in one
run.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import everfed as ef
from everfed import bench
from everfed.folder import RunFolder
from everfed.methods import METHODS
from everfed.runs import surroundings

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
W1, W2 = bench.WORKLOADS["W1"], bench.WORKLOADS["W2"]
#: what a method may cost beside FedAvg, in words
REASONS = {
    "special": "server only",
    "fedeve": "server only, and the cohort's spread",
    "fedavgm": "server only",
    "fedadam": "server only",
    "fedprox": "one more pass over the model a step",
    "scaffold": "one more pass over the model a step, client states, a second upload",
    "mimelite": "a full gradient at the model received (as much work as an epoch), a pass a step",
    "cfl_coreset": "choosing the core set, and its samples",
    "cfl_regularization": "a forward pass over all data and the Fisher of the top layers",
    "cflag": "full gradients of data and memory, one of every batch that is drawn again, the table",
}
#: what two workers can gain, by counting
SPLIT = """
"At most" is what half the cohort (rounded up) takes on one worker beside all of it: W2's 7 equal
clients are split 4 to 3, and of W1's 10 the largest has twice as many steps as the mean, each of
which costs something however few clients take it. The rest is the server's work, messages and what
two cores share. The rows with 100 and 70 clients show that the factor depends on the work in a
round.
""".strip()
#: what these costs must be, by counting; in braces what is measured beside the table
COUNTED = """
CPU time in the second task, where anchors pull and memories are replayed; the median of 30 turns,
and in brackets where it lies with 95 %. What the extra work must cost, by counting. A step of W2 is
2 (2·784·200 + 3·200·10) flops for each of 7·32 samples, 143 million, and a pass over the 7 models
reads and writes 1.1 million numbers, 8.9 MB. Products and passes of these shapes had
{flops:.0f} Gflop/s and {bytes:.0f} GB/s here, which makes {step:.1f} ms and {one_pass:.2f} ms:
beside the products alone, a pass is {share:.0f} %.

- FedProx: a pass in every step.
- SCAFFOLD: a pass in every step that reads its shift as well (13 MB), and 7 more a round for
  states and new variates: about as many again. It measures more than that; most likely because
  models and inputs leave the caches meanwhile.
- MimeLite: the products of one more epoch, 2.0 at the most; less where slices of all data are
  larger than batches.
- C-FLAG: an epoch's products in the probe, one in the steps, and the gradient at the start of
  those batches that are drawn after the first step: of m batches in m draws a share of 1 - (1 -
  1/m)^(m-1), 0.61 on W2; and the memory's gradient, over 200 samples beside 285. That is 3.3, and
  there are six more passes over the models a step. On W1 the memory is as large as the data.
- CFL-Core-Set: 100 samples of the task before beside 285. On W1 few clients of a round have any.
- CFL-Regularization: on W2, where the top layers are the whole model, a forward pass, a gradient
  and a squared gradient, 2.5 epochs' products; and it reads its 40 series of two vectors, 51 MB.
""".strip()


@dataclass
class Times:
    """Measurements repeated in turn, so that a machine that is slower for a while is slower for all
    of them; ratios are the medians of the turns' own."""

    found: dict[Any, list[float]]

    def __getitem__(self, key: Any) -> float:
        return statistics.median(self.found[key])

    def items(self) -> list[tuple[Any, float]]:
        return [(key, self[key]) for key in self.found]

    def ratios(self, key: Any, base: Any) -> list[float]:
        pairs = zip(self.found[key], self.found[base], strict=True)
        return [own / other for own, other in pairs]

    def ratio(self, key: Any, base: Any) -> float:
        return statistics.median(self.ratios(key, base))

    def spread(self, key: Any, base: Any) -> str:
        """The ratio, and within what bounds its median is known (95 %, by the turns' ranks)."""
        found = sorted(self.ratios(key, base))
        reach = round(0.98 * len(found) ** 0.5)  # deviations of a binomial's rank, 1.96 / 2
        low, high = (found[len(found) // 2 + side * reach] for side in (-1, 1))
        return f"{self.ratio(key, base):.2f} ({low:.2f}–{high:.2f})"


def in_turn(jobs: dict[Any, Callable[[], float]], repeats: int) -> Times:
    """After a first turn that is dropped."""
    found: dict[Any, list[float]] = {key: [] for key in jobs}
    for _ in range(repeats + 1):
        for key, job in jobs.items():
            found[key].append(job())
    return Times({key: values[1:] for key, values in found.items()})


def per_sample(works: dict[Any, dict[str, Any]], rounds: int = 3, turns: int = 15) -> Times:
    """Seconds a training sample of several federations that play the same rounds."""
    with surroundings():
        benches = {key: bench.prepare(**options) for key, options in works.items()}
        try:
            jobs = {key: lambda b=b: 1 / b.time(0.0, rounds)[0] for key, b in benches.items()}
            return in_turn(jobs, turns)
        finally:
            for own in benches.values():
                own.engine.close()


def section(title: str, columns: str, rows: list[str], *after: str) -> list[str]:
    """A heading, a table with its first column to the left, and what follows it."""
    rule = "|---|" + "---:|" * (columns.count("|") - 2)
    return [f"### {title}", "", columns, rule, *rows, "", *after]


def plot(axis: Any, title: str, times: dict[int, float], unit: str) -> None:
    axis.loglog(list(times), list(times.values()), "o-")
    axis.set(title=title, ylabel=unit)
    axis.set_ylim(min(times.values()) / 3, max(times.values()) * 3)
    axis.spines[["top", "right"]].set_visible(False)


def population(axis: Any) -> list[str]:
    """Round time at 10 of 1e3 to 1e6 clients; memory and set-up at the largest."""
    sizes = (10**3, 10**4, 10**5, 10**6)
    works = {n: replace(W1, sizes=lambda n=n: bench.natural_sizes(n)) for n in sizes}
    times = per_sample({n: {"workload": w, "workers": 1} for n, w in works.items()})
    plot(axis, "clients in the population", {n: 1e6 * t for n, t in times.items()}, "µs a sample")
    code = (
        "import resource, time; t = time.perf_counter(); import everfed.bench as b\n"
        "from dataclasses import replace\n"
        "w = replace(b.WORKLOADS['W1'], sizes=lambda: b.natural_sizes(10**6))\n"
        "x = b.prepare(w, workers=1); x.rounds.play(x.fed)\n"
        "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, gigabytes = map(float, done.stdout.split())
    rows = [f"| {n:,} | {1e6 * t:.1f} | {times.ratio(n, 10**3):.2f} |" for n, t in times.items()]
    return section(
        "Clients in the population (W1, 10 a round, one worker)",
        "| clients | µs a sample | relative to 1,000 |",
        rows,
        f"A million clients: {seconds:.1f} s from the start of Python to the first round's end, "
        f"{gigabytes:.2f} GB at the most.",
        "",
    )


#: a table of users in files, mapped into memory; prints what each round took and held
MILLION = """
import json, sys, tempfile, time
from pathlib import Path
import numpy as np
import everfed as ef

users, rounds, sample, width = 10**6, 200, 100, 32
random = np.random.default_rng(0)
sizes = np.clip(random.lognormal(np.log(10), 0.5, users), 2, 40).astype(np.int64)
with tempfile.TemporaryDirectory() as folder:
    place = Path(folder)
    n, truth = int(sizes.sum()), random.standard_normal((width, 10)).astype(np.float32)
    x = np.lib.format.open_memmap(place / "x.npy", "w+", np.float32, (n, width))
    y = np.empty(n, np.int64)
    for k in range(0, n, 10**6):
        x[k : k + 10**6] = random.standard_normal((min(10**6, n - k), width), dtype=np.float32)
        y[k : k + 10**6] = (x[k : k + 10**6] @ truth).argmax(1)
    x.flush()
    size = x.nbytes
    np.save(place / "y.npy", y)
    np.save(place / "user.npy", np.repeat(np.arange(users, dtype=np.int32), sizes))
    np.save(place / "test.npy", random.random(n) < 0.001)
    del x, y

    def memory():
        lines = Path("/proc/self/status").read_text().splitlines()
        found = dict(line.split(":") for line in lines if line.startswith("Rss"))
        return [int(found[key].split()[0]) / 1e6 for key in ("RssAnon", "RssFile")]

    print(json.dumps({"gigabytes": size / 1e9, "samples": n, "start": memory()}))
    began = time.process_time()
    stream = ef.streams.given(ef.data.npy(folder, client="user"), rounds=rounds)
    print(json.dumps({"ready": time.process_time() - began, "memory": memory()}))
    began = time.process_time()

    def tell(progress):
        spent = time.process_time() - began
        print(json.dumps({"round": progress.round, "seconds": spent, "memory": memory()}))

    run = ef.run(ef.methods.fedavg(), stream, ef.models.mlp(width, 10), sample=sample, workers=1,
                 local=ef.Local(lr=0.5), test_every=20, on_round=tell)
    print(json.dumps({"accuracy": run.acc}))
"""


def million() -> list[str]:
    """Logistic regression on a million users, 100 in each of 200 rounds."""
    words = [sys.executable, "-c", MILLION]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    first, ready, played, last = told[0], told[1], told[2:-1], told[-1]
    at = [row["round"] for row in played]
    own, mapped = zip(*(row["memory"] for row in played), strict=True)
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    axes[0].plot(at, [row["seconds"] for row in played])
    axes[0].set(title="processor seconds", xlabel="round")
    axes[1].plot(at, own, label="the process's own")
    axes[1].plot(at, mapped, label="pages of mapped files")
    axes[1].set(title="GB of memory", xlabel="round", ylim=0)
    axes[1].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PAGE.parent / "million.png", dpi=120)
    rows = [
        f"| {row['round']} | {row['seconds']:.1f} | {row['memory'][0]:.2f} | "
        f"{row['memory'][1]:.2f} |"
        for row in played
        if row["round"] in (1, 20, 50, 100, 150, 200)
    ]
    return section(
        "A million users in a table on disk (logistic regression, 100 a round, one worker)",
        "| after round | processor seconds | own GB | mapped GB |",
        rows,
        f"{first['samples']:,} samples of 32 numbers, {first['gigabytes']:.1f} GB in `.npy` files, "
        "2 to 40 of each user. Reading labels and owners and sorting users takes "
        f"{ready['ready']:.1f} processor seconds before the first round; "
        f"{100 * last['accuracy']:.1f} % right at the end. Mapped are the pages that "
        "were read; the system may drop them.",
        "",
        "![Time and memory of a million users](million.png)",
        "",
    )


def cohort(axis: Any) -> list[str]:
    """Time and memory of a round of 10 to 1000 clients."""
    rows, times = [], {}
    for n in (10, 100, 1000):
        code = (
            "import resource, everfed.bench as b\n"
            "from dataclasses import replace\n"
            f"m = b.measure(replace(b.WORKLOADS['W1'], sample={n}), 2.0, workers=1)\n"
            "print(m[1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
        )
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        times[n], peak = map(float, done.stdout.split())
        rows.append(f"| {n} | {1000 * times[n]:.0f} | {1000 * times[n] / n:.1f} | {peak:.2f} |")
    plot(axis, "clients in the cohort", times, "seconds a round")
    columns = "| clients a round | ms a round | ms a client | peak GB |"
    return section("Clients in the cohort (W1, one worker)", columns, rows)


def model_size(axis: Any) -> list[str]:
    """Seconds a round of MLPs from 1e4 to 1e7 parameters."""
    rows, times = [], {}
    for hidden in (13, 126, 1230, 12500):
        work = replace(W2, model=ef.models.mlp(784, hidden, 10))
        d = 784 * hidden + hidden + hidden * 10 + 10
        times[d] = bench.measure(work, 2.0, workers=1)[1]
        rows.append(f"| {d:,} | {1000 * times[d]:.1f} | {1e9 * times[d] / d / 1995:.3f} |")
    plot(axis, "parameters", times, "seconds a round")
    columns = "| parameters | ms a round | ns a parameter and sample |"
    return section("Parameters (W2 with other hidden widths, one worker)", columns, rows)


def growth() -> list[str]:
    """Population, cohort and model size, with their picture."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    lines = [*population(axes[0]), *cohort(axes[1]), *model_size(axes[2])]
    figure.savefig(PAGE.parent / "scaling.png", dpi=120)
    return [*lines, "![How cost grows](scaling.png)", ""]


def workers() -> list[str]:
    """One worker and two."""
    rows = []
    works = {
        "W1": (W1, 10),
        "W1, 100 clients a round": (replace(W1, sample=100), 1),
        "W2": (W2, 10),
        "W2, 70 clients": (replace(W2, sizes=lambda: np.full(70, 285), sample=70), 1),
        "W3": (bench.WORKLOADS["W3"], 1),
    }
    for name, (work, rounds) in works.items():
        half = -(-work.sample // 2)
        options = {k: {"workload": work, "workers": k} for k in (1, 2)}
        options[0] = {"workload": replace(work, sample=half), "workers": 1}
        times = per_sample(options, rounds, turns=15)
        one, two = 1e6 * times[1], 1e6 * times[2]
        most = times.ratio(1, 0) * work.sample / half
        rows.append(f"| {name} | {one:,.1f} | {two:,.1f} | {times.ratio(1, 2):.2f} | {most:.2f} |")
    columns = "| | µs a sample, 1 worker | 2 workers | speed-up | at most |"
    return section("Workers", columns, rows, SPLIT, "")


def cpu_time(rounds: int, own: bench.Bench) -> float:
    """Processor seconds of some rounds with one worker, which other processes disturb least."""
    own.rounds.play(own.fed)  # does not count: the cache is full of another method's numbers
    began = time.process_time()
    for _ in range(rounds):
        own.rounds.play(own.fed)
    return time.process_time() - began


def counted() -> str:
    """What methods must cost, with the speed of this machine."""
    torch.set_num_threads(1)
    x, w, out = torch.randn(7, 32, 784), torch.randn(7, 784, 200), torch.empty(7, 32, 200)
    one, other = torch.randn(7, 158_810), torch.randn(158_810)

    def per_call(job: Callable[[], Any]) -> float:
        began = time.process_time()
        for _ in range(50):
            job()
        return (time.process_time() - began) / 50

    jobs = {
        "product": lambda: per_call(lambda: torch.bmm(x, w, out=out)),
        "pass": lambda: per_call(lambda: one.add_(other, alpha=1e-9)),
    }
    times = in_turn(jobs, 9)
    flops, bytes_ = 2 * 7 * 32 * 784 * 200 / times["product"], 8 * one.numel() / times["pass"]
    step, one_pass = 143e6 / flops, times["pass"]
    return COUNTED.format(
        flops=flops / 1e9, bytes=bytes_ / 1e9, step=1e3 * step, one_pass=1e3 * one_pass,
        share=100 * one_pass / step,
    )  # fmt: skip


def methods() -> list[str]:
    """Each method's round beside FedAvg's."""

    def second_task(work: bench.Workload, name: str) -> bench.Bench:
        """Where anchors pull and memories are replayed."""
        own = bench.prepare(work, METHODS[name].build(), workers=1, stream=work.stream(tasks=True))
        own.rounds.play(own.fed)
        own.rounds.end_task(own.fed)
        return own

    def times(work: bench.Workload) -> Times:
        with surroundings():
            names = ("fedavg", *REASONS)
            jobs = {name: partial(cpu_time, 3, second_task(work, name)) for name in names}
            return in_turn(jobs, 30)

    first, second = times(W1), times(W2)
    rows = [
        f"| {name} | {first.spread(name, 'fedavg')} | {second.spread(name, 'fedavg')} | {why} |"
        for name, why in REASONS.items()
    ]
    head = "| method | W1 | W2 | what it does more |"
    title = "Methods: time of a round relative to FedAvg (one worker)"
    return section(title, head, rows, counted(), "")


def start_up() -> list[str]:
    """The command line's help, and the demo's first round."""
    first = (
        "import os\n"
        "from everfed import config\n"
        "config.experiment(config.read(None)).go(on_round=lambda progress: os._exit(0))"
    )

    def spent(*words: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], capture_output=True, check=True)
        return time.perf_counter() - began

    jobs = {
        "help": lambda: spent("-m", "everfed", "--help"),
        "round": lambda: spent("-c", first),
    }
    times = in_turn(jobs, 5)
    return [
        "### Start-up",
        "",
        f"From the start of Python: `everfed --help` {times['help']:.2f} s, the first round of the "
        f"demo's stream (set-up, training, test) {times['round']:.1f} s.",
        "",
    ]


@contextmanager
def clocked(owner: type, *names: str) -> Iterator[list[float]]:
    """Seconds that calls of a class's methods take while this lasts."""
    spent: list[float] = []
    plain = {name: getattr(owner, name) for name in names}

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent.append(time.perf_counter() - began)

        return timing

    for name, call in plain.items():
        setattr(owner, name, timed(call))
    try:
        yield spent
    finally:
        for name, call in plain.items():
            setattr(owner, name, call)


def records() -> list[str]:
    """What of the demo's FedAvg run goes into its folder; timed within the run, because two runs
    differ by more than that."""
    stream = ef.streams.domains(ef.data.digits(), clients=8, alpha=0.3, rounds=10)
    local = ef.Local(lr=0.2, epochs=5)

    def share(folder: str) -> float:
        with clocked(RunFolder, "append", "save") as spent:
            began = time.perf_counter()
            ef.run(
                ef.methods.fedavg(), stream, ef.models.mlp(64, 128, 10), sample=4, local=local,
                folder=folder, workers=1,
            )  # fmt: skip
            return 100 * sum(spent) / (time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        shares = [share(f"{folder}/{k}") for k in range(16)][1:]
    return [
        "### Records and checkpoints",
        "",
        f"{statistics.median(shares):.1f} % of the demo's FedAvg run ({min(shares):.1f} to "
        f"{max(shares):.1f} in {len(shares)} runs), timed within them.",
        "",
    ]


def precision() -> list[str]:
    """Accuracy in bf16 and in float32 of W3's model on real images."""
    stream = ef.streams.static(ef.data.digits(domains=["plain"]), clients=4, alpha=1.0, rounds=5)
    local = ef.Local(lr=0.002, batch=32)

    def accuracy(kind: str, seed: int) -> float:
        model = ef.models.resnet18(1, 10)
        done = ef.run(ef.methods.fedavg(), stream, model, local=local, seed=seed, precision=kind)
        return 100 * done.acc

    rows = []
    for kind in ("float32", "bf16"):
        found = [accuracy(kind, seed) for seed in range(3)]
        mean, spread = statistics.mean(found), statistics.stdev(found)
        rows.append(f"| {kind} | {mean:.2f} ± {spread:.2f} |")
    return section(
        "Precision: accuracy of ResNet-18 (GroupNorm) on scikit-learn's digits",
        "| precision | accuracy after 5 rounds of 4 clients, 3 seeds |",
        rows,
    )


SECTIONS = {
    job.__name__: job for job in (growth, million, workers, methods, start_up, records, precision)
}


def renew(page: str, lines: list[str]) -> str:
    """The page with the sections that the lines hold in the place of those with the same titles."""
    for new in re.split(r"^(?=### )", "\n".join([*lines, ""]), flags=re.MULTILINE)[1:]:
        title = re.escape(new.partition("\n")[0])
        old = re.search(rf"^{title}\n.*?(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
        assert old, f"{PAGE.name} has no section {title}"
        page = page.replace(old[0], new)
    return page


def main(names: Sequence[str]) -> None:
    """Measure sections and write each to the page as soon as it is there."""
    for name in names:
        found = SECTIONS[name]()
        print("\n".join(found), flush=True)
        PAGE.write_text(renew(PAGE.read_text(), found))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name not in SECTIONS:
            sys.exit(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    main(sys.argv[1:] or list(SECTIONS))
