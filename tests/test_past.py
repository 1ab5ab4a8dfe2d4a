"""Approximations of past objectives: Taylor series, core sets, generated samples, FedCurv."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import everfed as ef
from everfed import memory
from everfed.chance import rng
from everfed.client import Ask, ClientProgram, Phase
from everfed.compute import choose
from everfed.data.table import Beside
from everfed.engines.local import LocalEngine
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Reduced
from everfed.methods import Taylor
from everfed.methods.cfl_generative import langevin, prior, total_variation
from everfed.methods.cfl_regularization import chosen, kept
from everfed.past import information_loss
from everfed.records import collect
from everfed.report.page import gather, render
from everfed.round import Federation, Rounds
from everfed.vector import Layout
from quadratics import Game

CPU = torch.device("cpu")
RESNET = Layout.of(ef.models.resnet18(1, 10)())


# Taylor series: layers ----------------------------------------------------------------------------
class Wrapped(nn.Module):
    """A body of numbered blocks and a head, as torchvision and transformers name them."""

    def __init__(self):
        super().__init__()
        block = nn.ModuleDict({"conv": nn.Conv2d(1, 4, 3), "norm": nn.BatchNorm2d(4)})
        self.body = nn.ModuleDict({"layer": nn.ModuleList([block, nn.Conv2d(4, 4, 3)])})
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


def names(layers, layout):
    return {slot.name: beta for slot, beta in chosen(layers, layout)}


def test_top_is_the_last_two_blocks():
    """As in the paper's ResNet-18: all of the last block at 0.1, the last layer at 1."""
    top = names("top", RESNET)
    assert {name.partition(".")[0] for name in top} == {"10", "13"}
    assert len(top) == 8
    assert (top["10.norm1.bias"], top["13.weight"]) == (0.1, 1.0)
    assert names("top", Layout.of(Wrapped())) == {
        "body.layer.1.weight": 0.1, "body.layer.1.bias": 0.1, "head.weight": 1.0, "head.bias": 1.0,
    }  # fmt: skip
    assert names("top", Layout.of(nn.Linear(2, 2))) == {"weight": 1.0, "bias": 1.0}


def test_all_is_every_parameter():
    """Norms are neither layers nor blocks, and are not forgotten."""
    assert set(names("all", RESNET)) == {slot.name for slot in RESNET.slots}


def test_layers_are_named_as_the_models():
    assert len(names({"9": 0.1, "10": 0.1, "13": 1.0}, RESNET)) == 9 + 6 + 2
    assert names({"body.layer.0.conv": 2.0}, Layout.of(Wrapped())) == {
        "body.layer.0.conv.weight": 2.0, "body.layer.0.conv.bias": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"fc": 1.0}, "the model has no layer 'fc'; it has 1, 3"),
        ({"3": 1.0, "3.weight": 0.5}, "'3.weight' shares parameters with another"),
        ({"3.weight": 1.0, "3": 0.5}, "'3' shares parameters with another"),
        ({}, "layers names none; the model has 1, 3"),
    ],
)
def test_wrong_layers_are_told_before_any_work(digits, layers, words):
    stream = ef.streams.static(digits, clients=2, rounds=1)
    with pytest.raises(EverfedError, match=words):
        ef.run(
            ef.methods.cfl_regularization(layers=layers),
            stream,
            ef.models.mlp(64, 16, 10),
            workers=1,
        )


# Taylor series: the buffer ------------------------------------------------------------------------
def test_the_latest_forty_series_are_kept_and_summed_exactly():
    """Cohorts of 7 for 8 rounds: what clients are sent is the plain sum over the last 40 of 56."""
    g = torch.Generator().manual_seed(0)
    taylor, entries = Taylor(layers="all"), []
    state = {"cuts": torch.tensor([[0, 5]])}
    for t in range(8):
        at, slope, h = torch.randn(3, 7, 5, generator=g, dtype=torch.float64)
        entries += zip(at, slope, h.square(), strict=True)
        own = {"h": h.square(), "c": slope - h.square() * at}
        reduced = Reduced(own, torch.zeros(5), 7, 7.0, 7, t, 0, clients=tuple(range(7)))
        _, state = taylor.fold(state, torch.zeros(5), reduced)
    assert sum(kept(state).values()) == 40
    w = torch.randn(5, generator=g, dtype=torch.float64)
    _, down = taylor.send(state, w)
    direct = sum(slope + h * (w - at) for at, slope, h in entries[-40:]) / 40
    torch.testing.assert_close(down["h"] * w + down["c"], direct)


