"""Figures for papers, drawn with matplotlib from the same data as the page."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from everfed.errors import EverfedError
from everfed.report.page import Curve, Page, Panel

#: colours that stay apart for colour-blind readers (Okabe and Ito)
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
DASHES = ("-", "--", ":")
MARKERS = "osD^vP*X"


#: boundaries of tasks that are drawn; more would be a grey field, and slow
EDGES = 60


@contextmanager
def plain() -> Iterator[None]:
    """Names come from users: a dollar sign is no formula, and a glyph may be missing."""
    with plt.rc_context({"text.parse_math": False, "pdf.fonttype": 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def comparison(page: Page, path: Path) -> None:
    """One picture for all methods: curves on the left, matrices on the right."""
    with plain():
        rows, matrices = len(page.tasks), _rows(len(page.methods))
        columns = -(-len(page.methods) // matrices)
        height = max(1.55 * rows, 2.6 * matrices) + 0.7 + _above(page)
        figure = plt.figure(figsize=(6.4 + 2.35 * columns, height), layout="constrained")
        halves: Any = figure.subfigures(1, 2, width_ratios=(6.4, 2.35 * columns))
        _tests(halves[0], page, 1)
        _matrices(halves[1], page)
        _save(figure, path)


def save_all(page: Page, folder: Path) -> list[Path]:
    """Every chart of the page as PDF and PNG."""
    across, several = _columns(page), len(page.tasks) > 1
    down, tall = -(-len(page.tasks) // across), _rows(len(page.methods))
    wide = -(-len(page.methods) // tall)
    charts: dict[str, Callable[[], Figure | None]] = {
        page.measure: lambda: _whole(page, _tests, 4.2 * across, 2.0 * down + 0.7 + _above(page)),
        "matrices": lambda: _whole(page, _matrices, 2.35 * wide, 2.6 * tall) if several else None,
        "trade-off": lambda: _trade(page),
        "forgetting": lambda: _forgetting(page),
        "stream": lambda: _stream(page),
    }
    for panel in page.panels:
        name = re.sub(r"\W+", "-", panel.title.lower(), flags=re.ASCII).strip("-")
        name = name if name and name not in charts else f"{name}-{len(charts)}"
        charts[name] = lambda panel=panel: _panel(page, panel)  # type: ignore[misc]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with plain():
            for name, draw in charts.items():
                figure = draw()
                if figure is None:
                    continue
                for kind in ("pdf", "png"):
                    written.append(folder / f"{name}.{kind}")
                    figure.savefig(written[-1], dpi=200)
                plt.close(figure)
    except OSError as error:
        raise EverfedError(f"{folder} cannot be written: {error.strerror}") from None
    return written


def bubbles(axis: Axes, x: Sequence[int], rows: Sequence[str], triples: Any, gap: float) -> None:
    """Bubbles of (moment, row, count) triples, the largest as wide as `gap` inches."""
    at, row, count = np.array(triples).T
    area = (72 * gap) ** 2 * count / count.max()
    axis.scatter(np.array(x)[at], row, s=area, color=COLOURS[2], alpha=0.75, lw=0)
    axis.set_yticks(range(len(rows)), rows)
    if len(rows) > 30:
        axis.yaxis.set_major_locator(MaxNLocator(20, integer=True))
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("round")
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise EverfedError(f"{path} cannot be written: {error.strerror}") from None
    plt.close(figure)


def _whole(
    page: Page, draw: Callable[[FigureBase, Page], None], wide: float, tall: float
) -> Figure:
    figure = plt.figure(figsize=(wide, tall), layout="constrained")
    draw(figure, page)
    return figure


def _columns(page: Page) -> int:
    return 1 if len(page.tasks) == 1 else 2 if len(page.tasks) <= 8 else 4


def _tests(figure: FigureBase, page: Page, columns: int | None = None) -> None:
    """Curves of every task's tests."""
    across = columns or _columns(page)
    down = -(-len(page.tasks) // across)
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for j, axis in enumerate(axes):
        if j >= len(page.tasks):
            axis.set_visible(False)
            continue
        _lines(axis, page, [page.tests[j]])
        if len(page.tasks) > 1:
            axis.set_title(_task(page, j), loc="left", fontsize=9)
        if page.measure == "accuracy":
            axis.set_ylim(0, 100)
        if j >= len(page.tasks) - across:
            axis.set_xlabel("round")
            axis.tick_params(labelbottom=True)
    _legend(figure, page)
    which = " on each task" if len(page.tasks) > 1 else ""
    figure.supylabel(f"{page.measure}{which}{', %' if page.unit else ''}", fontsize=10)


def _legend(figure: FigureBase, page: Page, panel: Panel | None = None) -> None:
    """Above everything: all methods, or those that a panel shows."""
    known = range(len(page.methods))
    used = [k for k in known if panel is None or any(line[k] for line in panel.lines)]
    handles = [Line2D([], [], color=_colour(k), ls=_dash(k), lw=1.6) for k in used]
    names = [_cut(page.methods[k], 26) for k in used]
    where: Any = "outside upper center"
    figure.legend(handles, names, loc=where, ncols=3, frameon=False, fontsize=8)


def _above(page: Page) -> float:
    """Inches that the legend takes."""
    return 0.18 * -(-len(page.methods) // 3)


def _lines(axis: Axes, page: Page, lines: Sequence[Sequence[Curve | None]]) -> None:
    """Means over seeds with a band of one standard deviation."""
    for part, curves in enumerate(lines):
        for k, curve in enumerate(curves):
            if curve is None:
                continue
            y, s = np.array(curve.y, float), np.array(curve.s, float)
            dash = "--" if part else _dash(k)
            axis.plot(
                curve.x,
                y,
                color=_colour(k),
                lw=1.6,
                ls=dash,
                marker="" if len(y) > 2 else "o",
                ms=3,
            )
            low = np.maximum(y - s, 0) if np.nanmin(y) >= 0 else y - s
            axis.fill_between(curve.x, low, y + s, color=_colour(k), alpha=0.12, lw=0)
    for edge in _edges(page):
        axis.axvline(edge + 0.5, color="0.75", lw=0.8, ls=":")
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _matrices(figure: FigureBase, page: Page) -> None:
    rows = _rows(len(page.methods))
    columns = -(-len(page.methods) // rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(page.methods) :]:
        axis.set_visible(False)
    size = len(page.tasks)
    for k, (axis, method) in enumerate(zip(axes, page.methods, strict=False)):
        a = np.array(page.matrices[k], float)
        most = 100.0 if page.measure == "accuracy" else float(np.nanmax(a, initial=1e-9))
        axis.imshow(np.where(np.tril(np.ones((size, size), bool)), a, np.nan), vmin=0, vmax=most)
        for i in range(size if size <= 10 else 0):
            for j in range(i + 1):
                if not np.isnan(a[i, j]):
                    ink = "white" if a[i, j] < 0.6 * most else "black"
                    text = f"{a[i, j]:.0f}" if most == 100 else f"{a[i, j]:.2g}"
                    axis.text(j, i, text, ha="center", va="center", color=ink, fontsize=8)
        axis.set_title(_cut(method, 22), fontsize=9)
        ticks = range(0, size, max(1, size // 10))
        axis.set_xticks(ticks, [str(t + 1) for t in ticks])
        axis.set_yticks(ticks, [str(t + 1) for t in ticks])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        if k % columns == 0:
            axis.set_ylabel("after task", fontsize=9)
        if k >= len(page.methods) - columns:
            axis.set_xlabel(f"{page.measure} on task", fontsize=9)


def _trade(page: Page) -> Figure | None:
    known = [[r for r in runs if None not in r] for runs in page.trade]
    if not any(known):
        return None
    tall = max(4.0, 0.18 * len(known) + 0.4)
    figure, axis = plt.subplots(figsize=(5.8, tall), layout="constrained")
    for k, runs in enumerate(known):
        if not runs:
            continue
        acc, bwt = np.array(runs, float).T
        axis.scatter(acc, bwt, s=18, color=_colour(k), alpha=0.45, lw=0)
        marker = MARKERS[(k + k // len(COLOURS)) % len(MARKERS)]  # no pair with a colour twice
        label = _cut(page.methods[k], 26)
        axis.scatter(acc.mean(), bwt.mean(), s=80, color=_colour(k), marker=marker, label=label)
    axis.set_xlabel("ACC, %")
    axis.set_ylabel("BWT")
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _forgetting(page: Page) -> Figure | None:
    if not page.forgetting[0]:
        return None
    rows = np.array(page.forgetting, float)  # (methods, tasks, mean and deviation)
    if np.isnan(rows[:, :, 0]).all():
        return None
    size = (max(5.0, 1.5 * rows.shape[1]), 3.0 + _above(page))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    width = 0.8 / len(rows)
    for k, own in enumerate(rows):
        x = np.arange(len(own)) + (k - (len(rows) - 1) / 2) * width
        error = None if np.isnan(own[:, 1]).all() else own[:, 1]
        axis.bar(
            x, own[:, 0], width, yerr=error, color=_colour(k), ecolor="0.5", error_kw={"lw": 1}
        )
    axis.axhline(0, color="0.4", lw=0.8)
    names = [_cut(_task(page, j), 18) for j in range(rows.shape[1])]
    axis.set_xticks(range(rows.shape[1]), names, fontsize=8)
    axis.set_ylabel("accuracy lost, points")
    axis.spines[["top", "right"]].set_visible(False)
    _legend(figure, page)
    return figure


def _panel(page: Page, panel: Panel) -> Figure:
    figure, axis = plt.subplots(figsize=(5.6, 3.0 + _above(page)), layout="constrained")
    _lines(axis, page, panel.lines)
    if panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:.0e}")  # the usual ones write formulas
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    elif axis.get_ylim()[0] > 0:
        axis.set_ylim(bottom=0)
    kinds = zip(("solid", "dashed"), panel.labels, strict=False)
    labels = ", ".join(f"{kind}: {name}" for kind, name in kinds if name)
    axis.set_title(
        _cut(panel.title, 50) + (f" ({labels})" if labels else ""), loc="left", fontsize=9
    )
    axis.set_xlabel("round")
    axis.set_ylabel(_cut(re.split("[,:;]", panel.what)[0], 40), fontsize=9)  # what the unit is of
    _legend(figure, page, panel)
    return figure


def _stream(page: Page) -> Figure | None:
    view = page.stream
    if view is None:
        return None
    height = max(2.0, 0.22 * len(view.classes) + 0.9)
    figure, axis = plt.subplots(figsize=(8.0, height), layout="constrained")
    bubbles(axis, view.rounds, view.classes, view.whole, min(0.2, 7.0 / len(view.rounds)))
    for edge in _edges(page):
        axis.axvline(edge + 0.5, color="0.75", lw=0.8, ls=":")
    axis.set_ylabel("class")
    axis.set_title(f"samples of each round's clients ({_cut(view.of, 40)})", loc="left", fontsize=9)
    return figure


def _rows(methods: int) -> int:
    return 1 if methods == 1 else 2 if methods <= 8 else 3


def _task(page: Page, j: int) -> str:
    return f"task {j + 1}" + (f": {_cut(page.tasks[j], 48)}" if page.tasks[j] else "")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _dash(k: int) -> str:
    return DASHES[k // len(COLOURS) % len(DASHES)]


def _edges(page: Page) -> Sequence[int]:
    return page.edges if len(page.edges) <= EDGES else ()
