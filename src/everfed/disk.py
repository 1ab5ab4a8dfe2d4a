"""States as files: safetensors and JSON with a checksum, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from everfed.errors import EverfedError
from everfed.method import State


def flat(states: list[State]) -> dict[str, Tensor]:
    """The parts' states under names of one file."""
    return {f"{i}/{key}": value for i, state in enumerate(states) for key, value in state.items()}


def deep(tensors: Mapping[str, Tensor], count: int) -> list[State]:
    """The way back from `flat`."""
    out: list[State] = [{} for _ in range(count)]
    for name, value in tensors.items():
        i, _, key = name.partition("/")
        out[int(i)][key] = value
    return out


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """safetensors with the metadata and a checksum over everything."""
    own = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    text = json.dumps(meta, sort_keys=True)
    return save_tensors(own, {"meta": text, "crc": str(_checksum(own, text))})


def unpack(raw: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; ValueError where the bytes are not what was packed."""
    try:
        tensors = load_tensors(raw)
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])["__metadata__"]
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"not readable: {error}") from None
    if str(_checksum(tensors, header["meta"])) != header["crc"]:
        raise ValueError("the checksum does not match")
    return tensors, json.loads(header["meta"])


def _checksum(tensors: Mapping[str, Tensor], text: str) -> int:
    total = crc32(text.encode())
    for name in sorted(tensors):
        total = crc32(name.encode(), total)
        total = crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def write(path: Path, content: bytes) -> None:
    """Write beside the place, then rename: a reader sees the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Have the names of a folder's files on disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def failed(error: OSError, path: Path) -> EverfedError:
    """What to say when a run's folder cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return EverfedError(
            f"the disk of {path} is full; the last checkpoint is safe: free some space and "
            f"'everfed resume {path}'"
        )
    return EverfedError(f"{path} cannot be written: {error.strerror or error}")
