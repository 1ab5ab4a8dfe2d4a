"""everfed's continual methods with one client beside Avalanche's: the same samples, class order,
first weights, epochs, batches and rate.

EVERFED_DATA=/path/to/data python benchmarks/avalanche.py

Avalanche has an environment of its own in .bench/ (or EVERFED_BENCH), made on demand. Writes the
table of docs/reproduction.md's outside check, docs/runs/results/avalanche.md.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run import ROOT, environment
from torch import nn

import everfed as ef
from everfed import metrics
from everfed.data.join import open_first
from everfed.local import batches

PAGE = ROOT / "docs" / "runs" / "results" / "avalanche.md"
SEEDS = (0, 1, 2)
BATCH = 32
NEEDS = ["dill", "packaging", "pillow", "psutil", "tqdm"]
#: with all that it asks for it would bring another torch and gigabytes
LOOSE = ["avalanche-lib==0.6.0"]


@dataclass(frozen=True)
class Sequence:
    """Five tasks of Fashion-MNIST, for one client."""

    stream: ef.Stream
    local: ef.Local


@dataclass(frozen=True)
class Row:
    """A method of ours and its like in Avalanche: settings of plugins, or of its ICaRL."""

    sequence: str
    name: str
    ours: ef.Method
    theirs: dict[str, Any] = field(default_factory=dict)
    #: whether only a task's new classes compete in the loss, as in our EWC and LwF
    among_new: bool = False
    #: times our rate
    faster: float = 1.0


def ewc(lam: float) -> dict[str, Any]:
    """Our EWC: Avalanche's penalty has no 1/2."""
    return {"ewc_lambda": lam / 2, "mode": "online", "decay_factor": 1.0}


LWF = {"LwF": {"alpha": 1.0, "temperature": 2.0}}
REPLAY = {"Replay": {"mem_size": 256}}
AGEM = {"AGEM": {"patterns_per_experience": 256, "sample_size": BATCH}}
ICARL = {"ICaRL": {"memory_size": 240}}
m = ef.methods
ROWS = [
    Row("permuted", "fine-tuning", m.fedavg()),
    Row("permuted", "EWC", m.ewc(lam=5.0), {"EWC by sample": ewc(5.0)}),
    # squared means of batches are smaller than means of squares: about as large in sum
    Row("permuted", "EWC, Avalanche's importance", m.ewc(lam=5.0), {"EWC": ewc(3 * 5.0)}),
    Row("permuted", "LwF", m.lwf(lam=1.0), LWF),
    Row("permuted", "ER", m.er(memory=256), REPLAY),
    Row("permuted", "A-GEM", m.agem(memory=1024), AGEM),
    Row("classes", "fine-tuning", m.fedavg()),
    Row("classes", "EWC", m.ewc(lam=100.0), {"EWC by sample": ewc(100.0)}, among_new=True),
    Row("classes", "EWC, Avalanche's importance", m.ewc(lam=100.0), {"EWC": ewc(4 * 100.0)},
        among_new=True),
    Row("classes", "LwF", m.lwf(lam=1.0), LWF, among_new=True),
    Row("classes", "ER", m.er(memory=256), REPLAY),
    Row("classes", "A-GEM", m.agem(memory=1024), AGEM),
    Row("classes", "iCaRL", m.icarl(memory=240, predict="means"),
        {"exemplars": {"memory_size": 240}} | LWF),
    Row("classes", "iCaRL, Avalanche's loss", m.icarl(memory=240, predict="means"), ICARL),
    # that loss is a mean over the ten outputs, too
    Row("classes", "iCaRL, Avalanche's loss, rate x 10", m.icarl(memory=240, predict="means"),
        ICARL, faster=10.0),
]  # fmt: skip


def sequences() -> dict[str, Sequence]:
    """Every pixel in another place with each task, and two new classes with each task."""
    data = open_first(["fashion_mnist", "fashion_mnist.npz"], None)
    labels = data.y.numpy()

    def some(train: int, test: int) -> ef.data.Data:
        """So many samples of each class; all batches are then full."""

        def first(ids: np.ndarray, count: int) -> np.ndarray:
            return np.concatenate([ids[labels[ids] == c][:count] for c in range(data.classes)])

        return replace(data, train=first(data.train, train), test=first(data.test, test))

    # a class order that ends with bags and trousers: with shirts at the end, which look like much
    # of what came before, the last steps move ER's accuracy by several points
    alone: dict[str, Any] = {"clients": 1, "alpha": None, "rounds": 1, "seed": 25}
    new = some(512, 200)
    pixels = ef.data.permute(some(128, 200), tasks=5)
    return {
        "permuted": Sequence(ef.streams.domains(pixels, **alone), local(0.1, 10)),
        "classes": Sequence(ef.streams.classes(new, tasks=5, **alone), local(0.05, 5)),
    }