def test_hutchinson_on_the_last_layers_has_only_their_variance(digits):
    """Probes are 0 on the layers before: the same diagonal, and other layers add no variance."""
    net = ef.models.cnn(1, 8, 10, 3)()
    compute = choose(net.double(), digits.x[0], CPU, "float32", "single")
    stream = ef.streams.static(digits, clients=100, alpha=None, rounds=1).seeded(0)
    data = digits.to(CPU, torch.float64)
    program = ClientProgram(ef.methods.fedavg(), compute, stream, data, Local(), 0)
    w = compute.weights()
    ask = Ask("train", 0, 0, 0.1, w, compute.read_buffers(), [])
    phase = Phase(program, ask, [program.job(0, 0, None, w)])
    slots = [slot for slot, _ in chosen("top", compute.layout)]
    since = min(slot.start for slot in slots)
    got = phase.hutchinson(w.unsqueeze(0), 100, since)[0]
    assert not got[:since].any()

    x, y = data.take(torch.from_numpy(stream.samples(0, 0)), torch.float64)

    def loss(v: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([w[:since], v])
        z = torch.func.functional_call(net, compute.layout.unflatten(whole), (x,))
        return nn.functional.cross_entropy(z, y)

    hessian = torch.func.hessian(loss)(w[since:].clone())
    exact = hessian.diagonal()
    # of one probe the variance is the sum of the row's squared off-diagonal entries
    deviation = ((hessian.square().sum(1) - exact.square()) / 100).sqrt()
    z = (got[since:] - exact) / deviation.clamp(min=1e-12)
    assert z.abs().max() < 5.5
    assert 0.8 < z[deviation > 1e-9].square().mean() < 1.25


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (ef.methods.cfl_regularization, [0.375, 0.69375]),
        (partial(ef.methods.cfl_regularization, mu=0.1), [0.375, 0.69]),
        (lambda **k: ef.methods.cfl_regularization(**k) + ef.methods.fedprox(0.1), [0.375, 0.69]),
    ],
    ids=["alone", "mu", "with fedprox"],
)
def test_local_steps_on_a_series(method, path):
    """f = 1/2 (w - 4)^2 at 3/4, the series g = -3, h = 3 of 3/2 (w - 1)^2 at 1/4, rate .1, w = 0:
    the first step is .1 (.75 * 4 + .25 * 3) = .375; at .375 FedProx adds .1 * .375 to the slope."""
    now = [(np.ones((1, 1)), np.full((1, 1), 4.0))]
    for steps, expected in enumerate(path, 1):
        local = Local(lr=0.1, steps=steps, batch=1)
        # Theorem 4.1 with D^2 = 1, R^2 = 2 and one past round
        made = method(layers="all", weights="theory", d2=1.0, r2=2.0)
        game = Game(made, [now], rounds=1, local=local)
        one = torch.ones(1, 1, dtype=torch.float64)
        old = torch.zeros(1, dtype=torch.int64)
        game.fed.parts[0] |= {"h-1": 3 * one, "c-1": -3 * one, "i-1": old}
        assert game.play()[0] == pytest.approx(expected)


# core sets ----------------------------------------------------------------------------------------
class Visits(ef.Stream):
    """One client that holds one of three data sets of 12 samples each, in a given order."""

    task_rounds = None

    def __init__(self, data, order):
        self.data, self.order, self.clients, self.rounds = data, order, 1, len(order)

    def block(self, client, round_):
        return self.order[round_]

    def samples(self, client, round_):
        return self.data.train[12 * self.order[round_] :][:12]


