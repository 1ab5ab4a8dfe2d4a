"""LEAF's federations of users: FEMNIST (characters by writer), Shakespeare (the next character of
what a speaker says).

LEAF's JSON files hold `users`, `num_samples` and `user_data`, in which each user has x and y: files
all_data_0.json, all_data_1.json, ..., or those in the folders train and test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.files import Missing, codes, data_folder
from everfed.data.mapped import parquet
from everfed.data.table import Data
from everfed.errors import EverfedError


def femnist(folder: str | Path | None = None) -> Data:
    """FEMNIST: digits and letters in 28x28 pixels, by their writers (LEAF's JSON files, or Parquet
    files with writer_id, image and character, in the folder femnist)."""
    root = data_folder(folder) / "femnist"
    parts = _files(root)
    if parts is None and any(root.rglob("*.parquet")):
        columns = {"label": "character", "client": "writer_id"}
        return replace(parquet(str(root), inputs=["image"], **columns), name="femnist")
    if parts is None:
        raise Missing(
            f"FEMNIST is not there: put LEAF's all_data_*.json, or its folders train and test, or "
            f"the Parquet files of flwrlabs/femnist into {root}"
        )
    return _table("femnist", parts, _image)


def shakespeare(
    folder: str | Path | None = None, length: PositiveInt = 80, stride: PositiveInt = 1
) -> Data:
    """Shakespeare: the next character of what a speaker says (LEAF's JSON files in the folder
    shakespeare, or a Parquet file with speaker and text).

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        length: characters before the one to predict, where texts are cut here.
        stride: characters from one sample to the next, likewise.
    """
    root = data_folder(folder)
    parts = _files(root / "shakespeare")
    if parts is not None:
        return _lettered(_table("shakespeare", parts, _letters))
    texts = [*root.glob("shakespeare/*.parquet"), *root.glob("*shakespeare*.parquet")]
    if not texts:
        raise Missing(
            f"Shakespeare is not there: put LEAF's all_data_*.json, or its folders train and test, "
            f"into {root / 'shakespeare'}, or a Parquet file with speaker and text"
        )
    return _lettered(_spoken(texts[0], length, stride))


# LEAF's files --------------------------------------------------------------------------------
#: files of training samples, and of test samples
Parts = tuple[list[Path], list[Path]]
#: a user's inputs and labels as they are in a file (named with the user in errors) -> as arrays
Convert = Callable[[list[Any], list[Any], Path, str], tuple[np.ndarray, np.ndarray]]


def _files(root: Path) -> Parts | None:
    """Where LEAF's scripts leave them: in the folder itself, or below data."""
    for place in (root, root / "data"):
        train, test = (sorted((place / part).glob("*.json")) for part in ("train", "test"))
        if train and test:
            return train, test
        for inside in (place, place / "all_data"):
            whole = sorted(inside.glob("all_data*.json"))
            if whole:
                return whole, []
    return None


