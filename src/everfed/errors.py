"""The one error a user sees: what is wrong and what to do, in one sentence."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")


class EverfedError(Exception):
    """A mistake in the input or the surroundings of a run, never a bug of everfed."""

    exit_code = 1


def near(
    word: str, known: Sequence[str] | Mapping[str, Any], meant: Sequence[str] | None = None
) -> str:
    """A hint at what was meant, if it is not known the one that is spelt most alike, and all there
    are.

    >>> near("epoch", ["lr", "epochs"])
    "; did you mean 'epochs'? (there are lr, epochs)"
    """
    close = meant or difflib.get_close_matches(word, list(known), 1, 0.6)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{hint} (there are {', '.join(known)})"


def unknown(problem: Mapping[str, Any]) -> bool:
    """Whether pydantic complains about a key, not about its value."""
    return problem["type"] in ("extra_forbidden", "unexpected_keyword_argument")


def wrong(error: ValidationError) -> str:
    """What the first value that pydantic complains about should be, and what it is."""
    problems = error.errors()
    first = problems[0]
    value, before = first["input"], first["loc"][:-1]
    if first["type"] in ("sequence_str", "list_type", "tuple_type") and isinstance(value, str):
        return f"takes a list, such as {_list_of(value)}, not {value!r}"
    # the types of a union are problems of one value
    same = [p for p in problems if p["loc"][:-1] == before and p["input"] is value]
    said = [p["msg"].removeprefix("Input should be ") for p in same]
    choice = [p["type"] == "literal_error" for p in same]  # all of its words, not only the first
    short = (text if c else text.partition(",")[0] for text, c in zip(said, choice, strict=True))
    return f"should be {' or '.join(dict.fromkeys(short))}, not {value!r}"


def _list_of(text: str) -> str:
    words = [word.strip(" '\"") for word in text.strip("[] ").split(",")]
    return "[0, 1]" if words[0][:1].isdigit() else json.dumps(words)


@contextmanager
def one_line(what: str, keys: Sequence[str]) -> Iterator[None]:
    """Makes an EverfedError of what pydantic says of the values of `keys`, in their order."""
    from pydantic import ValidationError  # not above: the command line's help does without it

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        at = first["loc"][0]  # a number, where the value was given without its name
        key = keys[at] if isinstance(at, int) and at < len(keys) else str(at)
        if unknown(first):
            raise EverfedError(f"{what} has no {key!r}{near(key, keys)}") from None
        raise EverfedError(f"{what}: {key} {wrong(error)}") from None


def plain(settings: type[T]) -> type[T]:
    """A dataclass of pydantic's whose mistakes are EverfedErrors."""
    init: Callable[..., None] = settings.__init__

    @wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        with one_line(settings.__name__, list(settings.__annotations__)):
            init(self, *args, **values)

    settings.__init__ = checked  # type: ignore[assignment]
    return settings