def memories(method, digits, order):
    """What the client keeps after each round, by data set."""
    stream = Visits(digits, order)
    torch.manual_seed(0)
    compute = choose(ef.models.mlp(64, 4, 10)(), digits.x[0], CPU, "float32", "auto")
    program = ClientProgram(method, compute, stream, digits, Local(), 0)
    fed = Federation(compute.weights(), compute.read_buffers(), [{}])
    rounds = Rounds(method, stream, Local(), LocalEngine(program, 1), None, 0)
    out = []
    for _ in order:
        rounds.play(fed)
        mine = fed.clients[0][0]
        ids, block = mine["ids"].tolist(), mine["block"].tolist()
        sets: dict[int, list[int]] = {}
        for i, b in zip(ids, block, strict=True):
            sets.setdefault(b, []).append(i)
        out.append(sets)
    return stream, out


@pytest.mark.parametrize("choice", ["naive", "herding"])
def test_one_core_set_for_each_data_set_replaced_on_revisit(digits, choice):
    order = [0, 1, 0, 2, 1]
    stream, kept = memories(ef.methods.cfl_coreset(5, choice), digits, order)
    for t, sets in enumerate(kept):
        met = list(dict.fromkeys(reversed(order[: t + 1])))
        assert list(sets) == met[::-1]  # in the order of the last visit
        for block, own in sets.items():
            held = stream.samples(0, order.index(block)).tolist()
            assert len(set(own)) == 5
            assert set(own) <= set(held)
    for t in range(1, len(order)):  # sets that were not visited stay as they were
        for block in set(kept[t]) - {order[t]}:
            assert kept[t][block] == kept[t - 1][block]


@pytest.mark.parametrize("choice", ["naive", "herding"])
@pytest.mark.parametrize(
    ("evict", "sizes"),
    [
        # size 6, budget 10: one set fits; of two and three, what is kept
        ("shrink", [[6], [5, 5], [3, 3, 4]]),
        ("oldest", [[6], [4, 6], [4, 6]]),
    ],
)
def test_a_budget_cuts_core_sets(digits, choice, evict, sizes):
    method = ef.methods.cfl_coreset(6, choice, budget=10, evict=evict)
    _, kept = memories(method, digits, [0, 1, 2])
    _, whole = memories(ef.methods.cfl_coreset(6, choice), digits, [0, 1, 2])
    assert [[len(own) for own in sets.values()] for sets in kept] == sizes
    if evict == "oldest":
        assert list(kept[2]) == [1, 2]  # nothing is left of the first
    # what is kept of the first set at each moment is a part of what was kept before
    assert set(kept[1][0]) < set(kept[0][0]) == set(whole[0][0])
    if choice == "herding":  # cut from the end: the first of each class stay, in their order
        labels = digits.y.numpy()
        for c in np.unique(labels[kept[0][0]]):
            first = [i for i in kept[0][0] if labels[i] == c]
            left = [i for i in kept[1][0] if labels[i] == c]
            assert left == first[: len(left)]


def test_a_budget_is_never_exceeded_and_is_used_up():
    random = np.random.default_rng(0)
    for _ in range(300):
        sizes = random.integers(1, 20, random.integers(1, 8)).tolist()
        budget = int(random.integers(1, 60))
        for evict in ("shrink", "oldest"):
            left = memory.allotted(sizes, budget, evict)
            assert sum(left) == min(budget, sum(sizes))
            assert all(a <= b for a, b in zip(left, sizes, strict=True))
        left = memory.allotted(sizes, budget, "shrink")
        cut = [a for a, b in zip(left, sizes, strict=True) if a < b]
        if cut:  # none that was cut has less than another has, but for the rest of the division
            assert max(left) - min(cut) <= 1


def test_naive_cuts_are_uniform():
    """Every sample of a set of 12 stays in a core set of 6 that is cut to 3 with chance 1/4."""
    counts = np.zeros(12)
    for seed in range(2000):
        kept = memory.uniform(np.arange(12), 6, rng(seed, "core set", 0, 0))
        counts[memory.uniform(kept, 3, rng(seed, "cut", 0, 0, 0))] += 1
    # binomial: 500 expected, standard deviation 19.4
    assert np.abs(counts - 500).max() < 4 * 19.4


