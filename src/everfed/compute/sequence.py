"""Sequences of known layers without autograd: forward, backward and the SGD step written out.

Dense models of many clients go through as batched matrix products; with convolutions it is one
client at a time, still without autograd's overhead a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everfed.compute.base import Compute, Objective
from everfed.compute.layers import Convolution, Layer, Params

#: floats of one group of models; beyond it more groups are no slower and memory stays flat
ROOM = 2**25


class SequenceCompute(Compute):
    """Rows of models as stacks of layers."""

    def __init__(self, module: nn.Module, device: torch.device, layers: list[Layer]) -> None:
        super().__init__(module, device)
        self.layers = layers
        self.dense = not any(isinstance(layer, Convolution) for layer in layers)
        self.width = max(1, ROOM // self.layout.d) if self.dense else 1
        if self.dense:
            self.name = "clients batched as matrix products"
        else:
            self.name = "one client at a time, written-out gradients"
        #: the first and the last layer with parameters
        owners = [k for k, layer in enumerate(layers) if layer.slots]
        self._first, self._last = owners[0], owners[-1]
        self._w = torch.empty(0, self.layout.d, device=device, dtype=self.dtype)
        self._g = torch.empty_like(self._w)
        self._views: dict[tuple[int, int], list[Params]] = {}

    def space(self, clients: int) -> Tensor:
        if len(self._w) < clients:
            self._w = self._w.new_empty(clients, self.layout.d)
            self._g = torch.empty_like(self._w)
            self._views.clear()
        return self._w[:clients]

    def _params(self, rows: Tensor) -> list[Params]:
        """Each layer's parameters; those of the own space are kept, views cost time in a step."""
        key = (rows.data_ptr(), len(rows))
        if key in self._views:
            return self._views[key]
        out: list[Params] = [
            [slot.view(rows[:, slot.start : slot.stop]) for slot in layer.slots]
            for layer in self.layers
        ]
        if key[0] in (self._w.data_ptr(), self._g.data_ptr()):
            self._views[key] = out
        return out

    def _forward(self, params: list[Params], x: Tensor) -> tuple[Tensor, list[Any]]:
        """Outputs (clients, batch, ...), and what each layer saved."""
        saved = []
        for layer, own in zip(self.layers, params, strict=True):
            x, kept = layer.forward(own, x)
            saved.append(kept)
        return x, saved

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

    @torch.no_grad()
    def grad(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        g = self._g[: len(w)] if len(self._g) >= len(w) else torch.empty_like(w)
        z, saved = self._forward(self._params(w), x)
        slope, loss = self._slope(z, x, y, scale, objective)
        self._gradients(w, saved, slope, None, g)
        return g, loss

    def _gradients(
        self, w: Tensor, saved: list[Any], slope: Tensor, square: Tensor | None, g: Tensor
    ) -> None:
        params, out = self._params(w), self._params(g)
        for k in reversed(range(self._first, len(self.layers))):
            layer = self.layers[k]
            for target, value in zip(out[k], layer.gradient(saved[k], slope, square), strict=True):
                target.copy_(value)
            if k > self._first:
                slope = layer.backward(params[k], saved[k], slope)

    @torch.no_grad()
    def descend(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, lr: float
    ) -> Tensor:
        params = self._params(w)
        z, saved = self._forward(params, x)
        slope, loss = self._slope(z, x, y, scale, objective)
        for k in reversed(range(self._first, len(self.layers))):
            layer = self.layers[k]
            below = layer.backward(params[k], saved[k], slope) if k > self._first else slope
            layer.descend(params[k], saved[k], slope, lr)
            slope = below
        return loss

    @torch.no_grad()
    def fisher(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> Tensor:
        if not self.dense:
            return self.fisher_by_samples(w, x, y, scale, objective)
        z, saved = self._forward(self._params(w), x)
        slope, _ = self._slope(z, x, y, torch.ones_like(scale), objective)
        g = torch.empty_like(w)
        self._gradients(w, saved, slope, scale, g)
        return g

    @torch.no_grad()
    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        return self._forward(self._params(w.reshape(1, -1)), x.unsqueeze(0))[0][0]

    @torch.no_grad()
    def features(self, w: Tensor, x: Tensor) -> Tensor:
        _, saved = self._forward(self._params(w.reshape(1, -1)), x.unsqueeze(0))
        fed: Tensor = saved[self._last][0]  # a Linear saves its input, a Convolution it and more
        return fed.flatten(1)
