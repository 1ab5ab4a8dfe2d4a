"""Tables 1, 3 and 8 of SPECIAL, on Digit-10 and PACS, at a size for two cores."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from everfed import config as configs
from everfed.metrics import Summary, summarise
from everfed.records import collect
from everfed.report.table import spread
from everfed.reproduce import Comparer, Finding, Outcome, Reproduction


class Row(NamedTuple):
    """A method's figures: ACC and BWT (Table 1), worst drop (8), rounds to best (3)."""

    acc: float
    bwt: float
    worst: float
    rounds: float


PAPER_DIGITS = {
    "fedavg": Row(58.69, -40.44, -54.73, 83),
    "fedprox": Row(58.99, -30.19, -52.60, 72),
    "fedcil": Row(50.95, -27.56, -41.14, 68),
    "mfcl": Row(61.15, -19.58, -26.31, 77),
    "sr_fdil": Row(61.63, -36.38, -52.76, 71),
    "pfeddil": Row(46.17, -20.21, -33.86, 76),
    "flwf_2t": Row(47.39, -33.02, -38.60, 67),
    "special_c": Row(50.61, -16.42, -28.06, 74),
    "special": Row(62.12, -21.78, -34.37, 63),
}
PAPER_PACS = {
    "fedavg": Row(37.79, -22.32, -30.37, 84),
    "fedprox": Row(42.99, -19.48, -26.38, 7),  # 7 rounds are a misprint
    "fedcil": Row(35.11, -10.30, -16.35, 81),
    "mfcl": Row(34.68, -14.84, -20.73, 83),
    "sr_fdil": Row(44.92, -16.05, -29.41, 76),
    "pfeddil": Row(39.76, -21.85, -27.93, 84),
    "flwf_2t": Row(43.04, -8.12, -26.29, 76),
    "special_c": Row(43.30, -16.40, -25.10, 75),
    "special": Row(45.29, -11.66, -20.38, 67),
}
#: points of ACC within which a figure counts as the paper's
NEAR = 3.0
#: what `quick` changes: enough to see that everything works, too little to judge the method
QUICK = {
    "data": {"limit": 400, "test_limit": 200},
    "stream": {"rounds": 2},
    "local": {"epochs": 1},
    "compare": {"methods": ["fedavg", "special", "special_c"], "seeds": [25]},
}


def settings(name: str, quick: bool) -> configs.Config:
    """The experiment's configuration, special_NAME.toml."""
    text = resources.files("everfed.reproduce").joinpath(f"special_{name}.toml").read_text()
    values = tomllib.loads(text)
    if quick:
        for section, changes in QUICK.items():
            known = changes if section != "data" or name == "digits" else {}
            values[section] |= known
    return configs.parse(values)


def go(name: str, paper: Mapping[str, Row], quick: bool, comparer: Comparer) -> Outcome:
    """All methods and seeds, in runs/special-NAME."""
    folder = Path("runs") / f"special-{name}{'-quick' if quick else ''}"
    comparer(settings(name, quick), folder)
    found = {m: [summarise(r.records) for r in own] for m, own in collect([folder]).items()}
    return replace(judge(found, paper), short=quick)


def judge(found: Mapping[str, Sequence[Summary]], paper: Mapping[str, Row]) -> Outcome:
    """Ours beside the paper's, and which of its claims hold."""
    ours = {
        method: Row(
            *(
                factor * spread([getattr(s, attribute) for s in own])[0]
                for attribute, factor in
                (("acc", 100), ("bwt", 100), ("worst_drop", 100), ("rounds_to_best", 1))
            )
        )
        for method, own in found.items()
    }  # fmt: skip
    table = Table(title="Ours (the paper's), means over seeds", title_justify="left")
    for column in ("method", "ACC %", "BWT", "worst drop", "rounds to best"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in [*ours, *(m for m in paper if m not in ours)]:
        table.add_row(
            method, *map(_cell, ours.get(method, [None] * 4), paper.get(method, [None] * 4))
        )
    return Outcome([table], [*_orderings(ours), *_sizes(ours, paper)])


def _cell(own: float | None, theirs: float | None) -> str:
    return f"{'–' if own is None else f'{own:.1f}'} ({'–' if theirs is None else f'{theirs:.1f}'})"


def _orderings(ours: Mapping[str, Row]) -> list[Finding]:
    special, rest = ours["special"], {m: row for m, row in ours.items() if m != "special"}
    best = max(rest, key=lambda m: rest[m].acc)
    fedavg = ours["fedavg"]
    return [
        Finding("SPECIAL has the highest ACC",
                f"{special.acc:.1f}, the next {best} {rest[best].acc:.1f}",
                special.acc > rest[best].acc),
        Finding("SPECIAL forgets less than FedAvg (BWT)",
                f"{special.bwt:.1f} to {fedavg.bwt:.1f}", special.bwt > fedavg.bwt),
        Finding("SPECIAL's worst drop is smaller than FedAvg's",
                f"{special.worst:.1f} to {fedavg.worst:.1f}", special.worst > fedavg.worst),
        Finding("SPECIAL is at its best in fewer rounds than FedAvg",
                f"{special.rounds:.0f} to {fedavg.rounds:.0f}", special.rounds < fedavg.rounds),
    ]  # fmt: skip


def _sizes(ours: Mapping[str, Row], paper: Mapping[str, Row]) -> list[Finding]:
    return [
        Finding(f"{method}'s ACC is {paper[method].acc:.1f} (within {NEAR:.0f} points)",
                f"{ours[method].acc:.1f}", abs(ours[method].acc - paper[method].acc) <= NEAR, True)
        for method in ("fedavg", "special")
    ]  # fmt: skip


DIGITS = Reproduction(
    "special-digits", "four domains of digits (SPECIAL, Tables 1, 3, 8)",
    partial(go, "digits", PAPER_DIGITS),
)  # fmt: skip
PACS = Reproduction(
    "special-pacs", "PACS at 32 pixels (SPECIAL, Tables 1, 3, 8)", partial(go, "pacs", PAPER_PACS)
)
