"""What a round costs, counted and not timed: floating-point operations, numbers written, calls.

Counts do not depend on the machine, so they guard the speed of `docs/benchmarks.md` without ever
failing by chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from everfed import bench
from everfed.methods import METHODS

W1, W2 = bench.WORKLOADS["W1"], bench.WORKLOADS["W2"]
MLP = 784 * 200 + 200 + 200 * 10 + 10


def product(target, a, b, **options):
    """Flops of a matrix product, from shapes."""
    return 2 * math.prod(a) * b[-1]


def backwards(
    slope, x, kernels, bias, stride, padding, dilation, transposed, more, groups, wanted, **options
):
    """Flops of a convolution's way back, from shapes; torch's own count forgets the groups."""
    outputs = slope[0] * math.prod(slope[2:])
    return 2 * math.prod(kernels) * outputs * sum(wanted[:2])


#: what torch's counter does not know
COUNTED = {
    torch.ops.aten.addmm_: product,
    torch.ops.aten.baddbmm_: product,
    torch.ops.aten.convolution_backward: backwards,
}


@dataclass
class Cost(TorchDispatchMode):
    """Counts calls of torch, and the numbers that they write."""

    calls: int = 0
    written: int = 0

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        returned = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
        if not view:
            results = out if isinstance(out, tuple | list) else (out,)
            self.written += sum(t.numel() for t in results if isinstance(t, torch.Tensor))
        return out


@dataclass
class Spent:
    calls: int
    written: int
    flops: int
    samples: int


def one_round(work, method="fedavg", warm=1):
    """What the next round costs, once clients have their states."""
    torch.set_num_threads(1)
    b = bench.prepare(work, METHODS[method].build(), workers=1)
    for _ in range(warm):
        b.rounds.play(b.fed)
    stream, round_ = b.rounds.stream, b.fed.round
    cohort, _ = b.rounds.draw(round_, work.sample)
    counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
    with counter as flops, Cost() as cost:
        b.rounds.play(b.fed)
    samples = sum(len(stream.samples(client, round_)) for client in cohort)
    return Spent(cost.calls, cost.written, flops.get_total_flops(), samples)


def test_dense_training_does_the_products_of_backpropagation_and_no_more():
    """Forward and weight gradient of both layers, input gradient of the second: 2 flops each."""
    products = 2 * 784 * 200 + 3 * 200 * 10
    mean = 7 * MLP  # of the updates
    spent = one_round(W2)
    assert spent.flops == 2 * (products * spent.samples + mean)


def test_convolutions_do_no_more_than_backpropagation():
    conv1, conv2 = 24 * 24 * 6 * 25, 8 * 8 * 16 * 150
    dense = 256 * 120 + 120 * 84 + 84 * 62
    spent = one_round(W1)
    # nothing below the first convolution; some padding where clients' last batches are shorter
    assert spent.flops / spent.samples <= 2 * (2 * conv1 + 3 * conv2 + 3 * dense) * 1.12
    assert spent.calls < 25 * 130  # for all clients together: the largest has 20 steps


def test_a_step_writes_the_models_once():
    """SGD is fused into the gradients: no gradient, no change of it, is written."""
    spent = one_round(W2)
    steps, models = 9, 7 * MLP
    inputs_and_activations = 7 * 9 * 32 * (784 + 5 * 200 + 12 * 10)
    assert spent.written <= steps * models + inputs_and_activations + 4 * models


@pytest.mark.parametrize(
    ("method", "passes", "ends"),
    [
        # passes over the models in a step, and at the round's ends
        ("fedprox", 1, 0.5),
        ("scaffold", 1, 6.8),  # states are stacked, renewed and copied; a second upload
        ("special", 0, 0.5),
        ("fedeve", 0, 1.4),  # the spread
        ("fedavgm", 0, 0.5),
        ("fedadam", 0, 2),
    ],
)
def test_methods_write_no_more_than_their_maths(method, passes, ends):
    plain, own = one_round(W2), one_round(W2, method)
    models = 7 * MLP
    assert own.flops <= plain.flops * 1.005
    assert own.written - plain.written <= (9 * passes + ends) * models


@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        ("mimelite", 2),  # a gradient over all data at the model received
        ("cfl_coreset", 1),  # nothing to replay in the first task
        ("cfl_regularization", 2.5),  # gradient and squared gradient share a forward pass
        ("cflag", 2.6),  # a gradient over all data, and one of every batch that is drawn again
    ],
)
def test_methods_take_no_more_gradients_than_their_maths(method, epochs):
    for work in (W1, W2):
        assert one_round(work, method).flops <= epochs * one_round(work).flops * 1.03


def test_dense_clients_are_trained_together():
    """As many as stay in a core's caches: 13 clients are not one call more than 7, and 70 are six
    groups."""

    def calls(clients: int) -> int:
        work = replace(W2, sizes=lambda: np.full(clients, 285), sample=clients)
        return one_round(work).calls

    assert calls(13) <= calls(7) < 9 * 40 + 100
    assert calls(70) <= 6 * calls(7)


def test_a_population_costs_nothing_until_it_is_asked():
    """Ten of a million clients: only they are looked at."""
    work = replace(W2, sizes=lambda: np.full(10**6, 285), sample=7)
    b = bench.prepare(work, workers=1)
    asked = []
    samples = b.rounds.stream.samples
    b.rounds.stream.samples = lambda client, round_: asked.append(client) or samples(client, round_)
    b.rounds.play(b.fed)
    assert len(asked) == len(set(asked)) == 7
    assert one_round(work).calls <= one_round(W2).calls + 10
