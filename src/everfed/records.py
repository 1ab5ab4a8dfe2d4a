"""Runs as read from their folders: what was run and what was recorded. Works without torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.errors import EverfedError
from everfed.metrics import Record, Summary, summarise

#: the longest name of a method with its settings
BRIEF = 24


@dataclass(frozen=True)
class Loaded:
    """A run as read from its folder."""

    folder: Path
    about: dict[str, Any]  #: its config.json
    records: list[Record]
    skipped: int = 0  #: half-written lines

    @property
    def method(self) -> str:
        return shown(_table(self.about, "method").get("name", "?"))

    @property
    def seed(self) -> Any:
        return self.about.get("seed", "?")

    @property
    def place(self) -> str:
        """The name of its folder, or of its comparison's."""
        inside = self.folder.name == run_name(self.method, self.seed)
        return shown((self.folder.resolve().parent if inside else self.folder.resolve()).name)

    @property
    def in_time_order(self) -> bool:
        """Whether its tasks are blocks of time."""
        return _table(self.about, "stream").get("stream") == "Blocks"

    @property
    def tasks(self) -> list[str]:
        known = self.about.get("tasks") or []
        return [shown(name) for name in known] or [f"task {k + 1}" for k in range(self._last_task)]

    @property
    def _last_task(self) -> int:
        return 1 + max((r["task"] for r in self.records), default=0)

    @property
    def rounds_done(self) -> int:
        return 1 + max((r["round"] for r in self.records), default=-1)

    @property
    def rounds(self) -> int | None:
        """Rounds of the whole run; None where an older everfed did not keep it."""
        known = self.about.get("task_rounds")
        return sum(known) if known else None

    @property
    def summary(self) -> Summary:
        """Its measures; without ACC where tasks are still to come."""
        return summarise(self.records, len(self.tasks))

    @property
    def settings(self) -> dict[str, Any]:
        """What makes runs comparable, flat: all but the seed and what follows from it."""
        out: dict[str, Any] = {}
        for part in _table(self.about, "method").get("parts", []):
            name = part.get("part", "part")
            out |= {f"{name}.{key}": value for key, value in part.items() if key != "part"}
        out["average"] = _table(self.about, "method").get("average")
        for section in ("stream", "local", "late", "boundaries"):
            own = _table(self.about, section)
            kept = {key: value for key, value in own.items() if key not in ("seed", "tasks")}
            if section == "stream" and "rounds" in kept:  # a configuration's are those of a task
                kept["all rounds"] = kept.pop("rounds")
            out |= {f"{section}.{key}": _seedless(value) for key, value in kept.items()}
        for key in ("data", "sample", "parameters", "precision"):
            out[key] = self.about.get(key)
        return out


def _seedless(value: Any) -> Any:
    """A setting without the seed that it may hold, as who is present does."""
    return {k: v for k, v in value.items() if k != "seed"} if isinstance(value, dict) else value


def run_name(method: str, seed: int) -> str:
    """The folder of one run of a comparison."""
    return f"{method}-seed{seed}"


def members(path: Path) -> list[Path]:
    """The folders of a comparison's runs, whether begun or not; a run's folder is its own."""
    if not (path / "compare.json").exists():
        return [path]
    try:
        chosen = json.loads((path / "compare.json").read_text())["compare"]
        names = [run_name(method, seed) for seed in chosen["seeds"] for method in chosen["methods"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EverfedError(f"{path / 'compare.json'} cannot be read: {error}") from None
    return [path / name for name in names]


def load(path: Path) -> Loaded:
    """Read one run's folder."""
    about = read_config(path)
    records, skipped = read_records(path)
    return Loaded(path, about, records, skipped)


def collect(paths: Sequence[Path]) -> dict[str, list[Loaded]]:
    """Runs by method; a comparison's folder stands for all of its runs that have begun."""
    found: dict[Path, Loaded] = {}
    for path in paths:
        inside = members(path)
        for folder in inside:
            if inside != [path] and not (folder / "config.json").exists():
                continue
            run = load(folder)
            if run.records:
                found[folder.resolve()] = run
            elif inside == [path]:
                raise EverfedError(f"{path} has no records yet")
    if not found:
        raise EverfedError(f"no run in {', '.join(map(str, paths))} has begun yet")
    return by_method(found.values())


def not_begun(paths: Sequence[Path]) -> list[str]:
    """A sentence on each comparison of which some runs are not there yet."""
    out = []
    for path in paths:
        inside = members(path)
        begun = sum((folder / "records.jsonl").exists() for folder in inside)
        if begun < len(inside):
            out.append(f"{path}: {len(inside) - begun} of {len(inside)} runs have not begun")
    return out


def by_method(runs: Iterable[Loaded]) -> dict[str, list[Loaded]]:
    """Runs that differ in nothing but the seed, under the method's name; where one name has been
    run with several settings, those that differ are added to it, or the folder if they are long."""
    groups: dict[str, list[Loaded]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.method, run.settings], sort_keys=True), []).append(run)
    firsts = [own[0] for own in groups.values()]
    out: dict[str, list[Loaded]] = {}
    for own in groups.values():
        namesakes = [run for run in firsts if run.method == own[0].method]
        longest = max(len(_set_apart(run, namesakes)) for run in namesakes)
        brief = len(namesakes) == 1 or longest <= BRIEF
        name = _set_apart(own[0], namesakes) if brief else f"{own[0].method} ({_places(own)})"
        while name in out:  # values that differ, but look the same
            name += "'"
        out[name] = own
    return out


