"""Gradients, curvature and optimisers against torch's own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everfed as ef
from everfed.compute import ModuleCompute, Objective, SequenceCompute, choose, layers_of
from everfed.compute.base import cross_entropy
from everfed.curvature import hutchinson
from everfed.local import Affine, Local, Optimiser
from everfed.vector import Layout, bind, load

CPU = torch.device("cpu")


def net(act=nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), act(), nn.Linear(5, 4, bias=False), act(), nn.Linear(4, 3)
    )


def written(module, sample) -> SequenceCompute:
    layers = layers_of(module, sample)
    assert layers is not None
    return SequenceCompute(module, CPU, layers)


def batch(clients: int, size: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, size, 1, 2, 3, generator=g)
    y = torch.randint(0, 3, (clients, size), generator=g)
    scale = torch.rand(clients, size, generator=g)
    scale[0, -1] = 0  # padding
    return x, y, scale


def explicit(module, w, x, y, scale) -> torch.Tensor:
    """The gradient by functional_call, as torch's documentation does it."""
    layout = Layout.of(module)
    w = w.clone().requires_grad_()
    z = torch.func.functional_call(module, layout.unflatten(w), (x,))
    loss = (nn.functional.cross_entropy(z, y, reduction="none") * scale).sum()
    return torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.Sigmoid])
@pytest.mark.parametrize("kind", ["closed", "autograd"])
def test_batched_gradients_are_autograds(act, kind):
    module = net(act)
    compute = written(module, torch.zeros(1, 2, 3))
    w = compute.space(4)
    w.copy_(compute.weights() + 0.1 * torch.randn(4, compute.layout.d))
    x, y, scale = batch(4, 7)
    extra = (lambda z, x, y: torch.zeros(y.shape)) if kind == "autograd" else None
    objective = Objective(extra=extra)
    g, loss = compute.grad(w, x, y, scale, objective)
    for row in range(4):
        expected = explicit(module, w[row], x[row], y[row], scale[row])
        torch.testing.assert_close(g[row], expected, rtol=1e-4, atol=1e-6)
    before = w.clone()
    again = compute.descend(w, x, y, scale, objective, 0.1)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(w, before - 0.1 * g, rtol=1e-5, atol=1e-6)


def test_module_gradients_are_autograds():
    module = net()
    compute = ModuleCompute(module, CPU, "float32")
    x, y, scale = batch(1, 7)
    w = compute.weights()
    g, _ = compute.grad(w.unsqueeze(0), x, y, scale, Objective())
    torch.testing.assert_close(g[0], explicit(net(), w, x[0], y[0], scale[0]))


@pytest.mark.parametrize("kind", ["written", "module"])
def test_fisher_is_the_mean_of_per_sample_squares(kind):
    compute = ModuleCompute(net(), CPU, "float32")
    if kind == "written":
        compute = written(net(), torch.zeros(1, 2, 3))
    x, y, scale = batch(1, 6)
    w = compute.weights().unsqueeze(0)
    expected = sum(
        scale[0, k] * explicit(net(), w[0], x[0, k : k + 1], y[0, k : k + 1], 1.0).square()
        for k in range(6)
    )
    got, mean = compute.fisher(w, x, y, scale, Objective())
    torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(mean, compute.grad(w, x, y, scale, Objective())[0])
    since = compute.layout.slots[-2].start  # the last layer only
    top = compute.fisher(w, x, y, scale, Objective(), since)
    torch.testing.assert_close(top[:, 0, since:], torch.stack([got, mean])[:, 0, since:])


