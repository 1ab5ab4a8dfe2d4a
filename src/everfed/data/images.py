"""Images of any size and channels brought to one size; decoded files are kept in a cache.

Bytes stay bytes: a decoded data set is one file of (images, height, width, channels) that is mapped
into memory, so that several processes share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everfed.errors import EverfedError

if TYPE_CHECKING:
    from PIL.Image import Image

Channels = Literal[1, 3]
#: images that are brought to size at once
CHUNK = 4096
#: weights of red, green and blue in grey (ITU-R 601-2, as Pillow's)
LUMA = (0.299, 0.587, 0.114)


def fit(x: Tensor, size: int, channels: Channels) -> Tensor:
    """Byte images (n, c, h, w) as (n, channels, size, size): bilinear, smoothed when they shrink.

    >>> fit(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), 32, 3).shape
    torch.Size([2, 3, 32, 32])
    """
    if x.dtype != torch.uint8 or x.dim() != 4 or x.shape[1] not in (1, 3):
        raise EverfedError("only byte images, grey or RGB, can be brought to one size")
    if x.shape[1] == 3 and channels == 1:
        x = torch.einsum("nchw,c->nhw", x.float(), torch.tensor(LUMA)).round().byte().unsqueeze(1)
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=True)
    return x.expand(-1, channels, -1, -1)


def fill(out: Tensor, x: Tensor, ids: np.ndarray) -> None:
    """Write the images of these indices, brought to size, into out: (n, size, size, channels)."""
    channels: Channels = 1 if out.shape[3] == 1 else 3
    for begin in range(0, len(ids), CHUNK):
        rows = torch.from_numpy(ids[begin : begin + CHUNK])
        made = fit(x.index_select(0, rows), out.shape[1], channels)
        out[begin : begin + len(rows)] = made.permute(0, 2, 3, 1)


def cache_folder() -> Path:
    """Where decoded images are kept: EVERFED_CACHE, else everfed in the user's cache folder."""
    own = os.environ.get("EVERFED_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everfed"


def decoded(files: Sequence[Path], size: int, channels: Channels) -> tuple[Tensor, dict[int, str]]:
    """All files as byte images (n, channels, size, size), and why some cannot be read.

    They are decoded once; the cache knows files by path, size and time of change. What cannot be
    read is black.
    """
    digest = hashlib.sha256(f"1 {size} {channels}".encode())
    for file in files:
        facts = file.stat()
        digest.update(f"{file.absolute()}\0{facts.st_size} {facts.st_mtime_ns}\n".encode())
    place = cache_folder() / digest.hexdigest()[:32]
    images, unread = place.with_suffix(".npy"), place.with_suffix(".json")
    try:
        if not unread.exists():
            _write(files, size, channels, images, unread)
        x = np.load(images, mmap_mode="c")
        bad = json.loads(unread.read_text())
    except OSError:  # nowhere to keep them
        x = np.zeros((len(files), size, size, channels), np.uint8)
        bad = dict(_decode_all(files, x))
    return torch.from_numpy(x).permute(0, 3, 1, 2), {int(k): str(v) for k, v in bad.items()}


def _write(files: Sequence[Path], size: int, channels: int, images: Path, unread: Path) -> None:
    """Images first, then the list of what could not be read, which tells that they are whole."""
    images.parent.mkdir(parents=True, exist_ok=True)
    shape = (len(files), size, size, channels)
    with tempfile.TemporaryDirectory(dir=images.parent) as own:
        x = np.lib.format.open_memmap(Path(own, "x"), "w+", np.uint8, shape)
        bad = dict(_decode_all(files, x))
        x.flush()
        Path(own, "bad").write_text(json.dumps(bad))
        os.replace(Path(own, "x"), images)
        os.replace(Path(own, "bad"), unread)


def _decode_all(files: Sequence[Path], out: np.ndarray) -> Iterator[tuple[int, str]]:
    """Fill the rows; gives those that cannot be read, and why."""
    if find_spec("PIL") is None:
        raise EverfedError("image files need: pip install 'everfed[datasets]'")

    def one(k: int) -> str | None:
        try:
            out[k] = _decode(files[k], out.shape[1], out.shape[3])
        except Exception as error:  # damaged images raise of many kinds
            return str(error).replace(str(files[k]), files[k].name)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without Python's lock
        for k, why in enumerate(pool.map(one, range(len(files)))):
            if why is not None:
                yield k, why


def _decode(file: Path, size: int, channels: int) -> np.ndarray:
    """One image, (size, size, channels); its sides are scaled each by its own."""
    from PIL import Image as opening

    with opening.open(file) as image:
        image.draft("RGB", (2 * size, 2 * size))  # JPEG: decode no more than is needed
        return _scaled(image, size, channels)


def eight_bit(image: Image) -> Image:
    """The same image with 256 shades: Pillow would cut those of 16 bits off at 255."""
    if image.mode == "F":
        raise ValueError("its pixels are floats: save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    from PIL import Image as making

    shades = np.asarray(image)
    if int(shades.min()) < 0 or int(shades.max()) > 65535:  # mode I also is what 16 bits become
        raise ValueError("its pixels have 32 bits: save it with 8 or 16")
    return making.fromarray((shades // 257).astype(np.uint8))


def _scaled(image: Image, size: int, channels: int) -> np.ndarray:
    from PIL.Image import Resampling

    mode = "RGB" if channels == 3 else "L"
    image = eight_bit(image)
    if image.mode in ("P", "PA", "LA", "RGBa"):  # palettes and transparency in one step lose colour
        image = image.convert("RGBA")
    made = image.convert(mode).resize((size, size), Resampling.BILINEAR)
    return np.array(made, np.uint8).reshape(size, size, channels)


def picture(image: Any, size: int, channels: Channels) -> Tensor:
    """One image of a user's data set, a Pillow image or a byte array, as (channels, size, size)."""
    if hasattr(image, "resize") and hasattr(image, "mode"):
        return torch.from_numpy(_scaled(image, size, channels)).permute(2, 0, 1)
    x = torch.as_tensor(np.asarray(image))
    x = x.unsqueeze(0) if x.dim() == 2 else x
    x = x.permute(2, 0, 1) if x.dim() == 3 and x.shape[0] not in (1, 3) else x
    return fit(x.unsqueeze(0), size, channels)[0]