def _users(file: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Every user with inputs and labels."""
    try:
        found = json.loads(file.read_text())
        users, sizes, held = found["users"], found["num_samples"], found["user_data"]
        for user, size in zip(users, sizes, strict=True):
            x, y = held[user]["x"], held[user]["y"]
            if len(x) != size or len(y) != size:
                raise EverfedError(
                    f"{file}: user {user} should have {size} samples and has {len(x)} inputs and "
                    f"{len(y)} labels"
                )
            yield str(user), x, y
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise EverfedError(f"{file} is not a whole file of LEAF's ({what[:90]})") from None


def _table(name: str, parts: Parts, convert: Convert) -> Data:
    """All users; without test files a fifth of all samples is held out."""
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    owners: list[str] = []
    ends: list[int] = []
    for files in parts:
        for file in files:
            for user, own_x, own_y in _users(file):
                if own_y:
                    converted = convert(own_x, own_y, file, user)
                    xs.append(converted[0])
                    ys.append(converted[1])
                    owners += [user] * len(own_y)
        ends.append(len(owners))
    if not ends[0]:
        raise EverfedError(f"{parts[0][0].parent} has no samples")
    if len({x.shape[1:] for x in xs}) > 1:
        raise EverfedError(f"{parts[0][0].parent}: samples are of different shapes")
    train, test = np.arange(ends[0]), np.arange(*ends)
    if not parts[1]:
        order = rng(0, "held out").permutation(len(owners))
        cut = len(owners) // 5
        test, train = np.sort(order[:cut]), np.sort(order[cut:])
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    return Data(name, x, y, train, test, client=codes(np.array(owners)))


def _image(x: list[Any], y: list[Any], file: Path, user: str) -> tuple[np.ndarray, np.ndarray]:
    """784 numbers from 0 to 1 a sample, which are bytes over 255."""
    try:
        pixels = np.array(x, dtype=np.float32).reshape(len(y), 1, 28, 28)
        labels = np.array(y, dtype=np.int64)
        right = pixels.min() >= 0 and pixels.max() <= 1 and labels.min() >= 0
    except (ValueError, TypeError):
        right = False
    if not right:
        raise EverfedError(f"{file}: user {user} has samples that are no FEMNIST images")
    return np.rint(255 * pixels).astype(np.uint8), labels


def _letters(x: list[Any], y: list[Any], file: Path, user: str) -> tuple[np.ndarray, np.ndarray]:
    """Strings of one length, and one character each, as code points."""
    if len({len(text) for text in x}) > 1 or any(len(letter) != 1 for letter in y):
        raise EverfedError(f"{file}: user {user} has texts of different lengths")
    return _points("".join(x)).reshape(len(x), -1), _points("".join(y)).astype(np.int64)


def _points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.int32)


def _lettered(data: Data) -> Data:
    """Characters numbered in their order, those of inputs and of labels alike."""
    known = torch.unique(torch.cat([data.x.flatten().long(), data.y]))
    x = torch.searchsorted(known, data.x.long()).to(torch.int16)
    return replace(data, x=x, y=torch.searchsorted(known, data.y))


# texts by speaker ----------------------------------------------------------------------------
def _spoken(file: Path, length: int, stride: int) -> Data:
    """Windows on all that a speaker says; of the last fifth of it, for tests."""
    said = _speeches(file)
    xs, ys, owners, held, short = [], [], [], [], 0
    for who, text in enumerate(said.values()):
        points = _points(text)
        cut = len(points) * 4 // 5
        for tested, part in ((False, points[:cut]), (True, points[cut:])):
            if len(part) <= length:
                short += not tested
                continue
            windows = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::stride]
            xs.append(windows[:, :-1].astype(np.int32))
            ys.append(windows[:, -1].astype(np.int64))
            owners.append(np.full(len(windows), who))
            held.append(np.full(len(windows), tested))
    if not xs:
        raise EverfedError(f"{file}: nobody says more than {length} characters")
    note = f"{short} of {len(said)} speakers say no more than {length} characters to train on"
    x, y, owner, test = (np.concatenate(own) for own in (xs, ys, owners, held))
    table = Data("shakespeare", torch.from_numpy(x), torch.from_numpy(y),
                 np.flatnonzero(~test), np.flatnonzero(test))  # fmt: skip
    return replace(table, client=codes(owner), notes=(note,) if short else ())


def _speeches(file: Path) -> dict[str, str]:
    """All that each speaker says, in order."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import read_table
    except ImportError:
        raise EverfedError(f"{file} needs: pip install 'everfed[datasets]'") from None
    try:
        rows: Sequence[dict[str, Any]] = read_table(file).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise EverfedError(f"{file} is not a whole Parquet file: {error}") from None
    if not rows or not {"speaker", "text"} <= set(rows[0]):
        raise EverfedError(f"{file} should have the columns speaker and text")
    out: dict[str, list[str]] = {}
    for row in rows:
        out.setdefault(str(row["speaker"]), []).append(str(row["text"]))
    return {speaker: "\n".join(texts) for speaker, texts in out.items()}
