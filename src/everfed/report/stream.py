"""`everfed stream`: a stream in a table and a picture, before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from rich import box
from rich.table import Table
from rich.text import Text

from everfed.errors import EverfedError
from everfed.report.figure import bubbles, plain
from everfed.report.table import breadth, without
from everfed.streams.drift import Estimate, Look, Task
from everfed.streams.stream import Stream
from everfed.theory.measure import ENOUGH, Measured

#: what columns say; the others speak for themselves
EXPLAINED = {
    "of a client": "Of a client: least, median and most samples.",
    "label skew": "Label skew: TV between a client's labels and all clients', mean.",
    "labels TV": "Labels TV: of all labels, to the task before.",
    "JS": "JS: Jensen-Shannon divergence of all labels to the task before, in bits.",
    "inputs": "Inputs: distance of mean inputs to the task before, over the root of the inputs' "
    "total variance.",
    "round TV": "Round TV: of all labels, between a task's consecutive data.",
    "client TV": "Client TV: between a client's consecutive data sets.",
}
BRACKETS = (
    "TV: total variation distance, 0 equal, 1 disjoint; in brackets what chance alone gives for as "
    "many samples."
)
#: what goes first where there is no room
LEAST = ("JS", "data sets", "samples", "of a client", "inputs", "rounds", "round TV", "labels TV")

MEASURED = (
    "Squared lengths of the full gradients' parts, ± their standard error over clients, and as "
    "shares of the squared length of the mean gradient. Client drift: a client's own for good. "
    "Time drift: its own in one round, beyond what its finitely many samples give by chance; α is "
    "its correlation from round to round. Common drift: the same for all clients in one round. "
    "CFL's weights of past rounds: everfed theory weights ROUNDS --drift D² --alpha α --loss R²."
)


LIMIT = "At the limit: 0 comes nearest whichever client is left out, so there is no error to tell."
SLOW = (
    f"Where a client's data change fewer than {ENOUGH} times, what stays cannot be told from what "
    "passes slowly: look at more rounds, or tasks."
)


def drifts(found: Measured) -> Table:
    """What `everfed theory drift` prints."""
    out = Table(header_style="bold", box=box.SIMPLE_HEAD, caption_justify="left")
    for head in ("", "", "value", "share"):
        out.add_column(head, justify="right" if head else "left", no_wrap=head != "value")
    drift, error = found.drift, found.error
    told = found.changes == 0 or found.changes >= ENOUGH

    def row(sign: str, name: str, text: str, value: float) -> None:
        out.add_row(sign, name, text, f"{value / found.length:.2f}" if found.length else "–")

    if told:
        row("G²", "client drift", _fit(drift.client, error.client), drift.client)
        row("D²", "time drift", _fit(drift.time, error.time), drift.time)
        seen = drift.time > 2 * error.time  # otherwise there is nothing to be correlated
        correlation = f"{drift.alpha:.2f} ± {error.alpha:.1g}" if seen else "–"
        out.add_row("α", "its correlation", correlation, "")
        if not all((error.client, error.time)):
            out.caption = LIMIT
    else:
        few = f"too few changes ({found.changes}) to tell"
        both = drift.client + drift.time
        out.add_row("G²", "client drift", few, "")
        row("D²", "time drift", f"{both:.3g} with G²", both)
        out.add_row("α", "its correlation", "–", "")
        out.caption = SLOW
    row("C²", "common drift", f"{found.common:.3g}", found.common)
    row("N²", "chance", f"{found.chance:.3g}", found.chance)
    return out


def _fit(value: float, error: float) -> str:
    """An estimate; at its limit, where no client's absence moves it, an error says nothing."""
    return f"{value:.3g} ± {error:.1g}" if error else f"{value:.3g}, at the limit"


def table(seen: Look, width: int) -> tuple[Table, str]:
    """One row a task, without columns that have nothing to say, and what the others mean. A narrow
    table has what chance gives under the estimates; columns that it leaves out are named."""
    known = [_cells(task, narrow=False) for task in seen.tasks]
    heads = [head for head in known[0] if any(row[head] != "–" for row in known)]
    out, shown = _table(seen, heads, narrow=False), heads
    if breadth(out) > width:
        out = _table(seen, shown, narrow=True)
    for head in LEAST:
        if breadth(out) <= width:
            break
        shown = [other for other in shown if other != head]
        out = _table(seen, shown, narrow=True)
    said = [EXPLAINED[head] for head in shown if head in EXPLAINED]
    said += [BRACKETS] if any("(" in row[head] for row in known for head in shown) else []
    away = without([head for head in heads if head not in shown])
    return out, _counted(seen, " ".join([*said, away]).strip())


