"""What an engine asks of a model: losses, gradients and curvature of rows of flat vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from everfed.errors import EverfedError
from everfed.vector import Layout, Slot, load

#: outputs (batch, ...) and targets (batch, ...) -> one loss a sample, (batch,)
LossFunction = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """One loss a sample; positions of a sequence are averaged."""
    loss = F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    return loss.flatten(1).mean(1) if loss.dim() > 1 else loss


@dataclass(frozen=True)
class Objective:
    """The loss of every sample: (clients, batch, ...) outputs and targets -> (clients, batch)."""

    loss: LossFunction = cross_entropy
    #: which outputs compete for each sample, given its label; None: all
    mask: Callable[[Tensor], Tensor | None] | None = None
    #: what the parts add
    extra: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    #: what they add from features and targets: what the last layer is fed with, (clients, batch,
    #: width), and (clients, batch, ...) -> (clients, batch)
    features: Callable[[Tensor, Tensor], Tensor] | None = None
    #: how much the loss counts beside that
    weight: float = 1.0

    @property
    def closed(self) -> bool:
        """Whether it is the plain cross-entropy, whose gradient needs no autograd."""
        plain = self.loss is cross_entropy and self.weight == 1
        return plain and self.mask is None and self.extra is None

    def __call__(self, z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        allowed = self.mask(y) if self.mask else None
        outputs = z if allowed is None else z.masked_fill(~allowed, -torch.inf)
        per_sample = self.loss(outputs.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
        per_sample = per_sample if self.weight == 1 else self.weight * per_sample
        return per_sample if self.extra is None else per_sample + self.extra(z, x, y)


@dataclass(frozen=True)
class Seen:
    """A batch that went through a module."""

    z: Tensor  #: the outputs, (batch, ...)
    features: Tensor  #: what the last layer with weights was fed with, (batch, width)
    #: of every BatchNorm layer: what it was fed with, its running mean and its running variance
    normed: list[tuple[Tensor, Tensor, Tensor]]


def observe(module: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> Seen:
    """Run a module's forward pass on a batch and look at what its layers are fed with."""
    fed, normed = x, []

    def see(child: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal fed
        if not isinstance(child, _BatchNorm):
            fed = inputs[0]
        elif child.running_mean is not None and child.running_var is not None:
            normed.append((inputs[0], child.running_mean, child.running_var))

    with ExitStack() as hooks:
        for child in module.modules():
            weights = any(p.dim() > 1 for p in child.parameters(recurse=False))
            if weights or isinstance(child, _BatchNorm):
                hooks.callback(child.register_forward_pre_hook(see).remove)
        z = forward(x)
    return Seen(z, fed.flatten(1), normed)


class Compute(ABC):
    """A module seen as a function of rows of flat vectors, (clients, d).

    Inputs are (clients, batch, ...), `scale` (clients, batch) holds each sample's weight in its
    client's loss, 0 for padding.
    """

    #: how many clients it takes at once at the most
    width: int
    #: what to tell the user
    name: str
    #: the parameter whose rows the inputs' numbers are, where the module names one (`module.table`)
    #: and can be trained on some of them
    table: Slot | None = None

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        self.device = device
        self.layout = Layout.of(module)
        self.buffer_layout = Layout.of_buffers(module)
        whole = (b for b in self.module.buffers() if not b.is_floating_point())
        self._counts = [(buffer, buffer.clone()) for buffer in whole]
        if not self.layout.slots:
            raise EverfedError("the model has no trainable parameters")
        self.dtype = next(p.dtype for p in module.parameters() if p.requires_grad)

    def weights(self) -> Tensor:
        """The module's parameters as a new vector."""
        return self.layout.flatten(dict(self.module.named_parameters()))

    def read_buffers(self) -> Tensor:
        """The module's floating buffers as a new vector."""
        buffers = self.buffer_layout.flatten(dict(self.module.named_buffers()))
        return buffers.to(self.device, self.dtype)

    def load_buffers(self, buffers: Tensor) -> None:
        """Start from these statistics; whole-number buffers (counts) start as they were built."""
        load(self.module, self.buffer_layout, buffers)
        for buffer, first in self._counts:
            buffer.copy_(first)

    @contextmanager
    def kept_buffers(self) -> Iterator[None]:
        """Leaves all buffers as they were."""
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)

    def seed(self, value: int) -> None:  # noqa: B027 - most have nothing random
        """Make what is random in the module (dropout) a function of `value`."""

    def renew(self, w: Tensor, batches: Iterable[Tensor]) -> None:  # noqa: B027 - as most have none
        """Take running statistics anew, over these inputs, at the only client's model w."""

    def narrowed(self, start: Tensor, rows: Tensor) -> AbstractContextManager[Tensor]:
        """Room for one model that begins at `start` and has only these rows (sorted, 0 among them)
        of its table, (1, d'); inputs are then places in `rows`. Afterwards the whole model is in
        `space(1)`."""
        raise NotImplementedError

    def forward(self, w: Tensor, x: Tensor, train: bool, buffers: Tensor | None = None) -> Seen:
        """A batch's way through the model w, (d,), with gradients in both, and with other running
        statistics than the current ones if given. These stay as they are in any case."""
        # as in `grad`, BatchNorm has no statistics of a single sample
        normed = any(isinstance(child, _BatchNorm) for child in self.module.modules())
        self.module.train(train and not (normed and len(x) == 1))
        own = {name: b.clone() for name, b in self.module.named_buffers()}
        if buffers is not None:
            own |= self.buffer_layout.unflatten(buffers.clone())
        own |= self.layout.unflatten(w)
        return observe(self.module, x, lambda x: functional_call(self.module, own, (x,)))

    @abstractmethod
    def space(self, clients: int) -> Tensor:
        """Room for that many models, (clients, d), where gradients are cheapest."""

    @abstractmethod
    def grad(
        self,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        scale: Tensor,
        objective: Objective,
        train: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Gradients (clients, d), valid until the next call, and losses (clients,); with modules
        that behave otherwise in evaluation (BatchNorm), as in training or not."""

    def descend(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, lr: float
    ) -> Tensor:
        """One plain SGD step in place; losses (clients,)."""
        g, loss = self.grad(w, x, y, scale, objective)
        w.add_(g, alpha=-lr)
        return loss

    @abstractmethod
    def fisher(
        self, w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective, since: int = 0
    ) -> Tensor:
        """Sums over samples of scale * squared gradient and of scale * gradient: (2, clients, d).

        Coordinates before `since` are of no interest and may be left 0.
        """

    @abstractmethod
    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs without gradient, in evaluation mode: (d,) and (batch, ...) -> (batch, ...)."""

    @abstractmethod
    def features(self, w: Tensor, x: Tensor) -> Tensor:
        """What the last layer is fed with: (d,) and (batch, ...) -> (batch, width)."""


def choose(
    module: nn.Module, sample: Tensor, device: torch.device, precision: str, grouping: str
) -> Compute:
    """The fastest way of computing that fits the module."""
    from everfed.compute.layers import layers_of
    from everfed.compute.module import ModuleCompute
    from everfed.compute.sequence import SequenceCompute

    layers = layers_of(module, sample) if precision == "float32" else None
    if layers is not None and grouping != "single":
        written = SequenceCompute(module, device, layers)
        if written.width > 1 or grouping == "auto":
            return written
    if grouping == "batched":
        raise EverfedError(
            "grouping = 'batched' is for nn.Sequential models of Linear, Conv2d, MaxPool2d, "
            "Flatten and ReLU, Tanh or Sigmoid in float32; use grouping = 'auto'"
        )
    return ModuleCompute(module, device, precision)