# FedCurv ------------------------------------------------------------------------------------------
def test_fedcurv_takes_its_own_contribution_out():
    """w_A = 1, F_A = 2, w_B = 3, F_B = .5, lambda = .5: at w = 2 client A's penalty is
    .5 * .5 * (2 - 3)^2 = .25, its gradient 2 * .5 * .5 * (2 - 3) = -.5."""
    own = {"a": torch.tensor([[2.0]]), "b": torch.tensor([[2.0]])}
    whole = {"a": torch.tensor([2.5]), "b": torch.tensor([3.5])}
    c = SimpleNamespace(down=whole, mine=own)
    got = ef.methods.Curv(0.5).grad(torch.zeros(1, 1), torch.tensor([[2.0]]), c)
    assert got.item() == pytest.approx(-0.5)


def test_fedcurv_keeps_the_latest_of_every_client():
    """Partial participation: the server's sums are those of each client's last round."""
    random = np.random.default_rng(0)
    clients = [(random.uniform(0.5, 2, (3, 2)), random.normal(0, 2, (3, 2))) for _ in range(5)]
    local = Local(lr=0.1, steps=2, batch=8)
    game = Game(ef.methods.fedcurv(0.02), [clients], rounds=8, local=local, sample=2)
    for t in range(8):
        before = {i: s[0] for i, s in game.fed.clients.items()}
        cohort, _ = game.rounds.draw(t, 2)
        game.play()
        for i, states in game.fed.clients.items():
            changed = i not in before or not torch.equal(before[i]["a"], states[0]["a"])
            assert changed == (i in cohort)
        for key in ("a", "b"):
            total = sum(s[0][key] for s in game.fed.clients.values())
            torch.testing.assert_close(game.fed.parts[0][key], total)


# information loss ---------------------------------------------------------------------------------
def lost(game: Game, cohort: list[int]) -> float | None:
    return information_loss(game.rounds.engine.program, game.fed, cohort, game.fed.round - 1)


def test_taylor_series_of_quadratics_lose_nothing():
    """The Hessian's diagonal is exact; the Fisher information is another matrix, and loses."""
    tasks = [
        [(np.full((2, 2), 1.5), np.array([[i, 1.0], [t, 3.0]]))] * 2 for i, t in ((0, 1), (4, 2))
    ]
    for curvature, exact in (("hutchinson", True), ("fisher", False)):
        method = ef.methods.cfl_regularization(curvature, layers="all")
        game = Game(method, tasks, rounds=3, local=Local(lr=0.1, steps=2, batch=8))
        for _ in range(6):
            game.play()
            game.fed.w = game.fed.w + 1.0  # anywhere, not only where the series were made
            assert (lost(game, [0, 1]) < 1e-12) == exact


@pytest.mark.parametrize("w", [-3.0, 0.0, 7.5])
def test_a_core_set_loses_the_distance_of_the_means(w):
    """Samples 0, 1, 2, 3, 10 with losses 1/2 (w - x)^2: the gradient is w - 3.2, that of the core
    set {1, 3} is w - 2."""
    client = (np.ones((5, 1)), np.array([[0.0], [1.0], [2.0], [3.0], [10.0]]))
    game = Game(ef.methods.cfl_coreset(2), [[client]], rounds=1, local=Local(steps=1, batch=8))
    game.play()
    game.fed.clients[0][0]["ids"] = torch.tensor([1, 3])
    game.fed.w = torch.tensor([w], dtype=torch.float64)
    assert lost(game, [0]) == pytest.approx(1.2)


