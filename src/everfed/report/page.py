"""The report: from records to plain data, and from those to one page that needs nothing else.

`gather` is the data that the page and the figures of `figure.py` are drawn from.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import Any

import numpy as np

from everfed import __version__
from everfed.errors import EverfedError
from everfed.metrics import Record, explained, matrix, prequential
from everfed.records import Loaded, differing, unequal
from everfed.report.table import caption, cells, columns_of, spread, trouble

#: Points of all curves together, beyond which only some rounds are drawn.
POINTS = 100_000
#: Moments of the stream that are drawn.
MOMENTS = 60

Number = float | None
Runs = dict[str, list[Loaded]]


@dataclass(frozen=True)
class Curve:
    """A measure over rounds (from 1): mean over a method's runs and standard deviation."""

    x: list[int]
    y: list[Number]
    s: list[Number]


@dataclass(frozen=True)
class Panel:
    """One chart of measures that some methods record."""

    title: str
    what: str
    log: bool
    labels: list[str]  #: of its lines, each drawn for every method
    lines: list[list[Curve | None]]  #: by label and method


@dataclass(frozen=True)
class StreamView:
    """Label counts of what a run's cohorts held: (moment, class, count)."""

    of: str  #: the run
    every: int  #: one round in so many is shown
    rounds: list[int]
    classes: list[str]
    whole: list[tuple[int, int, int]]
    clients: dict[str, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Page:
    """All that is shown."""

    title: str
    subtitle: str
    version: str
    methods: list[str]
    notes: list[str]
    caption: str  #: of the table
    columns: list[dict[str, str]]
    table: list[list[dict[str, Any]]]
    tasks: list[str]
    edges: list[int]  #: the last round of each task but the last
    measure: str
    unit: str
    every: int  #: curves show one round in so many
    average: list[Curve | None]  #: mean over the tasks seen, by method
    tests: list[list[Curve | None]]  #: by task and method
    matrices: list[list[list[Number]]]
    trade: list[list[list[Number]]]  #: (ACC, BWT) of each run, by method
    forgetting: list[list[tuple[Number, Number]]]  #: by method and task; of accuracy only
    panels: list[Panel]
    stream: StreamView | None
    common: dict[str, str]
    own: list[str]  #: settings that differ, by method
    runs: list[dict[str, str]] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)


#: title, what it is, logarithmic, its metrics with labels; other metrics get a chart of their own
PANELS: tuple[tuple[str, str, bool, dict[str, str]], ...] = (
    ("Traffic", "MB of a round, to all its clients and back", False, {"mb": ""}),
    ("Time", "seconds of a round, with its tests", False, {"seconds": ""}),
    ("Client memory", "MB of the client that holds most: model, what comes with it, what it keeps",
     False, {"client_mb": "all", "memory_mb": "samples it keeps"}),
    ("Hit rate", "lists whose item is among the first 10 or 5 candidates", False,
     {"hr@10": "HR@10", "hr@5": "HR@5"}),
    ("NDCG", "the same, weighed by the item's place", False,
     {"ndcg@10": "NDCG@10", "ndcg@5": "NDCG@5"}),
    ("Training loss", "mean over the round's clients", False, {"train_loss": ""}),
    ("Clients", "whose updates counted; as many equal ones would say as much", False,
     {"clients": "counted", "effective_clients": "equal ones"}),
    ("Period drift", "how far the mean update turns from round to round: 0 not at all, 1 a right "
     "angle; well above the dashed line, whole rounds differ", False,
     {"drift_period": "measured", "drift_sampling": "explained by drawing clients at random"}),
    ("Client drift", "share of the clients' updates that cancels in their mean: 0 they agree, 1 "
     "nothing is left", False, {"drift_client": ""}),
    ("Signal to noise", "squared length of the mean update over its variance; below 1 a round says "
     "little of all clients", True, {"signal_to_noise": ""}),
    ("Update", "length of the clients' mean update", False, {"update_norm": ""}),
    ("Kalman gain", "FedEve: 1 trusts the cohort, 0 the server's prediction", False,
     {"kalman_gain": ""}),
    ("Drift variances", "FedEve's estimates: between rounds and between clients", True,
     {"period_drift": "period drift", "client_drift": "client drift"}),
    ("Distance to the anchor", "SPECIAL: to the previous task's model; and the round's step, "
     "before the pull", False,
     {"anchor_distance": "distance", "anchor_step": "step"}),
    ("Pull to the anchor", "SPECIAL's λ", False, {"anchor_lam": ""}),
    ("Forgetting term Γ", "C-FLAG: of the server's step; lower is better", False, {"gamma": ""}),
    ("Clients' parts of Γ", "C-FLAG: Σ pᵢΓᵢ with the clients' rates and with constant ones", False,
     {"gamma_rates": "adaptive", "gamma_constant": "constant"}),
    ("Agreement Λ", "C-FLAG: mean product of the memory's gradient and a client's steps", False,
     {"lambda": ""}),
    ("Transference and interference", "C-FLAG: clients whose steps help or harm the memory", False,
     {"transference": "transference", "interference": "interference"}),
    ("Privacy spent", "epsilon at the method's delta, over all exchanges so far", False,
     {"epsilon": ""}),
    ("Round weights", "CFL, Theorem 4.1: of the present round and of each past one", False,
     {"weight_now": "present", "weight_past": "each past"}),
    ("Information loss", "CFL: between past gradients and their approximations", True,
     {"information_loss": ""}),
)  # fmt: skip
#: what tests measure, the first that was recorded is shown task by task
MEASURES = ("accuracy", "auc")
#: metrics that are shown elsewhere
ELSEWHERE = {
    "accuracy", "loss", "labels", "mb_up", "mb_down", "lost_round", "dropped_updates",
    "empty_clients",
}  # fmt: skip