def _places(runs: Sequence[Loaded]) -> str:
    first, *more = dict.fromkeys(run.place for run in runs)
    return f"{first} and {len(more)} more" if more else first


def _set_apart(run: Loaded, namesakes: Sequence[Loaded]) -> str:
    """A run's method with the settings in which it differs from others of this name."""
    apart = differing([other.settings for other in namesakes])
    own = [f"{key.split('.')[-1]}={run.settings.get(key)}" for key in apart]
    return shown(" ".join([run.method, *own]))


def differences(runs: dict[str, list[Loaded]]) -> list[str]:
    """The settings in which runs of one method differ, where their names do not tell."""
    firsts = {name: own[0] for name, own in runs.items()}
    out = []
    for name, run in firsts.items():
        namesakes = [other for other in firsts.values() if other.method == run.method]
        if name != _set_apart(run, namesakes):
            apart = differing([other.settings for other in namesakes])
            own = [f"{key} = {run.settings[key]}" for key in apart if key in run.settings]
            out.append(shown(f"{name}: {', '.join(own)}"))
    return out


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which settings differ."""
    keys = dict.fromkeys(key for own in settings for key in own)
    first = settings[0]
    return [key for key in keys if any(own.get(key) != first.get(key) for own in settings)]


def unequal(runs: dict[str, list[Loaded]]) -> list[str]:
    """Settings beside the methods' own in which runs differ: not all are on the same ground."""
    known = ("data", "sample", "parameters", "precision")
    found = differing([own[0].settings for own in runs.values()])
    sections = ("stream.", "late.", "boundaries.")
    return [key for key in found if key.startswith(sections) or key in known]


#: what readers of config.json rely on: a key's kind, and that of the items (keys) in it
KEPT: dict[str, tuple[type[Collection[Any]], type]] = {
    **dict.fromkeys(
        ("config", "method", "stream", "local", "late", "boundaries", "layout"), (dict, str)
    ),
    "tasks": (list, str),
    "task_rounds": (list, int),
}


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of the run in a folder."""
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise EverfedError(f"{path} is not a run's folder (it has no config.json)") from None
    except (OSError, ValueError) as error:
        raise EverfedError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise EverfedError(f"{path / 'config.json'} is not a run's configuration")
    for key, (kind, inside) in KEPT.items():
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, kind) or not all(isinstance(item, inside) for item in value):
            raise EverfedError(f"{path / 'config.json'} is damaged: {key} is {value!r}")
    return config


def read_records(path: Path) -> tuple[list[Record], int]:
    """All records of a run, and how many half-written lines were skipped."""
    try:
        text = (path / "records.jsonl").read_text(errors="replace")
    except OSError as error:
        raise EverfedError(f"{path / 'records.jsonl'} cannot be read: {error.strerror}") from None
    return parse(text)


def parse(text: str) -> tuple[list[Record], int]:
    """The records in a piece of text, and how many lines were none."""
    records, skipped = [], 0
    for line in text.split("\n"):
        if not line:
            continue
        try:
            record = json.loads(line, parse_constant=lambda _: None)
        except ValueError:
            record = None
        if _whole(record):
            record["metric"] = shown(record["metric"])
            records.append(record)
        else:
            skipped += 1
    return records, skipped


def _whole(record: Any) -> bool:
    """Whether a line is a record: what reads records need not ask again."""
    if not isinstance(record, dict) or "value" not in record:
        return False
    counts = [record.get("round"), record.get("task"), record.get("on", 0)]
    if not all(isinstance(n, int) and 0 <= n < 10**9 for n in counts):
        return False
    if record.get("end") and "on" not in record:
        return False
    number = record["value"] is None or isinstance(record["value"], int | float)
    return isinstance(record.get("metric"), str) and (number or record["metric"] == "labels")


def shown(name: Any) -> str:
    """A name that any terminal and file takes: without control characters and broken unicode.

    >>> shown("\\x1b[31mred")
    '�[31mred'
    """
    text = str(name)
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def _table(about: dict[str, Any], key: str) -> dict[str, Any]:
    return about.get(key) or {}