def test_information_loss_is_of_the_objectives_that_were():
    """Two clients, two tasks, core sets of one sample: |mean - sample| of each, by hand."""
    random = np.random.default_rng(0)
    centres = random.normal(0, 2, (2, 2, 3, 1)).astype(np.float32)
    tasks = [[(np.ones((3, 1)), c) for c in task] for task in centres]
    game = Game(ef.methods.cfl_coreset(1), tasks, rounds=1, local=Local(steps=1, batch=8))
    game.play()
    assert lost(game, []) is None  # no client took part
    game.play()
    x = game.stream.data.x[:, 1, 0].numpy()  # rows: task by task, client by client
    expected = []
    for i in range(2):
        for t, k in enumerate(game.fed.clients[i][0]["ids"].tolist()):
            expected.append(abs(x[6 * t + 3 * i :][:3].mean() - x[k]))
    assert lost(game, [0, 1]) == pytest.approx(np.mean(expected), rel=1e-5)


def evolving(digits):
    return ef.streams.evolving(digits, clients=4, subsets=5, rounds=8)


def recorded(run):
    return [r["value"] for r in run.records if r["metric"] == "information_loss"]


def test_larger_core_sets_lose_less(digits):
    """As in the paper's Figure 3; a core set that is the whole data set loses nothing."""
    means = []
    for size in (5, 20, 1000):
        method = ef.methods.cfl_coreset(size)
        model, options = ef.models.mlp(64, 16, 10), {"sample": 3, "workers": 1}
        run = ef.run(method, evolving(digits), model, information_loss=True, **options)
        plain = ef.run(method, evolving(digits), model, **options)
        assert torch.equal(run.vector, plain.vector)  # measuring changes nothing
        assert len(recorded(run)) == 8
        assert recorded(plain) == []
        means.append(np.mean(recorded(run)))
    assert means[0] > 1.5 * means[1]
    assert means[2] == pytest.approx(0, abs=1e-7)


def test_information_loss_is_recorded_resumed_and_reported(digits, tmp_path):
    method = ef.methods.cfl_regularization(curvature="hutchinson", probes=2)
    options = {"sample": 3, "workers": 1, "information_loss": True}

    def stop(progress):
        if progress.round == 4:
            raise KeyboardInterrupt

    model = ef.models.mlp(64, 16, 10)
    whole = ef.run(method, evolving(digits), model, folder=tmp_path / "whole", **options)
    kept = {"folder": tmp_path / "half", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        ef.run(method, evolving(digits), model, on_round=stop, **kept, **options)
    with pytest.raises(EverfedError, match="another information_loss"):
        ef.run(method, evolving(digits), model, resume=True, sample=3, workers=1, **kept)
    again = ef.run(method, evolving(digits), model, resume=True, **kept, **options)
    assert recorded(again) == recorded(whole)
    assert all(value > 0 for value in recorded(whole))
    full = ef.methods.cfl_coreset(1000)  # loses nothing, for which a logarithmic axis has no place
    ef.run(full, evolving(digits), model, folder=tmp_path / "full", **options)
    page = gather(collect([tmp_path / "whole", tmp_path / "full"]))
    (panel,) = [p for p in page.panels if p.title == "Information loss"]
    assert panel.lines[0][0].y == pytest.approx(recorded(whole), rel=1e-3)
    assert set(panel.lines[0][1].y) == {None}
    assert "Information loss" in render(page)


def test_methods_without_approximations_have_no_information_loss(digits):
    run = ef.run(ef.methods.fedavg(), evolving(digits), ef.models.mlp(64, 8, 10),
                 information_loss=True, workers=1)  # fmt: skip
    assert recorded(run) == []
    with pytest.raises(EverfedError, match="it is for simulation"):
        ef.run(ef.methods.cfl_coreset(), evolving(digits), ef.models.mlp(64, 8, 10),
               information_loss=True, engine=lambda program: LocalEngine(program, 1))  # fmt: skip


# generated samples --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rate", "sigma", "variance"),
    [
        # x <- (1 - rate) x + N(0, sigma^2) has the variance sigma^2 / (1 - (1 - rate)^2)
        (0.1, 0.2**0.5, 1.052632),
        (0.01, 0.02**0.5, 1.005025),
        (0.1, 0.1, 0.052632),
    ],
)
def test_langevin_settles_at_its_stationary_variance(rate, sigma, variance):
    """E = x^2 / 2 without clipping: 40,000 chains, started far off."""
    n, everywhere = 40_000, (-float("inf"), float("inf"))
    start, random = torch.full((n,), 3.0, dtype=torch.float64), np.random.default_rng(0)
    x = langevin(start, lambda x: x, round(8 / rate), rate, sigma, everywhere, random)
    assert abs(x.mean().item()) < 4 * (variance / n) ** 0.5 + 3 * (1 - rate) ** (8 / rate)
    # of Gaussians, the sample variance has the standard error variance * sqrt(2 / n)
    assert x.var().item() == pytest.approx(variance, abs=4 * variance * (2 / n) ** 0.5)


