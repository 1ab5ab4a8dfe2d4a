"""Bad clients, odd models, workers: what a federation meets."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import everfed as ef
from everfed.errors import EverfedError
from everfed.reduce import Reducer

FAST = {"local": ef.Local(lr=0.05), "workers": 1}


def static(digits, rounds=3, clients=4):
    return ef.streams.static(digits, clients=clients, alpha=1.0, rounds=rounds)


@dataclass(frozen=True)
class Poison(ef.Part):
    """Some clients' updates are spoilt."""

    bad: tuple[int, ...] = (1,)
    value: float = float("nan")

    @property
    def batched(self) -> bool:
        return False

    def finish(self, update, w, c):
        return (update + self.value if c.client in self.bad else update), {}, {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_updates_are_dropped_and_counted(digits, value, workers):
    options = FAST | {"workers": workers}
    result = ef.run(
        ef.Method(Poison((1,), value)), static(digits), ef.models.mlp(64, 10), **options
    )
    assert result.summary.dropped_updates == 3
    assert torch.isfinite(result.vector).all()
    assert any("client 1" in note for note in result.notes)


def test_means_are_over_those_that_remain(digits):
    """Dropping client 1 is the same as a federation in which it has no data."""

    class Without(ef.Stream):
        def __init__(self, inner):
            self.inner, self.data = inner, inner.data
            self.clients, self.rounds = inner.clients, inner.rounds

        def samples(self, client, round_):
            return self.inner.samples(client, round_)[: 0 if client == 1 else None]

    inner = static(digits).seeded(0)
    dropped = ef.run(ef.Method(Poison()), inner, ef.models.mlp(64, 10), **FAST)
    empty = ef.run(ef.Method(Poison(())), Without(inner), ef.models.mlp(64, 10), **FAST)
    torch.testing.assert_close(dropped.vector, empty.vector)
    assert empty.summary.empty_clients == 3


def test_a_round_without_usable_updates_changes_nothing(digits):
    result = ef.run(ef.Method(Poison((0, 1, 2, 3))), static(digits), ef.models.mlp(64, 10), **FAST)
    start = ef.run(
        ef.Method(Poison((0, 1, 2, 3))), static(digits, 1), ef.models.mlp(64, 10), **FAST
    )
    assert result.summary.lost_rounds == 3
    assert torch.equal(result.vector, start.vector)
    assert any("stays as it was" in note for note in result.notes)


def test_wrong_shapes_are_dropped():
    reducer = Reducer({"update": "mean"}, {"update": (3,)})
    assert reducer.add([4], {"update": torch.ones(1, 2)}, torch.ones(1)) == []
    assert reducer.add([5], {"update": torch.ones(1, 3)}, torch.ones(1)) == [0]
    assert list(reducer.dropped) == [4]
    assert reducer.values()["update"].tolist() == [1, 1, 1]


def test_a_diverging_run_keeps_its_last_finite_model(digits):
    local = ef.Local(lr=1e18, epochs=1)
    result = ef.run(
        ef.methods.fedavg(), static(digits), ef.models.mlp(64, 10), local=local, workers=1
    )
    assert torch.isfinite(result.vector).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_part_is_named(digits, workers):
    @dataclass(frozen=True)
    class Broken(ef.Part):
        def grad(self, g, w, c):
            raise IndexError("out of luck")

    with pytest.raises(
        EverfedError, match=r"Broken\.grad failed .* round 1: IndexError: out of luck"
    ):
        ef.run(ef.Method(Broken()), static(digits), ef.models.mlp(64, 10), workers=workers)


def test_a_killed_worker_is_reported(digits):
    @dataclass(frozen=True)
    class Deadly(ef.Part):
        def grad(self, g, w, c):
            if c.round == 1 and os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)
            return g

    parent = os.getpid()
    with pytest.raises(EverfedError, match="a worker process died"):
        ef.run(ef.Method(Deadly()), static(digits), ef.models.mlp(64, 10), workers=2)