@pytest.mark.parametrize("pull", [0.0, 0.3, 4.0, 60.0])
def test_a_fused_step_is_the_step_along_the_changed_gradient(pull):
    """Two changes in a row, clients that have dropped out, and pulls up to where fusing ends."""
    g = torch.Generator().manual_seed(0)
    w, slope = torch.randn(2, 2, 5, generator=g).double()
    each = Affine(torch.randn(3, 5, generator=g).double(), scale=0.7, pull=pull)
    all_ = Affine(torch.randn(5, generator=g).double(), scale=1.3, pull=0.1)
    expected = w - 0.1 * all_(each(slope.clone(), w), w)
    by_hand = 1.3 * (0.7 * slope + pull * w + each.shift[:2]) + 0.1 * w + all_.shift
    torch.testing.assert_close(expected, w - 0.1 * by_hand)
    fused = all_.after(each).fuse(0.1)
    assert (fused is None) == (pull > 3.7)  # 0.1 * (1.3 * pull + 0.1) > 0.5
    if fused is not None:
        rate, finish = fused
        torch.testing.assert_close(finish(w - rate * slope), expected)


def test_hutchinson_estimates_the_exact_hessian_diagonal():
    module = net(nn.Tanh).double()
    compute = choose(module, torch.zeros(1, 2, 3), CPU, "float32", "single")
    x, y, _ = batch(1, 6)
    x = x[0].double()
    w, other = compute.weights(), net(nn.Tanh).double()

    def loss(v):
        z = torch.func.functional_call(other, compute.layout.unflatten(v), (x,))
        return nn.functional.cross_entropy(z, y[0])

    hessian = torch.func.hessian(loss)(w)
    exact = hessian.diagonal()
    signs = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (1000, len(w))) * 2.0 - 1)
    got = hutchinson(compute, w, x, y[0], Objective(), signs)
    # an estimate's variance is the sum of the squared off-diagonal entries over the probes
    deviation = ((hessian.square().sum(1) - exact.square()) / len(signs)).sqrt()
    assert ((got - exact).abs() < 5 * deviation + 1e-12).all()


