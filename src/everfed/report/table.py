"""The summary table of one run or of a comparison: for the terminal, LaTeX, Markdown, the page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from everfed.metrics import Summary

#: several runs' summaries by method
Summaries = Mapping[str, Sequence[Summary]]


@dataclass(frozen=True)
class Column:
    """One measure of the table."""

    name: str
    attribute: str  #: of Summary
    factor: float
    what: str
    more: bool | None = None  #: whether more is better (None: neither)
    narrow: bool = True  #: whether a narrow table has it, too
    digits: int = 1
    ranks: bool = False  #: whether it is of candidates that are ranked


COLUMNS = (
    Column("ACC %", "acc", 100, "mean accuracy over all tasks at the end", True),
    Column("AUC %", "auc", 100, "pairs in which the better candidate is ahead", True, ranks=True),
    Column("HR@5 %", "hr_5", 100, "lists whose item is in the first 5", True, False, ranks=True),
    Column("HR@10 %", "hr_10", 100, "lists whose item is in the first 10", True, ranks=True),
    Column("NDCG@5 %", "ndcg_5", 100, "the same, by place", True, False, ranks=True),
    Column("NDCG@10 %", "ndcg_10", 100, "the same, by place", True, ranks=True),
    Column("BWT", "bwt", 100, "what became of earlier tasks; negative: forgotten", True),
    Column("forgetting", "forgetting", 100, "accuracy lost on earlier tasks, -BWT", False, False),
    Column("worst drop", "worst_drop", 100, "the largest loss on one earlier task", True),
    Column("rounds to best", "rounds_to_best", 1, "rounds to each task's best, summed", False),
    Column("s/round", "seconds_per_round", 1, "seconds of a round, with its tests", digits=2),
    Column("MB sent", "mb_sent", 1, "to clients and back"),
    Column("client MB", "client_mb", 1, "the most that one client held", digits=2),
    Column("peak MB", "peak_mb", 1, "the most memory of the process or the GPU", None, False, 0),
)


@dataclass(frozen=True)
class Cell:
    """A measure over a method's runs."""

    mean: float
    std: float  #: NaN with fewer than two runs
    best: bool = False
    digits: int = 1

    def text(self, join: str = " ± ", none: str = "–") -> str:
        """mean ± standard deviation."""
        if math.isnan(self.mean):
            return none
        mean = round(self.mean, self.digits) + 0.0  # never -0.0
        std = "" if math.isnan(self.std) else f"{join}{self.std:.{self.digits}f}"
        return f"{mean:.{self.digits}f}{std}"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of a sample, n - 1) over what is known."""
    known = [v for v in values if not math.isnan(v)]
    mean = float(np.mean(known)) if known else math.nan
    return mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def columns_of(runs: Summaries) -> list[Column]:
    """The columns of a table of these runs: where candidates are ranked, all that is known; else
    all that is not of ranking."""
    everyone = [summary for own in runs.values() for summary in own]

    def known(column: Column) -> bool:
        return not all(math.isnan(getattr(summary, column.attribute)) for summary in everyone)

    if any(column.ranks and known(column) for column in COLUMNS):
        return [column for column in COLUMNS if known(column)]
    return [column for column in COLUMNS if not column.ranks]


def cells(runs: Summaries) -> dict[str, list[Cell]]:
    """The table's rows by method; the best of each column is marked where there is a choice."""
    columns = []
    for c in columns_of(runs):
        own = {m: spread([c.factor * getattr(s, c.attribute) for s in r]) for m, r in runs.items()}
        known = {m: mean for m, (mean, _) in own.items() if not math.isnan(mean)}
        best = None
        if c.more is not None and len(known) > 1:
            best = (max if c.more else min)(known.values())
        columns.append(
            {m: Cell(mean, std, mean == best, c.digits) for m, (mean, std) in own.items()}
        )
    return {method: [column[method] for column in columns] for method in runs}


def table(runs: Summaries, title: str | None = None, narrow: bool = False) -> Table:
    """For the terminal: the best of each column in bold. A narrow table has the deviations under
    the means, and leaves some columns out."""
    out = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )
    out.add_column("method", no_wrap=True)
    columns = columns_of(runs)
    shown = [k for k, column in enumerate(columns) if column.narrow or not narrow]
    for column in (columns[k] for k in shown):
        short = column.name.replace(" ", "\n")
        out.add_column(short if narrow else column.name, justify="right", no_wrap=True)
    join = "\n± " if narrow else " ± "
    for method, row in cells(runs).items():
        own = [row[k] for k in shown]
        texts = [Text(cell.text(join), "bold green" if cell.best else "") for cell in own]
        out.add_row(Text(method), *texts)
    return out


def markdown(runs: Summaries) -> str:
    """A Markdown table, the best of each column in bold."""
    columns = columns_of(runs)
    lines = ["| method | " + " | ".join(c.name for c in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for method, row in cells(runs).items():
        shown = [f"**{cell.text()}**" if cell.best else cell.text() for cell in row]
        lines.append("| " + " | ".join([escape_markdown(method), *shown]) + " |")
    return "\n".join(lines)


def latex(runs: Summaries) -> str:
    """A LaTeX table (with booktabs), the best of each column in bold."""
    columns = columns_of(runs)
    lines = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    lines.append(" & ".join(["method", *(escape_latex(c.name) for c in columns)]) + r" \\")
    lines.append(r"\midrule")
    for method, row in cells(runs).items():
        texts = [(cell.text(r" $\pm$ ", none="--"), cell.best) for cell in row]
        shown = [rf"\textbf{{{text}}}" if best else text for text, best in texts]
        lines.append(" & ".join([escape_latex(method), *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escape_markdown(text: str) -> str:
    r"""Text that Markdown leaves as it is.

    >>> print(escape_markdown("a|b_c <b>"))
    a\|b\_c \<b\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~!&$])", r"\\\1", " ".join(text.split()))


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> print(escape_latex("cfl_coreset 5%"))
    cfl\_coreset 5\%
    """
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def trouble(runs: Summaries) -> list[str]:
    """What was skipped or lost, in words."""
    out = []
    for method, own in runs.items():
        for attribute, words in (
            ("dropped_updates", "client updates were dropped (NaN, infinity or wrong shape)"),
            ("lost_rounds", "rounds were lost (no usable update)"),
            ("empty_clients", "client turns were skipped (no samples)"),
        ):
            count = sum(getattr(summary, attribute) for summary in own)
            if count:
                out.append(f"{method}: {count} {words}")
    return out
