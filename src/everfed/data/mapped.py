"""Tables of any size: .npy files mapped into memory, and Parquet files brought to that form.

Of the inputs nothing is read but the rows that clients train on, so a table may be larger than the
memory, and the processes of a comparison share its pages. Labels and owners are held in memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.chance import rng
from everfed.data.files import Missing, codes, data_folder, tasks_of
from everfed.data.images import cache_folder, eight_bit
from everfed.data.table import Data, finite, labels, names
from everfed.errors import EverfedError

#: rows of a Parquet file that are in memory at once
BATCH = 4096
#: how the names of files with test samples begin
HELD = ("test", "valid")


def npy(
    path: str, folder: str | Path | None = None, client: str | None = None, task: str | None = None
) -> Data:
    """A folder with x.npy and y.npy, mapped into memory and not read. Where test.npy is true, a
    sample is for tests; without that file a fifth is held out.

    Args:
        path: the folder, in the data folder if it is relative.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        client: name of the file with every sample's owner, without .npy.
        task: name of the file with every sample's task, likewise.
    """
    place = Path(path).expanduser()
    return _table(place if place.is_absolute() else data_folder(folder) / place, client, task)


def parquet(
    path: str,
    folder: str | Path | None = None,
    *,
    inputs: Sequence[str],
    label: str,
    client: str | None = None,
    task: str | None = None,
) -> Data:
    """Parquet files, as on Hugging Face. Inputs are columns of numbers, one of lists of numbers, or
    one of images, which become grey. Files whose names begin with test or valid are for tests;
    without any a fifth is held out. They are brought into .npy files once, in the cache folder.

    Args:
        path: a file, or a folder of them, in the data folder if it is relative.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        inputs: names of the columns.
        label: name of the column to predict, text or whole numbers for classes.
        client: name of the column with every sample's owner.
        task: name of the column with every sample's task.
    """
    inputs = names(inputs)
    place = Path(path).expanduser()
    place = place if place.is_absolute() else data_folder(folder) / place
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
    if not files or not files[0].is_file():
        raise Missing(f"there is no Parquet file {place}")
    columns = {"y": label} | {k: v for k, v in (("client", client), ("task", task)) if v}
    digest = hashlib.sha256(repr((3, list(inputs), columns)).encode())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.absolute()}\0{facts.st_size} {facts.st_mtime_ns}\n".encode())
    made = cache_folder() / f"table-{digest.hexdigest()[:32]}"
    if not made.is_dir():
        try:
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as own:
                _convert(files, inputs, columns, Path(own, "table"))
                os.replace(Path(own, "table"), made)
        except OSError as error:
            if not made.is_dir():  # where it is, another process has made it meanwhile
                raise EverfedError(
                    f"{made.parent} cannot be written ({error.strerror}), where Parquet files are "
                    "brought into a form to train from: set EVERFED_CACHE to another folder"
                ) from None
    return _table(made, client and "client", task and "task", place.stem)


def _table(place: Path, client: str | None, task: str | None, name: str | None = None) -> Data:
    """The table in a folder of .npy files."""
    x = _load(place / "x.npy", mapped=True)
    if x.dtype not in (np.float32, np.uint8, np.int16, np.int32, np.int64):
        raise EverfedError(f"{place / 'x.npy'} holds {x.dtype}: save float32, bytes or integers")

    def column(key: str) -> np.ndarray:
        found = _load(place / f"{key}.npy")
        if len(found) != len(x):
            raise EverfedError(f"{place}: {key}.npy and x.npy must have one entry a sample each")
        return found

    found = column("y")
    y = labels(codes(found) if found.dtype.kind in "US" else found, name or str(place))
    kinds = column(task) if task else None
    of_row, titles = None, ["all"]
    if kinds is not None:
        of_row, names = tasks_of(kinds)
        titles = names or [str(value) for value in np.unique(kinds)]
    if (place / "test.npy").exists():
        held = column("test").astype(bool)
        train, test = np.flatnonzero(~held), np.flatnonzero(held)
    else:
        order = rng(0, "held out").permutation(len(x))
        test, train = np.sort(order[: len(x) // 5]), np.sort(order[len(x) // 5 :])
    return Data(
        name or place.name,
        _laid_out(x),
        y,
        train,
        test,
        task=of_row,
        client=codes(column(client)) if client else None,
        tasks=tuple(titles),
    )


def _load(file: Path, mapped: bool = False) -> np.ndarray:
    """An array with at least one row."""
    try:
        found: np.ndarray = np.load(file, mmap_mode="c" if mapped else None)
    except FileNotFoundError:
        raise Missing(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise EverfedError(f"{file} is not a whole .npy file: {error}") from None
    if found.ndim == 0 or not len(found):
        raise EverfedError(f"{file} holds no samples")
    return found


def _laid_out(x: np.ndarray) -> Tensor:
    """Byte images with their channels where models expect them; a view."""
    t = torch.from_numpy(x)
    if t.dtype == torch.uint8 and t.dim() == 3:
        return t.unsqueeze(1)
    if t.dtype == torch.uint8 and t.dim() == 4 and t.shape[1] not in (1, 3, 4):
        return t.permute(0, 3, 1, 2)
    return t


# Parquet -------------------------------------------------------------------------------------
def _convert(
    files: Sequence[Path], inputs: Sequence[str], columns: dict[str, str], place: Path
) -> None:
    """Write x.npy row by row, and the columns."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise EverfedError(f"{files[0]} needs: pip install 'everfed[datasets]'") from None
    place.mkdir()
    out: np.ndarray | None = None
    kept: dict[str, list[np.ndarray]] = {key: [] for key in columns}
    at, counts = 0, []
    try:
        opened = [ParquetFile(file) for file in files]
        counts = [file.metadata.num_rows for file in opened]
        for path, file in zip(files, opened, strict=True):
            known = file.schema_arrow.names
            lacks = [name for name in (*inputs, *columns.values()) if name not in known]
            if lacks:
                raise EverfedError(f"{path} has no column {lacks[0]!r}; it has {', '.join(known)}")
            for batch in file.iter_batches(BATCH, columns=[*inputs, *columns.values()]):
                rows = _rows([batch.column(name) for name in inputs], path)
                if out is None:
                    shape = (sum(counts), *rows.shape[1:])
                    out = np.lib.format.open_memmap(place / "x.npy", "w+", rows.dtype, shape)
                elif rows.shape[1:] != out.shape[1:]:
                    raise EverfedError(
                        f"{path}: inputs are {rows.shape[1:]} after {out.shape[1:]}; all must be "
                        "of one shape"
                    )
                out[at : at + len(rows)] = rows
                at += len(rows)
                finite(rows, f"rows of inputs in {path}, from its row {at - len(rows)} on,")
                for key, name in columns.items():
                    if batch.column(name).null_count:
                        raise EverfedError(
                            f"{path}: the column {name!r} has rows without a value: leave them out "
                            "first"
                        )
                    kept[key].append(batch.column(name).to_numpy(zero_copy_only=False))
    except (OSError, pa.ArrowException) as error:
        raise EverfedError(f"{files[0].parent}: not whole Parquet files: {error}") from None
    if out is None:
        raise EverfedError(f"{files[0]} has no rows")
    del out
    for key, parts in kept.items():
        values = np.concatenate(parts)
        np.save(place / f"{key}.npy", values.astype(str) if values.dtype == object else values)
    held = [file.name.startswith(HELD) for file in files]
    if any(held) and not all(held):
        np.save(place / "test.npy", np.repeat(held, counts))


