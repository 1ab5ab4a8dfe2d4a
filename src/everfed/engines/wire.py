"""Requests and replies as Flower messages: arrays and plain values, no pickle.

A reply's keys, types and shapes are checked before its numbers are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from everfed.client import Ask
from everfed.engines.site import Answered
from everfed.errors import EverfedError
from everfed.method import State

#: numbers that an upload of unknown length may have, unless the model or what was sent has more
SMALL = 1024


def _arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({key: Array(value.detach().cpu().numpy()) for key, value in tensors.items()})


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.require(array.numpy(), requirements=("C", "W")))


def _header(raw: bytes) -> tuple[tuple[int, ...], str]:
    """Shape and type of a .npy file, before any of its numbers is read."""
    file = BytesIO(raw)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("uploads a file of another version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return tuple(shape), str(dtype)


def vectors(ask: Ask) -> dict[str, ArrayRecord]:
    """The model and the extras of a request, the same for every client."""
    extras = {f"{i}.{key}": v for i, own in enumerate(ask.down) for key, v in own.items()}
    model = {"start": ask.start, "buffers": ask.buffers}
    return {"model": _arrays(model), "extras": _arrays(extras)}


def wrap(ask: Ask, run: str, token: int, shared: Mapping[str, ArrayRecord]) -> RecordDict:
    """A request as a message's content; `run` and `token` name the client's state to go on from."""
    said: dict[str, Any] = {"exchange": ask.exchange, "round": ask.round, "task": ask.task}
    said |= {"lr": ask.lr, "parts": len(ask.down), "run": run, "token": token}
    return RecordDict({**shared, "ask": ConfigRecord(said)})


def unwrap(content: RecordDict) -> tuple[Ask, str, int]:
    """The way back from `wrap`."""
    said, model = content.config_records["ask"], content.array_records["model"]
    down: list[State] = [{} for _ in range(whole(said["parts"]))]
    for name, array in content.array_records["extras"].items():
        i, _, key = name.partition(".")
        down[int(i)][key] = _tensor(array)
    exchange: Any = said["exchange"]
    ask = Ask(
        exchange, whole(said["round"]), whole(said["task"]), float(said["lr"]),  # type: ignore[arg-type]
        _tensor(model["start"]), _tensor(model["buffers"]), down,
    )  # fmt: skip
    return ask, str(said["run"]), whole(said["token"])


def whole(value: Any) -> int:
    if not isinstance(value, int):
        raise EverfedError(f"a whole number was expected on the wire, not {value!r}")
    return value


def wrap_reply(ask: Ask, answered: Answered) -> RecordDict:
    """A site's answer as a message's content."""
    reply = answered.reply
    said: dict[str, Any] = {"round": ask.round, "exchange": ask.exchange, "token": answered.token}
    said |= {"empty": reply is None, "lost": answered.lost}
    content = RecordDict({"site": ConfigRecord(said)})
    if reply is not None:
        content["uploads"] = _arrays({key: value[0] for key, value in reply.uploads.items()})
        numbers: dict[str, Any] = {"weight": float(reply.weights[0]), "loss": float(reply.loss[0])}
        content["numbers"] = MetricRecord(numbers)
    return content


@dataclass(frozen=True)
class Opened:
    """A reply that was checked."""

    uploads: dict[str, Tensor]
    weight: float
    loss: float
    token: int
    empty: bool
    lost: bool


def open_reply(content: RecordDict, ask: Ask, shapes: Mapping[str, int], known: set[str]) -> Opened:
    """Check a reply and read it; ValueError says what is wrong with it.

    `shapes` are lengths that are known beforehand, `known` all keys that may be uploaded.
    """
    try:
        said = content.config_records["site"]
        token, lost, empty = whole(said["token"]), said["lost"] is True, said["empty"] is True
        if (said["round"], said["exchange"]) != (ask.round, ask.exchange):
            raise ValueError(f"is an answer to {said['exchange']!r} of round {said['round']!r}")
        if empty:
            return Opened({}, 0.0, 0.0, token, True, lost)
        numbers, arrays = content.metric_records["numbers"], content.array_records["uploads"]
        weight, loss = float(numbers["weight"]), float(numbers["loss"])  # type: ignore[arg-type]
    except (KeyError, TypeError, EverfedError) as error:
        raise ValueError(f"is incomplete ({error})") from None
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"has the weight {weight}")
    needed = {"update", "buffers"} if ask.exchange == "train" else set()
    if not needed <= set(arrays) <= known:
        raise ValueError(f"uploads {', '.join(sorted(arrays)) or 'nothing'}")
    sent = (value.numel() for own in ask.down for value in own.values())
    limit = max(SMALL, *shapes.values(), *sent)
    dtype = str(ask.start.dtype).removeprefix("torch.")
    for key, array in arrays.items():
        size = math.prod(array.shape)
        right = size == shapes[key] if key in shapes else size <= limit
        # a .npy file is its numbers and a short header
        if not right or array.dtype != dtype or len(array.data) > size * 8 + 1024:
            raise ValueError(f"uploads {key} as {array.dtype} of shape {tuple(array.shape)}")
    uploads = {}
    for key, array in arrays.items():
        try:
            if _header(array.data) != (tuple(array.shape), dtype):
                raise ValueError(f"uploads {key} otherwise than it says")
            uploads[key] = _tensor(array)
        except (TypeError, EOFError, OSError, MemoryError) as error:
            raise ValueError(f"uploads {key} in a form that cannot be read") from error
    return Opened(uploads, weight, loss, token, False, lost)
