"""Tables in time order, from CSV, ARFF or npz files: streams as they were recorded."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.io import arff

from everfed.data.files import data_folder, read_npz, tasks_of
from everfed.data.table import Data, arrays, names
from everfed.errors import EverfedError

#: a table's columns by name, in order: numbers or text, one entry a row
Columns = dict[str, np.ndarray]
#: what a CSV file may be separated by, in the place of commas
OTHERS = (";", "\t", "|")

ELEC2_FILES = (
    "elec2.csv", "electricity.csv", "elec.csv",
    "elecNormNew.arff", "electricity-normalized.arff", "electricity.arff",
)  # fmt: skip
WEATHER_FILES = ("weather.csv", "NOAA.csv", "weather.arff", "NOAA.arff")


def series(
    file: str,
    folder: str | Path | None = None,
    label: str | None = None,
    drop: Sequence[str] = (),
    client: str | None = None,
    task: str | None = None,
) -> Data:
    """Rows in time order from a .csv, .arff or .npz file. Inputs are scaled to mean 0 and deviation
    1; the last fifth of the rows (of every client's in every task) is for testing, where a stream
    does not say otherwise.

    Args:
        file: its path, in the data folder if it is relative. An .npz file holds x and y.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        label: the column to predict, text or whole numbers for classes; left out: the last one.
        drop: columns to leave out.
        client: the column with every row's owner.
        task: the column with every row's task; tasks are in the order in which they first come.
    """
    path = Path(file).expanduser()
    path = path if path.is_absolute() else data_folder(folder) / path
    return _series(path, label, names(drop), client=client, task=task)


def elec2(folder: str | Path | None = None) -> Data:
    """Elec2: does the price of electricity in New South Wales rise? 45,312 half hours, 1996 to 1998
    (CSV or ARFF). The date and the price itself are left out, as its authors advise."""
    path = _find("Elec2", ELEC2_FILES, folder, "OpenML (data set 151) or MOA's site")
    return _sized(_series(path, "class", ("date", "nswprice"), "elec2"), path, 45312, 6)


def weather(folder: str | Path | None = None) -> Data:
    """NOAA weather of Bellevue, Nebraska: does it rain? 18,159 days in 50 years, 8 measurements
    (CSV or ARFF)."""
    path = _find("The weather", WEATHER_FILES, folder, "github.com/vlosing/driftDatasets")
    return _sized(_series(path, None, (), "weather"), path, 18159, 8)


def _find(what: str, names: Sequence[str], folder: str | Path | None, source: str) -> Path:
    root = data_folder(folder)
    found = next((root / name for name in names if (root / name).is_file()), None)
    if found is None:
        raise EverfedError(
            f"{what} is not there: put {' or '.join(names)} into {root}. Get it from {source}"
        )
    return found


def _sized(data: Data, path: Path, rows: int, inputs: int) -> Data:
    if data.x.shape != (rows, inputs):
        found = "x".join(map(str, data.x.shape))
        raise EverfedError(f"{path} is not the published table: it is {found}, not {rows}x{inputs}")
    return data


def _series(
    path: Path,
    label: str | None,
    drop: Sequence[str],
    name: str | None = None,
    client: str | None = None,
    task: str | None = None,
) -> Data:
    if not path.is_file():
        raise EverfedError(f"{path} does not exist")
    columns, head = _read(path)
    if not columns or not len(next(iter(columns.values()))):
        raise EverfedError(f"{path} has no columns or no rows")
    of_rows = [column for column in (client, task) if column]
    others = [column for column in columns if column not in of_rows]
    label = label or (others or list(columns))[-1]
    for wanted in (label, *of_rows, *drop):
        if wanted not in columns:
            raise EverfedError(f"{path} has no column {wanted!r}; it has {', '.join(columns)}")
    for column, values in columns.items():
        if column not in drop:
            _whole(path, column, values, head)
    left_out = (label, *of_rows, *drop)
    inputs = [_numbers(path, k, v, head) for k, v in columns.items() if k not in left_out]
    if not inputs:
        raise EverfedError(f"{path} has no columns to predict {label} from")
    x = np.concatenate([np.atleast_2d(v.T).T for v in inputs], 1)
    owners, _ = tasks_of(columns[client]) if client else (None, None)
    kinds, titles = tasks_of(columns[task]) if task else (None, None)
    held = _last(len(x), owners, kinds)
    if not held.any() or (kinds is not None and len(np.unique(kinds[held])) <= kinds.max()):
        raise EverfedError(f"{path} has too few rows to keep some of every task for tests")
    spread = x[~held].std(0)
    moves = spread > 1e-9 * np.abs(x[~held]).max(0)  # of 0.1 and 0.1 and 0.1 it is not quite 0
    x = (x - x[~held].mean(0)) / np.where(moves, spread, 1)
    made = arrays(
        x, _targets(columns[label]), task=kinds, tasks=titles, client=owners, ordered=True,
        name=name or path.stem,
    )  # fmt: skip
    return replace(made, train=np.flatnonzero(~held), test=np.flatnonzero(held))


def _last(rows: int, owners: np.ndarray | None, kinds: np.ndarray | None) -> np.ndarray:
    """Which rows are of the last fifth of their client's in their task; a single one is not."""
    group = np.zeros(rows, dtype=np.int64)
    for code in (owners, kinds):
        if code is not None:
            group = group * (code.max() + 1) + code
    held = np.zeros(rows, dtype=bool)
    order = np.argsort(group, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        tested = min(max(1, len(own) // 5), len(own) - 1)
        held[own[len(own) - tested :]] = True
    return held


def _targets(values: np.ndarray) -> np.ndarray:
    """Classes from text or whole numbers; other numbers as they are."""
    if values.dtype.kind != "f":
        with suppress(ValueError, OverflowError):  # first: floats would merge large numbers
            values = values.astype(np.int64)
    try:
        numbers = values if values.dtype.kind == "i" else values.astype(np.float64)
    except ValueError:
        numbers = np.unique(values, return_inverse=True)[1]
    whole = np.array_equal(numbers, np.rint(numbers))
    return np.unique(numbers, return_inverse=True)[1] if whole else numbers


def _whole(path: Path, name: str, values: np.ndarray, head: int) -> None:
    """Raise EverfedError where a cell is empty."""
    if values.dtype.kind != "U" or values.ndim > 1:
        return
    empty = np.flatnonzero(np.char.strip(values) == "")
    if len(empty):
        raise EverfedError(
            f"{path}: the column {name!r} has {len(empty)} empty cells (the first in row "
            f"{empty[0] + 1 + head}): fill them, leave the rows out, or name it in drop"
        )


def _numbers(path: Path, name: str, values: np.ndarray, head: int) -> np.ndarray:
    try:
        numbers = values.astype(np.float64)
    except ValueError:
        at, cell = next((k, v) for k, v in enumerate(values.flat) if not _is_number(v))
        row = at * len(values) // values.size + 1 + head
        raise EverfedError(
            f"{path}: the column {name!r} holds text ({str(cell)!r} in row {row}): make it "
            "numbers, or name it in drop"
        ) from None
    bad = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(1))
    if len(bad):
        raise EverfedError(
            f"{path}: the column {name!r} holds NaN or infinity (the first in row "
            f"{bad[0] + 1 + head}): clean the data first"
        )
    return numbers


def _read(path: Path) -> tuple[Columns, int]:
    """The columns, and how many rows of the file come before their first one."""
    readers = {".csv": _csv, ".arff": _arff, ".npz": _npz}
    if path.suffix not in readers:
        raise EverfedError(f"{path} must end in {', '.join(readers)}")
    return readers[path.suffix](path)


def _csv(path: Path) -> tuple[Columns, int]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel's begin with a mark
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EverfedError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise EverfedError(f"{path} is empty")
    mark = next((mark for mark in OTHERS if mark in rows[0][0]), None)
    if mark and len(rows[0]) == 1:
        raise EverfedError(f"{path}: is it separated by {mark!r}? Save it with commas")
    named = _has_names(rows)
    titles = [cell.strip() if named else str(k) for k, cell in enumerate(rows[0])]
    body = rows[named:]
    if len(set(titles)) < len(titles):
        raise EverfedError(f"{path}: two columns have one name")
    if not body:
        raise EverfedError(f"{path} has names of columns and no rows")
    for k, row in enumerate(body):
        if len(row) != len(titles):
            line = k + 1 + named
            raise EverfedError(f"{path}, row {line}: {len(row)} cells, not {len(titles)}")
    table = np.array(body, dtype=str)
    return dict(zip(titles, table.T, strict=True)), int(named)


def _has_names(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: it has text where inputs are numbers or where the
    labels below are, or it counts the columns, as an unnamed frame does that was saved."""
    first, *body = rows
    if any(not _is_number(cell) for cell in first[:-1]):
        return True
    labelled = not _is_number(first[-1]) and all(_is_number(row[-1]) for row in body)
    counted = len(first) > 2 and first == [str(k) for k in range(len(first))]
    return bool(body) and (labelled or counted)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _arff(path: Path) -> tuple[Columns, int]:
    try:
        rows, about = arff.loadarff(path)
    except (OSError, ValueError, NotImplementedError, StopIteration, arff.ArffError) as error:
        raise EverfedError(f"{path} is not an ARFF file that can be read: {error}") from None
    return {name: rows[name].astype(str) for name in about.names()}, 0


def _npz(path: Path) -> tuple[Columns, int]:
    found = read_npz(path)
    for name in ("x", "y"):
        if name not in found:
            raise EverfedError(f"{path} has no array {name!r}; it has {', '.join(found)}")
    if len(found["x"]) != len(found["y"]):
        raise EverfedError(f"{path}: x and y must have one entry a sample each")
    return {"x": found["x"], "y": found["y"]}, 0
