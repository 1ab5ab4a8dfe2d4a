"""Several methods and seeds on one stream, each run in a process and a folder of its own."""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from everfed import config as configs
from everfed.data.table import Data
from everfed.engines import pool
from everfed.errors import EverfedError
from everfed.folder import RunFolder
from everfed.records import run_name
from everfed.runs import Interrupted, Progress


@dataclass(frozen=True)
class Entry:
    """One run of a comparison."""

    method: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"


#: told of every round of every run, of what made one fail, and once with None when one has ended
Listener = Callable[[Entry, Progress | str | None], None]


def plan(config: configs.Config, folder: Path) -> list[Entry]:
    """All runs, seed by seed so that a first comparison of all methods is there early."""
    return [
        Entry(method, seed, folder / run_name(method, seed))
        for seed in config.compare.seeds
        for method in config.compare.methods
    ]


def prepare(config: configs.Config) -> Data:
    """The data that the runs share; what is missing or impossible is told at once."""
    for name in config.compare.methods:
        configs.runnable({"name": name}, config)
    read = configs.table(config)
    for name in config.compare.methods:
        configs.experiment(config, name, read=read).check()
    return read


def create(config: configs.Config, folder: Path) -> None:
    """A comparison's folder, with the configuration that its runs share."""
    if (folder / "compare.json").exists():
        raise EverfedError(
            f"{folder} holds a comparison already: go on with 'everfed resume {folder}', or choose "
            "another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config.model_dump(exclude_none=True), indent=1)
        (folder / "compare.json").write_text(text)
    except OSError as error:
        raise EverfedError(f"{folder} cannot be written: {error.strerror}") from None


def opened(folder: Path) -> configs.Config:
    """The configuration of a comparison's folder."""
    try:
        return configs.parse(json.loads((folder / "compare.json").read_text()))
    except (OSError, ValueError) as error:
        raise EverfedError(f"{folder / 'compare.json'} cannot be read: {error}") from None


def run_all(
    config: configs.Config,
    folder: Path,
    jobs: int | None = None,
    listener: Listener | None = None,
    read: Data | None = None,
) -> list[str]:
    """Run what is not finished yet, `jobs` at a time; runs that were begun go on. Gives notes on
    what was left out or found damaged."""
    waiting = [entry for entry in plan(config, folder) if not finished(entry.folder)]
    forks = sys.platform == "linux"
    context: Any = mp.get_context("fork" if forks else "spawn")
    if read is None and forks and waiting:
        read = configs.table(config)  # once; the runs' processes share it
    running: dict[Connection, tuple[Entry, Any]] = {}
    failures: list[str] = []
    notes: dict[str, list[str]] = {}
    stopped = False

    def fail(entry: Entry, why: str) -> None:
        failures.append(f"{entry.name}: {why}")
        if listener:
            listener(entry, why)

    try:
        while waiting or running:
            while waiting and not stopped and len(running) < (jobs or pool.cores()):
                entry = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_one, args=(config, entry, theirs, read if forks else None)
                )
                process.start()
                theirs.close()
                running[ours] = (entry, process)
            if stopped and not running:
                break
            try:
                ready = wait(list(running))
            except KeyboardInterrupt:  # the runs have got it too: let them save
                stopped = True
                continue
            for pipe in ready:
                assert isinstance(pipe, Connection)
                entry, process = running[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    process.join()
                    if process.exitcode:
                        fail(entry, f"its process died ({process.exitcode})")
                    del running[pipe]
                    if listener:
                        listener(entry, None)
                    continue
                if isinstance(message, tuple):
                    for note in message:
                        notes.setdefault(note, []).append(entry.name)
                elif isinstance(message, str):
                    stopped = stopped or message == "interrupted"
                    if message != "interrupted":
                        fail(entry, message)
                elif listener:
                    listener(entry, message)
    finally:
        for _, process in running.values():
            process.terminate()
    if failures:
        raise EverfedError("; ".join(failures))
    if stopped:
        raise Interrupted(f"stopped; go on with: everfed resume {folder}")
    # what all runs say is said once
    return [text if len(who) > 1 else f"{who[0]}: {text}" for text, who in notes.items()]


def _one(config: configs.Config, entry: Entry, pipe: Connection, read: Data | None) -> None:
    """A run in its own process."""
    torch.set_num_threads(1)  # before any work: OpenMP's threads do not survive a fork
    pool.die_with_parent()
    try:
        begun = (entry.folder / "config.json").exists()
        made = configs.experiment(config, entry.method, entry.seed, read)
        done = made.go(workers=1, folder=entry.folder, resume=begun, on_round=pipe.send)
        pipe.send(done.notes)
    except (Interrupted, BrokenPipeError, KeyboardInterrupt):
        pipe.send("interrupted")
    except EverfedError as error:
        pipe.send(str(error))


def finished(folder: Path) -> bool:
    """Whether the run in a folder has come to its end."""
    return (folder / "config.json").exists() and RunFolder(folder).done()