def _rows(columns: Sequence[Any], path: Path) -> np.ndarray:
    """The inputs of a batch: (rows, ...)."""
    import pyarrow as pa

    first = columns[0]
    if any(column.null_count for column in columns):
        raise EverfedError(f"{path} has rows without inputs: leave them out first")
    numbers = all(pa.types.is_integer(c.type) or pa.types.is_floating(c.type) for c in columns)
    if not numbers and len(columns) > 1:
        raise EverfedError(f"{path}: inputs are columns of numbers, or one of lists or images")
    if pa.types.is_struct(first.type) or pa.types.is_binary(first.type):
        return np.stack(list(_pictures(first, path)))
    if pa.types.is_list(first.type) or pa.types.is_fixed_size_list(first.type):
        return np.stack([np.asarray(row, dtype=np.float32) for row in first.to_pylist()])
    if not numbers:
        raise EverfedError(f"{path}: inputs must be numbers, lists of numbers or images")
    return np.column_stack([c.to_numpy(zero_copy_only=False) for c in columns]).astype(np.float32)


def _pictures(column: Any, path: Path) -> Iterator[np.ndarray]:
    from PIL import Image

    for k, cell in enumerate(column.to_pylist()):
        raw = cell["bytes"] if isinstance(cell, dict) else cell
        try:
            yield np.asarray(eight_bit(Image.open(BytesIO(raw))).convert("L"), dtype=np.uint8)
        except (OSError, TypeError, ValueError) as error:
            raise EverfedError(f"{path} has an image that cannot be read ({k}): {error}") from None
