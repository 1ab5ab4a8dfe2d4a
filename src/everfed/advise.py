"""The adviser: from the drift meters of a run to a method, its settings, and why.

What it goes by was found in real runs (docs/drift.md has them):

    a task's accuracy is lost with the next    ->  keep samples (CFL-Core-Set), else LwF or EWC
    a client's own labels change               ->  keep samples
    otherwise                                  ->  momentum on the server, the longer the better
                                                   successive rounds agree
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from everfed import config as configs
from everfed import metrics
from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.metrics import Drift, Record
from everfed.records import Loaded, load, members
from everfed.runs import Progress
from everfed.streams.drift import DRAWS, change
from everfed.streams.pilot import Pilot
from everfed.streams.sites import Sites

#: accuracy that may be lost on earlier tasks before something is done about it
LOST = 0.05
#: distance of a client's labels from one time to the next, above which its data change
CHANGED = 0.2
#: turn below which successive rounds agree, and from which they turn back on each other
TURNED, BACK = 0.65, 1.15
#: turn, as a multiple of what sampling explains, from which it is the rounds' own
ALONE = 3.0
#: share of clients' updates that cancels, from which they differ much
APART = 0.7
#: share of the clients that is in a round, below which they come back too seldom to keep anything
SELDOM = 0.1
#: rounds at a run's beginning that say little: the first steps all go the same way
EARLY = 2
#: a pilot's tasks, and its rounds in all
TASKS, ROUNDS = 3, 24
#: rounds of a task that was cut short, below which it is hardly learnt, so hardly lost
FEW = 6
#: rounds of any task, below which the meters have hardly anything to compare
LEAST = 3


@dataclass(frozen=True)
class Signs:
    """What a run shows of its data."""

    method: str  #: that was run
    drift: Drift | None  #: medians of the drift meters
    lost: float  #: accuracy lost on earlier tasks; NaN with one task
    changed: float  #: distance of a client's labels from one time to the next; NaN: not known
    growing: bool  #: whether classes arrive task by task
    stateless: bool  #: whether clients cannot keep anything
    present: float  #: share of the clients that is in a round; NaN: not known
    tasks: int = 1  #: that were played
    rounds: int = 0  #: of the shortest task that came to its end; 0: none did
    cut: bool = False  #: whether tasks go on beyond what was played

    @property
    def few(self) -> bool:
        """Whether tasks were too short to tell what is forgotten."""
        return self.cut and self.tasks > 1 and self.rounds < FEW


@dataclass(frozen=True)
class Advice:
    """A method with its settings, and why."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()  #: sentences
    doubts: tuple[str, ...] = ()  #: what makes it less sure

    def __str__(self) -> str:
        own = ", ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        return f"{self.method} ({own})" if own else self.method

    def toml(self, config: configs.Config | None) -> str:
        """A configuration with the method, ready for `everfed run` and, beside FedAvg, for
        `everfed compare`; without one to begin with, the sections on the method only."""
        values: dict[str, Any] = {}
        if config is not None:
            values = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        values["method"] = {"name": self.method}
        if self.settings:
            values["methods"] = values.get("methods", {}) | {self.method: self.settings}
        both = ["fedavg", self.method] if self.method != "fedavg" else ["fedavg"]
        values["compare"] = values.get("compare", {}) | {"methods": both}
        return tomli_w.dumps(values)


