"""FedCIL. Qi et al., Better Generative Replay for Continual Federated Learning, 2023.

Every client trains an AC-GAN: the model is the discriminator, whose features also feed a head that
tells real inputs from generated ones, and a generator G makes inputs of a given label (its noise
begins with the label's one-hot code). With D(x) the probability of being real, p the classes', and
fakes of the same labels as the real inputs,

    loss of the model      = -log D(x) - log p_y(x) - log(1 - D(x')) - log p_y'(x'),    x' = G(y')
    loss of the generator  = -log D(x') - log p_y'(x')

From its second task on a client's loss is half that and half the same on inputs of its own
generator of the task before, with labels of all classes it met, in the place of real ones. Once
it has trained in a task it also descends, x^ being of the generator that the server sent,

    lambda (KL(p(x) || p(x^)) + KL(p(x') || p(x^)) - log p_y(x^))

The server averages all networks and then consolidates them: it trains the average on inputs of the
cohort's generators, and of those at the end of the previous task, with the same two losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from everfed.chance import rng, torch_seed
from everfed.compute.base import Seen
from everfed.data.table import Inputs
from everfed.errors import EverfedError
from everfed.generators import Generator, adam, among, check_inputs, needed, noise, picks
from everfed.method import Average, Context, Method, Part, Reduced, Server, State
from everfed.methods.lwf import need_classes
from everfed.methods.registry import register

#: a model w, (d,), and inputs -> outputs and features
Forward = Callable[[Tensor, Tensor], Seen]


def real(adv: Tensor, seen: Seen) -> Tensor:
    """log D / (1 - D): the head (width + 1,) on features -> (n,)."""
    return seen.features @ adv[:-1] + adv[-1]


def critic_loss(on_real: Tensor, on_fake: Tensor, nll_fake: Tensor) -> Tensor:
    """The model's loss but for the real inputs' classes, from log D / (1 - D)."""
    return F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + nll_fake


def maker_loss(on_fake: Tensor, nll_fake: Tensor) -> Tensor:
    """The generator's loss."""
    return F.softplus(-on_fake).mean() + nll_fake


def divergence(z: Tensor, other: Tensor) -> Tensor:
    """Mean KL(softmax z || softmax other), (n, classes) each; classes at -inf take no part."""
    z, other = (v[:, torch.isfinite(z[0])].log_softmax(1) for v in (z, other))
    return F.kl_div(other, z, log_target=True, reduction="batchmean")


