"""Layers with written-out backward passes, for a stack of models at once.

A layer maps inputs (clients, batch, ...) to outputs; its way back takes the slope at its output and
gives the slope at its input. The numbers are autograd's up to rounding (tested).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everfed.vector import Layout, Slot

aten = torch.ops.aten
#: floats of per-sample gradients at once
SAMPLES = 2**22
#: a layer's parameters in a stack of models, (clients, *shape) each
Params = Sequence[Tensor]


class Layer(ABC):
    """One step of a sequence."""

    #: where the layer's parameters lie in the vector
    slots: tuple[Slot, ...] = ()

    @abstractmethod
    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        """Outputs, and what the way back needs."""

    @abstractmethod
    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        """The slope at the input."""

    def accumulate(  # noqa: B027 - most have no parameters
        self, target: Params, saved: Any, slope: Tensor, beta: float, alpha: float
    ) -> None:
        """target <- beta * target + alpha * gradient of the layer's parameters, in place.

        (0, 1) gives the gradient, (1, -lr) is a step of SGD on the parameters themselves.
        """

    def fisher(self, target: Params, saved: Any, slope: Tensor, scale: Tensor) -> None:  # noqa: B027
        """target <- sum over samples of scale, (clients, batch), * squared gradient of a sample."""


@dataclass(frozen=True)
class Flatten(Layer):
    """Samples as vectors."""

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        return h.flatten(2), h

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        # in the order in memory that the images have
        return torch.empty_like(saved).copy_(slope.view(saved.shape))


@dataclass(frozen=True)
class Linear(Layer):
    """A batched matrix product; weight and, if there is one, bias."""

    slots: tuple[Slot, ...] = ()

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        weight = params[0].transpose(1, 2)
        if len(params) == 1:
            return torch.bmm(h, weight), h
        return torch.baddbmm(params[1].unsqueeze(1), h, weight), h

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        return torch.bmm(slope, params[0])

    def accumulate(
        self, target: Params, saved: Any, slope: Tensor, beta: float, alpha: float
    ) -> None:
        target[0].baddbmm_(slope.transpose(1, 2), saved, beta=beta, alpha=alpha)
        if len(target) > 1:
            blend(target[1], slope.sum(1), beta, alpha)

    def fisher(self, target: Params, saved: Any, slope: Tensor, scale: Tensor) -> None:
        # a sample's gradient is slope * input, so its square is slope^2 * input^2
        self.accumulate(target, saved.square(), slope.square() * scale.unsqueeze(-1), 0, 1)


def images(h: Tensor) -> Tensor:
    """(clients, batch, channels, height, width) -> (batch, clients * channels, height, width).

    Channels last in memory, where the library is fast. A view, if the memory is in that order
    already, as convolutions leave it.
    """
    n, b, c, y, x = h.shape
    flat = h.permute(1, 3, 4, 0, 2).reshape(b, y, x, n * c).permute(0, 3, 1, 2)
    return flat.contiguous(memory_format=torch.channels_last)


def by_client(h: Tensor, clients: int) -> Tensor:
    """The way back from `images`."""
    b, c, y, x = h.shape
    line = h.permute(0, 2, 3, 1).contiguous()  # no copy, if the library has kept the order
    return line.view(b, y, x, clients, c // clients).permute(3, 0, 4, 1, 2)


@dataclass(frozen=True)
class Convolution(Layer):
    """Convolutions of several clients as one with a group for each; weight and perhaps bias."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    slots: tuple[Slot, ...] = ()

    def _kernels(self, weight: Tensor) -> Tensor:
        """(clients, out, in, height, width) -> (clients * out, ...), in the order of `images`."""
        return weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        x, kernels = images(h), self._kernels(params[0])
        bias = params[1].flatten() if len(params) > 1 else None
        out = torch.conv2d(x, kernels, bias, self.stride, self.padding, groups=len(h))
        return by_client(out, len(h)), (x, kernels)

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        return by_client(self._library(saved, slope, (True, False))[0], len(slope))

    def accumulate(
        self, target: Params, saved: Any, slope: Tensor, beta: float, alpha: float
    ) -> None:
        weight = self._library(saved, slope, (False, True))[1]
        blend(target[0], weight.view(target[0].shape), beta, alpha)
        if len(target) > 1:
            blend(target[1], slope.sum((1, 3, 4)), beta, alpha)

    def fisher(self, target: Params, saved: Any, slope: Tensor, scale: Tensor) -> None:
        o, c, kh, kw = self.slots[0].shape
        x, rows = by_client(saved[0], len(slope)), max(1, SAMPLES // (o * c * kh * kw))
        for client in range(len(slope)):
            total = torch.zeros(o, c * kh * kw).to(slope)
            for k in range(0, slope.shape[1], rows):
                cut = (client, slice(k, k + rows))
                patches = F.unfold(x[cut], (kh, kw), padding=self.padding, stride=self.stride)
                each = torch.bmm(slope[cut].flatten(2), patches.transpose(1, 2))
                total += torch.einsum("b,bok->ok", scale[cut], each.square_())
            target[0][client].copy_(total.view(o, c, kh, kw))
        if len(target) > 1:
            squares = slope.sum((3, 4)).square()
            target[1].copy_(torch.bmm(scale.unsqueeze(1), squares).squeeze(1))

    def _library(self, saved: Any, slope: Tensor, wanted: tuple[bool, bool]) -> Any:
        x, kernels = saved
        return aten.convolution_backward(
            images(slope), x, kernels, None, self.stride, self.padding, (1, 1), False, (0, 0),
            len(slope), (*wanted, False),
        )  # fmt: skip


def blend(target: Tensor, value: Tensor, beta: float, alpha: float) -> None:
    """target <- beta * target + alpha * value for beta 0 or 1; 0 forgets even NaN, as in BLAS."""
    if beta:
        target.add_(value, alpha=alpha)
    else:
        torch.mul(value, alpha, out=target)


@dataclass(frozen=True)
class MaxPool(Layer):
    """Maxima of windows. The library is fast with channels last; of equal values the first in
    reading order gets the slope."""

    window: tuple[Any, ...]  #: kernel size, stride, padding, dilation, ceil_mode, as torch has them

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        x = images(h)
        out, places = aten.max_pool2d_with_indices(x, *self.window)
        return by_client(out, len(h)), (x, places)

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        x, places = saved
        back = aten.max_pool2d_with_indices_backward
        return by_client(back(images(slope), x, *self.window, places), len(slope))


@dataclass(frozen=True)
class Activation(Layer):
    """An element-wise function whose way back needs its output only."""

    function: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]  #: slope at the output, output -> slope at the input

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        out = self.function(h)
        return out, out

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        return self.back(slope, saved)


