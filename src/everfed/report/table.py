"""The summary table of one run or of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.table import Table

from everfed.metrics import Summary

#: column, attribute of Summary, factor, decimals, whether more is better (None: neither)
COLUMNS: tuple[tuple[str, str, float, int, bool | None], ...] = (
    ("ACC %", "acc", 100, 1, True),
    ("BWT", "bwt", 100, 1, True),
    ("forgetting", "forgetting", 100, 1, False),
    ("worst drop", "worst_drop", 100, 1, True),
    ("rounds to best", "rounds_to_best", 1, 1, False),
    ("seconds", "seconds", 1, 1, None),
    ("MB sent", "mb_sent", 1, 1, None),
)


def cell(values: Sequence[float], decimals: int, join: str = " ") -> str:
    """mean ± standard deviation over runs."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return "–"
    text = f"{np.mean(known):.{decimals}f}"
    return text if len(known) == 1 else f"{text}{join}± {np.std(known, ddof=1):.{decimals}f}"


def table(
    runs: Mapping[str, Sequence[Summary]], title: str | None = None, narrow: bool = False
) -> Table:
    """One row a method, mean ± std over its runs, the best of each column in bold.

    A narrow table has the deviations under the means.
    """
    out = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
    )
    out.add_column("method", no_wrap=True)
    for name, *_ in COLUMNS:
        short = name.replace(" ", "\n").replace("getting", "-\ngetting")
        out.add_column(short if narrow else name, justify="right", no_wrap=True)
    join = "\n" if narrow else " "
    best = {}
    for _, attribute, factor, _, more in COLUMNS:
        means = {m: _mean([factor * getattr(s, attribute) for s in own]) for m, own in runs.items()}
        finite = {m: v for m, v in means.items() if not math.isnan(v)}
        if more is not None and len(finite) > 1:
            best[attribute] = (max if more else min)(finite, key=lambda m: finite[m])
    for method, own in runs.items():
        row = []
        for _, attribute, factor, decimals, _ in COLUMNS:
            text = cell([factor * getattr(s, attribute) for s in own], decimals, join)
            row.append(f"[bold green]{text}[/]" if best.get(attribute) == method else text)
        out.add_row(method, *row)
    return out


def trouble(runs: Mapping[str, Sequence[Summary]]) -> list[str]:
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


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return float(np.mean(known)) if known else math.nan
