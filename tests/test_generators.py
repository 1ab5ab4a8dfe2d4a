"""Methods that train generators: their formulas, and that what they make is what was asked for,
without any data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everfed as ef
from everfed.chance import rng
from everfed.client import ClientProgram
from everfed.compute import choose
from everfed.data.table import Inputs
from everfed.engines.local import LocalEngine
from everfed.generators import Generator, noise, picks, smoothed
from everfed.local import Local
from everfed.methods.fedcil import critic_loss, maker_loss
from everfed.methods.lwf import distillation
from everfed.methods.mfcl import divergence, imbalance, normal_kl
from everfed.methods.target import disagreement, distance
from everfed.round import Federation, Rounds
from everfed.server import AtServer
from test_continual import Normed as DropOut
from test_continual import Odd

LR = 0.3


class Normed(nn.Module):
    """A small convolution with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.Linear(72, 10)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))).flatten(1))


@pytest.fixture(scope="module")
def plain():
    return ef.data.digits(["plain"])


def begun(
    method, data, model, *, tasks=5, rounds=8, clients=2, local=None, end=True, stream=None,
    sample=None,
):  # fmt: skip
    """A federation that has played its first task of new classes and that task's end."""
    played = rounds if end else 8
    stream = stream or ef.streams.classes(data, tasks=tasks, clients=clients, rounds=played, seed=0)
    torch.manual_seed(0)
    compute = choose(model(), data.x[0], torch.device("cpu"), "float32", "auto")
    local = local or Local(lr=0.1, epochs=2)
    program = ClientProgram(method, compute, stream, data, local, 0)
    states = [part.init(compute.weights(), compute.layout) for part in method.parts]
    fed = Federation(compute.weights(), compute.read_buffers(), states)
    rounds_ = Rounds(method, stream, local, LocalEngine(program, 1), sample, 0)
    for _ in range(rounds):
        rounds_.play(fed)
    if end:
        rounds_.end_task(fed)
    return fed, rounds_, program


def layers(*widths):
    return ef.models.mlp(*widths)


# the networks -------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 5, 7), (16,), (4, 6)])
def test_a_generator_fits_the_samples(shape):
    make, like = Generator(Inputs(shape), latent=6, width=3), torch.zeros(1)
    theta = make.fresh(1, like)
    assert torch.equal(theta, make.fresh(1, like))
    assert not torch.equal(theta, make.fresh(2, like))
    x = make(theta, noise(np.random.default_rng(0), 20, 6, like))
    assert x.shape == (20, *shape)
    assert x.min() >= 0
    assert x.max() <= 1
    assert x.std(0).max() > 1e-3  # other noise, other samples


@pytest.mark.parametrize("shape", [(3, 6, 6), (16,), (4, 6)])
def test_standardised_inputs_are_made_as_the_datas_are(shape):
    """As if made in [0, 1] and standardised then; and what is outside is told."""
    random = np.random.default_rng(0)
    raw = random.random((50, *shape)) * np.linspace(0.2, 1, shape[-1])
    data = ef.data.standardised(ef.data.arrays(raw.astype("f"), np.zeros(50), name="some"))
    plain, made = (Generator(Inputs(shape), 6, 3), Generator(data.inputs, 6, 3))
    theta, code = plain.fresh(1, torch.zeros(1)), noise(random, 20, 6, torch.zeros(1))
    over = (0, 2, 3) if len(shape) == 3 else (0,)
    mean, std = raw.mean(over, keepdims=True), raw.std(over, keepdims=True)
    expected = (plain(theta, code).numpy() - mean) / std
    np.testing.assert_allclose(made(theta, code), expected, rtol=1e-4, atol=1e-5)
    assert data.inputs.within(data.x)
    assert not Inputs(shape).within(data.x)
    assert not data.inputs.within(20 * data.x)


def test_a_blur_keeps_flat_images_and_the_sum_of_a_point():
    flat, point = torch.full((1, 2, 9, 9), 0.3), torch.zeros(1, 2, 9, 9)
    point[0, 1, 4, 4] = 1
    torch.testing.assert_close(smoothed(flat), flat)
    assert smoothed(point).sum() == pytest.approx(1)
    assert smoothed(point)[0, 0].abs().sum() == 0  # channels are not mixed
    row = torch.exp(-0.5 * torch.arange(-2.0, 3).square())
    assert smoothed(point)[0, 1, 4, 4] == pytest.approx(1 / float(row.sum()) ** 2)


