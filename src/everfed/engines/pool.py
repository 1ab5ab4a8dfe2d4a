"""Forked worker processes that answer requests; tensors travel through shared memory.

A worker inherits the data set, the model and the method by fork, so nothing is copied or pickled
but requests and answers, and those only between a run's own processes, never from a file.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.errors import EverfedError


def available() -> bool:
    """Whether this system has workers (fork and memory files: Linux)."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent() -> None:
    """Have this process killed when its parent dies, so that nothing goes on behind its back."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Slab:
    """A growing piece of shared memory for the tensors of one message."""

    def __init__(self) -> None:
        self.file = os.memfd_create("everfed")
        self.size = 0
        self.map: mmap.mmap | None = None

    def _reach(self, size: int) -> mmap.mmap:
        if self.map is None or self.size < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, max(size, 2**20))
            # an older map stays alive as long as a tensor looks into it
            self.size = os.fstat(self.file).st_size
            self.map = mmap.mmap(self.file, self.size)
        return self.map

    def dump(self, message: Any) -> tuple[bytes, int]:
        """Write a message's tensors here; the rest of it and the size used."""
        tensors: list[Tensor] = []
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, protocol=5)
        places: list[tuple[int, str, tuple[int, ...]]] = []
        at = 0

        def place(value: Any) -> Any:
            nonlocal at
            if not isinstance(value, Tensor | np.ndarray):
                return None
            tensor = torch.as_tensor(value)
            tensors.append(tensor)
            kind = "array" if isinstance(value, np.ndarray) else "tensor"
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append((at, dtype, tuple(tensor.shape)))
            key = (kind, *places[-1])
            at += -(-tensor.numel() * tensor.element_size() // 64) * 64
            return key

        pickler.persistent_id = place  # type: ignore[method-assign]
        pickler.dump(message)
        room = self._reach(at) if at else None
        for tensor, (start, _, shape) in zip(tensors, places, strict=True):
            if tensor.numel() and room is not None:
                _window(room, start, tensor.dtype, shape).copy_(tensor)
        return stream.getvalue(), at

    def load(self, message: tuple[bytes, int]) -> Any:
        """The message; its tensors are views, valid until the other side writes again."""
        body, size = message
        room = self._reach(size) if size else None

        def fetch(key: Any) -> Any:
            kind, start, dtype, shape = key
            if 0 in shape or room is None:
                tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            else:
                tensor = _window(room, start, getattr(torch, dtype), shape)
            return tensor if kind == "tensor" else tensor.numpy()

        unpickler = pickle.Unpickler(io.BytesIO(body))
        unpickler.persistent_load = fetch  # type: ignore[method-assign]
        return unpickler.load()


def _window(room: mmap.mmap, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(room, dtype=dtype, count=math.prod(shape), offset=at).view(shape)


class Worker:
    """One forked process that applies `answer` to every request."""

    def __init__(self, answer: Callable[[Any], Any], others: list[Worker]) -> None:
        self.down, self.up = Slab(), Slab()
        context = mp.get_context("fork")
        self.pipe, theirs = context.Pipe()
        inherited = [worker.pipe for worker in others] + [self.pipe]
        self.process = context.Process(
            target=self._serve, args=(answer, theirs, inherited), daemon=True
        )
        self.process.start()
        theirs.close()

    def _serve(
        self, answer: Callable[[Any], Any], pipe: Connection, inherited: list[Connection]
    ) -> None:
        # the parent decides what Ctrl-C means; and only if the parent's ends are closed here does
        # a worker notice that the parent has died
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for end in inherited:
            end.close()
        die_with_parent()
        torch.set_num_threads(1)
        while True:
            try:
                request = self.down.load(pipe.recv())
            except EOFError:
                return
            try:
                result: tuple[str, Any] = ("done", answer(request))
            except EverfedError as error:
                result = ("error", str(error))
            except Exception:
                result = ("crash", traceback.format_exc())
            try:
                pipe.send(self.up.dump(result))
            except OSError:  # the parent is gone
                return

    def request(self, message: Any) -> None:
        try:
            self.pipe.send(self.down.dump(message))
        except (BrokenPipeError, OSError) as error:
            raise self._death() from error

    def result(self) -> Any:
        try:
            kind, value = self.up.load(self.pipe.recv())
        except (EOFError, OSError) as error:
            raise self._death() from error
        if kind == "error":
            raise EverfedError(value)
        if kind == "crash":
            raise RuntimeError(f"a worker failed:\n{value}")
        return value

    def _death(self) -> EverfedError:
        self.process.join(1)
        code = self.process.exitcode
        return EverfedError(
            f"a worker process died (exit code {code}; -9 is often the system running out of "
            "memory). Resume the run, with fewer workers if memory is short"
        )

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for slab in (self.down, self.up):
            os.close(slab.file)
