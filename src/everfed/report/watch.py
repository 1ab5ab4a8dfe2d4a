"""`everfed watch`: a live view of running or finished runs, from their records alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everfed.errors import EverfedError
from everfed.metrics import Record, drift
from everfed.records import Loaded, members, parse, read_config

BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Tail:
    """A run whose records are read as they grow."""

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    skipped: int = 0
    _read: int = 0

    def update(self) -> None:
        """Read what is new; a line that is still being written waits for the next time."""
        if not (self.folder / "config.json").exists():
            return
        self.about = self.about or read_config(self.folder)
        try:
            with open(self.folder / "records.jsonl", "rb") as file:
                if file.seek(0, 2) < self._read:  # a resumed run goes back to its checkpoint
                    self.records, self.skipped, self._read = [], 0, 0
                file.seek(self._read)
                new = file.read()
        except OSError as error:
            raise EverfedError(f"{self.folder} cannot be read: {error.strerror}") from None
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        records, skipped = parse(whole.decode(errors="replace"))
        self.records += records
        self.skipped += skipped

    @property
    def run(self) -> Loaded:
        return Loaded(self.folder, self.about, self.records, self.skipped)

    @property
    def finished(self) -> bool:
        return self.run.rounds is not None and self.run.rounds_done >= (self.run.rounds or 0)

    def quiet(self) -> float:
        """Seconds since the records last grew."""
        try:
            return max(0.0, time.time() - (self.folder / "records.jsonl").stat().st_mtime)
        except OSError:
            return 0.0


def watch(paths: Sequence[Path], console: Console, once: bool = False, every: float = 1.0) -> None:
    """Show the runs until all are finished (or once); nothing is written, nothing is locked."""
    for path in paths:
        if members(path) == [path]:
            read_config(path)  # tells at once if it is no run
    tails = [Tail(folder) for path in paths for folder in members(path)]

    def shown() -> Table:
        for tail in tails:
            tail.update()
        return view(tails, console.width)

    if once or not console.is_terminal:
        console.print(shown())
        return
    with Live(shown(), console=console, auto_refresh=False) as live:
        while not all(tail.finished for tail in tails):
            time.sleep(every)
            live.update(shown(), refresh=True)


def view(tails: Sequence[Tail], width: int = 120) -> Table:
    """One row a run."""
    out = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), expand=False)
    wide, drifts = width >= 115, width >= 140
    room = min(32, width - 90 - 25 * drifts) if wide else 12
    heads = ["run", "rounds", "", "task", "now %", "accuracy of tasks seen"]
    heads += ["period drift", "client drift", "s/round", "state"]
    kept = [0, 1, 2, 3, 4, 5, *((6, 7) if drifts else ()), 8, 9] if wide else [0, 1, 4, 5, 9]
    for k in kept:
        right = heads[k] in ("rounds", "now %", "period drift", "client drift", "s/round")
        head = heads[k] if wide else heads[k].partition(" of")[0]
        out.add_column(head, justify="right" if right else "left", no_wrap=True)
    for tail in tails:
        row = _row(tail, room)
        out.add_row(*(row[k] for k in kept))
    skipped = sum(tail.skipped for tail in tails)
    if skipped:
        out.caption = f"skipped {skipped} half-written record line(s)"
    return out


def _row(tail: Tail, room: int) -> list[Text]:
    run = tail.run
    if not tail.records:
        return [Text(tail.folder.name), *[Text("")] * 8, Text("waiting", "dim")]
    done, total = run.rounds_done, run.rounds
    bar = _bar(done / total if total else 0.0, 12)
    task = max(r["task"] for r in tail.records)
    curve = _curve(tail.records)
    seen = drift(tail.records, since=done - 10)
    seconds = [r["value"] for r in tail.records if r["metric"] == "seconds" and r["value"]][-20:]
    pace = float(np.median(seconds)) if seconds else 0.0
    return [
        Text(f"{run.method} seed {run.seed}"),
        Text(f"{done}/{total}" if total else f"{done}"),
        Text(bar, "cyan"),
        Text(_cut(run.tasks[task] if task < len(run.tasks) else "?", 16)),
        Text(f"{curve[-1]:.1f}" if curve else "–"),
        Text(spark(curve, room), "green"),
        Text(f"{seen.period:.2f}" if seen else "–"),
        Text(f"{seen.client:.2f}" if seen and seen.client == seen.client else "–"),
        Text(f"{pace:.2f}"),
        _state(tail, pace),
    ]


def _state(tail: Tail, pace: float) -> Text:
    if tail.finished:
        return Text("finished", "green")
    quiet, total = tail.quiet(), tail.run.rounds
    if quiet > max(30.0, 10 * pace):
        return Text(f"no news for {quiet:.0f} s", "yellow")
    left = (total - tail.run.rounds_done) * pace if total else 0.0
    return Text(f"{left:.0f} s left" if total else "running")


def _curve(records: Sequence[Record]) -> list[float]:
    """Mean accuracy (or AUC) over the tasks tested, round by round, in %."""
    tests: dict[int, list[float]] = {}
    for r in records:
        if r["metric"] in ("accuracy", "auc") and not r.get("end") and r["value"] is not None:
            tests.setdefault(r["round"], []).append(100 * r["value"])
    return [float(np.mean(tests[at])) for at in sorted(tests)]


def spark(curve: Sequence[float], room: int) -> str:
    """A curve between 0 and 100 in a line of text.

    >>> spark([0, 50, 100], 8)
    '▁▅█'
    """
    if len(curve) > room:
        curve = [float(np.mean(part)) for part in np.array_split(np.array(curve), room)]
    return "".join(BARS[min(7, int(max(0.0, v) / 100 * 8))] for v in curve)


def _bar(share: float, room: int) -> str:
    full = round(share * room)
    return "━" * full + "╌" * (room - full)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
