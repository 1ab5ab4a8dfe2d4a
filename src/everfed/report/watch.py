"""`everfed watch`: a live view of running or finished runs, from their records alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everfed.errors import EverfedError
from everfed.metrics import Record, drift
from everfed.records import Loaded, members, parse, read_config
from everfed.report.table import breadth, decimals

try:
    import fcntl
except ImportError:  # Windows: folders have no lock, so nobody knows
    fcntl = None  # type: ignore[assignment]

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = (
    "run", "rounds", "bar", "task", "now %", "accuracy", "period drift", "client drift", "s/round",
    "state",
)  # fmt: skip
#: columns with the length of the curve, from the widest; the first that fits is shown
LAYOUTS = [
    *((COLUMNS, room) for room in (32, 22)),
    *((("run", "rounds", "bar", "task", "now %", "accuracy", "s/round", "state"), room)
      for room in (32, 22, 12)),
    (("run", "rounds", "now %", "accuracy", "state"), 12),
    (("run", "rounds", "now %", "state"), 12),
]  # fmt: skip


@dataclass
class Tail:
    """A run whose records are read as they grow."""

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    skipped: int = 0
    free: bool = False  #: whether nobody was running it when it was last read
    _read: int = 0
    _changed: int = 0

    def update(self) -> None:
        """Read what is new; a line that is still being written waits for the next time."""
        if not (self.folder / "config.json").exists():
            return
        self.about = self.about or read_config(self.folder)
        try:
            self._ask((self.folder / "records.jsonl").stat().st_mtime_ns)
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

    def _ask(self, changed: int) -> None:
        """Ask who holds the folder, before its records are read: a run that ends writes first. Not
        again while it is free and nothing changes: a run that begins must find it so."""
        if not self.free or changed != self._changed:
            self.free, self._changed = _free(self.folder), changed

    @property
    def run(self) -> Loaded:
        return Loaded(self.folder, self.about, self.records, self.skipped)

    @property
    def finished(self) -> bool:
        return self.run.rounds is not None and self.run.rounds_done >= (self.run.rounds or 0)

    @property
    def stopped(self) -> bool:
        return self.free and not self.finished

    def quiet(self) -> float:
        """Seconds since the records last grew."""
        try:
            return max(0.0, time.time() - (self.folder / "records.jsonl").stat().st_mtime)
        except OSError:
            return 0.0


def watch(paths: Sequence[Path], console: Console, once: bool = False, every: float = 1.0) -> None:
    """Show the runs until all are finished (or once); nothing is written, no lock is kept."""
    for path in paths:
        if members(path) == [path]:
            read_config(path)  # tells at once if it is no run
    tails = {path: [Tail(folder) for folder in members(path)] for path in paths}
    everyone = [tail for own in tails.values() for tail in own]

    def shown() -> list[Table | Text]:
        for tail in everyone:
            tail.update()
        ways = [go_on(path, own) for path, own in tails.items()]
        return [view(everyone, console.width), *(Text(way, "yellow") for way in ways if way)]

    if once or not console.is_terminal:
        first, *lines = shown()
        console.print(first)
        for line in lines:
            console.print(line, soft_wrap=True)  # a path that is broken cannot be copied
        return
    with Live(Group(*shown()), console=console, auto_refresh=False) as live:
        while not all(tail.finished for tail in everyone):
            time.sleep(every)
            live.update(Group(*shown()), refresh=True)


def go_on(path: Path, tails: Sequence[Tail]) -> str:
    """How to go on with a run or a comparison that has stopped; nothing while it runs."""
    stopped = [tail for tail in tails if tail.stopped]
    if not stopped or not all(tail.free or not tail.about for tail in tails):
        return ""
    how = f"go on with: everfed resume {path}"
    if stopped[0].about.get("config") is None:  # begun from Python
        how = f"go on with everfed.run(..., folder={str(path)!r}, resume=True)"
    if len(tails) > 1:
        return f"{len(stopped)} of {len(tails)} runs in {path} stopped; {how}"
    run = stopped[0].run
    return f"stopped after round {run.rounds_done} of {run.rounds or '?'}; {how}"


def _free(folder: Path) -> bool:
    """Whether no process holds a run's folder. A lock that is free is taken for a moment only,
    and shared, so that viewers do not mistake each other for runs."""
    if fcntl is None:
        return False
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held; or not ours to read
        return False
    return True


def view(tails: Sequence[Tail], width: int = 120) -> Table:
    """One row a run, with the columns that there is room for."""
    rows = [_row(tail) for tail in tails]
    for columns, room in LAYOUTS:
        out = _view(rows, columns, room)
        if breadth(out) <= width:
            break
    skipped = sum(tail.skipped for tail in tails)
    if skipped:
        out.caption = f"skipped {skipped} half-written record line(s)"
    return out


def _view(rows: Sequence[dict[str, Any]], columns: Sequence[str], room: int) -> Table:
    out = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), expand=False)
    for name in columns:
        right = name in ("rounds", "now %", "period drift", "client drift", "s/round")
        head = {"accuracy": "accuracy of tasks seen", "bar": ""}.get(name, name)
        out.add_column(
            head if len(head) <= max(room, 12) else name,
            justify="right" if right else "left",
            no_wrap=name != "run",
            overflow="fold",
        )
    for row in rows:
        shown = row | {"accuracy": Text(spark(row["accuracy"], room), "green")}
        out.add_row(*(shown[name] for name in columns))
    return out


def _row(tail: Tail) -> dict[str, Any]:
    """A run's columns, with the curve still in numbers."""
    run = tail.run
    if not tail.records:
        state = Text("stopped", "yellow") if tail.stopped else Text("waiting", "dim")
        nothing = dict.fromkeys(COLUMNS, Text(""))
        return nothing | {"run": Text(tail.folder.name), "accuracy": [], "state": state}
    done, total = run.rounds_done, run.rounds
    task = max(r["task"] for r in tail.records)
    curve = _curve(tail.records)
    seen = drift(tail.records, since=done - 10)
    seconds = [r["value"] for r in tail.records if r["metric"] == "seconds" and r["value"]][-20:]
    pace = float(np.median(seconds)) if seconds else 0.0
    return {
        "run": Text(f"{run.method} seed {run.seed}"),
        "rounds": Text(f"{done}/{total}" if total else f"{done}"),
        "bar": Text(_bar(done / total if total else 0.0, 12), "cyan"),
        "task": Text(_cut(run.tasks[task] if task < len(run.tasks) else "?", 16)),
        "now %": Text(f"{curve[-1]:.1f}" if curve else "–"),
        "accuracy": curve,
        "period drift": Text(f"{seen.period:.2f}" if seen else "–"),
        "client drift": Text(f"{seen.client:.2f}" if seen and seen.client == seen.client else "–"),
        "s/round": Text(f"{pace:.{decimals(pace, 2)}f}"),
        "state": _state(tail, pace),
    }


def _state(tail: Tail, pace: float) -> Text:
    if tail.finished:
        return Text("finished", "green")
    if tail.stopped:
        return Text("stopped", "yellow")
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
