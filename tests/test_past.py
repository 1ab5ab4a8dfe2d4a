"""Approximations of past objectives: Taylor series, core sets, generated samples, FedCurv."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import everfed as ef
from everfed import memory
from everfed.chance import rng
from everfed.client import Ask, ClientProgram, Phase
from everfed.compute import choose
from everfed.engines.local import LocalEngine
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Reduced
from everfed.methods import Taylor
from everfed.methods.cfl_regularization import chosen
from everfed.round import Federation, Rounds
from everfed.vector import Layout

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
    taylor, state, entries = Taylor(layers="all"), {}, []
    for t in range(8):
        at, slope, h = torch.randn(3, 7, 5, generator=g, dtype=torch.float64)
        entries += zip(at, slope, h.square(), strict=True)
        own = {"h": h.square(), "c": slope - h.square() * at}
        reduced = Reduced(own, torch.zeros(5), 7, 7.0, 7, t, 0)
        _, state = taylor.fold(state, torch.zeros(5), reduced)
    assert len(state["h"]) == 40
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
