"""`everfed reproduce NAME`: a paper's experiment run anew, ours beside the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from everfed.errors import EverfedError

FOLDER = Path(__file__).parent  #: of the presets


@dataclass
class Finding:
    """A claim, what was measured, and whether it holds."""

    claim: str
    found: str
    holds: bool
    figure: bool = False  #: whether the claim is a number, not which method is ahead
    ours: bool = False  #: whether it is not in the paper, and so does not count

    @property
    def title(self) -> str:
        """The claim, and whose it is, for readers."""
        return f"{self.claim} (not the paper's)" if self.ours else self.claim


@dataclass
class Outcome:
    """What a reproduction prints.

    >>> order = Finding("a above b", "3 to 2", True)
    >>> size = Finding("a is 5", "3", False, figure=True)
    >>> Outcome([], [order, size]).verdict
    'ordering only: 0 of 1 figures are as in the paper'
    """

    tables: list[Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    short: bool = False  #: whether the runs are too short to say anything of the paper
    #: whether the paper's figures are of another size of network or data, and are not to be met
    smaller: bool = False

    @property
    def verdict(self) -> str:
        if self.short:
            return "too short for a verdict: run it without --quick"
        theirs = [finding for finding in self.findings if not finding.ours]
        held = sum(finding.holds for finding in theirs)
        if held == len(theirs):
            smaller = "ordering only: the figures are of a larger experiment"
            return smaller if self.smaller else "reproduced"
        if all(finding.holds for finding in theirs if not finding.figure):
            figures = [finding.holds for finding in theirs if finding.figure]
            return f"ordering only: {sum(figures)} of {len(figures)} figures are as in the paper"
        return f"not reproduced: {held} of {len(theirs)} claims hold"


@dataclass(frozen=True)
class Reproduction:
    """An experiment that is no comparison of runs; `go(quick)` runs it."""

    name: str
    what: str
    go: Callable[[bool], Outcome]


def names() -> list[str]:
    """All there are."""
    presets = (path.stem for path in FOLDER.glob("*.toml"))
    return sorted(["cfl-nqm", *presets])


def check(name: str) -> None:
    """Raise EverfedError where there is no such reproduction."""
    if name not in names():
        raise EverfedError(f"there is no reproduction {name!r}; there are {', '.join(names())}")
