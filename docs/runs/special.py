"""Makes the small tables of SPECIAL's section in docs/reproduction.md: one setting of the preset
special-digits (or special-pacs) is changed at a time. Runs are kept in runs/docs/special; what is
finished is not run again.

python docs/runs/special.py [NAME ...]    all, or some of figure2, best, lambda, clients, ...
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed import compare as comparing
from everfed import config as configs
from everfed.metrics import summarise
from everfed.records import Loaded, collect
from everfed.reproduce import preset

HERE = Path(__file__).parent
SEEDS = (25, 225, 2025)


@dataclass(frozen=True)
class Sweep:
    """The settings of each row, and the methods that are the columns."""

    rows: dict[str, dict[str, Any]]
    methods: tuple[str, ...] = ("fedavg", "special")
    of: str = "special-digits"
    seeds: tuple[int, ...] = SEEDS[:1]


def lam(value: float) -> dict[str, Any]:
    return {"methods": {"special": {"lam": value}}}


#: sweeps on PACS are at half the preset's size, a third of its work
SMALL = {"data": {"size": 16}}
LAMBDAS = {f"λ = {value:g}": lam(value) for value in (0.0, 0.02, 0.05, 0.1, 0.25, 1.0)}
SWEEPS = {
    "lambda": Sweep(LAMBDAS, ("special",), seeds=SEEDS),
    "lambda-pacs": Sweep(
        {row: own | SMALL for row, own in LAMBDAS.items()}, ("special",), "special-pacs", SEEDS
    ),
    "clients": Sweep({f"N = {n}": {"sample": n} for n in (2, 4, 6, 8)}),
    "rates": Sweep(
        {f"lr = {lr}": {"local": {"lr": lr}} for lr in (0.01, 0.02, 0.03, 0.05)},
        ("fedavg", "server_rate", "special", "special_auto"),
        seeds=SEEDS,
    ),
    "rates-pacs": Sweep(
        {f"lr = {lr}": {"local": {"lr": lr}} | SMALL for lr in (0.005, 0.02)},
        ("fedavg", "special", "special_auto"),
        "special-pacs",
        SEEDS,
    ),
    "rounds": Sweep(
        {f"T = {t}": {"stream": {"rounds": t}} for t in (1, 5, 10, 20, 30)},
        ("fedavg", "special", "special_auto"),
    ),
    "epochs": Sweep(
        {f"E = {e}": {"local": {"epochs": e}} for e in (1, 3, 5, 10)},
        ("fedavg", "special", "special_auto"),
    ),
    "heads": Sweep(
        {"one head": {}, "a head for each task": {"stream": {"head": "task"}}},
        ("fedavg", "flwf2t", "special"),
        "special-cifar100",
        SEEDS,
    ),
    "skew": Sweep({f"α = {a:g}": {"stream": {"alpha": a}} for a in (0.05, 0.1, 0.3, 1.0, 100.0)}),
}


def main(names: Sequence[str]) -> None:
    for name in names:
        lines = OTHERS[name]() if name in OTHERS else table(name)
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        (HERE / "results" / f"special-{name}.md").write_text(text)


def table(name: str) -> list[list[str]]:
    """A sweep: a row for each setting, a column for each method."""
    sweep = SWEEPS[name]
    head = ["", *(f"`{method}`" for method in sweep.methods)]
    lines = [head, ["---"] * len(head)]
    for row, changes in sweep.rows.items():
        place = f"{name}/{row.replace(' ', '')}"
        cells = [
            cell(runs(sweep.of, f"{place}/{m}", m, sweep.seeds, changes)) for m in sweep.methods
        ]
        lines.append([row, *cells])
    return lines


def runs(
    of: str, place: str, method: str, seeds: Sequence[int], changes: dict[str, Any]
) -> list[Loaded]:
    """A method's runs of a preset with changed settings, seed by seed."""
    own = {"compare": {"methods": [method], "seeds": list(seeds)}}
    settings = configs.parse(preset.merged(preset.merged(preset.read(of).values, changes), own))
    folder = Path("runs/docs/special") / place
    if not (folder / "compare.json").exists():
        comparing.create(settings, folder)
    comparing.run_all(settings, folder, jobs=1)
    return collect([folder])[method]


def cell(found: Sequence[Loaded]) -> str:
    """ACC and BWT, mean over the seeds."""
    summaries = [summarise(run.records) for run in found]
    acc = sum(summary.acc for summary in summaries) / len(summaries)
    bwt = sum(summary.bwt for summary in summaries) / len(summaries)
    return f"{100 * acc:.1f} / {100 * bwt:+.1f}"


def figure2() -> list[list[str]]:
    """Accuracy on the first two domains while the second is learnt, mean over the seeds."""
    shown = (1, 5, 10, 15, 20)
    lines = [["round of the second domain", *map(str, shown)], ["---"] + ["---:"] * len(shown)]
    for method in ("fedavg", "special_c", "special"):
        found = runs("special-digits", f"figure2/{method}", method, SEEDS, {})
        by: dict[tuple[int, int], list[float]] = {}
        for record in (r for run in found for r in run.records):
            if record["metric"] == "accuracy" and record["task"] == 1 and not record.get("end"):
                by.setdefault((record["round"], record["on"]), []).append(record["value"])
        begun = min(round_ for round_, _ in by)
        cells = [
            ", ".join(f"{100 * sum(own) / len(own):.0f}" for own in pair)
            for pair in ((by[begun + t - 1, 0], by[begun + t - 1, 1]) for t in shown)
        ]
        lines.append([f"`{method}`: {', '.join(found[0].tasks[:2])}", *cells])
    return lines


def best() -> list[list[str]]:
    """When domains are at their best, over ten seeds that nothing was chosen by."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "`fedavg`": ("fedavg", {}),
        "`fedprox`": ("fedprox", {}),
        "`special_c`, λ = 0.01": ("special_c", {}),
        **{f"`special`, λ = {value:g}": ("special", lam(value)) for value in (0.05, 0.1, 0.25)},
    }
    lines = [["", "ACC %", "BWT", "rounds to best", "more than FedAvg's"], ["---"] + ["---:"] * 4]
    plain: list[float] = []
    for row, (method, changes) in rows.items():
        place = row.replace("`", "").replace(" ", "")
        found = runs("special-digits", f"best/{place}", method, range(10), changes)
        own = [summarise(run.records) for run in found]
        best = [one.rounds_to_best for one in own]
        plain = plain or best
        columns = (
            [100 * one.acc for one in own],
            [100 * one.bwt for one in own],
            best,
            [a - b for a, b in zip(best, plain, strict=True)],
        )
        lines.append([row, *(mean(column) for column in columns)])
    return lines


def mean(values: Sequence[float]) -> str:
    """The mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


OTHERS = {"figure2": figure2, "best": best}

if __name__ == "__main__":
    main(sys.argv[1:] or [*SWEEPS, *OTHERS])
