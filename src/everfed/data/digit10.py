"""Digits of other hands and places in public formats: USPS, SVHN, EMNIST-digits, MNIST-M."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from everfed.data.files import Missing, data_folder, find, npz, read_idx
from everfed.data.folders import from_files
from everfed.data.table import Data, arrays
from everfed.errors import EverfedError

#: where files may lie below the data folder
USPS, SVHN = ("usps", "USPS", "."), ("svhn", "SVHN", ".")
EMNIST = ("emnist", "EMNIST/raw", "emnist/gzip", "gzip", ".")
MNIST_M = ("mnist_m", "MNIST-M", ".")
EMNIST_FILES = tuple(
    f"emnist-digits-{part}-{what}-ubyte"
    for part in ("train", "test")
    for what in ("images-idx3", "labels-idx1")
)
EMNIST_SOURCE = (
    "nist.gov/itl/products-and-services/emnist-dataset (binary format), or "
    "torchvision.datasets.EMNIST(..., split='digits', download=True)"
)


def usps(folder: str | Path | None = None) -> Data:
    """USPS: 7,291 and 2,007 grey 16x16 digits (usps.h5, LIBSVM's usps.bz2, or usps.npz)."""
    root = data_folder(folder)
    if h5 := _first(root, USPS, "usps.h5"):
        return _usps_h5(h5)
    train, test = _first(root, USPS, "usps.bz2", "usps"), _first(root, USPS, "usps.t.bz2", "usps.t")
    if train and test:
        return arrays(*_libsvm(train), test=_libsvm(test), name="usps")
    return _other("usps", root, "usps.h5, or LIBSVM's usps.bz2 and usps.t.bz2")


def svhn(folder: str | Path | None = None) -> Data:
    """SVHN: 73,257 and 26,032 house-number digits, 32x32 in colour (.mat files, or svhn.npz)."""
    root = data_folder(folder)
    train, test = _first(root, SVHN, "train_32x32.mat"), _first(root, SVHN, "test_32x32.mat")
    if train and test:
        return arrays(*_mat(train), test=_mat(test), name="svhn")
    return _other("svhn", root, "train_32x32.mat and test_32x32.mat (ufldl.stanford.edu)")


def emnist_digits(folder: str | Path | None = None) -> Data:
    """EMNIST-digits: 240,000 and 40,000 grey 28x28 digits (IDX files)."""
    root = data_folder(folder)
    x, y, xt, yt = (
        read_idx(find(root, EMNIST, EMNIST_FILES, file, EMNIST_SOURCE)) for file in EMNIST_FILES
    )
    upright = (0, 2, 1)  # the files hold columns, not rows
    return arrays(
        np.transpose(x, upright), y, test=(np.transpose(xt, upright), yt), name="emnist-digits"
    )


def mnist_m(folder: str | Path | None = None) -> Data:
    """MNIST-M: 59,001 and 9,001 digits on photographs, 32x32 in colour (PNG files, or mnist_m.npz).

    mnist_m_train_labels.txt lies beside the folder mnist_m_train, and the same for test.
    """
    root = data_folder(folder)
    lists = [_first(root, MNIST_M, f"mnist_m_{part}_labels.txt") for part in ("train", "test")]
    files: list[Path] = []
    labels: list[int] = []
    held: list[bool] = []
    for k, path in enumerate(lists):
        if path is None:
            return _other("mnist_m", root, "the folders and label files of mnist_m.tar.gz")
        images = path.with_name(path.stem.removesuffix("_labels"))
        lines = path.read_text().splitlines()
        there = len(list(images.glob("*.png")))
        if len(lines) != there:
            raise EverfedError(f"{path} lists {len(lines)} images, but {images} holds {there}")
        for number, line in enumerate(lines, 1):
            file, _, digit = line.strip().rpartition(" ")
            if not file or not digit.isdigit():
                raise EverfedError(f"{path}, line {number}: not 'NAME.png DIGIT' but {line!r}")
            files.append(images / file)
            labels.append(int(digit))
            held.append(k == 1)
    return from_files("mnist_m", root, files, labels, held, size=32)


def _first(root: Path, places: Sequence[str], *names: str) -> Path | None:
    tried = (root / place / name for place in places for name in names)
    return next((path for path in tried if path.is_file()), None)


def _other(name: str, root: Path, wanted: str) -> Data:
    """The data set as NAME.npz, or what to put where."""
    if (root / f"{name}.npz").is_file():
        return npz(f"{name}.npz", root)
    raise Missing(f"{name} is not there: put {wanted}, or {name}.npz, into {root}")


def _usps_h5(path: Path) -> Data:
    try:
        import h5py
    except ImportError:
        raise EverfedError(f"{path} needs: pip install 'everfed[datasets]'") from None
    try:
        with h5py.File(path) as file:
            x, y, xt, yt = (
                np.asarray(file[part][what])
                for part in ("train", "test")
                for what in ("data", "target")
            )
    except (OSError, KeyError) as error:
        raise EverfedError(f"{path} is not the USPS file: {error}") from None
    return arrays(_bytes(x, path), y, test=(_bytes(xt, path), yt), name="usps")


def _libsvm(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values in [-1, 1] as bytes, classes 1 to 10 as digits 0 to 9."""
    from sklearn.datasets import load_svmlight_file

    try:
        x, y = load_svmlight_file(str(path), n_features=256)
    except (ValueError, OSError, EOFError) as error:
        raise EverfedError(f"{path} is not a whole LIBSVM file: {error}") from None
    return _bytes((x.toarray() + 1) / 2, path), y.astype(np.int64) - 1


def _bytes(x: np.ndarray, path: Path) -> np.ndarray:
    """Rows of 256 values in [0, 1] as 16x16 byte images."""
    if x.ndim != 2 or x.shape[1] != 256 or x.min() < 0 or x.max() > 1:
        raise EverfedError(f"{path} should hold rows of 256 grey values, not {x.shape}")
    images: np.ndarray = np.rint(255 * x).astype(np.uint8).reshape(-1, 16, 16)
    return images


def _mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """X is (32, 32, 3, images), y has 10 for the digit 0."""
    from scipy.io import loadmat

    try:
        found = loadmat(path)
        x, y = found["X"], found["y"].reshape(-1)
    except Exception as error:  # scipy raises of many kinds on damaged files
        raise EverfedError(f"{path} is not a whole SVHN file: {error}") from None
    if x.shape != (32, 32, 3, len(y)) or x.dtype != np.uint8:
        raise EverfedError(f"{path} should hold byte images X (32, 32, 3, n), not {x.shape}")
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), y.astype(np.int64) % 10