def pilot(
    made: configs.Experiment,
    rounds: int = ROUNDS,
    on_round: Callable[[Progress], None] | None = None,
) -> Loaded:
    """A short run, on the first rounds of the first tasks."""
    if isinstance(made.stream, Sites):
        raise EverfedError("the samples live at the sites: give the folder of a run there instead")
    tasks = min(TASKS, len(made.stream.tasks))
    short = Pilot(made.stream, tasks, max(1, rounds // tasks))
    done = configs.Experiment(made.method, short, made.model, made.options, made.terms).go(
        on_round=on_round, test_every=short.rounds, information_loss=False, loggers=[], config=None
    )
    about = {
        "method": made.method.describe(),
        "stream": short.describe(),
        "head": short.head,
        "stateless": short.stateless,
        "task_rounds": [made.stream.length(k) for k in range(tasks)],
    }
    return Loaded(Path(), about, done.records)


def chosen(folder: Path) -> list[Loaded]:
    """The run in a folder; of a comparison, the runs of FedAvg."""
    inside = members(folder)
    if inside == [folder]:
        return [load(folder)]
    begun = [load(path) for path in inside if (path / "config.json").exists()]
    found = [run for run in begun if run.method == "fedavg" and run.records]
    if not found:
        names = ", ".join(str(run.folder) for run in begun) or "none has begun"
        raise EverfedError(
            f"{folder} is a comparison without a run of fedavg: give one of its runs ({names})"
        )
    return found


def read(*runs: Loaded) -> Signs:
    """What the records of a run, or of runs that differ in the seed only, show."""
    first = runs[0]
    stream = first.about.get("stream") or {}
    records = [record for run in runs for record in run.records]
    counted = [r["value"] for r in records if r["metric"] == "clients"]
    played = _rounds(runs)
    planned = first.about.get("task_rounds") or []
    return Signs(
        first.method,
        metrics.drift(records, since=EARLY),
        _mean([metrics.forgetting(metrics.matrix(run.records)) for run in runs]),
        _mean([_changed(run.records) for run in runs]),
        first.about.get("head", "shared") != "shared",
        bool(first.about.get("stateless", False)),
        float(np.median(counted)) / stream.get("clients", math.nan) if counted else math.nan,
        1 + max((r["task"] for r in records), default=0),
        min(played.values(), default=0),
        any(n < planned[task] for task, n in played.items() if task < len(planned)),
    )


def _rounds(runs: Sequence[Loaded]) -> dict[int, int]:
    """Rounds that were played of each task that came to its end, in the run that has fewest."""
    out: dict[int, int] = {}
    for run in runs:
        for task in {r["task"] for r in run.records if r.get("end")}:
            count = len({r["round"] for r in run.records if r["task"] == task})
            out[task] = min(count, out.get(task, count))
    return out


def _mean(values: Sequence[float]) -> float:
    """Over what is known."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def advise(signs: Signs, keep: bool = True) -> Advice:
    """A method for data that show these signs; `keep`: whether clients may keep samples."""
    advice = _advise(signs, keep)
    doubts = []
    if signs.few and not signs.lost > LOST:
        doubts.append(
            f"{signs.rounds} rounds a task are few: what is hardly learnt cannot be lost. A "
            f"pilot of --rounds {FEW * min(signs.tasks, TASKS)} or more is surer"
        )
    elif signs.rounds < LEAST:
        doubts.append(f"{signs.rounds} rounds a task say little: the meters are mostly noise")
    if signs.method != "fedavg":
        doubts.append(f"the signs are of {signs.method}: FedAvg's are surer, of a pilot's run")
    return replace(advice, doubts=tuple(doubts))


def _advise(signs: Signs, keep: bool) -> Advice:
    if signs.drift is None:
        raise EverfedError(
            "the run has no drift meters (they need three rounds or more, of this version of "
            "everfed): give a configuration instead, and a pilot is run"
        )
    seldom = signs.stateless or signs.present < SELDOM
    seen = _seen(signs.drift)
    if signs.tasks > 1 and math.isnan(signs.lost):
        seen += ("no accuracy was measured at the tasks' ends: what is forgotten is not known",)
    elif signs.tasks > 1:
        seen += (_lost(signs),)
    if signs.lost > LOST:
        return _against_forgetting(signs, keep, seldom, seen)
    if signs.changed > CHANGED and keep and not seldom:
        why = (
            f"a client's own labels change from one time to the next by {signs.changed:.2f} "
            "more than by chance (total variation; 1 is all of them): what it has seen must not be "
            "lost",
            "keeping 100 samples of each of a client's data sets and training on them again "
            "brings its past into every round",
        )
        return Advice("cfl_coreset", {"size": 100}, (*seen, *why))
    turn = signs.drift.period
    beta = 0.9 if turn < TURNED else 0.7 if turn < BACK else 0.5
    rounds = round(1 / (1 - beta))
    what = "what they have in common adds up, what is only one round's averages out"
    if beta == 0.9:
        what = "they agree, so it may go further than a single round dares"
    why = (
        f"momentum on the server adds up the last {rounds} rounds or so: {what}",
        "it sends nothing more, clients need not change, and nothing is kept at them",
    )
    return Advice("fedavgm", {"beta": beta}, (*seen, *why))


def _against_forgetting(signs: Signs, keep: bool, seldom: bool, seen: tuple[str, ...]) -> Advice:
    lost = ("what is learnt must be kept, before anything else",)
    if keep and not seldom:
        why = "100 samples of each task at every client, trained on again, forget least"
        return Advice("cfl_coreset", {"size": 100}, (*seen, *lost, why))
    reason = "clients seldom or never come back" if seldom else "no samples may be kept"
    if signs.growing:
        why = f"{reason}: EWC holds on to the weights that mattered, while new classes arrive"
        return Advice("ewc", {}, (*seen, *lost, why))
    why = f"{reason}: LwF keeps the last model's answers while inputs change"
    return Advice("lwf", {}, (*seen, *lost, why))


def _lost(signs: Signs) -> str:
    points = round(100 * signs.lost) + 0.0
    what = f"{points:.0f} points of accuracy on earlier tasks were lost by the end"
    if points <= 0:
        what = f"no accuracy on earlier tasks was lost by the end ({-points:+.0f} points)"
    return f"{what}, in {signs.rounds} rounds a task"


def _seen(drift: Drift) -> tuple[str, ...]:
    """The meters in sentences."""
    turn, by_chance = drift.period, drift.sampling
    if turn < TURNED:
        said = "successive rounds agree"
    elif math.isnan(by_chance):
        said = "rounds differ (period drift)"
    elif turn > ALONE * by_chance:
        said = (
            f"drawing clients at random explains only {by_chance:.2f} of it, so whole rounds "
            "differ (period drift), and more clients of the same round would not help"
        )
    else:
        said = (
            f"drawing clients at random, who weigh as much as {drift.effective:.1f} equal ones, "
            f"explains {by_chance:.2f}, so it is period drift through few and different clients; "
            "more of them in a round would help"
        )
    out = [f"rounds turn by {turn:.2f} (0: not at all, 1: a right angle): {said}"]
    if turn > BACK:
        out.append("they even turn back on each other: a smaller local.lr or fewer local.epochs "
                   "may help, too")  # fmt: skip
    if drift.client > APART:
        steady = "; the mean itself is steady" if turn < TURNED else ""
        out.append(
            f"{drift.client:.2f} of what clients send cancels in their mean: they pull in "
            f"different directions (client drift){steady}"
        )
    elif not math.isnan(drift.client):
        out.append(f"{drift.client:.2f} of what clients send cancels in their mean: no more than "
                   "a moderate client drift")  # fmt: skip
    return tuple(out)


def _changed(records: Sequence[Record]) -> float:
    """Mean distance of a client's labels in successive rounds of its within a task, less what
    chance makes it."""
    held: dict[tuple[str, int], list[dict[str, int]]] = {}
    for r in records:
        if r["metric"] == "labels" and isinstance(r["value"], dict):
            for client, own in r["value"].get("clients", {}).items():
                held.setdefault((client, r["task"]), []).append(own)
    pairs = [pair for own in held.values() for pair in pairwise(own) if all(pair)]
    if not pairs:
        return math.nan
    random = rng(0, "labels")
    return float(np.mean([_distance(a, b, random) for a, b in pairs]))


def _distance(a: dict[str, int], b: dict[str, int], random: np.random.Generator) -> float:
    names = sorted({*a, *b})
    first, second = (np.array([own.get(name, 0) for name in names]) for own in (a, b))
    if len(names) < 2 or np.array_equal(first, second):
        return 0.0
    found = change(first, second, random, DRAWS)
    return max(0.0, found.value - found.chance)
