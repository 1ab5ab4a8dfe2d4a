"""The summary table of one run or of a comparison: for the terminal, LaTeX, Markdown, the page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text, TextType

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
    Column("s/round", "seconds_per_round", 1, "seconds of a round, with its tests", digits=3),
    Column("MB sent", "mb_sent", 1, "to clients and back"),
    Column("client MB", "client_mb", 1, "the most that one client held", digits=2),
    Column("peak MB", "peak_mb", 1, "the most memory of the process or the GPU", None, False, 0),
)
#: of a narrow table, what goes first where there is still no room
LEAST = ("client MB", "MB sent", "s/round", "rounds to best", "worst drop", "NDCG@10 %", "HR@10 %")
#: the widest name of a method in a narrow table; longer ones are folded
LABEL = 24


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


def decimals(value: float, digits: int) -> int:
    """Decimals of a number that has some: three significant digits where it would look like 0.

    >>> decimals(0.0123, 1), decimals(12.3, 1)
    (4, 1)
    """
    small = 0 < value < 10**-digits
    return 2 - math.floor(math.log10(value)) if small else digits


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
    """The table's rows by method; where there is a choice, the best of each column is marked, and
    all that lie within its deviation of it."""
    columns = []
    # a run that is not at its end yet has no ACC, and is not to be measured with those that are
    ended = {m for m, r in runs.items() if not any(math.isnan(s.acc) for s in r)} or set(runs)
    for c in columns_of(runs):
        own = {m: spread([c.factor * getattr(s, c.attribute) for s in r]) for m, r in runs.items()}
        known = [own[m] for m in runs if m in ended and not math.isnan(own[m][0])]
        best, near = math.nan, 0.0
        if c.more is not None and len(known) > 1:
            best, std = (max if c.more else min)(known, key=itemgetter(0))
            near = 0.0 if math.isnan(std) else std
        columns.append(
            {
                m: Cell(mean, std, m in ended and abs(mean - best) <= near, _digits(c, mean))
                for m, (mean, std) in own.items()
            }
        )
    return {method: [column[method] for column in columns] for method in runs}


def caption(runs: Summaries) -> str:
    """What ± and bold mean, where the table has them."""
    mean = "Mean ± standard deviation over seeds. " if _spreads(runs) else ""
    return (mean + marks(runs)).strip()


def marks(runs: Summaries) -> str:
    """What bold means, where the table has it."""
    if not any(cell.best for row in cells(runs).values() for cell in row):
        return ""
    within = ", and all that lie within its ±" if _spreads(runs) else ""
    return f"Bold: the best of a column{within}."


def _spreads(runs: Summaries) -> bool:
    return any(len(own) > 1 for own in runs.values())


def _digits(column: Column, mean: float) -> int:
    return decimals(mean, column.digits) if column.factor == 1 else column.digits


def table(runs: Summaries, title: str | None, width: int) -> Table:
    """For the terminal, with what fits into its width. A narrow table has the deviations under
    the means; columns that it leaves out are named below it."""
    columns = columns_of(runs)
    wide = _table(runs, title, columns, narrow=False)
    if breadth(wide) <= width:
        return wide
    shown = [column for column in columns if column.narrow]
    out = _table(runs, title, shown, narrow=True)
    for name in LEAST:
        if breadth(out) <= width:
            break
        shown = [column for column in shown if column.name != name]
        out = _table(runs, title, shown, narrow=True)
    away = [column.name for column in columns if column not in shown]
    out.caption = f"{out.caption} {without(away)}".strip()
    return out


def without(names: Sequence[str]) -> str:
    """What a narrow table says of columns that it has not."""
    return f"Left out, for want of room: {', '.join(names)}." if names else ""


def breadth(table: Table) -> int:
    """The width that a table needs for every cell to be whole."""
    console = Console(width=10_000)
    return console.measure(table).maximum


def split(table: Table, width: int) -> list[Table]:
    """A table in as many as it takes for every cell to be whole, each with the first column."""
    names, *columns = table.columns
    out: list[list[RichColumn]] = []
    for column in columns:
        if out and breadth(_of(table, [names, *out[-1], column])) <= width:
            out[-1].append(column)
        else:
            out.append([column])
    return [_of(table, [names, *own], table.title if own is out[0] else None) for own in out]


def _of(table: Table, columns: Sequence[RichColumn], title: TextType | None = None) -> Table:
    """Some columns of a table."""
    out = Table(title=title, title_justify="left")
    for column in columns:
        out.add_column(column.header, justify=column.justify, no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        out.add_row(*row)
    return out


def _table(runs: Summaries, title: str | None, columns: Sequence[Column], narrow: bool) -> Table:
    out = Table(
        title=title,
        title_justify="left",
        caption=marks(runs),
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )
    out.add_column("method", max_width=LABEL if narrow else None, overflow="fold")
    for column in columns:
        short = column.name.replace(" ", "\n")
        out.add_column(short if narrow else column.name, justify="right", no_wrap=True)
    join, places = "\n± " if narrow else " ± ", [columns_of(runs).index(c) for c in columns]
    for method, row in cells(runs).items():
        own = [row[k] for k in places]
        texts = [Text(cell.text(join), "bold green" if cell.best else "") for cell in own]
        out.add_row(Text(method), *texts)
    return out


def markdown(runs: Summaries) -> str:
    """A Markdown table, and what it has in bold."""
    columns = columns_of(runs)
    lines = ["| method | " + " | ".join(c.name for c in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for method, row in cells(runs).items():
        shown = [f"**{cell.text()}**" if cell.best else cell.text() for cell in row]
        lines.append("| " + " | ".join([escape_markdown(method), *shown]) + " |")
    return "\n".join([*lines, "", caption(runs)]).rstrip()


def latex(runs: Summaries) -> str:
    """A LaTeX table (with booktabs), and in a comment what its caption should say."""
    columns = columns_of(runs)
    lines = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    lines.append(" & ".join(["method", *(escape_latex(c.name) for c in columns)]) + r" \\")
    lines.append(r"\midrule")
    for method, row in cells(runs).items():
        texts = [(cell.text(r" $\pm$ ", none="--"), cell.best) for cell in row]
        shown = [rf"\textbf{{{text}}}" if best else text for text, best in texts]
        lines.append(" & ".join([escape_latex(method), *shown]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    told = caption(runs).replace("±", r"$\pm$")
    return "\n".join([*lines, f"% {told}"] if told else lines)


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
