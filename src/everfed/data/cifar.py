"""CIFAR-10 and CIFAR-100 in their public formats.

The binary version is rows of bytes. The Python version is pickles, which can run any code when they
are loaded: here they are read with stand-ins for the three names that they need, and none of
numpy's or anyone's code is called by what a file says.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.files import Missing, data_folder
from everfed.data.table import Data, arrays
from everfed.errors import EverfedError

IMAGE = (3, 32, 32)  #: channels, height, width: 3,072 bytes in a row


@dataclass(frozen=True)
class Version:
    """The files of one version: where they may lie, and their names."""

    places: tuple[str, ...]
    train: tuple[str, ...]
    test: str


def cifar10(folder: str | Path | None = None) -> Data:
    """CIFAR-10: 50,000 and 10,000 colour images of 32x32, 10 classes (either version)."""
    batches = tuple(f"data_batch_{k}" for k in range(1, 6))
    python = Version(("cifar-10-batches-py", "cifar10", "."), batches, "test_batch")
    binary = Version(
        ("cifar-10-batches-bin", "cifar10", "."),
        tuple(f"{name}.bin" for name in batches),
        "test_batch.bin",
    )
    return _read("cifar10", folder, python, binary, b"labels")


def cifar100(folder: str | Path | None = None) -> Data:
    """CIFAR-100: 50,000 and 10,000 colour images of 32x32, 100 classes (either version)."""
    python = Version(("cifar-100-python", "cifar100"), ("train",), "test")
    binary = Version(("cifar-100-binary", "cifar100"), ("train.bin",), "test.bin")
    return _read("cifar100", folder, python, binary, b"fine_labels")


def _read(
    name: str, folder: str | Path | None, python: Version, binary: Version, labels: bytes
) -> Data:
    root = data_folder(folder)
    classes = int(name.removeprefix("cifar"))
    for version in (python, binary):
        files = (*version.train, version.test)
        found = (root / place for place in version.places)
        place = next((p for p in found if all((p / file).is_file() for file in files)), None)
        if place is None:
            continue
        if version is python:
            read = [_unpickled(place / file, labels) for file in files]
        else:  # CIFAR-100 has a row's coarse label before its fine one
            read = [_rows(place / file, 1 if classes == 10 else 2) for file in files]
        if max(int(y.max()) for _, y in read) >= classes:
            raise EverfedError(f"{place} has labels of more than {classes} classes: get it again")
        *train, test = read
        x, y = (np.concatenate(own) for own in zip(*train, strict=True))
        return arrays(x, y, test=test, name=name)
    raise Missing(
        f"{name} is not there: put {', '.join((*python.train, python.test))} (or the binary "
        f"version's files) into {root / python.places[0]}. Get them from "
        f"cs.toronto.edu/~kriz/cifar.html or torchvision.datasets.{name.upper()}(download=True)"
    )


def _rows(path: Path, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a binary file, whose rows begin with `label` bytes of labels."""
    raw = np.fromfile(path, np.uint8)
    width = label + int(np.prod(IMAGE))
    if not len(raw) or len(raw) % width:
        raise EverfedError(f"{path} is truncated: {len(raw)} bytes are no rows of {width}")
    rows = raw.reshape(-1, width)
    return rows[:, label:].reshape(-1, *IMAGE), rows[:, label - 1].astype(np.int64)


@dataclass
class _Array:
    """What stands in for numpy's array: bytes and their shape."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, kind, columns_first, raw = state
        if kind.name not in ("u1", b"u1") or columns_first or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array of something else than bytes")
        self.values = np.frombuffer(bytearray(raw), np.uint8).reshape(shape)


@dataclass
class _Kind:
    """What stands in for numpy's dtype."""

    name: Any
    align: Any = None
    copy: Any = None

    def __setstate__(self, state: Any) -> None:
        """The order of bytes, of which a byte has none."""


class _Reader(pickle.Unpickler):
    """Makes lists, dictionaries, numbers, strings and arrays of bytes, and nothing else."""

    NAMES = {"_reconstruct": lambda *_: _Array(), "ndarray": _Array, "dtype": _Kind}

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self.NAMES:
            return self.NAMES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickled(path: Path, labels: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one pickle."""
    try:
        with path.open("rb") as file:
            found = _Reader(file, encoding="bytes").load()
        x = found[b"data"].values.reshape(-1, *IMAGE)
        y = np.array(found[labels], dtype=np.int64)
        if y.shape != (len(x),):
            raise ValueError(f"{len(x)} images and {y.shape} labels")
    except Exception as error:  # a damaged pickle raises of many kinds
        raise EverfedError(f"{path} is not CIFAR's file: {error!r}; get it again") from None
    return x, y