# gathering -----------------------------------------------------------------------------------
def gather(runs: Runs) -> Page:
    """The page's data."""
    everyone = [run for own in runs.values() for run in own]
    tasks = task_names(everyone)
    measure = next((m for m in MEASURES if any(_has(run, m) for run in everyone)), "loss")
    factor, unit = (100, "%") if measure == "accuracy" else (1, "")
    series = {m: [_series(run.records, measure, factor) for run in own] for m, own in runs.items()}
    edges = _edges(everyone)
    every = _thinning(series)

    def curves(key: str) -> list[Curve | None]:
        return [
            _curve([one[key] for one in own if key in one], every, edges) for own in series.values()
        ]

    matrices = {m: [_matrix(run, measure, len(tasks)) for run in own] for m, own in runs.items()}
    summaries = {m: [run.summary for run in own] for m, own in runs.items()}
    rows = cells(summaries)
    settings = [own[0].settings for own in runs.values()]
    apart = differing(settings)
    shared = {key: str(value) for key, value in settings[0].items() if key not in apart}
    return Page(
        title=", ".join(runs) if len(runs) <= 6 else f"{len(runs)} methods",
        subtitle=_subtitle(runs, len(tasks)),
        version=__version__,
        methods=list(runs),
        notes=notes(runs) + trouble(summaries),
        caption=caption(summaries),
        columns=[{"name": c.name, "what": c.what} for c in columns_of(summaries)],
        table=[[{"text": cell.text(), "best": cell.best} for cell in row] for row in rows.values()],
        tasks=tasks,
        edges=edges,
        measure=measure,
        unit=unit,
        every=every,
        average=curves("seen"),
        tests=[curves(f"on {j}") for j in range(len(tasks))],
        matrices=[_numbers(factor * _mean(own)) for own in matrices.values()],
        trade=[
            [[_short(100 * s.acc), _short(100 * s.bwt)] for s in own] for own in summaries.values()
        ],
        forgetting=[_forgetting(own) if unit else [] for own in matrices.values()],
        panels=_panels(series, curves),
        stream=_stream(everyone),
        common=_versions(everyone) | shared,
        own=[", ".join(f"{k} = {own[k]}" for k in apart if k in own) for own in settings],
        runs=[_about(m, run) for m, own in runs.items() for run in own],
        configs=[own[0].about for own in runs.values()],
    )


def task_names(runs: Sequence[Loaded]) -> list[str]:
    """The tasks that the runs share; without names where every seed has its own."""
    tasks = runs[0].tasks
    for run in runs:
        if len(run.tasks) != len(tasks):
            raise EverfedError(
                f"{runs[0].folder} has {len(tasks)} task(s), {run.folder} has {len(run.tasks)}: "
                "make a report of each"
            )
    return tasks if all(run.tasks == tasks for run in runs) else [""] * len(tasks)


