"""A model is a vector: the layout of a module's tensors in one flat tensor.

`Layout.of(module)` covers the trainable parameters, `Layout.of_buffers(module)` the floating
buffers (BatchNorm statistics). The weights of torch's own convolutions lie in the vector
channels-last, so that the views a module trains on are already in the order in which CPU
convolutions are fast; those of other modules, which may flatten them, lie as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everfed.chance import rng


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product along the last dimension, kept: shapes (..., d), (..., d) -> (..., 1)."""
    return (a * b).sum(-1, keepdim=True)


def sq(a: Tensor) -> Tensor:
    """Squared norm along the last dimension, kept: (..., d) -> (..., 1)."""
    return dot(a, a)


def unit(a: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension; 0 stays 0."""
    length: Tensor = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return a / length.clamp(min=1e-12)


def squares(v: Tensor) -> Tensor:
    """Squared norms along the last dimension as doubles on the CPU, (..., d) -> (...): of short
    pieces first, so that they are right to 1e-8."""
    cut = v.shape[-1] // 256 * 256
    pieces = v[..., :cut].view(*v.shape[:-1], cut // 256, 256)
    rest = v[..., cut:].unsqueeze(-2)
    wide = torch.float32 if v.dtype == torch.bfloat16 else v.dtype
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in (pieces, rest)]
    return torch.cat(norms, -1).cpu().double().square().sum(-1)


def folded(v: Tensor, width: int = 4096) -> Tensor:
    """A long vector's coordinates added up in `width` places with random signs, (d,) -> (width,):
    products of vectors stay the same in the mean, up to 1 / sqrt(width) of the lengths' product."""
    if len(v) <= width:
        return v
    signed = v * _signs(len(v), v.device)
    cut = len(v) // width * width
    out: Tensor = signed[:cut].view(-1, width).sum(0)
    out[: len(v) - cut] += signed[cut:]
    return out


@lru_cache(maxsize=1)
def _signs(d: int, device: torch.device) -> Tensor:
    drawn = rng(0, "fold").integers(0, 2, d, dtype=np.int8) * 2 - 1
    return torch.from_numpy(drawn).to(device, torch.float32)


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    channels_last: bool = False

    def view(self, piece: Tensor) -> Tensor:
        """The tensor behind its slice of the vector: (..., stop - start) -> (..., *shape)."""
        lead = piece.shape[:-1]
        if self.channels_last:
            o, i, h, w = self.shape
            return piece.view(*lead, o, h, w, i).movedim(-1, -3)
        return piece.view((*lead, *self.shape))

    def line(self, tensor: Tensor) -> Tensor:
        """The slice of the vector in which a tensor lies: shape -> (stop - start,)."""
        return (tensor.permute(0, 2, 3, 1) if self.channels_last else tensor).reshape(-1)


@dataclass(frozen=True)
class Layout:
    """Names and slices of a flat vector of length `d`.

    >>> layout = Layout.of(nn.Linear(3, 2))
    >>> layout.d, [slot.name for slot in layout.slots]
    (8, ['weight', 'bias'])
    """

    slots: tuple[Slot, ...]

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The trainable parameters of a module; frozen ones stay where they are."""
        convolutions = {
            f"{prefix}.weight".removeprefix(".")
            for prefix, own in module.named_modules()
            if type(own) in (nn.Conv2d, nn.ConvTranspose2d)
        }
        parameters = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        return Layout._build((name, p.shape, name in convolutions) for name, p in parameters)

    @staticmethod
    def of_buffers(module: nn.Module) -> Layout:
        """The floating buffers of a module (running statistics); one that begins with infinity, as
        a causal mask does, is none, and stays where it is."""
        floats = ((n, b) for n, b in module.named_buffers() if b.is_floating_point())
        return Layout._build((n, b.shape, False) for n, b in floats if bool(b.isfinite().all()))

    @staticmethod
    def from_names(described: Iterable[Sequence[Any]]) -> Layout:
        """The layout that `describe` told of; in older runs, which do not say, all tensors of four
        dimensions are channels-last."""
        return Layout._build(
            (name, shape, last[0] if last else len(shape) == 4) for name, shape, *last in described
        )

    def describe(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """Names, shapes and whether channels come last, as `from_names` takes them."""
        return [(slot.name, slot.shape, slot.channels_last) for slot in self.slots]

    @staticmethod
    def _build(tensors: Iterable[tuple[str, Sequence[int], bool]]) -> Layout:
        slots, at = [], 0
        for name, shape, last in tensors:
            slots.append(Slot(name, tuple(shape), at, at + prod(shape), last))
            at += prod(shape)
        return Layout(tuple(slots))

    @property
    def d(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors to one new vector."""
        if not self.slots:
            return torch.zeros(0)
        return torch.cat([slot.line(tensors[slot.name].detach()) for slot in self.slots])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's named tensors, as views: (..., d) -> {name: (..., *shape)}.

        One `torch.split`, so that autograd's way back is one `cat`.
        """
        if not self.slots:
            return {}
        sizes = [slot.stop - slot.start for slot in self.slots]
        pieces = torch.split(vector, sizes, dim=-1)
        return {slot.name: slot.view(p) for slot, p in zip(self.slots, pieces, strict=True)}

    def reshaped(self, name: str, shape: tuple[int, ...]) -> Layout:
        """The layout of a vector in which one tensor has another shape."""
        shapes = (shape if slot.name == name else slot.shape for slot in self.slots)
        return Layout._build(
            (slot.name, own, slot.channels_last)
            for slot, own in zip(self.slots, shapes, strict=True)
        )

    def names(self, prefix: str) -> list[Slot]:
        """The slots of one layer: those named `prefix` or `prefix.…` ("": the module's own)."""
        return [
            slot
            for slot in self.slots
            if slot.name.rpartition(".")[0] == prefix or f"{slot.name}.".startswith(f"{prefix}.")
        ]

    def pieces(self) -> tuple[int, ...]:
        """Lengths of the slices that belong to one module each (a layer's weights and biases)."""
        owned = groupby(self.slots, lambda slot: slot.name.rpartition(".")[0])
        return tuple(sum(slot.stop - slot.start for slot in own) for _, own in owned)

    def layers(self) -> list[str]:
        """Names of the modules with weights (norms are left out), in the order of definition."""
        own: dict[str, int] = {}
        for slot in self.slots:
            name = slot.name.rpartition(".")[0]
            own[name] = max(own.get(name, 0), len(slot.shape))
        return [name for name, dims in own.items() if dims > 1] or list(own)

    def blocks(self) -> list[str]:
        """The layers, of which those of one numbered block (of a ResNet, of a transformer) count as
        one: 'layer4.1.conv1' and 'layer4.1.conv2' are the block 'layer4.1'."""
        out: list[str] = []
        for name in self.layers():
            numbered = re.match(r"(?:.*\.)?\d+(?=\.|$)", name)
            block = numbered[0] if numbered else name
            if not any(f"{block}.".startswith(f"{other}.") for other in out):
                out.append(block)
        return out


def bind(module: nn.Module, layout: Layout, vector: Tensor, gradient: Tensor) -> None:
    """Make a module's parameters views of `vector`, their gradients views of `gradient`."""
    values, slopes = layout.unflatten(vector), layout.unflatten(gradient)
    for name, parameter in module.named_parameters():
        if name in values:
            parameter.data = values[name]
            parameter.grad = slopes[name]


def load(module: nn.Module, layout: Layout, vector: Tensor) -> None:
    """Copy a vector's tensors into a module's parameters or buffers of the same names."""
    if not layout.slots:
        return
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in layout.unflatten(vector).items():
            own[name].copy_(value)