# odd clients --------------------------------------------------------------------------------------
class Odd(ef.Stream):
    """Client 0 has nothing, 1 a single sample, 2 a single class, 3 plenty."""

    def __init__(self, data):
        self.data, self.clients, self.rounds = data, 4, 3

    def samples(self, client, round_):
        train = self.data.train
        one_class = train[self.data.y[train].numpy() == 3]
        return [train[:0], train[:1], one_class[:40], train[50:150]][client]


class Normed(nn.Module):
    """BatchNorm, dropout and a branch: never batched."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(64, 12), nn.BatchNorm1d(12)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(12, 10)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.norm(self.a(x.flatten(1))))))


ODD_METHODS = ["fedavg", "scaffold", "cfl_coreset", "cfl_regularization", "cflag", "fedeve", "lwf"]


@pytest.mark.parametrize("name", [*ODD_METHODS, "ewc", "fedtrack", "mimelite", "fednova"])
@pytest.mark.parametrize("model", [ef.models.mlp(64, 16, 10), Normed], ids=["mlp", "batchnorm"])
def test_odd_clients_work(digits, name, model):
    method = ef.methods.METHODS[name].build()
    result = ef.run(method, Odd(digits), model, local=ef.Local(lr=0.02), workers=1)
    assert result.summary.lost_rounds == 0
    assert result.summary.empty_clients >= 3
    assert torch.isfinite(result.vector).all()


def test_batchnorm_statistics_are_averaged_and_returned(digits):
    result = ef.run(ef.methods.fedavg(), static(digits), Normed, **FAST)
    assert "one client at a time" in result.engine
    norm = result.model.norm
    assert norm.running_mean.abs().sum() > 0.1
    again = ef.run(ef.methods.fedavg(), static(digits), Normed, **(FAST | {"workers": 2}))
    torch.testing.assert_close(again.model.norm.running_var, norm.running_var, rtol=1e-4, atol=1e-5)
    assert float((again.vector - result.vector).norm() / result.vector.norm()) < 1e-5


def test_convolutions_give_the_same_model_on_two_workers(digits):
    model = ef.models.cnn(1, 8, 10, 4)
    one = ef.run(ef.methods.fedavg(), static(digits), model, **FAST)
    two = ef.run(ef.methods.fedavg(), static(digits), model, **(FAST | {"workers": 2}))
    assert float((one.vector - two.vector).norm() / one.vector.norm()) < 1e-5


def test_frozen_parameters_stay(digits):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    module[1].requires_grad_(False)
    result = ef.run(ef.methods.fedavg(), static(digits), module, **FAST)
    assert torch.equal(result.model[1].weight, module[1].weight)
    assert not torch.equal(result.model[3].weight, module[3].weight)
    assert result.vector.numel() == 16 * 10 + 10


def test_fewer_online_than_sampled(digits):
    class Night(Odd):
        def samples(self, client, round_):
            return self.data.train[client * 50 : client * 50 + 50]

        def online(self, round_):
            return np.array([[0, 1], [3], []][round_], dtype=int)

    result = ef.run(ef.methods.fedavg(), Night(digits), ef.models.mlp(64, 10), sample=2, **FAST)
    assert [r["value"] for r in result.records if r["metric"] == "clients"] == [2, 1]
    assert result.summary.lost_rounds == 1
    assert any("no client was online" in note for note in result.notes)


MISTAKES = [
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 9)), "9 outputs"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(63, 10)), "does not take inputs"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), sample=5), "4 clients"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), nn.Flatten()), "no trainable"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), device="moon"), "moon"),
    (lambda d: ef.run(ef.methods.scaffold(), static(d), ef.models.mlp(64, 10),
                      local=ef.Local(momentum=0.9)), "SCAFFOLD"),
    (lambda d: ef.run(ef.methods.cflag(lipschitz=50), static(d), ef.models.mlp(64, 10)), "lipschitz"),
    (lambda d: ef.run(ef.methods.cfl_regularization(layers={"fc": 1.0}), static(d),
                      ef.models.mlp(64, 10)), "no layer 'fc'"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), Normed, grouping="batched"), "grouping"),
    (lambda d: ef.Method("fedavg"), "not a Part"),
    (lambda d: ef.Local(nesterov=True), "momentum"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_told(digits, make, words):
    with pytest.raises(EverfedError, match=words):
        make(digits)


def test_the_engine_says_what_it_chose(digits):
    small = ef.run(ef.methods.fedavg(), static(digits, 1), ef.models.mlp(64, 10))
    assert small.engine == "1 worker on cpu, clients batched as matrix products"
    flag = ef.run(ef.methods.cflag(), static(digits, 1), ef.models.mlp(64, 10), workers=1)
    assert flag.engine.endswith("one client at a time")


def test_large_cohorts_go_through_in_groups(digits, monkeypatch):
    """Grouping changes memory, not results."""
    whole = ef.run(ef.methods.fedavg(), static(digits, 2, 30), ef.models.mlp(64, 10), **FAST)
    monkeypatch.setattr("everfed.compute.sequence.ROOM", 650 * 4)
    cut = ef.run(ef.methods.fedavg(), static(digits, 2, 30), ef.models.mlp(64, 10), **FAST)
    assert float((whole.vector - cut.vector).norm() / whole.vector.norm()) < 1e-5


def test_class_incremental_heads(digits):
    """Untrained classes never win (class head); only the task's own compete (task head)."""
    plain = ef.data.digits(["plain"])
    options = {"tasks": 5, "clients": 4, "alpha": None, "rounds": 4}
    local = ef.Local(lr=0.2, epochs=2)
    runs = {
        head: ef.run(ef.methods.fedavg(), ef.streams.classes(plain, head=head, **options),
                     ef.models.mlp(64, 32, 10), local=local, seed=3)
        for head in ("class", "task")
    }  # fmt: skip
    assert np.isnan(runs["class"].matrix[0, 1])  # nothing is measured on classes not yet seen
    assert np.diag(runs["class"].matrix).min() > 0.8
    assert runs["class"].bwt < -0.5  # fine-tuning forgets
    assert runs["task"].acc > 0.85