@dataclass(frozen=True)
class AcGan(Part):
    """A generator beside the model at every client, replay of its past self, consolidation."""

    reduces = {"theta": "stack", "classes": "stack", "weight": "stack", "adv": "mean"}
    lam: NonNegativeFloat = 0.5
    rate: PositiveFloat = 0.01
    iterations: NonNegativeInt = 50
    server_rate: PositiveFloat = 2e-4
    size: PositiveInt = 32
    latent: PositiveInt = 64
    width: PositiveInt = 16

    @property
    def batched(self) -> bool:
        return False

    @property
    def bounded(self) -> bool:
        return True  # a client sees by the task's number that the one before has ended

    def prepare(self, s: State, w: Tensor, server: Server) -> State:
        make = Generator(needed(server, "fedcil").inputs, self.latent, self.width)
        features = server.forward(w, w.new_zeros(1, *server.inputs.shape), train=False).features
        seed = torch_seed(server.seed, "generator")
        return {"theta": make.fresh(seed, w), "adv": w.new_zeros(features.shape[1] + 1)}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, {"theta": s["theta"], "adv": s["adv"]}

    def client_init(self, w: Tensor) -> State:
        none = w.new_zeros(0)
        return {"task": w.new_full((1,), -1), "theta": none, "classes": none,
                "frozen": none, "past": none}  # fmt: skip

    # the networks ----------------------------------------------------------------------------
    def make(
        self, theta: Tensor, y: Tensor, inputs: Inputs, random: np.random.Generator, k: int
    ) -> Tensor:
        """Inputs of the given labels among k classes, (n, *shape)."""
        if k > self.latent:
            raise EverfedError(f"fedcil: {k} classes need latent = {k} or more, not {self.latent}")
        code = noise(random, len(y), self.latent, theta)
        code[:, :k] = F.one_hot(y, k).to(code)
        return Generator(inputs, self.latent, self.width)(theta, code)

    def slopes(
        self, forward: Forward, nets: list[Tensor], x: Tensor, y: Tensor, inputs: Inputs,
        random: np.random.Generator, nll: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients in model, head and generator of their losses, x taken for real; without `nll`
        but for the classes of x."""
        w, adv, theta = (net.detach().requires_grad_() for net in nets)
        seen = forward(w, x)
        fake = self.make(theta, y, inputs, random, seen.z.shape[1])
        on_fake = forward(w, fake)
        judged = (real(adv, on_fake), F.cross_entropy(on_fake.z, y))
        loss = critic_loss(real(adv, seen), *judged)
        if nll:
            loss = loss + F.cross_entropy(seen.z, y)
        model = torch.autograd.grad(loss, [w, adv], retain_graph=True)
        return [*model, *torch.autograd.grad(maker_loss(*judged), theta)]

    # clients ---------------------------------------------------------------------------------
    def begun(self, c: Context) -> dict[str, Any]:
        """What a client trains beside the model in this round, and what it replays."""
        if not c.scratch:
            mine = {key: value[0] for key, value in c.mine.items()}
            entered = int(mine["task"]) != c.task
            theta, adv = c.down["theta"].clone(), c.down["adv"].clone()
            c.scratch |= {
                "theta": theta, "adv": adv, "again": not entered,
                "descent": adam([{"params": [theta, adv]}], self.rate),
                "frozen": mine["theta"] if entered else mine["frozen"],
                "past": mine["classes"] if entered else mine["past"],
            }  # fmt: skip
        return c.scratch

    def weigh(self, c: Context) -> float:
        entered = int(c.mine["task"][0]) != c.task
        return 0.5 if c.mine["theta" if entered else "frozen"].numel() else 1.0

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        (x,), (y,) = c.batch[0], c.batch[1]
        if c.step == 0:
            need_classes(c.batch[1], "fedcil")
            check_inputs(x, c.inputs, "fedcil")
        own, inputs = self.begun(c), c.inputs
        random = rng(c.seed, "generated batch", c.round, c.client, c.step)

        def forward(v: Tensor, x: Tensor) -> Seen:
            seen = c.forward(v, x, train=True)
            return Seen(among(seen.z, c.seen), seen.features, [])

        nets = [w[0], own["adv"], own["theta"]]
        with torch.enable_grad():
            slopes = self.slopes(forward, nets, x, y, inputs, random, nll=False)
            if len(own["frozen"]):
                past = own["past"].nonzero()[:, 0]
                old = past[picks(random, len(y), len(past), w)]
                made = self.make(own["frozen"], old, inputs, random, len(own["past"])).detach()
                again = self.slopes(forward, nets, made, old, inputs, random, nll=True)
                slopes = [(a + b) / 2 for a, b in zip(slopes, again, strict=True)]
            if own["again"] and self.lam:
                consistent = self.consistency(forward, nets, x, y, inputs, random, c.down["theta"])
                slopes[0] = slopes[0] + self.lam * consistent
        _, own["adv"].grad, own["theta"].grad = slopes
        own["descent"].step()
        return g + slopes[0]

    def consistency(
        self, forward: Forward, nets: list[Tensor], x: Tensor, y: Tensor, inputs: Inputs,
        random: np.random.Generator, server: Tensor,
    ) -> Tensor:  # fmt: skip
        """The gradient in the model of lambda's term; `server` is the server's generator."""
        w = nets[0].detach().requires_grad_()
        z = forward(w, x).z
        made = (inputs, random, z.shape[1])
        ours = forward(w, self.make(nets[2], y, *made).detach()).z
        theirs = forward(w, self.make(server, y, *made)).z
        loss = F.cross_entropy(theirs, y) + divergence(z, theirs) + divergence(ours, theirs)
        return torch.autograd.grad(loss, w)[0]

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        own, k = self.begun(c), c.outputs(w[0], c.ids[:1]).shape[-1]
        met = torch.zeros(k).to(w)
        met[torch.from_numpy(c.labels(c.ids))] = 1
        if c.mine["classes"].numel():
            met = torch.maximum(met, c.mine["classes"][0])
        kept = {"theta": own["theta"], "classes": met}
        sent = kept | {"adv": own["adv"], "weight": c.weight[0]}
        state = kept | {
            "frozen": own["frozen"],
            "past": own["past"],
            "task": met.new_tensor([c.task]),
        }
        uploads, mine = ({k: v.unsqueeze(0) for k, v in some.items()} for some in (sent, state))
        return update, uploads, mine

    # the server ------------------------------------------------------------------------------
    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        share = r["weight"][:, 0] / r["weight"].sum()
        nets = [r.w + update, r["adv"], share @ r["theta"]]
        new = s | {"newest": r["theta"], "newest_classes": r["classes"]}
        sources = [*zip(r["theta"], r["classes"], strict=True)]
        if "past" in s:
            sources += zip(s["past"], s["past_classes"], strict=True)
        w, adv, theta = self.consolidate(nets, sources, needed(r.server, "fedcil"))
        return w - r.w, new | {"theta": theta, "adv": adv}

    @torch.enable_grad()
    def consolidate(
        self, nets: list[Tensor], sources: list[tuple[Tensor, Tensor]], server: Server
    ) -> list[Tensor]:
        """Model, head and generator after training on batches of each source in turn."""
        nets = [net.clone() for net in nets]
        descent = adam([{"params": nets}], self.server_rate)
        random, inputs = rng(server.seed, "consolidation", server.round), server.inputs

        def forward(v: Tensor, x: Tensor) -> Seen:
            seen = server.forward(v, x, train=True)
            classes = torch.zeros(seen.z.shape[1], dtype=torch.bool)
            classes[server.seen.cpu()] = True
            return Seen(among(seen.z, classes), seen.features, [])

        for k in range(self.iterations):
            theta, classes = sources[k % len(sources)]
            held = classes.nonzero()[:, 0]
            y = held[picks(random, self.size, len(held), theta)]
            x = self.make(theta, y, inputs, random, len(classes)).detach()
            slopes = self.slopes(forward, nets, x, y, inputs, random, nll=True)
            for net, slope in zip(nets, slopes, strict=True):
                net.grad = slope
            descent.step()
        return [net.detach() for net in nets]

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        if "newest" not in s:  # no client has answered yet
            return s
        return s | {"past": s["newest"], "past_classes": s["newest_classes"]}


@register("Qi et al. 2023")
def fedcil(
    lam: NonNegativeFloat = 0.5,
    rate: PositiveFloat = 0.01,
    iterations: NonNegativeInt = 50,
    server_rate: PositiveFloat = 2e-4,
    size: PositiveInt = 32,
    latent: PositiveInt = 64,
    width: PositiveInt = 16,
    average: Average = "samples",
) -> Method:
    """Every client trains an AC-GAN and replays its past self; the server consolidates them all.

    Args:
        lam: weight of the consistency with the server's generator.
        rate: learning rate of the clients' generators and heads.
        iterations: of the consolidation in a round; 0 leaves the plain average.
        server_rate: learning rate of the consolidation.
        size: inputs in each.
        latent: numbers of noise for each input, at least as many as classes.
        width: channels of the generator.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    part = AcGan(lam, rate, iterations, server_rate, size, latent, width)
    return Method(part, average=average, name="fedcil")