def _table(seen: Look, heads: Sequence[str], narrow: bool) -> Table:
    out = Table(
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1) if narrow else (0, 1),
        show_edge=not narrow,
        pad_edge=False,
    )
    out.add_column("task", max_width=16 if narrow else None, overflow="fold")
    for head in (_counted(seen, head) for head in heads):
        out.add_column(head.replace(" ", "\n") if narrow else head, justify="right", no_wrap=True)
    for task in seen.tasks:
        row = _cells(task, narrow)
        out.add_row(Text(task.name), *(row[head] for head in heads))
    return out


def _counted(seen: Look, text: str) -> str:
    """Text on labels, said of domains where those are counted."""
    if seen.counted == "class":
        return text
    return text.replace("label", seen.counted).replace("Label", seen.counted.capitalize())


def _cells(task: Task, narrow: bool) -> dict[str, str]:
    sizes = [f"{n:.0f}" for n in task.sizes]
    join = "\n" if narrow else " "
    return {
        "rounds": str(task.rounds),
        "data sets": str(task.moments),
        "samples": f"{task.samples:.0f}",
        "of a client": ("–" if narrow else " – ").join(sizes),
        "label skew": _distance(task.skew, join),
        "labels TV": _distance(task.labels, join),
        "JS": _number(task.js),
        "inputs": _number(task.inputs),
        "round TV": _distance(task.round, join),
        "client TV": _distance(task.client, join),
    }


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _distance(found: Estimate, join: str) -> str:
    return "–" if math.isnan(found.value) else f"{found.value:.2f}{join}({found.chance:.2f})"


def picture(stream: Stream, seen: Look, path: Path, shown: int = 7) -> None:
    """Bubbles: classes of all clients together and of the first few; without classes, samples.
    And who is online, where not all are."""
    come_and_go = not seen.there.all()
    panels = [("all clients", seen.held.sum(1))]
    if len(seen.clients) > 1:
        some = seen.clients[: shown - come_and_go]
        panels += [(f"client {client}", seen.held[:, k]) for k, client in enumerate(some)]
    if not seen.classes:
        panels = [("samples of each client", seen.held[:, :40, 0])]
    rows, moments = panels[0][1].shape[1], len(seen.rounds)
    names = seen.names if seen.classes else [str(client) for client in seen.clients[:40]]
    few = moments <= 15  # data sets that last for rounds stand side by side
    wide = 1.0 + 0.28 * max(4, moments) if few else 5.2
    tall = max(1.7, 0.17 * min(rows, 30) + 0.8)
    count = len(panels) + come_and_go
    columns = min(count, max(1, min(4, int(11 / wide))))
    with plain():
        figure, axes = plt.subplots(
            -(-count // columns), columns, squeeze=False, layout="constrained",
            figsize=(wide * columns, tall * -(-count // columns)),
        )  # fmt: skip
        for axis in axes.ravel()[count:]:
            axis.set_visible(False)
        if come_and_go:
            _online(axes.ravel()[count - 1], seen)
        for axis, (title, held) in zip(axes.ravel(), panels, strict=False):
            x = list(range(moments)) if few else seen.rounds
            gap = min(0.17, (wide - 1) / moments, 0.9 * (tall - 0.8) / rows)
            found = [(m, c, held[m, c]) for m, c in np.argwhere(held > 0)]
            if found:
                bubbles(axis, x, names, found, max(0.03, gap))
            axis.set_title(title, loc="left", fontsize=9)
            axis.set_ylabel(seen.counted if seen.classes else "client", fontsize=8)
            if few:
                axis.set_xticks(x, [str(t) for t in seen.rounds])
                axis.set_xlim(-0.7, moments - 0.3)
                axis.set_xlabel("from round", fontsize=8)
            else:
                axis.set_xlim(1 - 0.02 * stream.rounds, 1.02 * stream.rounds)
                for edge in np.cumsum([stream.length(k) for k in range(len(stream.tasks) - 1)]):
                    axis.axvline(edge + 0.5, color="0.75", lw=0.8, ls=":")
            axis.tick_params(labelsize=7)
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError) as error:
            raise EverfedError(f"{path} cannot be written: {error}") from None
        finally:
            plt.close(figure)


def _online(axis: Axes, seen: Look) -> None:
    """Which clients are there, round by round."""
    some = seen.there[:, :40]
    spread = (seen.times[0] - 0.5, seen.times[-1] + 0.5, some.shape[1] - 0.5, -0.5)
    axis.imshow(
        some.T, aspect="auto", interpolation="nearest", cmap="Blues", vmax=1.4, extent=spread
    )
    axis.set_title("online", loc="left", fontsize=9)
    axis.set_ylabel("client", fontsize=8)
    axis.set_xlabel("round")
    places = np.linspace(0, some.shape[1] - 1, min(6, some.shape[1])).astype(int)
    axis.set_yticks(places, [str(seen.clients[k]) for k in places])
    axis.tick_params(labelsize=7)