def test_lwf_distils_the_old_classes(digits):
    """Distilling the new slice instead, a public bug, would leave old outputs unprotected."""
    pulls: list[torch.Tensor] = []

    class Watched(ef.methods.Distil):
        def loss(self, z, x, y, c):
            leaf = z.detach().requires_grad_()
            term = super().loss(leaf, x, y, c)
            if c.task == 1:
                pulls.append(torch.autograd.grad(term.sum(), leaf)[0].abs().sum((0, 1)))
            return super().loss(z, x, y, c)

    plain = ef.data.digits(["plain"])
    stream = ef.streams.classes(plain, tasks=2, clients=4, rounds=2, seed=0)
    ef.run(ef.Method(Watched()), stream, ef.models.mlp(64, 32, 10), **FAST)
    old, new = (list(group) for group in stream.task_classes)
    assert torch.stack(pulls)[:, new].sum() == 0
    assert (torch.stack(pulls).sum(0)[old] > 0).all()


def test_ewc_protects_the_old_task(digits):
    """An EWC whose penalty has no gradient (a public bug) is fine-tuning."""
    stream = ef.streams.domains(digits, clients=4, alpha=None, rounds=8)
    local, model = ef.Local(lr=0.1, epochs=3), ef.models.mlp(64, 32, 10)
    ewc, fine = (
        ef.run(method, stream, model, local=local, workers=1)
        for method in (ef.methods.ewc(lam=30), ef.methods.ewc(lam=0))
    )
    assert ewc.matrix[1, 0] > fine.matrix[1, 0] + 0.02


def test_runs_leave_torch_as_it_was(digits):
    torch.set_num_threads(2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ef.run(ef.methods.fedavg(), static(digits, 1), Normed)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.rand(3), expected)
    torch.set_num_threads(1)
