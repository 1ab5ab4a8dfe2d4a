"""Any nn.Module, one client at a time: autograd on views of one flat vector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.compute.base import Compute, Objective, observe
from everfed.curvature import ROOM, sample_gradients
from everfed.vector import Layout, bind


class ModuleCompute(Compute):
    """Parameters are views of `self.w`, gradients views of `self.g`."""

    width = 1

    def __init__(self, module: nn.Module, device: torch.device, precision: str) -> None:
        super().__init__(module, device)
        self.bf16 = precision == "bf16"
        self.name = "one client at a time" + (", bf16" if self.bf16 else "")
        w = self.weights()
        self._bind(self.layout, w, torch.zeros_like(w))
        known = {slot.name: slot for slot in self.layout.slots}
        self.table = known.get(getattr(module, "table", ""))
        self.norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]

    def seed(self, value: int) -> None:
        # not torch.manual_seed, which spends 0.4 ms on a traceback where CUDA is not in use
        torch.default_generator.manual_seed(value)
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).manual_seed(value)

    def renew(self, w: Tensor, batches: Iterable[Tensor]) -> None:
        usable = [x for x in batches if len(x) > 1]  # BatchNorm has no statistics of one sample
        if not self.norms or not usable:
            return
        momenta = [norm.momentum for norm in self.norms]
        for norm in self.norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
        self.module.train()
        with torch.no_grad(), self._at(w):
            for x in usable:
                self._forward(x)
        for norm, momentum in zip(self.norms, momenta, strict=True):
            norm.momentum = momentum

    def space(self, clients: int) -> Tensor:
        return self.w.unsqueeze(0)

    @contextmanager
    def narrowed(self, start: Tensor, rows: Tensor) -> Iterator[Tensor]:
        assert self.table is not None
        whole, cut = (self.layout, self.w, self.g), slice(self.table.start, self.table.stop)
        shape = (len(rows), *self.table.shape[1:])
        chosen = self.table.view(start[cut])[rows]
        small = self.layout.reshaped(self.table.name, shape)
        w = torch.cat([start[: cut.start], chosen.reshape(-1), start[cut.stop :]])
        self._bind(small, w, torch.zeros_like(w))
        try:
            yield w.unsqueeze(0)
        finally:
            self._bind(*whole)
        end = cut.start + chosen.numel()
        self.w.copy_(start)
        self.w[: cut.start], self.w[cut.stop :] = w[: cut.start], w[end:]
        self.table.view(self.w[cut])[rows] = w[cut.start : end].view(shape)

    def _bind(self, layout: Layout, w: Tensor, g: Tensor) -> None:
        self.layout, self.w, self.g = layout, w, g
        bind(self.module, layout, w, g)

    @contextmanager
    def _at(self, w: Tensor) -> Iterator[None]:
        """The module at another point of the parameter space, for a while."""
        if w.data_ptr() == self.w.data_ptr():
            yield
            return
        kept = self.w.clone()
        self.w.copy_(w.reshape(-1))
        try:
            yield
        finally:
            self.w.copy_(kept)

    def _forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            z: Tensor = self.module(x)
        return z.to(self.dtype)

    def grad(
        self,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        objective: Objective,
        train: bool = True,
    ) -> tuple[Tensor, Tensor]:
        # BatchNorm cannot be trained on a single sample: that step uses the running statistics
        self.module.train(train and not (self.norms and x.shape[1] == 1))
        with self._at(w):
            self.g.zero_()
            seen = observe(self.module, x[0], self._forward) if objective.features else None
            z = seen.z if seen else self._forward(x[0])
            loss = (objective(z.unsqueeze(0), x, y) * scale).sum()
            if objective.features is not None and seen is not None:
                loss = loss + (objective.features(seen.features.unsqueeze(0), y) * scale).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return self.g.unsqueeze(0), loss.detach().reshape(1)

    def fisher(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, since: int = 0
    ) -> Tensor:
        self.module.eval()
        vector = w.reshape(-1)
        out = vector.new_zeros(2, 1, len(vector))
        chunk = max(1, ROOM // self.layout.d)
        for k in range(0, x.shape[1], chunk):
            piece = slice(k, k + chunk)
            grads = sample_gradients(self, vector, x[0, piece], y[0, piece], objective)
            each = scale[0, piece].to(vector)
            out[1, 0] += each @ grads
            out[0, 0] += each @ grads.square_()
        return out

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        self.module.eval()
        with torch.no_grad(), self._at(w):
            return self._forward(x)

    def features(self, w: Tensor, x: Tensor) -> Tensor:
        self.module.eval()
        with torch.no_grad(), self._at(w):
            return observe(self.module, x, self._forward).features
