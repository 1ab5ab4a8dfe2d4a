"""A run's folder: configuration, records and checkpoints that survive a kill at any moment.

    config.json          what was run
    records.jsonl        one measurement a line
    checkpoints/         the two newest states of the server
    clients/             client states by client and round, those the checkpoints refer to
    asked                exchanges that were begun, where privacy is accounted for (see ledger.py)
    lock                 held while a process runs the folder

Files are written beside their place and renamed into it; numbers are safetensors and JSON, never
pickle. A checkpoint knows how long the records were, so a resumed run cuts off what came later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any

import torch

from everfed.disk import deep, failed, flat, pack, unpack, write
from everfed.errors import EverfedError
from everfed.metrics import Record
from everfed.records import read_config, read_records
from everfed.round import Federation

try:
    import fcntl
except ImportError:  # Windows: a folder is not guarded against a second process
    fcntl = None  # type: ignore[assignment]

KEPT = 2
#: open lock files; a forked worker lets go of them, or it would hold the lock of a killed parent
_LOCKS: set[IO[str]] = set()


def _let_go() -> None:
    for lock in _LOCKS:
        lock.close()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@dataclass
class Checkpoint:
    """A state that was saved, and what else was known then."""

    fed: Federation
    meta: dict[str, Any]
    lost: list[int] = field(default_factory=list)  #: clients whose states cannot be read


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records_path = path / "records.jsonl"
        #: client -> round of its newest saved state
        self.versions: dict[int, int] = {}
        #: for each checkpoint on disk, by its round, the client states that it refers to
        self._refers: dict[int, set[Path]] = {}
        self._lock: IO[str] | None = None
        self._records: FileIO | None = None

    # creating and opening --------------------------------------------------------------------
    @staticmethod
    def create(path: Path, config: Mapping[str, Any]) -> RunFolder:
        """A new folder; an existing run is never written over."""
        folder = RunFolder(path)
        if (path / "config.json").exists():
            raise EverfedError(
                f"{path} holds a run already: resume it with 'everfed resume {path}', or choose "
                "another folder"
            )
        try:
            # a run killed before its config.json was written leaves these behind, and no more
            known = {"checkpoints", "clients", "lock", "records.jsonl", "config.tmp"}
            if path.exists() and not {entry.name for entry in path.iterdir()} <= known:
                raise EverfedError(f"{path} holds other files: choose a new or an empty folder")
            for sub in ("checkpoints", "clients"):
                (path / sub).mkdir(parents=True, exist_ok=True)
            folder._take_lock()
            folder.records_path.touch()
            folder.describe(config)
        except OSError as error:
            raise failed(error, path) from error
        return folder

    def describe(self, config: Mapping[str, Any]) -> None:
        """Write down what is run."""
        write(self.path / "config.json", json.dumps(config, indent=1, default=str).encode())

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run, to go on with it."""
        folder = RunFolder(path)
        folder.config()
        folder._take_lock()
        try:
            for sub in ("checkpoints", "clients"):  # someone may have deleted them
                (path / sub).mkdir(exist_ok=True)
        except OSError as error:
            raise failed(error, path) from error
        return folder

    def _take_lock(self) -> None:
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 - held until close
        _LOCKS.add(self._lock)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise EverfedError(f"{self.path} is being run by another process") from None

    def close(self) -> None:
        if self._lock:
            _LOCKS.discard(self._lock)
            self._lock.close()
        if self._records:
            self._records.close()

    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    # records ---------------------------------------------------------------------------------
    def append(self, records: Iterable[Record]) -> None:
        rest = memoryview("".join(json.dumps(record) + "\n" for record in records).encode())
        try:
            file = self._open_records()
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise failed(error, self.path) from error

    def _open_records(self) -> FileIO:
        """Kept open, and without a buffer: what is appended can be read at once."""
        if self._records is None:
            self._records = open(self.records_path, "ab", buffering=0)  # noqa: SIM115
        return self._records

    def records(self) -> list[Record]:
        return read_records(self.path)[0]

    # checkpoints -----------------------------------------------------------------------------
    def save(self, fed: Federation, changed: Iterable[int], meta: Mapping[str, Any]) -> None:
        """Save a state; `changed` are the clients whose state is newer than the last save."""
        try:
            self._save(fed, changed, meta)
        except OSError as error:
            raise failed(error, self.path) from error

    def _save(self, fed: Federation, changed: Iterable[int], meta: Mapping[str, Any]) -> None:
        file = self._open_records()
        os.fsync(file.fileno())
        length = file.seek(0, os.SEEK_END)
        for client in changed:
            if any(v.numel() for state in fed.clients[client] for v in state.values()):
                tensors = flat(fed.clients[client])
                write(self._client(client, fed.round), pack(tensors, {}))
                self.versions[client] = fed.round
        tensors = {"w": fed.w, "buffers": fed.buffers} | flat([*fed.parts, fed.seen, *fed.late])
        tensors |= {} if fed.last is None else {"last": fed.last}
        tensors["informed"] = torch.tensor(sorted(fed.informed), dtype=torch.int64)
        full = dict(meta) | {
            "round": fed.round,
            "asked": fed.asked,
            "records": length,
            "parts": len(fed.parts),
            "late": len(fed.late),
            "found": fed.found,
            "clients": {str(k): v for k, v in self.versions.items()},
        }
        write(self._checkpoint(fed.round), pack(tensors, full))
        self._refers[fed.round] = {self._client(*item) for item in self.versions.items()}
        self._forget_old()

    def _forget_old(self) -> None:
        """Remove checkpoints beyond the newest, and client states that none of the rest needs."""
        rounds = sorted(self._refers, reverse=True)
        for round_ in rounds[KEPT:]:
            self._checkpoint(round_).unlink(missing_ok=True)
        dropped = set().union(*(self._refers.pop(round_) for round_ in rounds[KEPT:]))
        for path in dropped - set().union(*self._refers.values()):
            path.unlink(missing_ok=True)

    def _checkpoint(self, round_: int) -> Path:
        return self.path / "checkpoints" / f"{round_:08d}.safetensors"

    def _client(self, client: int, round_: int) -> Path:
        return self.path / "clients" / f"{client}-{round_}.safetensors"

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("*.safetensors"), reverse=True)

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest state that is whole, or None before one was saved, and a note on each that was
        not (it is set aside). Where clients' states are damaged in every checkpoint, the newest is
        taken and they begin anew, as a site does that has lost its disk.

        Only for the process that holds the folder.
        """
        found: Checkpoint | None = None
        aside: dict[Path, str] = {}
        for path in self._checkpoints():
            try:
                if found is None or found.lost:
                    own = self._load(path)
                    if found is not None and not own.lost:
                        damaged = ", ".join(f"the state of client {c}" for c in found.lost)
                        aside[self._checkpoint(found.fed.round)] = damaged
                    found = own if found is None or not own.lost else found
                meta = unpack(path.read_bytes())[1]
                refers = {self._client(int(k), v) for k, v in meta["clients"].items()}
                self._refers[meta["round"]] = refers
            except (ValueError, KeyError, FileNotFoundError) as error:
                aside[path] = str(error)
        if found is None and not aside:
            return None, []
        if found is None:
            self.close()
            why = "; ".join(f"{path.name}: {error}" for path, error in aside.items())
            raise EverfedError(
                f"no checkpoint of {self.path} is whole ({why}): put one back from a backup, or "
                "begin anew in another folder"
            )
        for path in aside:
            path.rename(path.with_suffix(".damaged"))
            self._refers.pop(int(path.stem), None)
        known = {int(client): round_ for client, round_ in found.meta["clients"].items()}
        self.versions = {client: known[client] for client in known if client not in found.lost}
        used = set().union(*self._refers.values())
        unfinished = set((self.path / "checkpoints").glob("*.tmp"))
        for orphan in unfinished | set((self.path / "clients").iterdir()) - used:
            orphan.unlink()
        notes = [f"checkpoint {p.name} is damaged ({why}): going back" for p, why in aside.items()]
        lost = [f"the state of client {c} is damaged: it begins anew" for c in found.lost]
        return found, notes + lost

    def done(self) -> bool:
        """Whether the run has come to its end; changes nothing."""
        for path in self._checkpoints()[:1]:
            try:
                return bool(unpack(path.read_bytes())[1]["done"])
            except (ValueError, KeyError, OSError):
                return False
        return False

    def _load(self, path: Path) -> Checkpoint:
        tensors, meta = unpack(path.read_bytes())
        if self.records_path.stat().st_size < meta["records"]:
            raise ValueError("records.jsonl is shorter than it was then")
        w, buffers, informed = (tensors.pop(key) for key in ("w", "buffers", "informed"))
        last, k = tensors.pop("last", None), meta["parts"]
        states = deep(tensors, k + 1 + meta.get("late", 0))
        fed = Federation(
            w=w,
            buffers=buffers,
            informed=set(informed.tolist()),
            parts=states[:k],
            seen=states[k],
            late=states[k + 1 :],
            found=meta.get("found", []),
            last=last,
            round=meta["round"],
            asked=meta.get("asked", 0),
        )
        found = Checkpoint(fed, meta)
        for client, round_ in meta["clients"].items():
            try:
                own, _ = unpack(self._client(int(client), round_).read_bytes())
                fed.clients[int(client)] = deep(own, meta["parts"])
            except (ValueError, FileNotFoundError):
                found.lost.append(int(client))
        return found

    def set_aside(self) -> bool:
        """Begin the records anew; the old ones, if there are any, stay beside them."""
        if not self.records_path.stat().st_size:
            return False
        old = self.records_path.with_suffix(".jsonl.before")
        with open(old, "ab") as file:  # a run may be begun anew more than once
            file.write(self.records_path.read_bytes())
        self.cut_records(0)
        return True

    def cut_records(self, length: int) -> None:
        """Drop what was recorded after a checkpoint."""
        with open(self.records_path, "rb+") as file:
            file.truncate(length)
