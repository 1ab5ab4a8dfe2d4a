"""`everfed reproduce NAME`: a paper's experiment run anew, ours beside the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.table import Table

from everfed.errors import EverfedError


@dataclass
class Finding:
    """A claim of the paper, what was measured, and whether it holds."""

    claim: str
    found: str
    holds: bool


@dataclass
class Outcome:
    """What a reproduction prints."""

    tables: list[Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        held = sum(finding.holds for finding in self.findings)
        if held == len(self.findings):
            return "reproduced"
        return f"not reproduced: {held} of {len(self.findings)} claims hold"


@dataclass(frozen=True)
class Reproduction:
    """An experiment by name; `go(quick)` runs it."""

    name: str
    what: str
    go: Callable[[bool], Outcome]


def find(name: str) -> Reproduction:
    """The reproduction of that name."""
    from everfed.reproduce import cfl_nqm

    known = {one.name: one for one in (cfl_nqm.REPRODUCTION,)}
    if name not in known:
        raise EverfedError(f"there is no reproduction {name!r}; there are {', '.join(known)}")
    return known[name]
