"""Makes the tables and figures of docs/choosing.md again, each in its own folder of runs/docs.

python docs/runs/remake.py [NAME ...]    all, or some of domains, classes, ...
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import elec2
from everfed.metrics import Summary, summarise
from everfed.records import collect
from everfed.report.figure import comparison
from everfed.report.page import gather

HERE = Path(__file__).parent
#: the methods in the figure; all of them would be a tangle
SHOWN = ("fedavg", "special", "ewc", "lwf", "cflag", "cfl_coreset")
NAMES = [path.stem for path in sorted(HERE.glob("*.toml"))]


def main(names: Sequence[str]) -> None:
    for name in names:
        (HERE / "results" / f"{name}.md").write_text(table(compare(name)))


def compare(name: str) -> dict[str, list[Summary]]:
    """`everfed compare` on a configuration; what is finished is not run again."""
    if name == "elec2":
        elec2.main()
    folder = Path("runs/docs") / name
    words = ["compare", f"{HERE / name}.toml", "--folder", str(folder)]
    if (folder / "compare.json").exists():
        words = ["resume", str(folder)]
    subprocess.run([sys.executable, "-m", "everfed", *words, "--jobs", "1"], check=True)
    runs = collect([folder])
    if name == "domains":
        comparison(gather({method: runs[method] for method in SHOWN}), HERE.parent / "domains.png")
    return {m: [summarise(run.records) for run in own] for m, own in runs.items()}


def table(results: dict[str, list[Summary]]) -> str:
    """Best first; mean ± standard deviation over seeds."""
    tasks = not np.isnan(next(iter(results.values()))[0].bwt)
    columns = [("ACC %", "acc", 100), ("MB sent", "mb_sent", 1)]
    if tasks:
        columns[1:1] = [("BWT", "bwt", 100), ("worst drop", "worst_drop", 100)]
    ranked = sorted(results.items(), key=lambda item: -mean(item[1], "acc"))
    lines = [["method", *(title for title, *_ in columns)], ["---", *["---:"] * len(columns)]]
    for method, own in ranked:
        page = "fedavg" if method == "fine" else method
        cells = [f"[`{method}`](methods/{page}.md)"]
        for title, key, scale in columns:
            values = scale * np.array([getattr(summary, key) for summary in own])
            spread = "" if title == "MB sent" else f" ± {values.std(ddof=1):.1f}"
            cells.append(f"{values.mean():.1f}{spread}")
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mean(own: list[Summary], key: str) -> float:
    return float(np.mean([getattr(summary, key) for summary in own]))


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