IMAGES = [
    (ef.models.lenet(1, 28, 10)(), (1, 28, 28)),
    (ef.models.cnn(3, 12, 10, 4)(), (3, 12, 12)),
    # odd sizes, stride, no bias, many channels, another activation, pooling after it
    (nn.Sequential(nn.Conv2d(2, 7, 3, stride=2, padding=1, bias=False), nn.Tanh(), nn.MaxPool2d(2),
                   nn.Conv2d(7, 5, (2, 3), padding=(0, 1)), nn.ReLU(), nn.MaxPool2d((2, 2), (2, 2)),
                   nn.Conv2d(5, 3, 1, stride=1), nn.Flatten(), nn.Linear(3 * 2 * 2, 10)), (2, 21, 22)),
    (nn.Sequential(nn.Conv2d(6, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten(),
                   nn.Linear(4 * 4 * 4, 10, bias=False)), (6, 9, 9)),
    # windows that overlap, that reach beyond the edge, that have gaps
    (nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 2),
                   nn.MaxPool2d((2, 1), dilation=2, ceil_mode=True), nn.Flatten(),
                   nn.Linear(6 * 2 * 4, 10)), (1, 12, 12)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "shape"), IMAGES, ids=["lenet", "cnn", "odd", "strided", "windows"]
)
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_written_out_convolutions_are_autograds(module, shape, clients, kind):
    """Also where pooling windows hold equal values: constant patches of real images."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 8, *shape, generator=g)
    if kind == "ties":
        x = (x > 1).float()
    y = torch.randint(0, 10, (clients, 8), generator=g)
    scale = torch.full((clients, 8), 1 / 8)
    scale[-1, 5:] = 0  # padding
    compute, plain = written(module, x[0, 0]), ModuleCompute(copy.deepcopy(module), CPU, "float32")
    w = compute.space(clients)
    w.copy_(compute.weights() * (1 + torch.arange(clients).unsqueeze(1) / 10))
    before = w.clone()
    got, losses = compute.grad(w, x, y, scale, Objective())
    fishers = compute.fisher(before, x, y, scale, Objective())
    for i in range(clients):
        expected = explicit(module, w[i], x[i], y[i], scale[i])
        assert float((got[i] - expected).norm() / expected.norm()) < 1e-5
        own = (before[i : i + 1], x[i : i + 1], y[i : i + 1], scale[i : i + 1], Objective())
        torch.testing.assert_close(losses[i : i + 1], plain.grad(*own)[1])
        torch.testing.assert_close(fishers[:, i], plain.fisher(*own)[:, 0], rtol=1e-4, atol=1e-6)
    slopes = got.clone()
    compute.descend(w, x, y, scale, Objective(), 0.1)
    torch.testing.assert_close(w, before - 0.1 * slopes, rtol=1e-4, atol=1e-5)
    for of in ("logits", "features"):
        both = [getattr(c, of)(before[0], x[0]) for c in (compute, plain)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


def test_only_known_sequences_are_written_out():
    flat, image = torch.zeros(6), torch.zeros(1, 8, 8)
    assert layers_of(nn.Sequential(nn.Linear(6, 2)), flat)
    assert layers_of(net(), torch.zeros(1, 2, 3))
    conv = nn.Conv2d(1, 2, 3)
    for module, sample in (
        (nn.Linear(6, 2), flat),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), flat),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 2)), flat),
        (nn.Sequential(nn.Linear(6, 2)).requires_grad_(False), flat),
        (nn.Sequential(nn.Linear(3, 2)), torch.zeros(2, 3)),
        (nn.Sequential(nn.Linear(8, 2)), image),
        (nn.Sequential(conv, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(8, 2)), image),
        (nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(32, 2)), image),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(128, 2)), image),
        (nn.Sequential(nn.Flatten(0), nn.Linear(6, 2)), flat),
    ):
        assert layers_of(module, sample) is None


OPTIMISERS = [
    (Local(lr=0.1), torch.optim.SGD, {}),
    (Local(lr=0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (Local(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), torch.optim.SGD,
     {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Local(lr=0.1, optimizer="adam", weight_decay=0.01), torch.optim.Adam, {"weight_decay": 0.01}),
    (Local(lr=0.1, optimizer="adamw", weight_decay=0.1, betas=(0.8, 0.95)), torch.optim.AdamW,
     {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
]  # fmt: skip


@pytest.mark.parametrize(("local", "kind", "settings_"), OPTIMISERS)
def test_optimisers_are_torchs(local, kind, settings_):
    """Two rows stepped together, one of them dropping out, as torch.optim steps each alone."""
    torch.manual_seed(0)
    w = torch.randn(2, 7)
    theirs = [w[row].clone().requires_grad_() for row in range(2)]
    optimisers = [kind([v], lr=0.1, **settings_) for v in theirs]
    ours = Optimiser(local)
    for step in range(6):
        rows = 2 if step < 4 else 1
        g = torch.randn(rows, 7)
        ours.step(w[:rows], g.clone(), 0.1)
        for row in range(rows):
            theirs[row].grad = g[row].clone()
            optimisers[row].step()
    torch.testing.assert_close(w, torch.stack(theirs).detach(), rtol=1e-5, atol=1e-6)


def test_clipping_is_by_each_clients_own_norm():
    w = torch.zeros(2, 2)
    Optimiser(Local(lr=1, clip=1.0)).step(w, torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    torch.testing.assert_close(w, -torch.tensor([[0.6, 0.8], [0.3, 0.4]]), atol=1e-5, rtol=1e-5)


def test_schedules():
    assert Local(lr=1, schedule="exponential", decay=0.5).rate(3, 10) == 0.125
    assert Local(lr=1, schedule="cosine").rate(5, 10) == pytest.approx(0.5)
    assert Local(lr=1, schedule="sqrt").rate(3, 10) == 0.5


# vectors ------------------------------------------------------------------------------------------
shapes = st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=4), min_size=1, max_size=6)


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_layout_round_trip(sizes):
    """Any shapes, scalars and convolutions included: flatten and unflatten are inverse."""
    module = nn.ParameterDict(
        {f"p{k}": nn.Parameter(torch.randn(tuple(size))) for k, size in enumerate(sizes)}
    )
    layout = Layout.of(module)
    tensors = dict(module.named_parameters())
    vector = layout.flatten(tensors)
    assert layout.d == len(vector) == sum(p.numel() for p in tensors.values())
    back = layout.unflatten(vector)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    stacked = layout.unflatten(torch.stack([vector, 2 * vector]))
    assert all(torch.equal(stacked[name][1], 2 * tensors[name]) for name in tensors)


class Standardised(nn.Conv2d):
    """A convolution that flattens its own weights, as many users' do."""

    def forward(self, x):
        flat = self.weight.view(len(self.weight), -1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)
        return self._conv_forward(x, flat.view(self.weight.shape), self.bias)