def test_a_pass_through_the_model_changes_no_statistics(plain):
    """Neither in training mode, which counts batches, nor with other statistics than its own."""
    compute = choose(Normed(), plain.x[0], torch.device("cpu"), "float32", "auto")
    x, w, before = plain.x[:16], compute.weights(), compute.read_buffers()
    z = compute.logits(w, x)
    assert torch.equal(compute.forward(w, x, train=False).z, z)
    other = compute.forward(w, x, train=False, buffers=before + 0.5)
    assert (other.z - z).abs().max() > 0.01
    assert all((mean == 0.5).all() for _, mean, _ in other.normed)
    trained = compute.forward(w, x, train=True)
    assert (trained.z - z).abs().max() > 0.01
    assert torch.equal(
        trained.features @ compute.module.b.weight.T + compute.module.b.bias, trained.z
    )
    assert torch.equal(compute.read_buffers(), before)
    assert compute.module.norm.num_batches_tracked == 0


# numbers by hand ----------------------------------------------------------------------------------
def test_targets_loss_by_hand():
    z, u = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]])
    assert 1.2 + 25 * float(distillation(z, u, 2.0)) == pytest.approx(18.528680, abs=1e-4)


def test_the_student_counts_where_it_agrees():
    """KL of (.5, .5) from (.75, .25) is .75 log 1.5 + .25 log .5; the other sample's classes differ."""
    teacher = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
    student = torch.tensor([[1.001, 1.0], [3.0, 1.0]]).log()
    expected = (0.75 * np.log(1.5) + 0.25 * np.log(0.5)) / 2
    assert float(disagreement(teacher, student)) == pytest.approx(expected, abs=1e-3)


def test_mfcls_terms_by_hand():
    zero, one = torch.zeros(1), torch.ones(1)
    assert float(normal_kl(zero, one, one / 2, 2 * one)) == pytest.approx(0.159074, abs=1e-6)
    assert float(imbalance(torch.tensor([0.5, 0.25, 0.25]))) == pytest.approx(0.053605, abs=1e-6)
    assert float(imbalance(torch.tensor([0.5, 0.5]))) == pytest.approx(0, abs=1e-6)
    assert float(imbalance(torch.tensor([1.0, 0.0]))) == pytest.approx(1)
    assert float(imbalance(torch.tensor([1.0]))) == 0  # nothing to share


# what is made -------------------------------------------------------------------------------------
def test_target_makes_what_it_asks_for(plain):
    """Of the first task's two classes, as the teacher sees them, where a fresh generator's are not."""
    method = ef.methods.target(batches=3, size=64, steps=20, warmup=9, width=8, latent=32)
    fed, rounds, program = begun(method, plain, layers(64, 32, 10))
    part, made = method.parts[0], fed.parts[0]
    seen = torch.tensor(rounds.stream.task_classes[0]).sort().values
    random, asked = rng(0, "synthesis", fed.round - 1), []
    for _ in range(3):
        noise(random, 64, 32, fed.w)
        asked.append(seen[picks(random, 64, 2, fed.w)])
    found = made["u"][:, seen].argmax(1)
    assert made["x"].shape == (192, 1, 8, 8)
    assert float((seen[found] == torch.cat(asked)).double().mean()) > 0.95
    assert torch.equal(made["u"], program.compute.logits(fed.w, made["x"]))
    make = Generator(Inputs((1, 8, 8)), 32, 8)
    fresh = make(make.fresh(0, fed.w), noise(random, 192, 32, fed.w))
    guess = program.compute.logits(fed.w, fresh)[:, seen].argmax(1)
    assert float((seen[guess] == torch.cat(asked)).double().mean()) < 0.7
    again = part.synthesise(fed.w, AtServer(program, fed.buffers, fed.round - 1))
    assert torch.equal(again, made["x"])


