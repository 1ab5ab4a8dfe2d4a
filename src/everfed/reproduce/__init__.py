"""`everfed reproduce NAME`: a paper's experiment run anew, ours beside the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from everfed.errors import EverfedError

if TYPE_CHECKING:
    from everfed.config import Config

#: runs a comparison in a folder, or goes on with it
Comparer = Callable[["Config", Path], None]


@dataclass
class Finding:
    """A claim of the paper, what was measured, and whether it holds."""

    claim: str
    found: str
    holds: bool
    #: whether it is of a figure's size; other claims say what is above what
    size: bool = False


@dataclass
class Outcome:
    """What a reproduction prints.

    >>> order, size = Finding("a above b", "3 to 2", True), Finding("a is 5", "3", False, size=True)
    >>> Outcome([], [order, size]).verdict
    'ordering only: 0 of 1 figures are as in the paper'
    """

    tables: list[Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    short: bool = False  #: whether the runs are too short to say anything of the paper

    @property
    def verdict(self) -> str:
        if self.short:
            return "too short for a verdict: run it without --quick"
        held = sum(finding.holds for finding in self.findings)
        if held == len(self.findings):
            return "reproduced"
        sizes = [finding.holds for finding in self.findings if finding.size]
        if sizes and all(finding.holds for finding in self.findings if not finding.size):
            return f"ordering only: {sum(sizes)} of {len(sizes)} figures are as in the paper"
        return f"not reproduced: {held} of {len(self.findings)} claims hold"


@dataclass(frozen=True)
class Reproduction:
    """An experiment by name; `go(quick, comparer)` runs it."""

    name: str
    what: str
    go: Callable[[bool, Comparer], Outcome]


def find(name: str) -> Reproduction:
    """The reproduction of that name."""
    from everfed.reproduce import cfl_nqm, special

    known = {one.name: one for one in (cfl_nqm.REPRODUCTION, special.DIGITS, special.PACS)}
    if name not in known:
        raise EverfedError(f"there is no reproduction {name!r}; there are {', '.join(known)}")
    return known[name]