def notes(runs: Runs) -> list[str]:
    """What a reader should know of the runs before looking at numbers."""
    apart = unequal(runs)
    out = [f"the runs differ in {', '.join(apart)}: compare with care"] if apart else []
    seeds = {method: [str(run.seed) for run in own] for method, own in runs.items()}
    if len({frozenset(own) for own in seeds.values()}) > 1:
        told = "; ".join(f"{method} {', '.join(own)}" for method, own in seeds.items())
        out.append(f"the methods have been run with different seeds: {told}")
    for method, own in runs.items():
        if len(set(seeds[method])) < len(own):
            out.append(f"{method}: some of its {len(own)} runs have the same seed")
        for run in own:
            if run.skipped:
                out.append(
                    f"{run.folder}: skipped {run.skipped} half-written record line(s); the run "
                    "crashed or is still being written"
                )
            if run.rounds and run.rounds_done < run.rounds:
                done = f"{run.rounds_done} of {run.rounds} rounds"
                out.append(f"{method}, seed {run.seed}: unfinished, {done}")
        ahead = [prequential(matrix(run.records)) for run in own if run.in_time_order]
        if ahead and not math.isnan(np.mean(ahead)):
            share = f"{100 * np.mean(ahead):.1f} %"
            out.append(f"{method}: {share} right on each block before it was trained on")
    return out


def _subtitle(runs: Runs, tasks: int) -> str:
    everyone = [run for own in runs.values() for run in own]
    seeds = sorted({str(run.seed) for run in everyone})
    rounds = max(run.rounds_done for run in everyone)
    data = dict.fromkeys(str(run.about.get("data", "")).partition(":")[0] for run in everyone)
    parts = [
        _count(len(everyone), "run"), _count(len(runs), "method"),
        ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(seeds),
        " and ".join(data), _count(tasks, "task"), _count(rounds, "round"),
    ]  # fmt: skip
    return " · ".join(part for part in parts if part)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _has(run: Loaded, metric: str) -> bool:
    return any(r["metric"] == metric for r in run.records)


def _series(records: Iterable[Record], measure: str, factor: float) -> dict[str, dict[int, float]]:
    """One run's measures by round: tests of task j are 'on j', their mean over tasks 'seen'."""
    out: dict[str, dict[int, float]] = {}
    for r in records:
        metric, value, at = r["metric"], r["value"], r["round"] + 1
        if value is None or metric == "labels" or r.get("end"):
            continue
        if "on" in r:
            if metric == measure:
                out.setdefault(f"on {r['on']}", {})[at] = factor * value
            elif metric not in ELSEWHERE:  # other measures: of the present task
                out.setdefault(metric, {})[at] = value
        elif metric in ("mb_up", "mb_down"):
            own = out.setdefault("mb", {})
            own[at] = own.get(at, 0.0) + value
        elif metric not in ELSEWHERE:
            if metric == "signal_to_noise":
                out.setdefault("drift_sampling", {})[at] = explained(value)
            out.setdefault(metric, {}).setdefault(at, value)  # a task's end may tell it again
    tests: dict[int, list[float]] = {}
    for key, own in out.items():
        if key.startswith("on "):
            for at, value in own.items():
                tests.setdefault(at, []).append(value)
    return out | {"seen": {at: float(np.mean(values)) for at, values in sorted(tests.items())}}


def _edges(runs: Sequence[Loaded]) -> list[int]:
    last: dict[int, int] = {}
    for run in runs:
        for r in run.records:
            last[r["task"]] = max(last.get(r["task"], 0), r["round"] + 1)
    return [last[task] for task in sorted(last)][:-1]


def _thinning(series: Mapping[str, Sequence[Mapping[str, Mapping[int, float]]]]) -> int:
    total = sum(
        max((len(one.get(key, ())) for one in own), default=0)
        for own in series.values()
        for key in {key for one in own for key in one}
    )
    return max(1, math.ceil(total / POINTS))


def _curve(own: Sequence[Mapping[int, float]], every: int, edges: Sequence[int]) -> Curve | None:
    """The mean over runs; of thinned rounds the first and those before an edge stay."""
    rounds = sorted({at for one in own for at in one})
    rounds = [at for at in rounds if at % every == 0 or at == rounds[0] or at in edges]
    if not rounds:
        return None
    values = [spread([one[at] for one in own if at in one]) for at in rounds]
    return Curve(rounds, [_short(mean) for mean, _ in values], [_short(std) for _, std in values])


def _positive(curve: Curve) -> Curve:
    """For a logarithmic axis, which has no place for 0."""
    return replace(curve, y=[y if y is not None and y > 0 else None for y in curve.y])


