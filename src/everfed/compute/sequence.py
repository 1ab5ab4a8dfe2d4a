"""Sequences of known layers without autograd: forward, backward and the SGD step written out.

Many clients' models go through together: as batched matrix products and grouped convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everfed.compute.base import Compute, Objective
from everfed.compute.layers import Convolution, Layer, Params, by_client

#: what is done with a layer and the slope at its output; the number is its place in the sequence
Use = Callable[[int, Layer, Tensor], None]
#: channels of all clients of a group, in the widest convolution
CHANNELS = 256
#: floats of one group of models: as many as a core's part of the caches holds from step to step
NEAR = 2**21


class SequenceCompute(Compute):
    """Rows of models as stacks of layers."""

    def __init__(self, module: nn.Module, device: torch.device, layers: list[Layer]) -> None:
        super().__init__(module, device)
        self.layers = layers
        convolutions = [layer for layer in layers if isinstance(layer, Convolution)]
        self.width = max(1, NEAR // self.layout.d)
        if convolutions:  # beyond some channels the library needs no other clients to be fast
            most = max(layer.slots[0].shape[0] for layer in convolutions)
            self.width = min(self.width, max(1, CHANNELS // most))
        self.name = "clients trained together" if self.width > 1 else "one client at a time"
        #: the first and the last layer with parameters
        owners = [k for k, layer in enumerate(layers) if layer.slots]
        self._first, self._last = owners[0], owners[-1]
        self._w = torch.empty(0, self.layout.d, device=device, dtype=self.dtype)
        self._g = torch.empty_like(self._w)
        self._views: dict[tuple[int, int, int], list[Params]] = {}
        self._minus = torch.full((1, 1, 1), -1.0, device=device, dtype=self.dtype)

    def space(self, clients: int) -> Tensor:
        if len(self._w) < clients:
            self._w = self._w.new_empty(clients, self.layout.d)
            self._g = torch.empty_like(self._w)
            self._views.clear()
        return self._w[:clients]

    def _params(self, rows: Tensor) -> list[Params]:
        """Each layer's parameters; those of the own space are kept, views cost time in a step."""
        key = (rows.data_ptr(), len(rows), rows.stride(0))  # 0: one model for several clients
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
            slope = logp.exp_().scatter_add_(-1, at, self._minus.expand(at.shape))
            return slope.mul_(scale.unsqueeze(-1)), loss
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            loss = (objective(leaf, x, y) * scale).sum(1)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        return slope, loss.detach()

    def _slopes(
        self, z: Tensor, saved: list[Any], x: Tensor, y: Tensor, scale: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Slopes at the outputs and, if the objective sees them, at the features; the losses."""
        slope, loss = self._slope(z, x, y, scale, objective)
        if objective.features is None:
            return slope, None, loss
        kept = saved[self._last]  # a Linear saves its input, a Convolution it and more
        fed = kept if isinstance(kept, Tensor) else by_client(kept[0], len(z))
        with torch.enable_grad():
            leaf = fed.detach().requires_grad_()
            more = (objective.features(leaf.flatten(2), y) * scale).sum(1)
            if not more.requires_grad:  # nothing yet
                return slope, None, loss + more
            (below,) = torch.autograd.grad(more.sum(), leaf)
        return slope, below, loss + more.detach()

    def _back(
        self,
        params: list[Params],
        saved: list[Any],
        slope: Tensor,
        first: int,
        use: Use,
        features: Tensor | None = None,
    ) -> None:
        """From the last layer to layer `first`: give every layer's slope to `use`. `features` is
        added to the slope below the last layer with parameters."""
        for k in reversed(range(first, len(self.layers))):
            layer = self.layers[k]
            # the slope below needs the parameters before `use` may change them
            below = layer.backward(params[k], saved[k], slope) if k > first else slope
            use(k, layer, slope)
            slope = below if features is None or k != self._last else below + features

    @torch.no_grad()
    def grad(
        self,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        objective: Objective,
        train: bool = True,
    ) -> tuple[Tensor, Tensor]:
        g = self._g[: len(w)] if len(self._g) >= len(w) else torch.empty_like(w)
        params, out = self._params(w), self._params(g)
        z, saved = self._forward(params, x)
        slope, features, loss = self._slopes(z, saved, x, y, scale, objective)

        def write(k: int, layer: Layer, slope: Tensor) -> None:
            layer.accumulate(out[k], saved[k], slope, 0, 1)

        self._back(params, saved, slope, self._first, write, features)
        return g, loss

    @torch.no_grad()
    def descend(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, lr: float
    ) -> Tensor:
        params = self._params(w)
        z, saved = self._forward(params, x)
        slope, features, loss = self._slopes(z, saved, x, y, scale, objective)

        def step(k: int, layer: Layer, slope: Tensor) -> None:
            layer.accumulate(params[k], saved[k], slope, 1, -lr)

        self._back(params, saved, slope, self._first, step, features)
        return loss

    @torch.no_grad()
    def fisher(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, since: int = 0
    ) -> Tensor:
        params = self._params(w)
        z, saved = self._forward(params, x)
        slope, _ = self._slope(z, x, y, torch.ones_like(scale), objective)
        out = w.new_zeros(2, *w.shape)
        squares, means = self._params(out[0]), self._params(out[1])

        def write(k: int, layer: Layer, slope: Tensor) -> None:
            layer.fisher(squares[k], saved[k], slope, scale)
            each = scale.view(*scale.shape, *[1] * (slope.dim() - 2))
            layer.accumulate(means[k], saved[k], slope * each, 0, 1)

        ends = [max((slot.stop for slot in layer.slots), default=0) for layer in self.layers]
        self._back(
            params, saved, slope, next(k for k, end in enumerate(ends) if end > since), write
        )
        return out

    @torch.no_grad()
    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        return self._forward(self._params(w.reshape(1, -1)), x.unsqueeze(0))[0][0]

    @torch.no_grad()
    def features(self, w: Tensor, x: Tensor) -> Tensor:
        _, saved = self._forward(self._params(w.reshape(1, -1)), x.unsqueeze(0))
        fed: Tensor = saved[self._last][0]  # a Linear saves its input, a Convolution it and more
        return fed.flatten(1)
