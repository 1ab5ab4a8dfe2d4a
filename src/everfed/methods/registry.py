"""The list of methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

from pydantic import ValidationError, validate_call

from everfed.errors import one_line
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

        @wraps(build)
        def checked(*args: P.args, **settings: P.kwargs) -> Method:
            try:
                return build(*args, **settings)
            except ValidationError:  # of a part; the function's own names are told
                given = inspect.signature(build).bind(*args, **settings).arguments
                again: Callable[..., Method] = validate_call(build)
                with one_line(name, list(given)):
                    return again(**given)

        METHODS[name] = Entry(name, checked, (build.__doc__ or "").strip().split("\n")[0], paper)
        return checked

    return add