def test_the_student_is_not_judged_by_the_teachers_statistics(plain):
    """Only the teacher is evaluated with the server's running statistics."""

    class Watched(AtServer):
        def forward(self, w, x, train):
            ways.append((torch.equal(w, fed.w), train))
            return super().forward(w, x, train)

    method, ways = ef.methods.target(**TINY["target"]), []
    fed, _, program = begun(method, plain, Normed)
    method.parts[0].synthesise(fed.w, Watched(program, fed.buffers, fed.round - 1))
    assert set(ways) == {(True, False), (False, True)}


def test_mfcls_generator_is_trained(plain):
    """Its classes are balanced and certain, where a fresh generator's are not."""
    method = ef.methods.mfcl(iterations=60, size=64, width=8, latent=32, rate=0.01, soften=1.0)
    fed, rounds, program = begun(method, plain, layers(64, 32, 10), tasks=2)
    seen = torch.tensor(rounds.stream.task_classes[0]).sort().values
    make = Generator(Inputs((1, 8, 8)), 32, 8)
    random = np.random.default_rng(0)
    balance, certainty = [], []
    for theta in (make.fresh(0, fed.w), fed.parts[0]["generator"]):
        p = program.compute.logits(fed.w, make(theta, noise(random, 500, 32, fed.w)))[:, seen]
        balance.append(float(imbalance(p.softmax(1).mean(0))))
        certainty.append(float(p.softmax(1).amax(1).mean()))
    assert balance[1] < balance[0] / 2
    assert certainty[1] > certainty[0]


@pytest.mark.parametrize(("name", "gap"), [("target", distance), ("mfcl", divergence)])
def test_running_statistics_are_matched(plain, name, gap):
    """Nearer than with weight 0; and those of the server's model, not of whoever trained last."""
    sizes = {"size": 64, "width": 8, "latent": 16}
    sizes |= {"batches": 1, "steps": 40} if name == "target" else {"iterations": 40, "rate": 0.01}
    found = []
    for bn in (0.0, 10.0):
        method = getattr(ef.methods, name)(bn=bn, **sizes)
        fed, _, program = begun(method, plain, Normed)
        server = AtServer(program, fed.buffers, 0)
        if name == "target":
            x = fed.parts[0]["x"]
        else:
            make, random = Generator(Inputs((1, 8, 8)), 16, 8), np.random.default_rng(0)
            x = make(fed.parts[0]["generator"], noise(random, 64, 16, fed.w))
        program.compute.load_buffers(torch.zeros_like(fed.buffers))
        seen = server.forward(fed.w, x, train=False)
        assert torch.equal(seen.normed[0][1], fed.buffers[:8])
        found.append(float(gap(seen)))
    assert found[1] < 0.7 * found[0]


@pytest.mark.parametrize("name", ["target", "mfcl"])
def test_the_server_needs_no_data(plain, name):
    """Other samples of the same shape give the same generator, and clients upload their update."""
    sizes = {"size": 16, "width": 4, "latent": 8}
    sizes |= {"batches": 2, "steps": 2} if name == "target" else {"iterations": 3}
    method = getattr(ef.methods, name)(**sizes)
    part, made = method.parts[0], []
    fed, _, program = begun(method, plain, layers(64, 16, 10), rounds=1)
    for data in (plain, replace(plain, x=torch.full_like(plain.x, torch.nan))):
        server = AtServer(replace(program, data=data), fed.buffers, 0)
        made.append(
            part.synthesise(fed.w, server) if name == "target" else part.train(fed.w, server)
        )
    assert torch.equal(made[0], made[1])
    assert not part.reduces
    assert not part.stateful


# the clients' steps -------------------------------------------------------------------------------
def second_task(build, plain, **settings):
    """Models before and after the second task's second step of one client, and all around it; at
    the first one the model is the teacher, and distillation has nothing to say."""
    method = build(**settings)
    local = Local(lr=LR, steps=1, batch=64)
    fed, rounds, program = begun(
        method, plain, layers(64, 12, 10), tasks=5, rounds=3, clients=1, local=local
    )
    rounds.play(fed)
    before, at = fed.w.clone(), fed.round
    rounds.play(fed)
    ids = rng(0, "batches", at, 0).permutation(rounds.stream.samples(0, at))[:64]
    x, y = plain.x[ids], plain.y[ids]
    known, seen = rounds.stream.known(1), rounds.stream.known(2)
    return fed, program, before, (x, y), known, seen


