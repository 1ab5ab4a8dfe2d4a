"""A data set is one table: inputs, labels, and columns that say test, task and client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from everfed.data.images import picture
from everfed.errors import EverfedError

#: Inputs or labels as users have them.
Array = Any


@dataclass(frozen=True)
class Inputs:
    """What one input looks like to those who make some.

    >>> Inputs((2,), low=(-1.0,), high=(3.0,)).scaled(torch.tensor([[0.0, 0.5]])).tolist()
    [[-1.0, 1.0]]
    """

    shape: tuple[int, ...]
    #: what stands for 0 and for 1, in all, or in each channel of images, or in each column
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)

    def _ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        one = len(self.low) == 1
        shape = (1,) if one else (-1, 1, 1) if len(self.shape) == 3 else self.shape
        low, high = (torch.tensor(end).to(like).view(shape) for end in (self.low, self.high))
        return low, high

    def scaled(self, x: Tensor) -> Tensor:
        """Inputs in [0, 1], (n, *shape), as the data have them."""
        low, high = self._ends(x)
        return low + (high - low) * x

    def within(self, x: Tensor) -> bool:
        """Whether real inputs, (n, *shape), are what `scaled` could give, but for rounding."""
        low, high = self._ends(x)
        slack = 1e-3 * (high - low)
        return bool((x >= low - slack).all() and (x <= high + slack).all())


@dataclass(frozen=True, eq=False)
class Data:
    """Samples by index; streams hand out indices, never copies.

    `x` is (samples, ...), bytes or floats (bytes are scaled to [0, 1] when taken), `y` is
    (samples,). Images are (samples, channels, height, width).
    """

    name: str  #: in messages and records
    x: Tensor  #: inputs, (samples, ...)
    y: Tensor  #: labels, (samples,)
    train: np.ndarray  #: indices of training samples
    test: np.ndarray  #: indices of test samples
    task: np.ndarray | None = None  #: task (domain) of each sample
    client: np.ndarray | None = None  #: owner of each sample
    tasks: tuple[str, ...] = ("all",)  #: names of the tasks
    ordered: bool = False  #: whether the rows of `x` are in time order
    notes: tuple[str, ...] = ()  #: what was left out or found odd when the data were read
    #: where candidates are ranked: the list that each test sample is in, (samples,); label 1 is
    #: what should come first
    lists: np.ndarray | None = None
    #: where inputs are standardised, what 0 and 1 have become
    ends: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,))

    @property
    def inputs(self) -> Inputs:
        """What one input looks like."""
        return Inputs(tuple(self.x.shape[1:]), *self.ends)

    @cached_property
    def classes(self) -> int:
        """Number of classes; 0 where labels are not whole numbers."""
        return 0 if self.y.is_floating_point() else int(self.y.max()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Tells whether a run is resumed on the same data: sizes, labels and some inputs."""
        some = self.x[:: max(1, len(self.x) // 1000)].contiguous()
        total = 0
        for tensor in (self.y, some):
            own = tensor.contiguous().reshape(-1).view(torch.uint8)
            total = crc32(own.cpu().numpy().data, total)
        return f"{self.name}: {len(self.train)} + {len(self.test)} samples, {total:08x}"

    @property
    def sample_bytes(self) -> int:
        """Size of one sample, its input and label."""
        return sum(t[0].numel() * t.element_size() for t in (self.x, self.y))

    def to(self, device: torch.device, dtype: torch.dtype) -> Data:
        """The same samples on another device; floats in the model's precision."""
        x = self.x.to(device, dtype) if self.x.is_floating_point() else self.x.to(device)
        y = self.y.to(device, dtype) if self.y.is_floating_point() else self.y.to(device)
        return replace(self, x=x, y=y)

    def take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples: ids of any shape (...) -> (..., *sample), (...)."""
        flat = ids.reshape(-1).to(self.x.device)
        if self.x.dim() == 4 and not self.x.is_contiguous():  # channels last, and they stay there
            x = self.x.permute(0, 2, 3, 1).index_select(0, flat).permute(0, 3, 1, 2)
        else:
            x = self.x.index_select(0, flat)  # several times faster than x[flat]
        if not x.is_floating_point():
            x = x.to(dtype).mul_(1 / 255) if self.x.dtype == torch.uint8 else x
        shape = tuple(ids.shape)
        y = self.y.index_select(0, flat)
        return x.view(*shape, *x.shape[1:]), y.view(*shape, *y.shape[1:])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        return (
            f"Data({self.name}: {len(self.train)} train, {len(self.test)} test, {shape}, "
            f"{self.classes} classes, tasks {', '.join(self.tasks)})"
        )


@dataclass(frozen=True, eq=False)
class Beside:
    """A table with more samples after its own, whose indices go on where the table's end."""

    table: Data
    x: Tensor  #: more inputs, as a model takes them
    y: Tensor

    def take(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples, as `Data.take`."""
        own = len(self.table.y)
        x, y = self.table.take(ids.clamp(max=own - 1), dtype)
        more = (ids >= own).to(x.device)
        at = (ids[ids >= own] - own).to(self.x.device)
        x[more], y[more] = self.x[at].to(x), self.y[at.to(self.y.device)].to(y)
        return x, y


def arrays(
    x: Array,
    y: Array,
    *,
    test: tuple[Array, Array] | None = None,
    task: Sequence[int] | np.ndarray | None = None,
    test_task: Sequence[int] | np.ndarray | None = None,
    client: Sequence[int] | np.ndarray | None = None,
    tasks: Sequence[str] | None = None,
    ordered: bool = False,
    name: str = "arrays",
) -> Data:
    """A data set from tensors or arrays, with optional task and client ids for each sample.

    >>> data = arrays(np.zeros((4, 3)), [0, 1, 0, 1], test=(np.ones((2, 3)), [0, 1]))
    >>> len(data.train), len(data.test), data.classes
    (4, 2, 2)

    Args:
        x: inputs, (samples, ...); byte images may be (samples, height, width) or (samples, height,
            width, channels).
        y: labels, (samples,): whole numbers from 0 on, or floats for a loss of one's own.
        test: inputs and labels to test on; left out: the training samples.
        task: the task of every sample, counted from 0.
        test_task: the task of every test sample.
        client: the owner of every sample, counted from 0.
        tasks: names of the tasks.
        ordered: whether samples are in time order, those to test on the last.
        name: what messages and records call the data.
    """
    xs, ys = _inputs(x), _labels(y)
    if len(xs) != len(ys):
        raise EverfedError(f"{name}: {len(xs)} inputs but {len(ys)} labels")
    if len(xs) == 0:
        raise EverfedError(f"{name}: there are no samples")
    n = len(xs)
    train = np.arange(n)
    held = train
    if test is not None:
        xt, yt = _inputs(test[0]), _labels(test[1])
        if xt.shape[1:] != xs.shape[1:]:
            raise EverfedError(
                f"{name}: inputs are {tuple(xs.shape[1:])}, test inputs {tuple(xt.shape[1:])}"
            )
        if len(xt) != len(yt):
            raise EverfedError(f"{name}: {len(xt)} test inputs but {len(yt)} test labels")
        xs, ys = torch.cat([xs, xt]), torch.cat([ys, yt])
        held = np.arange(n, len(xs))
    task_ids = _ids(task, n, "task", name)
    if task_ids is not None and test is not None:
        test_ids = _ids(test_task, len(held), "test_task", name)
        if test_ids is None:
            raise EverfedError(f"{name}: with task ids, give test_task for the test samples too")
        task_ids = np.concatenate([task_ids, test_ids])
    _check_classes(ys, name)
    client_ids = _ids(client, n, "client", name)
    if client_ids is not None:
        if client_ids.min() > 0:
            raise EverfedError(
                f"{name}: clients are counted from 0, and these begin at {client_ids.min()} "
                "(np.unique(client, return_inverse=True)[1] counts them)"
            )
        client_ids = np.concatenate([client_ids, np.full(len(xs) - n, -1)])
    names = tuple(tasks or _task_names(task_ids))
    if task_ids is not None and task_ids.max() >= len(names):
        raise EverfedError(f"{name}: task ids go up to {task_ids.max()}, names are {len(names)}")
    return Data(name, xs, ys, train, held, task_ids, client_ids, names, ordered)


def standardised(data: Data) -> Data:
    """The same samples with mean 0 and standard deviation 1 over the training samples: of each
    channel of images, of each column otherwise. Inputs become floats, which take more memory.

    >>> standardised(arrays(np.array([[1.0, 5.0], [3.0, 5.0]]), [0, 1])).x.tolist()
    [[-1.0, 0.0], [1.0, 0.0]]
    """
    if not (data.x.is_floating_point() or data.x.dtype == torch.uint8):
        raise EverfedError(f"{data.name}: inputs that are neither bytes nor floats have no mean")
    x = data.x.float() / 255 if data.x.dtype == torch.uint8 else data.x
    own = x[torch.as_tensor(data.train)]
    over = (0, 2, 3) if x.dim() == 4 else (0,)
    spread, mean = torch.std_mean(own, over, correction=0, keepdim=True)
    spread[spread == 0] = 1  # a column that never changes
    low, high = ((end - mean) / spread for end in (0.0, 1.0))
    ends = tuple(low.flatten().tolist()), tuple(high.flatten().tolist())
    return replace(data, x=(x - mean) / spread, ends=ends)


def sites(shape: Sequence[PositiveInt] = (1, 28, 28), classes: PositiveInt = 10) -> Data:
    """Samples that live at the sites of a federation: only their shape and classes are known.

    Args:
        shape: of one sample; images are channels, height, width.
        classes: how many there are.
    """
    nothing = np.zeros(0, dtype=np.int64)
    example = torch.zeros(1, *shape)
    return Data("sites", example, torch.tensor([classes - 1]), np.zeros(1, dtype=np.int64), nothing)


def from_dataset(
    dataset: Any,
    test: Any = None,
    *,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    inputs: str = "image",
    label: str = "label",
    name: str = "dataset",
    **columns: Any,
) -> Data:
    """A data set from torch, torchvision or Hugging Face datasets; they are read once, in order.

    Args:
        dataset: the training samples: pairs of input and label, or dictionaries.
        test: the test samples.
        size: height and width that images are brought to; left out: they have one size already.
        channels: 3 (RGB) or 1 (grey), with `size`.
        inputs: key of the input, where samples are dictionaries.
        label: key of the label, likewise.
        name: what messages and records call the data.
        **columns: task, test_task, client and tasks, as `arrays` takes them.
    """

    def read(source: Any) -> tuple[Tensor, Tensor]:
        xs, ys = [], []
        for k in range(len(source)):
            row = source[k]
            if isinstance(row, Mapping) and not {inputs, label} <= set(row):
                raise EverfedError(
                    f"{name}: samples have {', '.join(row)}; say which are inputs= and label="
                )
            x, y = (row[inputs], row[label]) if isinstance(row, Mapping) else row[:2]
            if size is not None:
                x = picture(x, size, channels)
            xs.append(x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)))
            ys.append(y)
        if not xs:
            raise EverfedError(f"{name}: the dataset is empty")
        shapes = {tuple(x.shape) for x in xs}
        if len(shapes) > 1:
            some = " and ".join(map(str, sorted(shapes)[:2]))
            raise EverfedError(f"{name}: inputs are of different shapes, {some}; give size=")
        return torch.stack(xs), torch.as_tensor(ys)

    held = None if test is None else read(test)
    return arrays(*read(dataset), test=held, name=name, **columns)


def names(given: Sequence[str]) -> Sequence[str]:
    """Names in order; one alone need not be in a list."""
    return [given] if isinstance(given, str) else given


def _task_names(ids: np.ndarray | None) -> list[str]:
    return ["all"] if ids is None else [f"task {k + 1}" for k in range(int(ids.max()) + 1)]


def _inputs(x: Array) -> Tensor:
    t = _tensor(x, "inputs")
    if t.dtype in (torch.float64, torch.float16, torch.bfloat16):
        t = t.float()
    if t.dtype == torch.uint8 and t.dim() == 3:
        t = t.unsqueeze(1)
    elif t.dtype == torch.uint8 and t.dim() == 4 and t.shape[1] not in (1, 3, 4):
        t = t.permute(0, 3, 1, 2)
    finite(t, "inputs")
    return t


def finite(x: Array, what: str) -> None:
    """Raise EverfedError where there is NaN or infinity, with the first row, counted from 0."""
    t = _tensor(x, what)
    if not t.is_floating_point():
        return
    good = torch.isfinite(t)
    bad = ~(good.flatten(1).all(1) if t.dim() > 1 else good)
    if bad.any():
        raise EverfedError(
            f"{int(bad.sum())} of {len(t)} {what} hold NaN or infinity "
            f"(the first at row {int(bad.nonzero()[0])}, counted from 0): clean the data first"
        )


def _tensor(values: Array, what: str) -> Tensor:
    try:
        t = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except TypeError:
        kind = np.asarray(values).dtype
        how = "; np.unique(y, return_inverse=True)[1] makes classes of text" * (what == "labels")
        raise EverfedError(f"{what} must be numbers, not {kind}{how}") from None
    if t.dim() == 0:
        raise EverfedError(f"{what} must have one entry a sample, and are a single value")
    return t


def _check_classes(y: Tensor, name: str) -> None:
    """Raise EverfedError where whole numbers cannot be meant as classes 0, 1, 2, ..."""
    if y.is_floating_point() or y.dim() > 1 or not len(y):
        return
    last = int(y.max())
    if last >= max(1000, len(y)):
        raise EverfedError(
            f"{name}: labels go up to {last}, and there are {len(y)} samples: number the classes "
            "0, 1, 2, ... (np.unique(y, return_inverse=True)[1] does it)"
        )


def labels(y: Array, name: str) -> Tensor:
    """Classes 0, 1, 2, ... or other targets, one a sample, checked."""
    t = _labels(y)
    _check_classes(t, name)
    return t


def _labels(y: Array) -> Tensor:
    t = _tensor(y, "labels")
    if t.is_floating_point():
        if not torch.isfinite(t).all():
            raise EverfedError("labels hold NaN or infinity: clean the data first")
        return t
    t = t.long()
    if t.dim() == 2 and t.shape[1] == 1:  # a column
        t = t[:, 0]
    if len(t) and int(t.min()) < 0:
        raise EverfedError(f"labels must be 0, 1, 2, ...; the smallest is {int(t.min())}")
    return t


def _ids(values: Any, n: int, what: str, name: str) -> np.ndarray | None:
    if values is None:
        return None
    ids = np.asarray(values)
    if ids.shape != (n,) or ids.dtype.kind not in "iu" or (n and ids.min() < 0):
        raise EverfedError(f"{name}: {what} must be {n} whole numbers from 0 on")
    return ids.astype(np.int64)