def test_langevin_stays_in_its_range():
    random = np.random.default_rng(0)
    x = langevin(torch.zeros(1000), lambda x: 0 * x, 20, 0.1, 1.0, (-1.0, 2.0), random)
    assert (x.min().item(), x.max().item()) == (-1.0, 2.0)


def test_the_energys_terms():
    x = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    mean, deviation = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    # (0 + 1) / (2 * 2) and (4 + 4) / (2 * 2)
    assert prior(x, mean, deviation).tolist() == [0.25, 2.0]
    image = torch.tensor([[[[0.0, 1.0], [3.0, 3.0]]]])
    assert total_variation(image).tolist() == [1 + 0 + 3 + 2]
    assert total_variation(x).tolist() == [0.0, 0.0]


class Norm(nn.Sequential):
    """BatchNorm behind a dense layer."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10))


def generation(digits, order, model, **settings):
    """The federation of one client after its rounds, with its program."""
    method = ef.methods.cfl_generative(**settings)
    stream, local = Visits(digits, order), Local(lr=0.1, epochs=40, batch=4)
    torch.manual_seed(0)
    compute = choose(model(), digits.x[0], CPU, "float32", "auto")
    program = ClientProgram(method, compute, stream, digits, local, 0)
    fed = Federation(compute.weights(), compute.read_buffers(), [{}])
    rounds = Rounds(method, stream, local, LocalEngine(program, 1), None, 0)
    for _ in order:
        rounds.play(fed)
    return program, fed


def test_generated_samples_are_what_the_model_takes_for_their_label(digits):
    program, fed = generation(digits, [0], ef.models.mlp(64, 32, 10), count=60)
    mine = fed.clients[0][0]
    held = digits.y[program.stream.samples(0, 0)]
    assert mine["x"].shape == (60, 1, 8, 8)
    assert 0 <= mine["x"].min() <= mine["x"].max() <= 1
    assert set(mine["y"].tolist()) <= set(held.tolist())
    # labels are drawn as they occur: the commonest of the data is common among the drawn
    share = (held == held.mode().values).double().mean().item()
    drawn = (mine["y"] == held.mode().values).double().mean().item()
    assert abs(drawn - share) < 4 * (share * (1 - share) / 60) ** 0.5
    right = program.compute.logits(fed.w, mine["x"]).argmax(1) == mine["y"]
    assert right.double().mean() > 0.95
    noise = torch.rand(60, 1, 8, 8)
    assert (program.compute.logits(fed.w, noise).argmax(1) == mine["y"]).double().mean() < 0.6


@pytest.mark.parametrize(("evict", "sizes"), [("shrink", [3, 3, 4]), ("oldest", [4, 6])])
def test_generated_samples_stay_within_the_budget(digits, evict, sizes):
    settings = {"count": 6, "steps": 2, "budget": 10, "evict": evict}
    _, fed = generation(digits, [0, 1, 2], ef.models.mlp(64, 8, 10), **settings)
    mine = fed.clients[0][0]
    blocks = mine["block"].tolist()
    assert [blocks.count(b) for b in dict.fromkeys(blocks)] == sizes
    assert len(mine["x"]) == len(mine["y"]) == 10


def test_statistics_are_renewed_on_real_data(digits):
    """After a round with generated samples the running statistics are those of the client's own
    samples at its model; before anything is replayed they are left to training."""
    program, fed = generation(digits, [0, 1], Norm, count=5, steps=2)
    ids = torch.from_numpy(program.stream.samples(0, 1))
    weights = program.compute.layout.unflatten(fed.w)
    inner = digits.x[ids].flatten(1) @ weights["1.weight"].T + weights["1.bias"]
    buffers = program.compute.buffer_layout.unflatten(fed.buffers)
    torch.testing.assert_close(buffers["2.running_mean"], inner.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(buffers["2.running_var"], inner.var(0), rtol=1e-4, atol=1e-5)
    assert all(norm.momentum == 0.1 for norm in program.compute.norms)


@pytest.mark.parametrize("model", [ef.models.mlp(64, 16, 10), Norm], ids=["mlp", "batchnorm"])
def test_generation_is_fedavg_on_the_first_data_set(digits, model):
    """Nothing is replayed before another data set is met."""
    stream = ef.streams.static(digits, clients=3, rounds=3)
    method = ef.methods.cfl_generative(count=4, steps=2)
    one, two = (
        ef.run(m, stream, model, workers=1) for m in (method, ef.methods.fedavg(average="uniform"))
    )
    assert torch.equal(one.vector, two.vector)
    for a, b in zip(one.model.buffers(), two.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_generation_needs_inputs_that_are_floats():
    tokens = ef.data.arrays(np.random.default_rng(0).integers(0, 9, (40, 5)), np.arange(40) % 2)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 2))
    stream = ef.streams.static(tokens, clients=2, rounds=1)
    with pytest.raises(EverfedError, match="floats: use cfl_coreset"):
        ef.run(ef.methods.cfl_generative(), stream, model, workers=1)


@pytest.mark.parametrize("kind", ["bytes", "floats", "channels last"])
def test_samples_beside_a_table(kind):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (6, 3, 4, 4)).astype(np.uint8)
    table = ef.data.arrays(x if kind == "bytes" else x.astype(np.float32) / 255, np.arange(6))
    if kind == "channels last":
        table = replace(table, x=table.x.to(memory_format=torch.channels_last))
    more = torch.rand(2, 3, 4, 4), torch.tensor([7, 8])
    ids = torch.tensor([[5, 6, 0], [7, 2, 6]])
    got, labels = Beside(table, *more).take(ids, torch.float32)
    assert labels.tolist() == [[5, 7, 0], [8, 2, 7]]
    whole = torch.cat([torch.from_numpy(x).float() / 255, more[0]])
    torch.testing.assert_close(got, whole[ids])


def test_information_loss_of_generated_samples(digits):
    """It is that of the samples that are replayed; a client that met one data set has one."""
    program, fed = generation(digits, [0], ef.models.mlp(64, 8, 10), count=5, steps=2)
    mine = fed.clients[0][0]
    w = fed.w.clone().requires_grad_()

    def gradient(x, y):
        z = torch.func.functional_call(
            program.compute.module, program.compute.layout.unflatten(w), x
        )
        return torch.autograd.grad(nn.functional.cross_entropy(z, y), w)[0]

    ids = torch.from_numpy(program.stream.samples(0, 0))
    gap = gradient(digits.x[ids], digits.y[ids]) - gradient(mine["x"], mine["y"])
    got = information_loss(program, fed, [0], 0)
    assert got == pytest.approx(gap.norm().item(), rel=1e-4)


@pytest.mark.parametrize("curvature", ["fisher", "hutchinson"])
def test_a_series_at_the_model_itself_loses_nothing_with_batch_norm(curvature):
    """Both sides are with running statistics; a batch's own would tell another gradient."""
    stream = ef.streams.evolving(ef.data.digits(["plain"]), clients=1, subsets=2, rounds=1)
    model = ef.models.cnn(1, 8, 10, 4, norm="batch")
    method = ef.methods.cfl_regularization(curvature=curvature, layers="all", weights="auto")
    options = {"local": ef.Local(lr=1e-6), "workers": 1, "information_loss": True}
    seen = {r["metric"]: r["value"] for r in ef.run(method, stream, model, **options).records}
    assert seen["information_loss"] == pytest.approx(0, abs=1e-3)
    assert seen["series_loss"] == pytest.approx(0, abs=1e-6)