def modules(program, w):
    module = layers(64, 12, 10)()
    nn.utils.vector_to_parameters(w.clone(), module.parameters())
    return module


def test_target_follows_its_formula(plain):
    """One step of CE among the new classes and KD on what the server made, over the old ones."""
    small = {"batches": 2, "size": 32, "steps": 3, "width": 4, "latent": 8}
    fed, program, before, (x, y), known, seen = second_task(ef.methods.target, plain, **small)
    made = fed.parts[0]
    random = rng(0, "synthetic batch", 4, 0, 0)
    drawn = picks(random, 64, len(made["x"]), before)
    module = modules(program, before)
    new = (seen & ~known).nonzero()[:, 0]
    ce = F.cross_entropy(module(x)[:, new], torch.searchsorted(new, y))
    p = torch.softmax(made["u"][drawn][:, known] / 2, 1)
    kd = -(p * torch.log_softmax(module(made["x"][drawn])[:, known] / 2, 1)).sum(1).mean()
    (ce + 25 * kd).backward()
    slope = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(fed.w, before - LR * slope, rtol=1e-4, atol=1e-5)


def test_mfcl_follows_its_formula(plain):
    """Written as in the paper: a head on detached features, and the teacher's head on features."""
    small = {"size": 20, "iterations": 3, "width": 4, "latent": 8, "ft": 0.7, "kd": 0.4}
    fed, program, before, (x, y), known, seen = second_task(ef.methods.mfcl, plain, **small)
    down = fed.parts[0]
    random = rng(0, "synthetic batch", 4, 0, 0)
    made = Generator(Inputs((1, 8, 8)), 8, 4)(down["generator"], noise(random, 20, 8, before))
    module, teacher = modules(program, before), modules(program, down["teacher"])
    body, head, old_body, old_head = module[:-1], module[-1], teacher[:-1], teacher[-1]
    both = torch.cat([x, made]).detach()
    with torch.no_grad():
        old = known.nonzero()[:, 0]
        guess = old[old_head(old_body(made))[:, old].argmax(1)]
    labels = torch.cat([y, guess])
    assert set(guess.tolist()) <= set(old.tolist())
    assert set(y.tolist()).isdisjoint(old.tolist())
    new, every = (seen & ~known).nonzero()[:, 0], seen.nonzero()[:, 0]
    ce = F.cross_entropy(module(x)[:, new], torch.searchsorted(new, y))
    tuned = F.cross_entropy(head(body(both).detach())[:, every], torch.searchsorted(every, labels))
    gap = (old_head(body(both)) - old_head(old_body(both)))[:, old]
    kept = gap.square().sum(1).mean() / len(old)
    (ce + 0.7 * tuned + 0.4 * kept).backward()
    slope = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(fed.w, before - LR * slope, rtol=1e-4, atol=1e-5)


def test_mfcl_needs_a_head_that_comes_last(plain):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(64, 10), nn.Linear(64, 64)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).relu())

    stream = ef.streams.classes(plain, tasks=2, clients=1, rounds=1)
    small = ef.methods.mfcl(size=8, iterations=2, width=2)
    with pytest.raises(ef.EverfedError, match="dense layer defined last"):
        ef.run(small, stream, First(), workers=1)
    single = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # nothing below the head to distil
    assert ef.run(small, stream, single, workers=1).acc > 0.1


@pytest.mark.parametrize("name", ["target", "mfcl"])
def test_classes_to_come_stay(plain, name):
    sizes = {"size": 16, "width": 4, "latent": 8}
    sizes |= {"batches": 2, "steps": 2} if name == "target" else {"iterations": 3}
    fed, program, before, _, _, seen = second_task(getattr(ef.methods, name), plain, **sizes)
    moved = (modules(program, fed.w)[-1].weight - modules(program, before)[-1].weight).abs().amax(1)
    assert moved[seen].min() > 1e-6  # the old ones by distillation or replay alone
    assert moved[~seen].max() == 0