def local(lr: float, epochs: int) -> ef.Local:
    return ef.Local(lr=lr, epochs=epochs, batch=BATCH)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ef.models.mlp(784, 100, 10)()


def ours(row: Row, sequence: Sequence, seed: int) -> np.ndarray:
    """The accuracy on each task after each task."""
    settings: dict[str, Any] = {"local": sequence.local, "workers": 1, "device": "cpu"}
    return ef.run(row.ours, sequence.stream, network(seed), seed=seed, **settings).matrix


def write(folder: Path, made: dict[str, Sequence]) -> None:
    """What Avalanche's side reads: samples, tasks, first weights, and the runs to make."""
    arrays: dict[str, Any] = {"names": list(made)}
    for name, sequence in made.items():
        stream, data = sequence.stream, sequence.stream.data
        arrays |= {f"{name} x": data.x.flatten(1).numpy(), f"{name} y": data.y.numpy()}
        arrays[f"{name} tasks"] = len(stream.tasks)
        for k in range(len(stream.tasks)):
            ids = stream.samples(0, k)
            arrays |= {f"{name} train {k}": ids, f"{name} test {k}": stream.test(k)}
            for seed in SEEDS:
                plan = batches(np.arange(len(ids)), sequence.local, seed, k, 0, False)
                shape = (sequence.local.epochs, -1, BATCH)
                arrays[f"{name} order {seed} {k}"] = np.reshape(plan.steps, shape)
    for seed in SEEDS:
        for k, own in enumerate(network(seed).parameters()):
            arrays[f"weights {seed} {k}"] = own.detach().numpy()
    np.savez(folder / "sequences.npz", **arrays)
    runs = [
        {
            "sequence": row.sequence, "settings": row.theirs, "among_new": row.among_new,
            "lr": row.faster * made[row.sequence].local.lr,
            "epochs": made[row.sequence].local.epochs, "batch": BATCH, "seed": seed,
        }
        for row in ROWS for seed in SEEDS
    ]  # fmt: skip
    (folder / "runs.json").write_text(json.dumps(runs))


def theirs(python: Path, made: dict[str, Sequence]) -> list[dict[str, Any]]:
    """Avalanche's runs, row by row and seed by seed."""
    script, out = ROOT / "benchmarks" / "peers" / "avalanche_.py", []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), made)
        command = [str(python), "-W", "ignore", str(script), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    out.append(json.loads(line))
                    print(f"Avalanche: run {len(out)} of {len(ROWS) * len(SEEDS)}", flush=True)
    if process.returncode:
        sys.exit("Avalanche's side failed: see above")
    return out


def cells(mine: list[float], other: list[float]) -> list[str]:
    """Means and deviations in percent, and how far the means are apart."""
    both = [(100 * np.mean(own), 100 * np.std(own, ddof=1)) for own in (mine, other)]
    apart = round(both[0][0] - both[1][0], 1) + 0.0  # no -0.0
    return [*(f"{mean:.1f} ± {spread:.1f}" for mean, spread in both), f"{apart:+.1f}"]


def main() -> None:
    try:
        made = sequences()
    except ef.EverfedError as error:
        sys.exit(f"error: {error}")
    python = environment("Avalanche", NEEDS, LOOSE)
    if isinstance(python, str):
        sys.exit(f"Avalanche cannot be installed: {python}")
    found = theirs(python, made)
    lines = [
        f"{len(SEEDS)} seeds, mean ± standard deviation; Avalanche {found[0]['version']}.",
        "",
        "| sequence | method | ACC %, everfed | Avalanche | apart | Fgt, everfed | Avalanche | "
        "apart |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    done: dict[tuple[str, str], list[np.ndarray]] = {}
    for k, row in enumerate(ROWS):
        key = (row.sequence, row.ours.name)
        if key not in done:
            done[key] = [ours(row, made[row.sequence], seed) for seed in SEEDS]
        other = [np.array(f["matrix"]) for f in found[k * len(SEEDS) : (k + 1) * len(SEEDS)]]
        scores = [
            cells([score(a) for a in done[key]], [score(a) for a in other])
            for score in (metrics.acc, metrics.forgetting)
        ]
        lines.append(f"| {' | '.join([row.sequence, row.name, *scores[0], *scores[1]])} |")
        print(lines[-1], flush=True)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
