"""Data sets read from the user's data folder, in their public formats, checked before use."""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from everfed.chance import rng
from everfed.data.table import Data, arrays, finite
from everfed.errors import EverfedError

#: sha256 of the uncompressed IDX files: train images and labels, test images and labels
IDX_HASHES = {
    "fashion-mnist": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    "mnist": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
#: where a set's files may lie below the data folder: its own name, or torchvision's
IDX_FOLDERS = {
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw", "."),
    "mnist": ("mnist", "MNIST/raw", "."),
}
SOURCES = {
    "fashion-mnist": "github.com/zalandoresearch/fashion-mnist, Debian's dataset-fashion-mnist, "
    "or torchvision.datasets.FashionMNIST(..., download=True)",
    "mnist": "yann.lecun.com/exdb/mnist or torchvision.datasets.MNIST(..., download=True)",
}


class Missing(EverfedError):
    """A data set's files are not there."""


def data_folder(folder: str | Path | None) -> Path:
    """The data folder: the one given, else the environment's EVERFED_DATA."""
    chosen = folder or os.environ.get("EVERFED_DATA")
    if not chosen:
        raise EverfedError(
            "this data set is read from files: set data_dir in the configuration (or the "
            "environment's EVERFED_DATA) to the folder that holds them"
        )
    path = Path(chosen).expanduser()
    if not path.is_dir():
        raise EverfedError(f"the data folder {path.absolute()} does not exist")
    return path


def fashion_mnist(folder: str | Path | None = None) -> Data:
    """Fashion-MNIST: 60,000 and 10,000 grey 28x28 images, 10 classes (IDX files)."""
    return _idx("fashion-mnist", folder)


def mnist(folder: str | Path | None = None) -> Data:
    """MNIST: 60,000 and 10,000 grey 28x28 digits (IDX files)."""
    return _idx("mnist", folder)


def _idx(name: str, folder: str | Path | None) -> Data:
    root = data_folder(folder)
    x, y, xt, yt = (
        read_idx(find(root, IDX_FOLDERS[name], IDX_FILES, file, SOURCES[name]), digest)
        for file, digest in zip(IDX_FILES, IDX_HASHES[name], strict=True)
    )
    return arrays(x, y, test=(xt, yt), name=name)


def find(root: Path, places: Sequence[str], files: Sequence[str], file: str, source: str) -> Path:
    """One file of a data set, in the first of the places that has it, packed or not."""
    tried = [root / place / (file + end) for place in places for end in ("", ".gz")]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        raise Missing(
            f"{file} is not there: put {', '.join(files)} (with or without .gz) into "
            f"{root / places[0]}. Get them from {source}"
        )
    return path


def read_idx(path: Path, digest: str | None = None) -> np.ndarray:
    """The bytes of an IDX file; with `digest`, only if it is the published one."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise EverfedError(f"{path} is truncated or damaged ({error}): get it again") from None
    found = hashlib.sha256(raw).hexdigest()
    if digest is not None and found != digest:
        raise EverfedError(
            f"{path} is not the published file: its content has sha256 {found[:16]}..., not "
            f"{digest[:16]}...; get it again"
        )
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise EverfedError(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(raw, ">u4", raw[3], 4).astype(int)
    values: np.ndarray = np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).copy()
    if len(values) != shape.prod():
        raise EverfedError(f"{path} is truncated: {len(values)} of {shape.prod()} values")
    return values.reshape(shape)


def npz(
    file: str, folder: str | Path | None = None, client: str | None = None, task: str | None = None
) -> Data:
    """Arrays from an .npz file: x_train, y_train, x_test, y_test (or x_val, y_val where nothing is
    named _test), or x and y (a fifth is held out). Labels are whole numbers from 0 on, or text,
    which is sorted. Images may be JPEG files end to end, jpeg_train in the place of x_train, with
    the places where they begin (and the last ends) in offset_train.

    Args:
        file: its path, in the data folder if it is relative.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        client: name of the array with every sample's owner (_train and _test are added as to x).
        task: name of the array with every sample's task, likewise. An array of that name with an s
            (domains for domain) gives the names of tasks 0, 1, 2, ...
    """
    path = Path(file).expanduser()
    if not path.is_absolute():
        path = data_folder(folder) / path
    found = read_npz(path)
    if not any(name.endswith("_test") for name in found):
        found = {name.removesuffix("_val") + "_test" if name.endswith("_val") else name: own
                 for name, own in found.items()}  # fmt: skip
    for part in ("train", "test"):
        if f"jpeg_{part}" in found and f"offset_{part}" in found:
            files, ends = found.pop(f"jpeg_{part}"), found.pop(f"offset_{part}")
            found[f"x_{part}"] = _decoded(path, files, ends)

    def column(name: str) -> np.ndarray:
        if name not in found:
            raise EverfedError(f"{path} has no array {name!r}; it has {', '.join(found)}")
        part = name.rpartition("_")[2]
        inputs = f"x_{part}" if part in ("train", "test") else "x"
        if found[name].ndim == 0 or len(found[name]) != len(found.get(inputs, found[name])):
            raise EverfedError(f"{path}: {name} and {inputs} must have one entry a sample each")
        if name == inputs:
            finite(found[name], f"inputs in {name}")  # here, where rows are the file's
        return found[name]

    if "x_train" in found:
        cut = len(column("x_train"))
        table = {
            name: np.concatenate([column(f"{name}_train"), column(f"{name}_test")])
            for name in ("x", "y", *filter(None, (client, task)))
        }
        train, test = np.split(np.arange(len(table["x"])), [cut])
    else:
        table = {name: column(name) for name in ("x", "y", *filter(None, (client, task)))}
        order = rng(0, "held out").permutation(len(table["x"]))
        test, train = np.split(order, [len(order) // 5])
    if table["y"].dtype.kind in "US":
        table["y"] = codes(table["y"])
    kinds, titles = tasks_of(table[task]) if task else (None, None)
    made = arrays(
        table["x"][train],
        table["y"][train],
        test=(table["x"][test], table["y"][test]),
        task=None if kinds is None else kinds[train],
        test_task=None if kinds is None else kinds[test],
        tasks=titles or _titles(found.get(f"{task}s"), kinds, table.get(task or "")),
        name=path.stem,
    )
    if client is None:
        return made
    return replace(made, client=codes(table[client])[np.concatenate([train, test])])


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file."""
    if not path.is_file():
        raise Missing(f"{path} does not exist")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with archive:
            return {key: archive[key] for key in archive.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
        raise EverfedError(f"{path} is not a whole .npz file: {error}") from None


def _decoded(path: Path, files: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """JPEG files end to end as colour images of one size, (samples, height, width, 3)."""
    from PIL import Image

    try:
        return np.stack([
            np.asarray(Image.open(BytesIO(files[begin:end].tobytes())).convert("RGB"))
            for begin, end in pairwise(ends.tolist())
        ])  # fmt: skip
    except (OSError, ValueError) as error:
        raise EverfedError(f"{path} has JPEG files that cannot be read: {error}") from None


def _titles(
    names: np.ndarray | None, codes: np.ndarray | None, values: np.ndarray | None
) -> list[str] | None:
    """What tasks 0, 1, 2, ... are called, where the file says it."""
    if names is None or codes is None or names.dtype.kind != "U" or (codes != values).any():
        return None
    return [str(name) for name in names]


def tasks_of(values: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Tasks 0, 1, 2, ... of a column, and their names: numbers in their order, and without names;
    text in the order in which it first comes, which is that of time in most files.

    >>> tasks_of(np.array(["winter", "winter", "summer"]))
    (array([0, 0, 1]), ['winter', 'summer'])
    """
    if values.dtype.kind not in "US":
        return codes(values), None
    found, first, code = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return np.argsort(order)[code], [str(value) for value in found[order]]


def codes(values: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 without gaps, in the order of the values.

    >>> codes(np.array([7, 3, 7, 12]))
    array([1, 0, 1, 2])
    """
    if values.dtype.kind == "f":
        finite(values, "owners, tasks or labels")
    if values.dtype.kind in "iu" and values.min() >= 0 and values.max() < 4 * len(values):
        numbers: np.ndarray = np.cumsum(np.bincount(values) > 0) - 1  # no need to sort
        return np.asarray(numbers[values])
    return np.asarray(np.unique(values, return_inverse=True)[1])
