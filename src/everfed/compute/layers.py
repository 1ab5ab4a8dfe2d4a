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
        return h.flatten(2), h.shape

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        return slope.view(saved)


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
            _blend(target[1], slope.sum(1), beta, alpha)

    def fisher(self, target: Params, saved: Any, slope: Tensor, scale: Tensor) -> None:
        # a sample's gradient is slope * input, so its square is slope^2 * input^2
        self.accumulate(target, saved.square(), slope.square() * scale.unsqueeze(-1), 0, 1)


@dataclass(frozen=True)
class Convolution(Layer):
    """A convolution of one client's images; weight and, if there is one, bias.

    Activations are (1, batch, channels, height, width) with the channels outermost in memory, which
    is how a matrix product with the weights leaves them.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    slots: tuple[Slot, ...] = ()

    @property
    def unfolds(self) -> bool:
        """Few input channels: a product with unfolded patches beats the library's convolution."""
        _, channels, high, wide = self.slots[0].shape
        return channels <= 4 and channels * high * wide <= 128

    def _matrix(self, weight: Tensor) -> Tensor:
        """The weights as they lie in the vector: (out, kernel height * width * channels)."""
        return weight[0].permute(0, 2, 3, 1).view(weight.shape[1], -1)

    def _patches(self, x: Tensor) -> Tensor:
        """Unfolded inputs: (kernel height, width, channels, batch, out height, out width)."""
        if any(self.padding):
            x = F.pad(x, (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        kh, kw = self.slots[0].shape[2:]
        (sh, sw), (b, c, h, w) = self.stride, x.shape
        high, wide = (h - kh) // sh + 1, (w - kw) // sw + 1
        tb, tc, th, tw = x.stride()
        return x.as_strided((kh, kw, c, b, high, wide), (th, tw, tc, tb, th * sh, tw * sw))

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        x, bias = h[0], params[1][0] if len(params) > 1 else None
        if not self.unfolds:
            weight = params[0][0].contiguous()
            out = torch.conv2d(x, weight, bias, self.stride, self.padding)
            return out.unsqueeze(0), (x, weight)
        windows, matrix = self._patches(x), self._matrix(params[0])
        patches = windows.reshape(matrix.shape[1], -1)
        flat = torch.mm(matrix, patches)
        if bias is not None:
            flat += bias.unsqueeze(1)
        out = flat.view(len(matrix), *windows.shape[3:])
        return out.transpose(0, 1).unsqueeze(0), (x, patches)

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        below: Tensor = self._library(slope, saved[0], params[0][0].contiguous(), (True, False))[0]
        return below.unsqueeze(0)

    def accumulate(
        self, target: Params, saved: Any, slope: Tensor, beta: float, alpha: float
    ) -> None:
        x, kept = saved
        if self.unfolds:
            flat = _flat(slope)
            self._matrix(target[0]).addmm_(flat, kept.t(), beta=beta, alpha=alpha)
            bias = flat.sum(1)
        else:
            _blend(target[0][0], self._weight_gradient(x, kept, slope), beta, alpha)
            bias = slope[0].sum((0, 2, 3))
        if len(target) > 1:
            _blend(target[1][0], bias, beta, alpha)

    def fisher(self, target: Params, saved: Any, slope: Tensor, scale: Tensor) -> None:
        o, c, kh, kw = self.slots[0].shape
        total = torch.zeros(o, c * kh * kw).to(slope)
        rows = max(1, SAMPLES // total.numel())
        for k in range(0, len(scale[0]), rows):
            cut = slice(k, k + rows)
            patches = F.unfold(saved[0][cut], (kh, kw), padding=self.padding, stride=self.stride)
            each = torch.bmm(slope[0, cut].flatten(2), patches.transpose(1, 2))
            total += torch.einsum("b,bok->ok", scale[0, cut], each.square_())
        target[0][0].copy_(total.view(o, c, kh, kw))
        if len(target) > 1:
            target[1][0].copy_(scale[0] @ slope[0].sum((2, 3)).square())

    def _weight_gradient(self, x: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
        if self.stride == (1, 1):
            # batch and channels exchanged, the gradient of the weights is itself a convolution
            inner = x.transpose(0, 1).contiguous(memory_format=torch.channels_last)
            outer = slope[0].transpose(0, 1).contiguous(memory_format=torch.channels_last)
            return torch.conv2d(inner, outer, padding=self.padding).transpose(0, 1)
        gradient: Tensor = self._library(slope, x, weight, (False, True))[1]
        return gradient

    def _library(self, slope: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]) -> Any:
        return aten.convolution_backward(
            slope[0], x, weight, None, self.stride, self.padding, (1, 1), False, (0, 0), 1,
            (*wanted, False),
        )  # fmt: skip


def _blend(target: Tensor, value: Tensor, beta: float, alpha: float) -> None:
    """target <- beta * target + alpha * value for beta 0 or 1; 0 forgets even NaN, as in BLAS."""
    if beta:
        target.add_(value, alpha=alpha)
    else:
        torch.mul(value, alpha, out=target)


def _flat(slope: Tensor) -> Tensor:
    """(1, batch, channels, height, width) -> (channels, batch * height * width)."""
    return slope[0].transpose(0, 1).reshape(slope.shape[2], -1)


@dataclass(frozen=True)
class MaxPool(Layer):
    """2x2 maxima as comparisons of slices, several times faster than the general pooling.

    Of equal values the first in reading order gets the slope, as in torch.
    """

    def forward(self, params: Params, h: Tensor) -> tuple[Tensor, Any]:
        high, wide = h.shape[-2] // 2 * 2, h.shape[-1] // 2 * 2
        left, right = h[..., :high, 0:wide:2], h[..., :high, 1:wide:2]
        pairs = torch.maximum(left, right)
        top, bottom = pairs[..., 0::2, :], pairs[..., 1::2, :]
        return torch.maximum(top, bottom), (left, right, top, bottom, h)

    def backward(self, params: Params, saved: Any, slope: Tensor) -> Tensor:
        left, right, top, bottom, h = saved
        # what goes to the bottom row and to the right column: the slope where they were larger
        pairs = torch.empty_like(left)
        lower = aten.threshold_backward(slope, bottom - top, 0)
        pairs[..., 1::2, :] = lower
        torch.sub(slope, lower, out=pairs[..., 0::2, :])
        righter = aten.threshold_backward(pairs, right - left, 0)
        even = h.shape[-2] % 2 == 0 and h.shape[-1] % 2 == 0
        out = torch.empty_like(h) if even else torch.zeros_like(h)
        high, wide = left.shape[-2], 2 * left.shape[-1]
        out[..., :high, 1:wide:2] = righter
        torch.sub(pairs, righter, out=out[..., :high, 0:wide:2])
        return out


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
        return MaxPool() if _pools_by_two(child) else None
    if isinstance(child, nn.Linear) and kind is nn.Linear:
        return Linear(_own(slots, name))
    if isinstance(child, nn.Conv2d) and kind is nn.Conv2d:
        simple = child.groups == 1 and child.dilation == (1, 1) and child.padding_mode == "zeros"
        if not simple or isinstance(child.padding, str):
            return None
        (sh, sw), (ph, pw) = child.stride, child.padding
        return Convolution((sh, sw), (ph, pw), _own(slots, name))
    return None


def _pools_by_two(child: nn.Module | None) -> bool:
    if type(child) is not nn.MaxPool2d or child.ceil_mode or child.return_indices:
        return False
    settings = (child.kernel_size, child.stride, child.padding, child.dilation)
    pairs = [p if isinstance(p, int) else tuple(p) for p in settings]
    return pairs in ([2, 2, 0, 1], [(2, 2), (2, 2), 0, 1])


def _own(slots: dict[str, Slot], name: str) -> tuple[Slot, ...]:
    both = (f"{name}.weight", f"{name}.bias")
    return tuple(slots[key] for key in both if key in slots)