PLAIN: dict[type[nn.Module], Layer] = {
    nn.ReLU: Activation(torch.relu, lambda slope, out: aten.threshold_backward(slope, out, 0)),
    nn.Tanh: Activation(torch.tanh, aten.tanh_backward),
    nn.Sigmoid: Activation(torch.sigmoid, aten.sigmoid_backward),
    nn.Flatten: Flatten(),
}


def layers_of(module: nn.Module, sample: Tensor) -> list[Layer] | None:
    """The layers of a sequence of known modules; None where there is anything else in it.

    `sample` is one input without batch.
    """
    if type(module) is not nn.Sequential or any(map(_hooked, module.modules())):
        return None
    if not all(p.requires_grad for p in module.parameters()) or list(module.buffers()):
        return None
    slots = {slot.name: slot for slot in Layout.of(module).slots}
    out: list[Layer] = []
    image = sample.dim() == 3
    if not image and sample.dim() != 1:
        return None
    for name, child in module._modules.items():  # named_children leaves out what stands twice
        layer = _layer(child, slots, name)
        image_only = isinstance(layer, Convolution | MaxPool)
        if layer is None or (image_only and not image) or (isinstance(layer, Linear) and image):
            return None
        if isinstance(layer, Flatten):
            image = False
        out.append(layer)
    return out if any(isinstance(layer, Linear | Convolution) for layer in out) else None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _layer(child: nn.Module | None, slots: dict[str, Slot], name: str) -> Layer | None:
    kind = type(child)
    if isinstance(child, nn.Flatten) and (child.start_dim != 1 or child.end_dim != -1):
        return None
    if isinstance(child, nn.Module) and kind in PLAIN:
        return PLAIN[kind]
    if f"{name}.weight" not in slots:  # unknown, or parameters that stand under another name
        return _pool(child)
    if getattr(child, "bias", None) is not None and f"{name}.bias" not in slots:
        return None
    if isinstance(child, nn.Linear) and kind is nn.Linear:
        return Linear(_own(slots, name))
    if isinstance(child, nn.Conv2d) and kind is nn.Conv2d:
        simple = child.groups == 1 and child.dilation == (1, 1) and child.padding_mode == "zeros"
        if not simple or isinstance(child.padding, str):
            return None
        (sh, sw), (ph, pw) = child.stride, child.padding
        return Convolution((sh, sw), (ph, pw), _own(slots, name))
    return None


def _pool(child: nn.Module | None) -> MaxPool | None:
    if not isinstance(child, nn.MaxPool2d) or type(child) is not nn.MaxPool2d:
        return None
    both = (child.kernel_size, child.stride, child.padding, child.dilation)
    window = (*([own] if isinstance(own, int) else list(own) for own in both), child.ceil_mode)
    return None if child.return_indices else MaxPool(window)


def _own(slots: dict[str, Slot], name: str) -> tuple[Slot, ...]:
    both = (f"{name}.weight", f"{name}.bias")
    return tuple(slots[key] for key in both if key in slots)