# the whole ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["target", "mfcl", "fedcil"])
def test_less_is_forgotten(plain, name):
    """Two digits at a time, three times: FedAvg knows the last two."""
    sizes = {"target": {"kd": 3.0, "batches": 4, "size": 64, "width": 8, "warmup": 9},
             "mfcl": {"size": 64, "width": 8, "iterations": 50},
             "fedcil": {"width": 8, "lam": 0.0, "iterations": 10}}  # fmt: skip
    train, test = (ids[plain.y[ids].numpy() < 6] for ids in (plain.train, plain.test))
    some = ef.data.arrays(
        plain.x[train], plain.y[train], test=(plain.x[test], plain.y[test]), name="six digits"
    )
    stream = ef.streams.classes(some, tasks=3, clients=3, rounds=5)
    options = {"local": Local(lr=0.1, epochs=2), "workers": 1, "seed": 1}
    accs = [
        ef.run(method, stream, layers(64, 32, 6), **options).acc
        for method in (ef.methods.fedavg(), getattr(ef.methods, name)(**sizes[name]))
    ]
    assert accs[0] < 0.4
    assert accs[1] > accs[0] + 0.1


@pytest.mark.parametrize("name", ["target", "mfcl", "fedcil"])
def test_inputs_beyond_the_generators_range_are_named(plain, name):
    sizes = {"size": 8, "width": 2, "latent": 10}
    sizes |= {"batches": 1, "steps": 1} if name == "target" else {"iterations": 1}
    wide = replace(plain, x=2 * plain.x - 1)
    stream = ef.streams.classes(wide, tasks=2, clients=2, rounds=1)
    method = getattr(ef.methods, name)(**sizes)
    with pytest.raises(ef.EverfedError, match=r"\[0, 1\]"):
        ef.run(method, stream, layers(64, 8, 10), workers=1)


TINY = {
    "target": {"batches": 2, "steps": 2, "warmup": 1, "student": 2, "size": 8, "width": 2},
    "mfcl": {"iterations": 2, "size": 8, "width": 2},
    "fedcil": {"iterations": 2, "size": 8, "width": 2},
    "pfeddil": {},
}


@pytest.mark.parametrize("name", TINY)
def test_odd_clients_and_normed_models(digits, name):
    """Clients with nothing or a single sample, BatchNorm and dropout."""
    method = getattr(ef.methods, name)(**TINY[name])
    result = ef.run(method, Odd(digits), DropOut, local=Local(lr=0.02), workers=1)
    assert result.summary.lost_rounds == 0
    assert torch.isfinite(result.vector).all()
    assert all(torch.isfinite(buffer).all() for buffer in result.model.buffers())
    assert not [text for text in result.warnings if "dropped" in text]


@pytest.mark.parametrize("name", ["target", "mfcl", "fedcil"])
def test_targets_that_are_not_classes(name):
    x = np.random.default_rng(0).random((120, 4)).astype(np.float32)
    data = ef.data.arrays(x, x[:, 0], task=np.repeat([0, 1], 60))
    stream = ef.streams.domains(data, clients=3, alpha=None, rounds=1)
    method = getattr(ef.methods, name)(**TINY[name])
    with pytest.raises(ef.EverfedError, match="needs one class a sample"):
        ef.run(
            method, stream, ef.models.mlp(4, 8, 1), workers=1,
            loss=lambda z, y: (z[:, 0] - y).square(),
        )  # fmt: skip


# FedCIL -------------------------------------------------------------------------------------------
SMALL = {"latent": 12, "width": 4, "size": 16}


def test_fedcils_losses_by_hand():
    """D(real) = .8 and D(fake) = .3, classes with .7 and .6."""
    on_real, on_fake = torch.tensor([0.8 / 0.2]).log(), torch.tensor([0.3 / 0.7]).log()
    nll_real, nll_fake = -torch.tensor(0.7).log(), -torch.tensor(0.6).log()
    critic = float(critic_loss(on_real, on_fake, nll_fake) + nll_real)
    assert critic == pytest.approx(1.447319, abs=1e-6)
    assert float(maker_loss(on_fake, nll_fake)) == pytest.approx(1.714798, abs=1e-6)