def _panels(series: Mapping[str, Sequence[Mapping[str, Any]]], curves: Any) -> list[Panel]:
    found = dict.fromkeys(key for own in series.values() for one in own for key in one)
    known = {metric for *_, metrics in PANELS for metric in metrics}
    tests = {key for key in found if key == "seen" or key.startswith("on ")}
    more = [
        (key, "recorded by the method", False, {key: ""})
        for key in found
        if key not in known | tests
    ]

    def lines(key: str, log: bool) -> list[Curve | None]:
        return [curve and _positive(curve) if log else curve for curve in curves(key)]

    return [
        Panel(title, what, log, list(metrics.values()), [lines(key, log) for key in metrics])
        for title, what, log, metrics in (*PANELS, *more)
        if any(key in found for key in metrics)
    ]


def _matrix(run: Loaded, measure: str, size: int) -> np.ndarray:
    """A run's matrix, with NaN for what is not there yet."""
    out, own = np.full((size, size), np.nan), matrix(run.records, measure)[:size, :size]
    out[: len(own), : len(own)] = own
    return out


def _mean(matrices: Sequence[np.ndarray]) -> np.ndarray:
    stack = np.stack(matrices)
    known = ~np.isnan(stack)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, stack, 0).sum(0) / known.sum(0))


def _forgetting(matrices: Sequence[np.ndarray]) -> list[tuple[Number, Number]]:
    """Accuracy lost on each earlier task since it was learnt, over runs that came to the end."""
    lost = [100 * (np.diag(a)[:-1] - a[-1, :-1]) for a in matrices]
    both = (spread([float(one[j]) for one in lost]) for j in range(len(matrices[0]) - 1))
    return [(_short(mean), _short(std)) for mean, std in both]


def _stream(runs: Sequence[Loaded]) -> StreamView | None:
    """What the first run's cohorts held (that depends on the seed, not on the method)."""
    for run in runs:
        held = {r["round"]: r["value"] for r in run.records if r["metric"] == "labels"}
        every = math.ceil(len(held) / MOMENTS)
        moments = [at for k, at in enumerate(sorted(held)) if k % every == 0]
        whole: list[tuple[int, int, int]] = []
        clients: dict[str, list[tuple[int, int, int]]] = {}
        try:
            for k, at in enumerate(moments):
                whole += [(k, int(c), int(n)) for c, n in held[at]["all"].items()]
                for client, own in held[at]["clients"].items():
                    triples = [(k, int(c), int(n)) for c, n in own.items()]
                    clients.setdefault(str(int(client)), []).extend(triples)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # damaged: another run may have the same
        if whole:
            count = 1 + max(c for _, c, _ in whole)
            names = ["all samples"] if count == 1 else [str(c) for c in range(count)]
            order = dict(sorted(clients.items(), key=lambda item: int(item[0])))
            rounds = [at + 1 for at in moments]
            of = f"{run.method}, seed {run.seed}"
            return StreamView(of, every, rounds, names, whole, order)
    return None


def _versions(runs: Sequence[Loaded]) -> dict[str, str]:
    out = {}
    for key in ("everfed", "python", "torch"):
        found = dict.fromkeys(str(run.about[key]) for run in runs if key in run.about)
        if found:
            out[key] = ", ".join(found)
    return out


def _about(method: str, run: Loaded) -> dict[str, str]:
    rounds = f"{run.rounds_done}" + (f" of {run.rounds}" if run.rounds else "")
    return {"method": method, "seed": str(run.seed), "rounds": rounds, "folder": str(run.folder)}


def _short(value: float) -> Number:
    """Four digits are more than a chart can show."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _numbers(a: np.ndarray) -> list[list[Number]]:
    return [[_short(float(value)) for value in row] for row in a]


# the page ------------------------------------------------------------------------------------
def render(page: Page) -> str:
    """One HTML file. Names are data, never markup; only our scripts run, nothing is loaded."""
    assets = resources.files("everfed.report").joinpath("assets")
    read = {name: assets.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")}
    charts = assets.joinpath("echarts", "echarts.min.js").read_text("utf-8")
    # "<" written as \u003c is the same JSON, and cannot end the script that holds it
    text = json.dumps(asdict(page), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(f"{page.title[:100]} – everfed"),
        "scripts": f"{_hash(charts)} {_hash(read['page.js'])}",
        "css": read["page.css"],
        "data": text,
        "echarts": charts,
        "js": read["page.js"],
    }
    template = assets.joinpath("page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
