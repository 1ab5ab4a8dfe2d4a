"""Tables in time order, from CSV, ARFF or npz files: streams as they were recorded."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.io import arff

from everfed.data.files import data_folder, read_npz
from everfed.data.table import Data, arrays
from everfed.errors import EverfedError

#: a table's columns by name, in order: numbers or text, one entry a row
Columns = dict[str, np.ndarray]

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
) -> Data:
    """Rows in time order from a .csv, .arff or .npz file. Inputs are scaled to mean 0 and deviation
    1; the last fifth of the rows is for testing, where a stream does not say otherwise.

    Args:
        file: its path, in the data folder if it is relative. An .npz file holds x and y.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        label: the column to predict, text or whole numbers for classes; left out: the last one.
        drop: columns to leave out.
    """
    path = Path(file).expanduser()
    return _series(path if path.is_absolute() else data_folder(folder) / path, label, drop)


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


def _series(path: Path, label: str | None, drop: Sequence[str], name: str | None = None) -> Data:
    if not path.is_file():
        raise EverfedError(f"{path} does not exist")
    columns = _read(path)
    if not columns or not len(next(iter(columns.values()))):
        raise EverfedError(f"{path} has no columns or no rows")
    label = label or list(columns)[-1]
    for wanted in (label, *drop):
        if wanted not in columns:
            raise EverfedError(f"{path} has no column {wanted!r}; it has {', '.join(columns)}")
    inputs = [_numbers(path, k, v) for k, v in columns.items() if k not in (label, *drop)]
    if not inputs:
        raise EverfedError(f"{path} has no columns to predict {label} from")
    x = np.concatenate([np.atleast_2d(v.T).T for v in inputs], 1)
    cut = len(x) - len(x) // 5
    spread = x[:cut].std(0)
    x = (x - x[:cut].mean(0)) / np.where(spread > 0, spread, 1)
    y = _targets(columns[label])
    return arrays(x[:cut], y[:cut], test=(x[cut:], y[cut:]), ordered=True, name=name or path.stem)


def _targets(values: np.ndarray) -> np.ndarray:
    """Classes from text or whole numbers; other numbers as they are."""
    try:
        numbers = values.astype(np.float64)
    except ValueError:
        numbers = np.unique(values, return_inverse=True)[1].astype(np.float64)
    whole = np.array_equal(numbers, np.rint(numbers))
    return np.unique(numbers, return_inverse=True)[1] if whole else numbers


def _numbers(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except ValueError:
        raise EverfedError(
            f"{path}: the column {name!r} holds text: make it numbers, or name it in drop"
        ) from None


def _read(path: Path) -> Columns:
    readers = {".csv": _csv, ".arff": _arff, ".npz": _npz}
    if path.suffix not in readers:
        raise EverfedError(f"{path} must end in {', '.join(readers)}")
    return readers[path.suffix](path)


def _csv(path: Path) -> Columns:
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EverfedError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise EverfedError(f"{path} is empty")
    named = any(not _is_number(cell) for cell in rows[0][:-1])
    names = [cell.strip() for cell in rows[0]] if named else [str(k) for k in range(len(rows[0]))]
    body = rows[named:]
    if len(set(names)) < len(names):
        raise EverfedError(f"{path}: two columns have one name")
    for k, row in enumerate(body):
        if len(row) != len(names):
            line = k + 1 + named
            raise EverfedError(f"{path}, row {line}: {len(row)} cells, not {len(names)}")
    table = np.array(body, dtype=str)
    return dict(zip(names, table.T, strict=True))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _arff(path: Path) -> Columns:
    try:
        rows, about = arff.loadarff(path)
    except (OSError, ValueError, NotImplementedError, StopIteration, arff.ArffError) as error:
        raise EverfedError(f"{path} is not an ARFF file that can be read: {error}") from None
    return {name: rows[name].astype(str) for name in about.names()}


def _npz(path: Path) -> Columns:
    found = read_npz(path)
    for name in ("x", "y"):
        if name not in found:
            raise EverfedError(f"{path} has no array {name!r}; it has {', '.join(found)}")
    if len(found["x"]) != len(found["y"]):
        raise EverfedError(f"{path}: x and y must have one entry a sample each")
    return {"x": found["x"], "y": found["y"]}
