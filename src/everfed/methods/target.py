"""TARGET. Zhang et al., TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation,
2023.

At a task's end the server makes inputs x with random labels y among the classes seen, without any
data: a generator G and the noise of each batch descend

    bn L_BN + ce CE(u(x), y) - adv KL(u(x) || v(x)),    x = G(noise)

with u the global model's outputs; L_BN is the distance of the batch's means and variances in its
BatchNorm layers from the running ones; v is a student that is distilled from what was made so far,
and counts after `warmup` batches, where it agrees with the teacher. Every batch begins at a common
generator, which follows (first-order MAML). Then the inputs and the outputs u on them are sent, and
clients descend

    CE + kd KD_T(z(x'), u(x'))

KD as in LwF, over the classes of earlier tasks, on batches x' of what was made. Where classes
arrive task by task, only the new ones compete in CE. kd = 0 is FedAvg with that CE.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from everfed.chance import rng, torch_seed
from everfed.compute.base import Seen
from everfed.generators import Generator, adam, check_inputs, needed, noise, picks, statistics
from everfed.method import Average, Context, Method, Part, Reduced, Server, State
from everfed.methods.lwf import distillation, known, need_classes
from everfed.methods.registry import register

#: learning rates of the generator and of the noise
GENERATOR, NOISE = 0.002, 0.01


def distance(seen: Seen) -> Tensor:
    """L_BN: sum over BatchNorm layers of |mean - running mean| + |variance - running variance|."""
    gaps = [(m - rm).norm() + (v - rv).norm() for m, v, rm, rv in statistics(seen)]
    return torch.stack(gaps).sum() if gaps else seen.z.new_zeros(())


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean KL(teacher || student) of the samples whose classes agree, 0 elsewhere: outputs (n,
    classes) -> scalar."""
    p, q = teacher.log_softmax(1), student.log_softmax(1)
    agree = teacher.argmax(1) == student.argmax(1)
    return (((p - q) * p.exp()).sum(1) * agree).mean()


@dataclass(frozen=True)
class Synthesis(Part):
    """Inputs that the server makes from the model alone, and distillation on them."""

    once = ("x", "u")
    kd: NonNegativeFloat = 25.0
    temperature: PositiveFloat = 2.0
    batches: PositiveInt = 20
    size: PositiveInt = 128
    steps: PositiveInt = 10
    warmup: NonNegativeInt = 10
    student: PositiveInt = 20
    bn: NonNegativeFloat = 10.0
    ce: NonNegativeFloat = 0.5
    adv: NonNegativeFloat = 1.0
    latent: PositiveInt = 256
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
        if c.step == 0:  # from the first round on, and not after a task for nothing
            need_classes(c.batch[1], "target")
            check_inputs(c.batch[0], c.inputs, "target")
        if "x" not in c.down:
            return g
        random = rng(c.seed, "synthetic batch", c.round, c.clients[0], c.step)
        drawn = picks(random, c.local.batch, len(c.down["x"]), w)
        with torch.enable_grad():
            v = w[0].detach().requires_grad_()
            z = c.forward(v, c.down["x"][drawn], train=True).z
            kd = distillation(known(z, c), known(c.down["u"][drawn], c), self.temperature).mean()
            (slope,) = torch.autograd.grad(kd, v)
        return g + self.kd * slope

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        server = needed(r.server, "target")
        x = self.synthesise(w, server)
        return {"x": x, "u": server.forward(w, x, train=False).z.detach()}

    @torch.enable_grad()
    def synthesise(self, w: Tensor, server: Server) -> Tensor:
        """Inputs with random labels among the classes seen: (batches * size, *shape)."""
        random = rng(server.seed, "synthesis", server.round)
        make = Generator(server.inputs, self.latent, self.width)
        first = torch_seed(server.seed, "generator", server.round)
        common = make.fresh(first, w).requires_grad_()
        follow = adam([{"params": [common]}], GENERATOR * self.steps)
        student, pool = server.fresh(), []
        for k in range(self.batches):
            code = noise(random, self.size, self.latent, w).requires_grad_()
            labels = picks(random, self.size, len(server.seen), w)
            theta = common.detach().clone().requires_grad_()
            descent = adam([{"params": [theta]}, {"params": [code], "lr": NOISE}], GENERATOR)
            lowest, best = torch.inf, code
            for _ in range(self.steps):
                x = make(theta, code)
                seen = server.forward(w, x, train=False)
                u = seen.z[:, server.seen]
                loss = self.bn * distance(seen) + self.ce * F.cross_entropy(u, labels)
                if (
                    k >= self.warmup
                ):  # by statistics of its batch: the running ones are the teacher's
                    v = server.forward(student, x, train=True).z[:, server.seen]
                    loss = loss - self.adv * disagreement(u, v)
                if loss.item() < lowest:
                    lowest, best = loss.item(), x.detach()
                descent.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                descent.step()
            common.grad = theta.grad
            follow.step()
            pool.append(best)
            if k + 1 >= self.warmup and self.adv:
                student = self.distil(student, w, torch.cat(pool), random, server)
        return torch.cat(pool)

    def distil(
        self, student: Tensor, w: Tensor, pool: Tensor, random: np.random.Generator, server: Server
    ) -> Tensor:
        """The student after some steps towards the teacher on what was made."""
        v = student.detach().requires_grad_()
        descent = torch.optim.SGD([v], lr=0.2, momentum=0.9)
        for _ in range(self.student):
            x = pool[picks(random, self.size, len(pool), w)]
            with torch.no_grad():
                u = server.forward(w, x, train=False).z[:, server.seen]
            z = server.forward(v, x, train=True).z[:, server.seen]
            descent.zero_grad()
            distillation(z, u, 20.0).mean().backward()  # type: ignore[no-untyped-call]
            descent.step()
        return v.detach()


@register("Zhang et al. 2023")
def target(
    kd: NonNegativeFloat = 25.0,
    temperature: PositiveFloat = 2.0,
    batches: PositiveInt = 20,
    size: PositiveInt = 128,
    steps: PositiveInt = 10,
    warmup: NonNegativeInt = 10,
    student: PositiveInt = 20,
    bn: NonNegativeFloat = 10.0,
    ce: NonNegativeFloat = 0.5,
    adv: NonNegativeFloat = 1.0,
    latent: PositiveInt = 256,
    width: PositiveInt = 32,
    average: Average = "samples",
) -> Method:
    """The server makes inputs from the model alone, and clients distil it on them.

    Args:
        kd: weight of the distillation on what was made.
        temperature: how much both models' outputs are softened in it.
        batches: of inputs that are made at a task's end.
        size: inputs in such a batch.
        steps: of the generator for each batch.
        warmup: batches before the student counts.
        student: steps of the student after each batch from then on.
        bn: weight of the distance to the running statistics of BatchNorm layers.
        ce: weight of the loss on the labels asked for.
        adv: weight of the student's disagreement.
        latent: numbers of noise for each input.
        width: channels of the generator.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = Synthesis(
        kd, temperature, batches, size, steps, warmup, student, bn, ce, adv, latent, width
    )
    return Method(part, average=average, name="target")
