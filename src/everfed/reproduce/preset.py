"""A reproduction that is a comparison: a configuration with the paper's figures beside it.

The file is what `everfed compare` takes, and a section [paper]: `what` it is, `figures` of each
method by measure, `within` how near ours must come to a measure's figures, where it has to,
`claims` as "measure: method + points > method + points", and `ours`, claims that the paper does not
make and its verdict does not count. [quick] and [full] have the settings that
`--quick` and `--full` change: the latter gives the paper's own protocol where it asks for a GPU.
`base` names another preset, of which all but [paper] is taken where the file is silent.
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from everfed import reproduce
from everfed.config import Config, parse
from everfed.errors import EverfedError
from everfed.metrics import Record, summarise
from everfed.records import Loaded
from everfed.reproduce import Finding, Outcome, check


def scores(records: Sequence[Record], metric: str = "accuracy") -> np.ndarray:
    """A run's tests of one measure; what a task's end tells again is left out."""
    return np.array([r["value"] for r in records if r["metric"] == metric and not r.get("end")])


def best5(records: Sequence[Record]) -> float:
    """The mean of a run's five best tests (CFL's measure)."""
    return float(np.sort(scores(records))[-5:].mean())


def mean(records: Sequence[Record], metric: str) -> float:
    """Over all rounds that have it; NaN if none has."""
    found = scores(records, metric)
    return float(found.mean()) if len(found) else math.nan


def swing(tests: np.ndarray) -> float:
    """How unsteady tests are, whatever their trend: the standard deviation of one, from the
    differences of consecutive ones."""
    return float(np.diff(tests).std() / np.sqrt(2))


#: what a paper reports, from a run's records; shares in percent
MEASURES: dict[str, Callable[[Sequence[Record]], float]] = {
    "best 5": lambda records: 100 * best5(records),
    "ACC": lambda records: 100 * summarise(records).acc,
    "Fgt": lambda records: 100 * summarise(records).forgetting,
    "BWT": lambda records: 100 * summarise(records).bwt,
    "worst drop": lambda records: 100 * summarise(records).worst_drop,
    "rounds to best": lambda records: summarise(records).rounds_to_best,
    "s/round": lambda records: summarise(records).seconds_per_round,
    "client MB": lambda records: summarise(records).client_mb,
    "information loss": lambda records: mean(records, "information_loss"),
    "last 10": lambda records: 100 * float(scores(records)[-10:].mean()),
    "swing": lambda records: 100 * swing(scores(records)[-50:]),
    "Kalman gain": lambda records: mean(records, "kalman_gain"),
} | {
    name: lambda records, metric=metric: 100 * float(scores(records, metric)[-5:].mean())
    for name, metric in (("AUC", "auc"), ("HR@5", "hr@5"), ("HR@10", "hr@10"),
                         ("NDCG@5", "ndcg@5"), ("NDCG@10", "ndcg@10"))
}  # fmt: skip
SIDE = r"(?P<{0}>\w+)(?: \+ (?P<{0}_by>[\d.]+))?"
CLAIM = re.compile(rf"(?P<measure>.+): {SIDE.format('a')} (?P<than>>=?) {SIDE.format('b')}")
#: by method, then seed by seed
Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Preset:
    """See the top of the file."""

    name: str
    what: str
    figures: dict[str, dict[str, float]]  #: measure -> method -> the paper's
    claims: list[str]
    ours: list[str]
    within: dict[str, float]  #: by measure
    values: dict[str, Any]
    changes: dict[str, dict[str, Any]]  #: by size, "quick" or "full"

    def settings(self, size: str | None) -> Config:
        """What is run."""
        if size and size not in self.changes:
            raise EverfedError(f"{self.name} has no --{size}: it is the paper's size as it is")
        return parse(merged(self.values, self.changes[size]) if size else self.values)

    def judge(self, runs: Mapping[str, Sequence[Loaded]], short: bool = False) -> Outcome:
        """Ours beside the paper's; short runs give no verdict."""
        found = {
            measure: {m: np.array([MEASURES[measure](r.records) for r in own])
                      for m, own in runs.items()}
            for measure in self.figures
        }  # fmt: skip
        return Outcome(
            [self._table(found)],
            [
                *(self._hold(claim, found) for claim in self.claims),
                *self._close(found),
                *(replace(self._hold(claim, found), ours=True) for claim in self.ours),
            ],
            short,
            smaller=not self.within,
        )

    def _table(self, found: Mapping[str, Values]) -> Table:
        """A row for each method, a column for each measure."""
        beside = " (the paper's)" if any(self.figures.values()) else ""
        table = Table(title=f"{self.what}: ours{beside}", title_justify="left")
        table.add_column("method", no_wrap=True)
        for measure in found:
            table.add_column(measure, justify="right")
        for method in next(iter(found.values())):
            table.add_row(method, *(
                said(values[method], self.figures[measure].get(method))
                for measure, values in found.items()
            ))  # fmt: skip
        return table

    def _hold(self, claim: str, found: Mapping[str, Values]) -> Finding:
        parsed = CLAIM.fullmatch(claim)
        assert parsed, claim
        values = found[parsed["measure"]]
        gap = float(values[parsed["a"]].mean() - values[parsed["b"]].mean())
        than = operator.gt if parsed["than"] == ">" else operator.ge
        least = float(parsed["b_by"] or 0) - float(parsed["a_by"] or 0)
        return Finding(claim, f"{gap:+.2f}", than(gap, least))

    def _close(self, found: Mapping[str, Values]) -> list[Finding]:
        return [
            Finding(f"{measure} of {method} within {self.within[measure]:g} of {figure:.2f}",
                    f"{values[method].mean() - figure:+.2f}",
                    abs(float(values[method].mean()) - figure) <= self.within[measure], figure=True)
            for measure, values in found.items()
            for method, figure in self.figures[measure].items()
            if measure in self.within and method in values
        ]  # fmt: skip

    def markdown(
        self, outcome: Outcome, settings: Config, runs: Mapping[str, Sequence[Loaded]]
    ) -> str:
        """The same as a page's section."""
        seeds = ", ".join(map(str, settings.compare.seeds))
        seconds = sum(summarise(run.records).seconds for own in runs.values() for run in own)
        made = made_with(str(run.about["everfed"]) for own in runs.values() for run in own)
        how = f"seeds {seeds}; {seconds / 60:.1f} min of runs; everfed {made}"
        lines = [f"`everfed reproduce {self.name}`: {how}. Verdict: **{outcome.verdict}**.", ""]
        for table in outcome.tables:
            names = [str(column.header) for column in table.columns]
            lines += [str(table.title), "", "| " + " | ".join(names) + " |"]
            lines += ["|---|" + "---:|" * (len(names) - 1)]
            cells = zip(*(column.cells for column in table.columns), strict=True)
            lines += ["| " + " | ".join(map(str, row)) + " |" for row in cells] + [""]
        lines += ["| claim | found | |", "|---|---:|---|"]
        lines += [f"| {f.title} | {f.found} | {'holds' if f.holds else 'does not hold'} |"
                  for f in outcome.findings]  # fmt: skip
        return "\n".join(lines) + "\n"


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changed settings, section by section; one that names another data set, stream, model or
    method is taken as it is.

    >>> merged({"model": {"name": "cnn", "width": 8}}, {"model": {"name": "resnet18"}})
    {'model': {'name': 'resnet18'}}
    """

    def change(old: Any, own: Any) -> Any:
        if not isinstance(old, dict) or not isinstance(own, dict):
            return own
        return own if own.get("name", old.get("name")) != old.get("name") else merged(old, own)

    return values | {key: change(values.get(key), own) for key, own in changes.items()}


def made_with(versions: Iterable[str]) -> str:
    """The versions of runs, each once.

    >>> made_with(["0.1.0, commit a1", "0.1.0, commit b2+", "0.1.0, commit a1"])
    '0.1.0, commit a1, b2+'
    """
    by: dict[str, dict[str, None]] = {}
    for version in versions:
        number, _, commit = version.partition(", commit ")
        by.setdefault(number, {}).update({commit: None} if commit else {})
    return " and ".join(
        f"{number}, commit {', '.join(commits)}" if commits else number
        for number, commits in by.items()
    )


def said(values: np.ndarray, figure: float | None = None) -> str:
    """Mean, standard deviation of several seeds, the paper's figure; nothing of what is not there.

    >>> said(np.array([60.0, 62.0]), 58.69)
    '61.00 ± 1.41 (58.69)'
    """
    if np.isnan(values).all():  # a method that has no such measure
        return ""
    spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{spread}" + ("" if figure is None else f" ({figure:.2f})")


def read(name: str) -> Preset:
    """The preset of that name."""
    check(name)
    values = _values(name)
    paper = values.pop("paper")
    changes: dict[str, Any] = {
        size: values.pop(size) for size in ("quick", "full") if size in values
    }
    return Preset(name, paper["what"], paper["figures"], paper["claims"], paper.get("ours", []),
                  paper.get("within", {}), values, changes)  # fmt: skip


def _values(name: str) -> dict[str, Any]:
    """A preset's file, with what it takes from its base."""
    values = tomllib.loads((reproduce.FOLDER / f"{name}.toml").read_text())
    if "base" not in values:
        return values
    return merged(_values(values.pop("base")) | {"paper": {}}, values)
