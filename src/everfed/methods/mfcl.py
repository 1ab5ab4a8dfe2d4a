"""MFCL. Babakniya et al., A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated
Class Incremental Learning for Vision Tasks, 2023.

At a task's end the server trains a generator G against the global model, with outputs u and without
any data. On batches x = G(noise), p the mean over the batch of softmax(u), C the classes seen:

    CE(u / soften, argmax u) + div (1 + sum_c p_c log p_c / log C)
    + bn mean_layers KL(N(running mean, variance) || N(the batch's)) + prior |x - smoothed x|^2

Generator and model are sent. Clients add `size` inputs of the generator to every batch, labelled by
the teacher, and descend, with phi the features and h the head (the last layer),

    CE(new classes; real inputs) + ft CE(h(phi), y) + kd |h_old(phi) - h_old(phi_old)|^2 / C_old

where the second term moves the head alone, as its features are held, and the third, with the
teacher's head, all but the head. ft = kd = 0 is FedAvg with the first term.
"""

from __future__ import annotations

import math

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from everfed.chance import rng, torch_seed
from everfed.compute.base import Seen
from everfed.errors import EverfedError
from everfed.generators import (
    Generator,
    adam,
    among,
    check_inputs,
    needed,
    noise,
    smoothed,
    statistics,
)
from everfed.method import Average, Context, Method, Part, Reduced, Server, State
from everfed.methods.lwf import known, need_classes
from everfed.methods.registry import register
from everfed.vector import Layout


def imbalance(p: Tensor) -> Tensor:
    """1 + sum_c p_c log p_c / log C: 0 for equal shares p, (C,), and 1 for a single class of
    several; one that is alone has its share."""
    if len(p) == 1:
        return p.new_zeros(())
    return 1 + torch.xlogy(p, p).sum() / math.log(len(p))


def divergence(seen: Seen) -> Tensor:
    """The mean over BatchNorm layers and channels of KL(N(running) || N(batch))."""
    gaps = [normal_kl(rm, rv, m, v).mean() for m, v, rm, rv in statistics(seen)]
    return torch.stack(gaps).mean() if gaps else seen.z.new_zeros(())


