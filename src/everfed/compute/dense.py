"""Small dense models, many clients at once: every layer is one batched matrix product.

Forward, backward and the SGD step are written out for nn.Sequential of Linear, Flatten and
element-wise activations; the numbers are autograd's up to rounding (tested).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from everfed.compute.base import Compute, Objective
from everfed.vector import Slot

aten = torch.ops.aten
#: activation in place, and its way back from the upstream gradient and the activation's output
ACTIVATIONS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu_, lambda d, h: aten.threshold_backward(d, h, 0)),
    nn.Tanh: (torch.tanh_, lambda d, h: aten.tanh_backward(d, h)),
    nn.Sigmoid: (torch.sigmoid_, lambda d, h: aten.sigmoid_backward(d, h)),
}
#: floats of one group of models; beyond it more groups are no slower and memory stays flat
ROOM = 2**25


@dataclass(frozen=True)
class Layer:
    weight: Slot
    bias: Slot | None
    activation: type | None


class DenseCompute(Compute):
    """Rows of models as stacks of matrices."""

    name = "clients batched as matrix products"

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module, device)
        self.width = max(1, ROOM // self.layout.d)
        slots = {slot.name: slot for slot in self.layout.slots}
        self.layers: list[Layer] = []
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                bias = slots.get(f"{name}.bias")
                self.layers.append(Layer(slots[f"{name}.weight"], bias, None))
            elif type(child) in ACTIVATIONS:
                last = self.layers[-1]
                self.layers[-1] = Layer(last.weight, last.bias, type(child))
        self._w = torch.empty(0, self.layout.d, device=device, dtype=self.dtype)
        self._g = torch.empty_like(self._w)

    @staticmethod
    def fits(module: nn.Module, sample: Tensor) -> bool:
        """Whether the module is such a sequence; `sample` is one input without batch."""
        if type(module) is not nn.Sequential or any(b is not None for b in module.buffers()):
            return False
        kinds = [type(child) for child in module]
        if kinds and kinds[0] is nn.Flatten:
            kinds = kinds[1:]
        elif sample.dim() != 1:
            return False
        # Linear, at most one activation, Linear, ...: what the backward pass below assumes
        linear = [kind is nn.Linear for kind in kinds]
        return (
            bool(kinds)
            and linear[0]
            and all(flag or kind in ACTIVATIONS for flag, kind in zip(linear, kinds, strict=True))
            and all(a or b for a, b in pairwise(linear))
            and all(p.requires_grad for p in module.parameters())
            and not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        )

    def space(self, clients: int) -> Tensor:
        if len(self._w) < clients:
            self._w = self._w.new_empty(clients, self.layout.d)
            self._g = torch.empty_like(self._w)
        return self._w[:clients]

    def _views(self, rows: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        def view(slot: Slot) -> Tensor:
            return slot.view(rows[:, slot.start : slot.stop])

        return [(view(la.weight), view(la.bias) if la.bias else None) for la in self.layers]

    def _forward(self, views: list[tuple[Tensor, Tensor | None]], x: Tensor) -> list[Tensor]:
        """Inputs of every layer and, last, the outputs: each (clients, batch, width)."""
        h = x.flatten(2)
        out = [h]
        for layer, (weight, bias) in zip(self.layers, views, strict=True):
            wt = weight.transpose(1, 2)
            h = torch.bmm(h, wt) if bias is None else torch.baddbmm(bias.unsqueeze(1), h, wt)
            if layer.activation:
                ACTIVATIONS[layer.activation][0](h)
            out.append(h)
        return out

    def _slope(
        self, z: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the scaled losses at the outputs, and the losses (clients,)."""
        if objective.closed and z.dim() == 3 and y.dim() == 2:
            logp = torch.log_softmax(z, -1)
            at = y.unsqueeze(-1)
            loss = -(logp.gather(-1, at).squeeze(-1) * scale).sum(1)
            slope = logp.exp_().scatter_add_(-1, at, logp.new_full((1,), -1.0).expand(at.shape))
            return slope.mul_(scale.unsqueeze(-1)), loss
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            loss = (objective(leaf, x, y) * scale).sum(1)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        return slope, loss.detach()

    def _backward(
        self,
        views: list[tuple[Tensor, Tensor | None]],
        acts: list[Tensor],
        slope: Tensor,
        take: Callable[[int, Tensor, Tensor], None],
    ) -> None:
        """Calls take(layer, slope at its output, its input) from the last layer to the first."""
        for k in reversed(range(len(self.layers))):
            activation = self.layers[k].activation
            if activation:
                slope = ACTIVATIONS[activation][1](slope, acts[k + 1])
            below = torch.bmm(slope, views[k][0]) if k else slope
            take(k, slope, acts[k])
            slope = below

    @torch.no_grad()
    def grad(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        g = self._g[: len(w)] if len(self._g) >= len(w) else torch.empty_like(w)
        views, out = self._views(w), self._views(g)
        acts = self._forward(views, x)
        slope, loss = self._slope(acts[-1], x, y, scale, objective)

        def take(k: int, slope: Tensor, h: Tensor) -> None:
            weight, bias = out[k]
            weight.copy_(torch.bmm(slope.transpose(1, 2), h))
            if bias is not None:
                torch.sum(slope, 1, out=bias)

        self._backward(views, acts, slope, take)
        return g, loss

    @torch.no_grad()
    def descend(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, lr: float
    ) -> Tensor:
        views = self._views(w)
        acts = self._forward(views, x)
        slope, loss = self._slope(acts[-1], x, y, scale, objective)

        def take(k: int, slope: Tensor, h: Tensor) -> None:
            weight, bias = views[k]
            weight.baddbmm_(slope.transpose(1, 2), h, alpha=-lr)
            if bias is not None:
                bias.sub_(slope.sum(1), alpha=lr)

        self._backward(views, acts, slope, take)
        return loss

    @torch.no_grad()
    def fisher(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> Tensor:
        # a sample's gradient of a weight is slope * input, so its square is slope^2 * input^2
        g = torch.empty_like(w)
        views, out = self._views(w), self._views(g)
        acts = self._forward(views, x)
        slope, _ = self._slope(acts[-1], x, y, torch.ones_like(scale), objective)

        def take(k: int, slope: Tensor, h: Tensor) -> None:
            weight, bias = out[k]
            squares = slope.square() * scale.unsqueeze(-1)
            weight.copy_(torch.bmm(squares.transpose(1, 2), h.square()))
            if bias is not None:
                torch.sum(squares, 1, out=bias)

        self._backward(views, acts, slope, take)
        return g

    @torch.no_grad()
    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        return self._forward(self._views(w.reshape(1, -1)), x.unsqueeze(0))[-1][0]

    @torch.no_grad()
    def features(self, w: Tensor, x: Tensor) -> Tensor:
        return self._forward(self._views(w.reshape(1, -1)), x.unsqueeze(0))[-2][0]