def test_fedcil_follows_its_formula(plain):
    """One client, one step a round, in the second round, when the head says something already."""
    method = ef.methods.fedcil(lam=0.0, rate=1e-3, iterations=0, **SMALL)
    local = Local(lr=LR, steps=1, batch=32)
    fed, rounds, program = begun(
        method, plain, layers(64, 12, 10), rounds=1, clients=1, local=local, end=False
    )
    before, theta, adv = fed.w.clone(), fed.parts[0]["theta"], fed.parts[0]["adv"]
    rounds.play(fed)
    ids = rng(0, "batches", 1, 0).permutation(rounds.stream.samples(0, 1))[:32]
    x, y = plain.x[ids], plain.y[ids]
    code = noise(rng(0, "generated batch", 1, 0, 0), 32, 12, before)
    code[:, :10] = F.one_hot(y, 10).float()
    theta = theta.clone().requires_grad_()
    fake, module = Generator(Inputs((1, 8, 8)), 12, 4)(theta, code), modules(program, before)
    body, head, two = module[:-1], module[-1], rounds.stream.known(1).nonzero()[:, 0]

    def judged(x):
        features = body(x)
        right = torch.sigmoid(features @ adv[:-1] + adv[-1])
        p = torch.softmax(head(features)[:, two], 1)
        return right, p[torch.arange(len(y)), torch.searchsorted(two, y)]

    (d, p), (d_fake, p_fake) = judged(x), judged(fake.detach())
    (-d.log() - p.log() - (1 - d_fake).log() - p_fake.log()).mean().backward()
    slope = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(fed.w, before - LR * slope, rtol=1e-4, atol=1e-5)
    # Adam's first step moves every parameter against the sign of its gradient, by the rate
    d_fake, p_fake = judged(fake)
    (-d_fake.log() - p_fake.log()).mean().backward()
    moved = (fed.parts[0]["theta"] - theta).detach()
    clear = theta.grad.abs() > 1e-6
    assert clear.float().mean() > 0.5
    torch.testing.assert_close(moved[clear], -1e-3 * theta.grad[clear].sign(), rtol=0.02, atol=0)


def test_fedcils_consistency_follows_its_formula(plain):
    """What lambda adds to that step, the second in its task: x' of the client's generator, x^ of the
    one that the server sent, which is the same at the round's first step."""

    def stepped(lam):
        method = ef.methods.fedcil(lam=lam, rate=1e-3, iterations=0, **SMALL)
        local = Local(lr=LR, steps=1, batch=32)
        fed, rounds, program = begun(
            method, plain, layers(64, 12, 10), rounds=1, clients=1, local=local, end=False
        )
        before, theta = fed.w.clone(), fed.parts[0]["theta"]
        rounds.play(fed)
        return before, fed.w, theta, rounds, program

    (start, without, *_), (before, w, theta, rounds, program) = stepped(0.0), stepped(0.5)
    assert torch.equal(start, before)  # a task's first round has no such term
    ids = rng(0, "batches", 1, 0).permutation(rounds.stream.samples(0, 1))[:32]
    x, y = plain.x[ids], plain.y[ids]
    random, module = rng(0, "generated batch", 1, 0, 0), modules(program, before)
    two = rounds.stream.known(1).nonzero()[:, 0]
    inputs = [x]
    for _ in range(3):  # the loss's own fakes come first
        code = noise(random, 32, 12, before)
        code[:, :10] = F.one_hot(y, 10).float()
        inputs.append(Generator(Inputs((1, 8, 8)), 12, 4)(theta, code).detach())
    p, ours, theirs = (torch.softmax(module(inputs[k])[:, two].double(), 1) for k in (0, 2, 3))
    kl = (p * (p / theirs).log()).sum(1) + (ours * (ours / theirs).log()).sum(1)
    nll = -theirs[torch.arange(len(y)), torch.searchsorted(two, y)].log()
    (0.5 * (kl + nll)).mean().backward()
    slope = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert slope.norm() > 1e-2
    torch.testing.assert_close(without - w, LR * slope, rtol=1e-3, atol=1e-5)


