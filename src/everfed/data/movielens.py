"""MovieLens as a federation of users: which film does a user watch next?

The leave-one-out protocol of FedEve's paper: every rating is a click. A user's last one is held out
and ranked among films that the user has not rated; the others are trained on, each with films not
rated as negatives. A sample is one row of film numbers, 0 being none: the candidate, then the films
that the user had rated last, the newest first: (1 + history,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.files import Missing, codes, data_folder
from everfed.data.table import Data
from everfed.errors import EverfedError

Size = Literal["100k", "1m"]
#: where the ratings may lie below the data folder, and what stands between a row's fields
FILES: dict[Size, tuple[tuple[str, str], ...]] = {
    "100k": (("ml-100k/u.data", "\t"), ("u.data", "\t"), ("ml-100k/ml-100k.inter", "\t")),
    "1m": (("ml-1m/ratings.dat", "::"), ("ratings.dat", "::"), ("ml-1m/ml-1m.inter", "\t")),
}


def movielens(
    size: Size = "100k",
    folder: str | Path | None = None,
    *,
    history: PositiveInt = 20,
    negatives: PositiveInt = 4,
    test_negatives: PositiveInt = 99,
) -> Data:
    """MovieLens: one client a user, the last film of each held out and ranked among others
    (GroupLens's u.data or ratings.dat, or RecBole's .inter).

    Args:
        size: "100k": 100,000 ratings by 943 users; "1m": a million by 6,040.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        history: films that a user rated before, of which a sample has the last ones.
        negatives: films that the user has not rated, for each one trained on; drawn once.
        test_negatives: the same for the film that is held out.
    """
    path, between = _find(size, data_folder(folder))
    users, films, times = _read(path, between)
    kept = np.bincount(users)[users] > 1
    few = len(np.unique(users[~kept]))
    users, films, times = (codes(users[kept]), codes(films[kept]), times[kept])
    if not len(users):
        raise EverfedError(f"{path}: no user has two ratings")
    order = np.lexsort((np.arange(len(users)), times, users))  # of one moment: as in the file
    users, films = users[order], films[order] + 1
    count, most = int(films.max()), int(np.bincount(users).max())
    if count - most < max(negatives, test_negatives):
        raise EverfedError(
            f"{path}: a user has rated {most} of {count} films, which leaves fewer than "
            f"{max(negatives, test_negatives)} to tell apart"
        )
    made = _samples(users, films, count, history, negatives, test_negatives)
    x, y, owner, test = (np.concatenate(parts) for parts in zip(*made, strict=True))
    notes = (f"{few} users with a single rating are left out",) if few else ()
    tested = np.flatnonzero(test)
    lists = np.where(test, owner, -1)
    table = Data(
        f"movielens-{size}", torch.from_numpy(x), torch.from_numpy(y), np.flatnonzero(~test), tested
    )
    return replace(table, client=owner, notes=notes, lists=lists)


def _samples(
    users: np.ndarray, films: np.ndarray, count: int, history: int, negatives: int, held: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Inputs, labels, owners and whether they are for tests, of one user after another."""
    everything = np.arange(1, count + 1, dtype=np.int32)
    for user, own in enumerate(np.split(films, np.cumsum(np.bincount(users))[:-1])):
        random, n = rng(0, "negatives", user), len(own)
        # row k: what was rated before film k, the newest first
        earlier = np.arange(n)[:, None] - 1 - np.arange(history)
        before = np.where(earlier >= 0, own[np.maximum(earlier, 0)], 0).astype(np.int32)
        others = np.setdiff1d(everything, own)
        wrong = random.choice(others, (n - 1) * negatives), random.choice(others, held, False)
        beside = np.repeat(np.arange(n - 1), negatives), np.full(held, n - 1)
        y = np.repeat([1, 0], [n, (n - 1) * negatives + held])
        candidates, rows = np.concatenate([own, *wrong]), np.concatenate([np.arange(n), *beside])
        x = np.column_stack([candidates.astype(np.int32), before[rows]])
        yield x, y, np.full(len(x), user), rows == n - 1


def _find(size: Size, root: Path) -> tuple[Path, str]:
    for name, between in FILES[size]:
        if (root / name).is_file():
            return root / name, between
    raise Missing(
        f"MovieLens {size} is not there: put {FILES[size][0][0]} into {root}. Get it from "
        f"grouplens.org/datasets/movielens"
    )


def _read(path: Path, between: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, films and times of all ratings."""
    try:
        lines = path.read_text(encoding="latin-1").splitlines()
    except OSError as error:
        raise EverfedError(f"{path} cannot be read: {error}") from None
    skip = int(path.suffix == ".inter")  # its first line names the columns
    out = np.empty((len(lines) - skip, 3), dtype=np.int64)
    for k, line in enumerate(lines[skip:]):
        try:
            user, film, _, when = line.split(between)
            out[k] = int(user), int(film), float(when)
        except ValueError:
            raise EverfedError(
                f"{path}, line {k + 1 + skip}: user, film, rating and time were expected, not "
                f"{line[:60]!r}"
            ) from None
    if not len(out):
        raise EverfedError(f"{path} has no ratings")
    return out[:, 0], out[:, 1], out[:, 2]