def test_a_module_may_flatten_its_weights(tmp_path):
    """Only torch's own convolutions may lie channels-last; a run that was saved says which do."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.Flatten(), nn.Linear(64, 10)
    )
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    stream = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=1)
    run = ef.run(ef.methods.fedavg(), stream, module, folder=tmp_path / "run", seed=3)
    saved = ef.load_model(tmp_path / "run", module).state_dict()
    assert all(torch.equal(saved[name], p) for name, p in run.model.state_dict().items())
    moved = {name: float((saved[name] - p).norm() / p.norm()) for name, p in start.items()}
    assert all(0 < moved[name] < 1 for name in moved), moved  # permuted weights would be far away


def test_a_run_is_not_resumed_with_another_model_of_the_same_size(tmp_path):
    stream = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=1)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    deep = nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(64, 10, bias=False))
    ef.run(ef.methods.fedavg(), stream, wide, folder=tmp_path)
    with pytest.raises(ef.EverfedError, match="another model"):
        ef.run(ef.methods.fedavg(), stream, deep, folder=tmp_path, resume=True)


def test_bound_modules_train_the_vector():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2))
    layout = Layout.of(module)
    w = layout.flatten(dict(module.named_parameters()))
    g = torch.zeros_like(w)
    bind(module, layout, w, g)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    before = module(torch.ones(1, 2, 3, 3)).detach()
    module(torch.ones(1, 2, 3, 3)).sum().backward()
    assert g.abs().sum() > 0
    w.sub_(g, alpha=0.1)
    assert not torch.equal(module(torch.ones(1, 2, 3, 3)), before)
    other = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2))
    load(other, layout, w)
    torch.testing.assert_close(
        other(torch.ones(1, 2, 3, 3)), module(torch.ones(1, 2, 3, 3)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "method", [ef.methods.fedavg(), ef.methods.icarl(predict="means")], ids=lambda m: m.name
)
def test_bf16_learns_like_float32(digits, method):
    stream = ef.streams.static(digits, clients=4, rounds=4)
    model = ef.models.cnn(1, 8, 10, 8)
    options = {"local": ef.Local(lr=0.1, epochs=2), "workers": 1}
    full = ef.run(method, stream, model, **options)
    half = ef.run(method, stream, model, precision="bf16", **options)
    assert "bf16" in half.engine
    assert half.acc == pytest.approx(full.acc, abs=0.05)
    assert half.vector.dtype == torch.float32


def test_cross_entropy_averages_the_positions_of_a_sequence():
    z, y = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5))
    expected = torch.stack([nn.functional.cross_entropy(z[k], y[k]) for k in range(2)])
    torch.testing.assert_close(cross_entropy(z, y), expected)


def test_norms_of_the_small_network(digits):
    """With BatchNorm the federation shares its running statistics, and tests go by them."""
    stream = ef.streams.static(digits, clients=2, rounds=6)
    options = {"local": ef.Local(lr=0.1, epochs=2), "workers": 1}
    for norm, kind in (("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)):
        run = ef.run(ef.methods.fedavg(), stream, ef.models.cnn(1, 8, 10, 4, norm), **options)
        found = [child for child in run.model.modules() if isinstance(child, kind)]
        assert [child.weight.numel() for child in found] == [4, 8]
        assert run.acc > 0.8
        if norm == "batch":
            assert all(child.running_mean.abs().sum() > 0 for child in found)
    with pytest.raises(ef.EverfedError, match="no width of 3"):
        ef.models.cnn(1, 8, 10, 3, "group")