def test_fedcils_generator_makes_what_it_asks_for(plain):
    method = ef.methods.fedcil(iterations=10, latent=16, width=8)
    fed, rounds, program = begun(
        method, plain, layers(64, 32, 10), local=Local(lr=0.1, epochs=2), rounds=8
    )
    part, state = method.parts[0], fed.parts[0]
    seen = torch.tensor(rounds.stream.task_classes[0]).sort().values
    y = seen.repeat(100)
    x = part.make(state["theta"], y, Inputs((1, 8, 8)), np.random.default_rng(0), 10)
    found = seen[program.compute.logits(fed.w, x)[:, seen].argmax(1)]
    assert float((found == y).double().mean()) > 0.9


def test_fedcil_replays_a_clients_own_past(plain):
    """Its own generator of the task's end, and labels of its own classes; also where it was not
    among the last round's clients."""
    method = ef.methods.fedcil(iterations=2, **SMALL)
    stream = ef.streams.classes(plain, tasks=5, clients=4, rounds=2, alpha=0.1, seed=0)
    fed, rounds, _ = begun(method, plain, layers(64, 8, 10), stream=stream, rounds=2, sample=2)
    ended = {i: {k: v.clone() for k, v in own[0].items()} for i, own in fed.clients.items()}
    assert len({tuple(own["theta"].tolist()) for own in ended.values()}) == len(ended)
    for own in ended.values():
        assert not len(own["frozen"])
    rounds.sample = None
    for _ in range(2):
        rounds.play(fed)
        for i, (own,) in fed.clients.items():
            if i in ended:
                held = {int(k) for k in plain.y[stream.samples(i, 0)]}
                assert torch.equal(own["frozen"], ended[i]["theta"])
                assert set(own["past"].nonzero()[:, 0].tolist()) == held
                assert not torch.equal(own["theta"], own["frozen"])
            else:  # it met its first data in this task
                assert not len(own["frozen"])


def test_fedcil_consolidates_without_data(plain):
    """All three networks move; with no iteration they are the weighted means."""
    method = ef.methods.fedcil(iterations=4, **SMALL)
    fed, _, program = begun(method, plain, layers(64, 12, 10), rounds=1)
    part, s = method.parts[0], fed.parts[0]
    nets = [fed.w, s["adv"], s["theta"]]
    sources = list(zip(s["newest"], s["newest_classes"], strict=True))
    made = []
    for data in (plain, replace(plain, x=torch.full_like(plain.x, torch.nan))):
        server = AtServer(replace(program, data=data), fed.buffers, 0)
        made.append(part.consolidate(nets, sources, server))
    for one, other, net in zip(*made, nets, strict=True):
        assert torch.equal(one, other)
        assert (one - net).abs().max() > 1e-4
    plainly = ef.methods.fedcil(iterations=0, **SMALL)
    fed, rounds, _ = begun(plainly, plain, layers(64, 12, 10), rounds=1, end=False)
    sizes = [len(rounds.stream.samples(i, 0)) for i in (0, 1)]
    mean = np.average(fed.parts[0]["newest"].numpy(), axis=0, weights=sizes)
    np.testing.assert_allclose(fed.parts[0]["theta"].numpy(), mean, rtol=1e-5, atol=1e-6)


def test_fedcil_needs_room_for_a_code_of_every_class(plain):
    stream = ef.streams.classes(plain, tasks=2, clients=2, rounds=1)
    with pytest.raises(ef.EverfedError, match="latent = 10"):
        ef.run(ef.methods.fedcil(latent=6), stream, layers(64, 8, 10), workers=1)


def test_one_new_class_at_a_time(plain):
    """The first task's generator knows of a single class."""
    stream = ef.streams.classes(plain, tasks=10, clients=2, rounds=1)
    run = ef.run(ef.methods.mfcl(iterations=2, size=8), stream, layers(64, 8, 10), workers=1)
    assert not [r for r in run.records if r["metric"] in ("dropped_updates", "lost_round")]


def test_fedcil_after_a_task_in_which_nobody_was_online(plain):
    away = ef.streams.present(
        ef.streams.domains(ef.data.digits(["plain", "inverted"]), clients=2, rounds=1),
        schedule={0: [(1, 2)], 1: [(1, 2)]},
    )
    run = ef.run(ef.methods.fedcil(iterations=1), away, layers(64, 8, 10), workers=1)
    assert [r["value"] for r in run.records if r["metric"] == "clients"] == [2]
