"""One site of a real federation: its samples, its state on its own disk, its answers.

A site's state is saved under its run's name and a *token*, which grows with every exchange. The
server knows which token it has counted and names it in the next request, so a reply that was lost,
a request that came twice and a server that went back to an older checkpoint all lead to the state
they belong to, and no run takes another one's.
Samples that a method remembers are copied into the state: the site's data may change or vanish.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.client import Ask, ClientProgram, Reply
from everfed.compute import choose
from everfed.data.table import Array, Data, arrays
from everfed.disk import deep, flat, pack, unpack, write
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Method, State
from everfed.models import Recipe
from everfed.streams.stream import Stream
from everfed.vector import Layout

#: a site's name and the round (from 0) -> inputs and labels that it holds now
Samples = Callable[[str, int], tuple[Array, Array]]

#: states beside the one asked for; a server may go back two checkpoints of three exchanges each
KEPT = 6
#: runs whose states a site keeps
RUNS = 8
STAGES = ("probe", "train", "close")
#: the token of a client without a state
NONE = -1


def token_of(round_: int, exchange: str) -> int:
    """The token of the state that an exchange leaves behind."""
    return len(STAGES) * round_ + STAGES.index(exchange)


def client_of(site: str) -> int:
    """A client's number: that of a site named by a number, else one made of the name."""
    if site.isdecimal():
        return int(site)
    return 2**40 + int.from_bytes(hashlib.sha256(site.encode()).digest()[:5], "big")


def rehearsed(stream: Stream, site: str, round_: int) -> tuple[Tensor, Tensor]:
    """The samples that a stream gives to a site."""
    ids = torch.from_numpy(stream.samples(client_of(site), round_))
    return stream.data.x[ids], stream.data.y[ids]


def run_name(folder: Path) -> str:
    """The name of the run in a server's folder, by which sites tell its states from another's."""
    path = folder / "name"
    if not path.exists():
        write(path, secrets.token_hex(8).encode())
    return path.read_text()


def run_folder(home: Path, run: str) -> Path:
    """Where a site keeps its states of a run; those of runs long past are forgotten."""
    if not re.fullmatch("[0-9a-f]{16}", run):
        raise EverfedError(f"the server names its run {run!r}")
    if not (home / run).exists():
        (home / run).mkdir(parents=True)
        for old in sorted(home.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-RUNS]:
            shutil.rmtree(old)
    return home / run


class Store:
    """States of one site on its disk, encrypted if there is a key (a Fernet key, see the docs)."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        self.folder = folder
        self.cipher: Any = None
        if key is not None:
            from cryptography.fernet import Fernet

            try:
                self.cipher = Fernet(key)
            except ValueError:
                raise EverfedError(
                    "the store's key is not one: make it with 'everfed flower store-key'"
                ) from None
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, token: int) -> Path:
        return self.folder / f"{token:012d}.state"

    def load(self, token: int) -> dict[str, Tensor] | None:
        """The state of a token; None where there is none, or none that is whole."""
        try:
            raw = self._path(token).read_bytes()
        except FileNotFoundError:
            return None
        if self.cipher is not None:
            from cryptography.fernet import InvalidToken

            try:
                raw = self.cipher.decrypt(raw)
            except InvalidToken:
                return None
        try:
            return unpack(raw)[0]
        except ValueError:
            return None

    def save(self, token: int, tensors: dict[str, Tensor], asked: int) -> None:
        """Save a state, and forget all but the newest ones and the one that was asked for."""
        raw = pack(tensors, {})
        write(self._path(token), self.cipher.encrypt(raw) if self.cipher else raw)
        files = sorted(self.folder.glob("*.state"), key=lambda path: path.stat().st_mtime_ns)
        needed = {self._path(asked), self._path(token)}  # whatever the clock says
        for path in {*files[:-KEPT], *self.folder.glob("*.tmp")} - needed:
            path.unlink(missing_ok=True)


class AtSite(Stream):
    """A stream as one site sees it in one exchange: rows of its own table."""

    def __init__(self, whole: Stream, table: Data, held: int) -> None:
        self.data, self.held = table, held
        self.clients, self.rounds, self.head = whole.clients, whole.rounds, whole.head
        self.known, self.mask = whole.known, whole.mask  # type: ignore[method-assign]
        self.task, self.block = whole.task, whole.block  # type: ignore[method-assign]

    def samples(self, client: int, round_: int) -> np.ndarray:
        return np.arange(self.held)


@dataclass(frozen=True)
class Answered:
    """What a site has to say to a request."""

    reply: Reply | None  #: None: it has no samples now
    token: int  #: of the state that it has now
    lost: bool  #: whether it did not find the state that was asked for, and began anew
    layout: Layout  #: of the update


@dataclass
class Site:
    """Answers the server's requests with a method's client side."""

    name: str
    method: Method
    stream: Stream
    model: Recipe
    local: Local
    seed: int
    samples: Samples
    store: Store
    announced: bool = True  #: whether the stream tells where tasks begin

    def answer(self, ask: Ask, asked: int) -> Answered:
        """The reply to a request that goes on from the state of token `asked` (NONE: from none)."""
        x, y = self.samples(self.name, ask.round)
        if len(x) == 0:
            return Answered(None, asked, False, Layout(()))
        saved = self.store.load(asked) if asked != NONE else None
        table, mine = self._table(x, y, saved)
        stream = AtSite(self.stream, table, len(x))
        compute = choose(self.model(), table.x[0], torch.device("cpu"), "float32", "auto")
        data = table.to(compute.device, compute.dtype)
        program = ClientProgram(
            self.method, compute, stream, data, self.local, self.seed, announced=self.announced
        )
        job = program.job(client_of(self.name), ask.round, mine, ask.start)
        (reply,) = program.run(ask, [job])
        token = token_of(ask.round, ask.exchange)
        saved_now = self._save(token, reply.mine[0], table, asked)
        lost = asked != NONE and saved is None
        return Answered(reply, token if saved_now else NONE, lost, compute.layout)

    def _table(
        self, x: Array, y: Array, saved: dict[str, Tensor] | None
    ) -> tuple[Data, list[State] | None]:
        """The current samples, then the remembered ones; the state with indices into both."""
        table = arrays(x, y, name=f"the samples of site {self.name}")
        table = replace(table, ends=self.stream.data.ends)
        if saved is None:
            return table, None
        remembered = saved.pop("memory.x"), saved.pop("memory.y")
        mine = deep(saved, len(self.method.parts))
        for part, state in zip(self.method.parts, mine, strict=True):
            for key in part.remembers:
                state[key] = state[key] + len(table.x)
        if len(remembered[0]):
            xs, ys = (torch.cat(pair) for pair in zip((table.x, table.y), remembered, strict=True))
            table = replace(table, x=xs, y=ys)
        return table, mine

    def _save(self, token: int, mine: list[State], table: Data, asked: int) -> bool:
        """Save a state, if there is any."""
        if not any(value.numel() for state in mine for value in state.values()):
            return False
        indices = [
            state[key]
            for part, state in zip(self.method.parts, mine, strict=True)
            for key in part.remembers
        ]
        rows = torch.cat([*indices, torch.zeros(0, dtype=torch.int64)])
        rows = torch.unique(rows)
        kept = [dict(state) for state in mine]
        for part, state in zip(self.method.parts, kept, strict=True):
            for key in part.remembers:
                state[key] = torch.searchsorted(rows, state[key])
        memory = {"memory.x": table.x[rows], "memory.y": table.y[rows]}
        self.store.save(token, flat(kept) | memory, asked)
        return True
