"""The comparison's figure: accuracy per task over rounds, and the accuracy matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from everfed.metrics import Record, matrix

#: colours that stay apart for colour-blind readers (Okabe and Ito)
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
Runs = Mapping[str, Sequence[Sequence[Record]]]


def comparison(runs: Runs, tasks: Sequence[str], path: Path) -> None:
    """Save one picture for all methods: curves on the left, matrices on the right."""
    figure = draw(runs, tasks)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw(runs: Runs, tasks: Sequence[str]) -> Figure:
    """Curves are means over seeds with a band of one standard deviation."""
    rows, columns = len(tasks), 1 + -(-len(runs) // rows_of_matrices(len(runs)))
    height = max(1.55 * rows, 2.6 * rows_of_matrices(len(runs))) + 1.1
    figure = plt.figure(figsize=(6.4 + 2.35 * (columns - 1), height), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(6.4, 2.35 * (columns - 1)))
    left, right = halves
    axes = left.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for j, axis in enumerate(axes):
        _curves(axis, runs, j, tasks)
    axes[-1].set_xlabel("round")
    handles, labels = axes[0].get_legend_handles_labels()
    left.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    left.supylabel("accuracy on each task, %", fontsize=10)
    _matrices(right, runs, tasks)
    return figure


def rows_of_matrices(methods: int) -> int:
    return 1 if methods == 1 else 2 if methods <= 8 else 3


def _curves(axis: Axes, runs: Runs, j: int, tasks: Sequence[str]) -> None:
    for k, (method, own) in enumerate(runs.items()):
        by_round: dict[int, list[float]] = {}
        for records in own:
            for r in records:
                own_test = r["metric"] == "accuracy" and r.get("on") == j and not r.get("end")
                if own_test and r["value"] is not None:
                    by_round.setdefault(r["round"] + 1, []).append(100 * r["value"])
        at = sorted(by_round)
        mean = np.array([np.mean(by_round[t]) for t in at])
        spread = np.array([np.std(by_round[t]) for t in at])
        colour = COLOURS[k % len(COLOURS)]
        axis.plot(at, mean, color=colour, lw=1.6, label=method)
        axis.fill_between(at, mean - spread, mean + spread, color=colour, alpha=0.12, lw=0)
    for edge in _boundaries(runs):
        axis.axvline(edge + 0.5, color="0.75", lw=0.8, ls=":")
    name = f": {tasks[j]}" if tasks[j] else ""
    axis.set_title(f"task {j + 1}{name}", loc="left", fontsize=9)
    axis.set_ylim(0, 100)
    axis.spines[["top", "right"]].set_visible(False)


def _boundaries(runs: Runs) -> list[int]:
    records = next(iter(runs.values()))[0]
    last: dict[int, int] = {}
    for r in records:
        last[r["task"]] = max(last.get(r["task"], 0), r["round"] + 1)
    return sorted(last.values())[:-1]


def _matrices(figure: FigureBase, runs: Runs, tasks: Sequence[str]) -> None:
    rows = rows_of_matrices(len(runs))
    columns = -(-len(runs) // rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(runs) :]:
        axis.set_visible(False)
    size = len(tasks)
    for k, (axis, (method, own)) in enumerate(zip(axes, runs.items(), strict=False)):
        a = 100 * np.mean([_padded(matrix(records), size) for records in own], axis=0)
        shown = np.where(np.tril(np.ones((size, size), bool)), a, np.nan)
        axis.imshow(shown, vmin=0, vmax=100, cmap="viridis")
        for i in range(size):
            for j in range(i + 1):
                if np.isnan(a[i, j]):
                    continue
                light = "white" if a[i, j] < 60 else "black"
                axis.text(j, i, f"{a[i, j]:.0f}", ha="center", va="center", color=light, fontsize=8)
        axis.set_title(method, fontsize=9)
        axis.set_xticks(range(size), [str(t + 1) for t in range(size)])
        axis.set_yticks(range(size), [str(t + 1) for t in range(size)])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        if k % columns == 0:
            axis.set_ylabel("after task", fontsize=9)
        if k >= len(runs) - columns:
            axis.set_xlabel("accuracy on task", fontsize=9)


def _padded(a: np.ndarray, size: int) -> np.ndarray:
    """An unfinished run's matrix, with NaN for what is not there yet."""
    out = np.full((size, size), np.nan)
    out[: len(a), : len(a)] = a
    return out
