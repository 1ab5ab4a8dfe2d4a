"""Approximations of past objectives: Taylor series, core sets, generated samples, FedCurv."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import everfed as ef
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Reduced
from everfed.methods import Taylor
from everfed.methods.cfl_regularization import chosen
from everfed.vector import Layout

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
        ef.run(ef.methods.cfl_regularization(layers=layers), stream, ef.models.mlp(64, 16, 10), workers=1)


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
    from everfed.client import Ask, ClientProgram, Phase
    from everfed.compute import choose

    net = ef.models.cnn(1, 8, 10, 3)()
    compute = choose(net.double(), digits.x[0], torch.device("cpu"), "float32", "single")
    stream = ef.streams.static(digits, clients=100, alpha=None, rounds=1).seeded(0)
    data = digits.to(torch.device("cpu"), torch.float64)
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
