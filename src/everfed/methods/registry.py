"""The list of methods by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from everfed.method import Method

P = ParamSpec("P")


@dataclass(frozen=True)
class Entry:
    """One named method: how it is built, what it is and where it comes from."""

    name: str
    build: Callable[..., Method]
    what: str
    paper: str


METHODS: dict[str, Entry] = {}


def register(paper: str) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """List a method under its function's name; the docstring's first line says what it is."""

    def add(build: Callable[P, Method]) -> Callable[P, Method]:
        name = build.__name__
        METHODS[name] = Entry(name, build, (build.__doc__ or "").strip().split("\n")[0], paper)
        return build

    return add