def normal_kl(m: Tensor, v: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """KL(N(m, v) || N(mean, variance)), element by element."""
    v, variance = v + 1e-8, variance + 1e-8
    return 0.5 * ((variance / v).log() + (v + (m - mean).square()) / variance - 1)


def head(layout: Layout, w: Tensor, features: Tensor) -> Tensor:
    """The last layer of the model w, (d,), on features (n, width): outputs (n, classes)."""
    last = layout.names(layout.layers()[-1])
    weight, *bias = (slot.view(w[slot.start : slot.stop]) for slot in last)
    return F.linear(features, weight, *bias)


def check_head(layout: Layout, w: Tensor, seen: Seen) -> None:
    """Raise EverfedError where `head` is not what the model w, (d,), ends with."""
    shape = (seen.z.shape[-1], seen.features.shape[-1])
    dense = layout.names(layout.layers()[-1])[0].shape == shape
    if not dense or not torch.allclose(head(layout, w, seen.features), seen.z, 1e-3, 1e-4):
        raise EverfedError("mfcl needs a model that ends with the dense layer defined last")


@dataclass(frozen=True)
class DataFree(Part):
    """Replay and distillation with a generator that the server trains from the model alone."""

    once = ("generator", "teacher", "buffers")
    ft: NonNegativeFloat = 1.0
    kd: NonNegativeFloat = 0.1
    size: PositiveInt = 128
    iterations: PositiveInt = 100
    rate: PositiveFloat = 1e-3
    soften: PositiveFloat = 1000.0
    div: NonNegativeFloat = 1.0
    bn: NonNegativeFloat = 50.0
    prior: NonNegativeFloat = 1e-3
    latent: PositiveInt = 100
    width: PositiveInt = 32

    @property
    def new_slice(self) -> bool:
        return True

    @property
    def batched(self) -> bool:
        return False

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        real, labels = c.batch[0][0], c.batch[1][0]
        if c.step == 0:  # from the first round on, and not after a task for nothing
            need_classes(c.batch[1], "mfcl")
            check_inputs(real, c.inputs, "mfcl")
        if "generator" not in c.down:
            return g
        teacher = c.down["teacher"]
        with torch.no_grad():
            x = torch.cat([real, self.draw(c)])
            seen = c.forward(teacher, x, train=False, buffers=c.down["buffers"])
            if c.step == 0:
                check_head(c.layout, teacher, seen)
            u = seen.z
            y = torch.cat([labels, among(u, c.known)[len(real) :].argmax(1)])
        with torch.enable_grad():
            v = w[0].detach().requires_grad_()
            phi = c.forward(v, x, train=True).features
            z = among(head(c.layout, v, phi.detach()), c.seen)
            (tuned,) = torch.autograd.grad(F.cross_entropy(z, y), v)
            change = self.ft * tuned
            if phi.requires_grad:  # there are layers below the head
                z = known(head(c.layout, teacher, phi), c)
                (kept,) = torch.autograd.grad(F.mse_loss(z, known(u, c)), v)
                change = change + self.kd * kept
        return g + change

    def draw(self, c: Context) -> Tensor:
        """A batch of the generator, (size, *shape)."""
        make = Generator(c.inputs, self.latent, self.width)
        random = rng(c.seed, "synthetic batch", c.round, c.clients[0], c.step)
        theta = c.down["generator"]
        return make(theta, noise(random, self.size, self.latent, theta))

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        server = needed(r.server, "mfcl")
        return {"generator": self.train(w, server), "teacher": w, "buffers": server.buffers}

    @torch.enable_grad()
    def train(self, w: Tensor, server: Server) -> Tensor:
        """The generator's parameters."""
        random = rng(server.seed, "synthesis", server.round)
        make = Generator(server.inputs, self.latent, self.width)
        theta = make.fresh(torch_seed(server.seed, "generator", server.round), w).requires_grad_()
        descent = adam([{"params": [theta]}], self.rate)
        for _ in range(self.iterations):
            x = make(theta, noise(random, self.size, self.latent, w))
            seen = server.forward(w, x, train=False)
            u = seen.z[:, server.seen]
            loss = F.cross_entropy(u / self.soften, u.argmax(1))
            loss = loss + self.div * imbalance(u.softmax(1).mean(0)) + self.bn * divergence(seen)
            loss = loss + self.prior * (x - smoothed(x)).square().flatten(1).sum(1).mean()
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
        return theta.detach()


@register("Babakniya et al. 2023")
def mfcl(
    ft: NonNegativeFloat = 1.0,
    kd: NonNegativeFloat = 0.1,
    size: PositiveInt = 128,
    iterations: PositiveInt = 100,
    rate: PositiveFloat = 1e-3,
    soften: PositiveFloat = 1000.0,
    div: NonNegativeFloat = 1.0,
    bn: NonNegativeFloat = 50.0,
    prior: NonNegativeFloat = 1e-3,
    latent: PositiveInt = 100,
    width: PositiveInt = 32,
    average: Average = "samples",
) -> Method:
    """The server trains a generator from the model alone; clients replay it and distil.

    Args:
        ft: weight of the loss among all classes seen, which moves the last layer alone.
        kd: weight of the distance to the outputs of the previous task's model.
        size: generated inputs beside each batch, and in a step of the generator.
        iterations: steps of the generator.
        rate: its learning rate.
        soften: how much the outputs are softened in its loss on its own labels.
        div: weight of the classes' imbalance among what is generated.
        bn: weight of the distance to the running statistics of BatchNorm layers.
        prior: weight of what a blur takes from the images.
        latent: numbers of noise for each input.
        width: channels of the generator.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = DataFree(ft, kd, size, iterations, rate, soften, div, bn, prior, latent, width)
    return Method(part, average=average, name="mfcl")
