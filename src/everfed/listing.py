"""`everfed list`: methods with what they need, streams, data sets and models with settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from everfed import reproduce
from everfed.config import DATASETS, MODELS, PRESENT, STREAMS, ConfigError, settings
from everfed.data.table import arrays
from everfed.errors import EverfedError
from everfed.method import Method
from everfed.methods import METHODS
from everfed.metrics import Record
from everfed.models import mlp
from everfed.reproduce import cfl_nqm, preset
from everfed.runs import run
from everfed.streams import domains


def table(what: str) -> Table:
    """The table of one kind of thing."""
    if what == "methods":
        return _methods()
    if what == "reproductions":
        return _reproductions()
    kinds = {"streams": STREAMS, "datasets": DATASETS, "models": MODELS}
    if what not in kinds:
        raise ConfigError(
            f"there is no list of {what!r}: methods, {', '.join(kinds)}, reproductions"
        )
    out = Table(header_style="bold")
    for column in ("name", "what it is", "settings"):
        out.add_column(column)
    for name, build in kinds[what].items():
        out.add_row(name, _first_sentence(build), _settings(build))
    if what == "streams":
        build = PRESENT["present"]
        out.add_section()
        out.add_row("[present]", _first_sentence(build), _settings(build))
    return out


def _reproductions() -> Table:
    out = Table(header_style="bold")
    out.add_column("name", no_wrap=True)
    out.add_column("what it is")
    out.add_row(cfl_nqm.REPRODUCTION.name, cfl_nqm.REPRODUCTION.what)
    for name in reproduce.names():
        if name != cfl_nqm.REPRODUCTION.name:
            out.add_row(name, preset.read(name).what)
    return out


def _methods() -> Table:
    out = Table.grid(padding=(0, 2, 1, 0))
    out.title = "P is one model; traffic is down + up, per client and round"
    for name, entry in sorted(METHODS.items()):
        method = entry.build()
        needs = method.needs
        facts = (
            f"client state: {_yes(needs.client_state)}",
            f"exchanges: {needs.exchanges}",
            f"task boundaries: {_yes(needs.boundaries)}",
            f"traffic: {traffic(method)}",
            f"secure aggregation: {_yes(needs.secure_aggregation)}",
        )
        out.add_row(Text(name, "bold"), Text.assemble(
            f"{entry.what} ({entry.paper})\n", (" · ".join(facts), "dim"), "\n",
            (_settings(entry.build), "cyan"),
        ))  # fmt: skip
    return out


def traffic(method: Method) -> str:
    """What a method sends, in models a client and round, measured on a tiny run."""
    random = np.random.default_rng(0)
    x, y = random.random((32, 16)).astype(np.float32), np.tile([0, 1], 16)
    task = np.repeat([0, 1], 16)
    clients = max(2, method.least)
    stream = domains(arrays(x, y, task=task), clients=clients, alpha=None, rounds=3)
    try:
        result = run(method, stream, mlp(16, 32, 2), workers=1)
    except EverfedError as error:  # an extra that is not installed
        return str(error)
    records, size = result.records, clients * 4 * result.vector.numel() / 1e6  # of all clients

    def sent(metric: str, at: int) -> float:
        return _sum(records, metric, at) / size

    # rounds 2 and 3 are a task's last and the next one's first, 1 and 4 ordinary ones
    each = f"{_short(sent('mb_down', 4))} P + {_short(sent('mb_up', 4))} P"
    boundary = sent("mb_down", 2) - sent("mb_down", 1) + sent("mb_up", 2) - sent("mb_up", 1)
    once = sent("mb_down", 3) - sent("mb_down", 4) + boundary
    return each if once < 0.5 else f"{each}, {_short(once)} P a task"


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 99.5 else f"{number:.0f}"


def _sum(records: list[Record], metric: str, at: int) -> float:
    return float(sum(r["value"] for r in records if r["metric"] == metric and r["round"] == at))


def _settings(build: Callable[..., Any]) -> str:
    def text(name: str, parameter: inspect.Parameter) -> str:
        if parameter.default is inspect.Parameter.empty:
            return name
        return f"{name}={parameter.default!r}"

    return ", ".join(text(*item) for item in settings(build).items()) or "none"


def _first_sentence(build: Callable[..., Any]) -> str:
    text = " ".join((build.__doc__ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
