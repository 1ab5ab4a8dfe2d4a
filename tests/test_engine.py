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
from everfed.compute import choose
from everfed.errors import EverfedError
from everfed.folder import RunFolder
from everfed.methods.er import Rehearsal
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
    assert any("client 1" in text for text in result.warnings)


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
    assert any("stays as it was" in text for text in result.warnings)


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


@pytest.mark.parametrize(
    "name", [*ODD_METHODS, "ewc", "fedtrack", "mimelite", "fednova", "fedcurv", "cfl_generative"]
)
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
    assert any("no client was online" in text for text in result.warnings)


class Leaky(Odd):
    """Positions in the training set in the place of row numbers."""

    def samples(self, client, round_):
        return self.data.test[:20]


class Crowd(Odd):
    def online(self, round_):
        return np.array([0, 7])


class Misspelt(ef.Part):
    def gard(self, g, w, c):
        return g


class Undecorated(ef.Part):
    mu: float = 1.0


class Forgetful(ef.Part):
    def grad(self, g, w, c):
        g.mul_(2)


class First(ef.Part):
    def grad(self, g, w, c):
        return g[:1]


class Stateless(ef.Part):
    def fold(self, s, update, r):
        return update


class Averaged(ef.Part):
    reduces = {"a": "avg"}


def alone(part, data):
    return ef.run(ef.Method(part), ef.streams.static(data), ef.models.mlp(64, 10), workers=1)


MISTAKES = [
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 9)), "9 outputs"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(63, 10)), "does not take inputs"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), sample=5), "4 clients"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), nn.Flatten()), "no trainable"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), device="moon"), "moon"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), device="meta"), "'meta' cannot be used"),
    (lambda d: ef.run(ef.methods.scaffold(), static(d), ef.models.mlp(64, 10),
                      local=ef.Local(momentum=0.9)), "SCAFFOLD"),
    (lambda d: ef.run(ef.methods.cflag(lipschitz=50), static(d), ef.models.mlp(64, 10)), "lipschitz"),
    (lambda d: ef.run(ef.methods.cfl_regularization(layers={"fc": 1.0}), static(d),
                      ef.models.mlp(64, 10)), "no layer 'fc'"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), Normed, grouping="batched"), "grouping"),
    (lambda d: ef.Method("fedavg"), "not a Part"),
    (lambda d: ef.run("fedavg", static(d), ef.models.mlp(64, 10)), "must be a Method"),
    (lambda d: ef.run(ef.methods.fedavg(), d, ef.models.mlp(64, 10)), "must be a Stream"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), sample=2.5), "sample"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), seed=None), "seed"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), precision="half"),
     "precision must be one of float32, bf16"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), grouping="batch"),
     "grouping must be one of"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10),
                      loss=lambda z, y: z.mean()), "one number a sample"),
    (lambda d: ef.methods.fedprox(0.1) + ef.methods.fednova(), "fednova\\(mu=0.1\\)"),
    (lambda d: ef.run(ef.methods.fedavg(), ef.streams.classes(ef.data.digits(["plain"])),
                      ef.models.mlp(64, 12)), "one output a class, 10"),
    (lambda d: ef.Local(nesterov=True), "momentum"),
    (lambda d: ef.Local(epochs=2.5), "^Local: epochs should be a valid integer, not 2.5$"),
    (lambda d: ef.Local(0.1, 2, 0), "^Local: steps should be greater than 0, not 0$"),
    (lambda d: ef.Local(epoch=2), "^Local has no 'epoch'; did you mean 'epochs'?"),
    (lambda d: ef.Late(lost="x"), "^Late: lost should be a valid number"),
    (lambda d: ef.Boundaries(by="me"), "^Boundaries: by should be"),
    (lambda d: ef.run(ef.methods.fedavg(), ef.streams.static(d), ef.models.mlp(64, 10),
                      local={"lr": 0.1}), "local must be an everfed.Local, not"),
    (lambda d: ef.methods.special(lam="x"), "^special: lam should be a valid number or 'auto', not 'x'$"),
    (lambda d: ef.methods.er(0), "^er: memory should be greater than 0, not 0$"),
    (lambda d: ef.methods.fedtrack() + ef.methods.lwf(), "adds to the loss.*set iag = false"),
    (lambda d: ef.methods.pfeddil() + ef.methods.fedadam(), "several models, and ServerAdaptive knows"),
    (lambda d: ef.methods.ewc() + ef.methods.pfeddil(), "several models, and Elastic knows of one"),
    (lambda d: ef.run(ef.methods.krum(bad=2), ef.streams.static(d), ef.models.mlp(64, 10), sample=4),
     "krum needs 7 clients a round, and 4 take part"),
    (lambda d: ef.run(ef.methods.fedavg(), Leaky(d), ef.models.mlp(64, 10)),
     "gave test samples to client 0 in round 1: it must give row numbers of the whole table"),
    (lambda d: ef.run(ef.methods.fedavg(), Crowd(d), ef.models.mlp(64, 10)),
     "online gave clients 0 to 7, and there are 4"),
    (lambda d: ef.Method(Misspelt()), "Misspelt.gard is no hook; did you mean grad?"),
    (lambda d: alone(Forgetful(), d), "Forgetful.grad must give a tensor of shape .*, and gave None"),
    (lambda d: alone(First(), d), "First.grad must give a tensor of shape .*, and gave"),
    (lambda d: alone(Stateless(), d), "Stateless.fold must give a step, .* and a state"),
    (lambda d: alone(Counting(), d), "Counting.init must give a state of tensors, and 'k' is 1"),
    (lambda d: alone(Talking(), d), "Talking.metrics must give numbers, and 'mood' is 'good'"),
    (lambda d: alone(Narrow(), d), "Narrow.fold failed in round 1: TypeError"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), "mlp"), "must be an nn.Module .*, not 'mlp'"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), Single), "a row of outputs for each of 2 inputs"),
    (lambda d: ef.run(ef.methods.fedavg(), static(d), ef.models.mlp(64, 10), sample=True), "sample"),
    (lambda d: ef.run(ef.methods.fedavg(), static(ef.data.arrays(np.ones((8, 3)), np.zeros(8, int))),
                      ef.models.mlp(3, 1)), "all labels are 0"),
    (lambda d: ef.run(ef.methods.fedavg(), ef.streams.static(
        ef.data.arrays(np.ones((8, 3)), np.arange(8) % 2.0), clients=2, alpha=np.inf),
        ef.models.mlp(3, 2)), "give classes as integers"),
    (lambda d: ef.Method(Undecorated()), "Undecorated has settings: write @dataclass"),
    (lambda d: ef.Method(Averaged()), "reduces\\['a'\\] must be 'mean', 'sum' or 'stack', not 'avg'"),
]  # fmt: skip


class Counting(ef.Part):
    def init(self, w, layout):
        return {"k": 1}


class Talking(ef.Part):
    def metrics(self, s):
        return {"mood": "good"}


class Narrow(ef.Part):
    def fold(self, s, update):
        return update, s


class Single(nn.Sequential):
    def forward(self, x):
        return x.sum()

    def __init__(self):
        super().__init__(nn.Linear(64, 10))


@pytest.mark.parametrize(("make", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_are_told(digits, make, words):
    with pytest.raises(EverfedError, match=words):
        make(digits)


def test_the_engine_says_what_it_chose(digits):
    small = ef.run(ef.methods.fedavg(), static(digits, 1), ef.models.mlp(64, 10))
    assert small.engine == "1 worker on cpu, clients trained together"
    alone = ef.run(ef.Method(Poison(())), static(digits, 1), ef.models.mlp(64, 10), workers=1)
    assert alone.engine.endswith("one client at a time")


def test_large_samples_go_through_in_smaller_pieces(digits, monkeypatch):
    """Tests and full gradients take 16 samples of 64 numbers at once where there is no room for
    more, and give the same."""
    largest = []

    class Watched(nn.Linear):
        def forward(self, x):
            largest.append(len(x))
            return super().forward(x.flatten(1))

    def play():
        largest.clear()
        torch.manual_seed(0)
        method, stream = ef.methods.mimelite(0.5), static(digits, rounds=2, clients=2)
        result = ef.run(method, stream, Watched(64, 10), **FAST)
        return result, max(largest)

    whole, most = play()
    monkeypatch.setattr("everfed.client.SLICE_FLOATS", 64 * 16)
    pieces, few = play()
    assert most > 500
    assert few == 32  # a batch of training, or twice 16 in tests
    torch.testing.assert_close(pieces.vector, whole.vector)


@pytest.mark.parametrize("name", ["fedavg", "mimelite", "fedtrack"])
def test_large_cohorts_go_through_in_groups(digits, monkeypatch, name):
    """Grouping changes memory, not results."""
    method = ef.methods.METHODS[name].build()
    whole = ef.run(method, static(digits, 2, 30), ef.models.mlp(64, 10), **FAST)
    monkeypatch.setattr("everfed.compute.sequence.NEAR", 650 * 4)
    cut = ef.run(method, static(digits, 2, 30), ef.models.mlp(64, 10), **FAST)
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


# found by review --------------------------------------------------------------------------------
def test_a_module_that_stands_twice_runs_twice(digits):
    """named_children() leaves out repeats: the second use of one ReLU would be lost."""
    torch.manual_seed(0)
    act = nn.ReLU()
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 10)
    )
    both = [
        ef.run(ef.methods.fedavg(), static(digits), module, grouping=grouping, **FAST)
        for grouping in ("auto", "single")
    ]
    assert "together" in both[0].engine
    assert float((both[0].vector - both[1].vector).norm() / both[1].vector.norm()) < 1e-5
    shared = nn.Linear(16, 16)
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), shared, shared, nn.Linear(16, 10))
    result = ef.run(ef.methods.fedavg(), static(digits), tied, **FAST)
    assert "one client at a time" in result.engine


@pytest.mark.parametrize("name", ["fedtrack", "cflag", "fedavg", "mimelite"])
def test_dropout_is_the_same_on_any_number_of_workers(digits, name):
    stream = ef.streams.domains(digits, clients=4, alpha=1.0, rounds=2)
    method = ef.methods.METHODS[name].build()
    one, two = (
        ef.run(method, stream, Normed, local=ef.Local(lr=0.02), workers=workers)
        for workers in (1, 2)
    )
    assert float((one.vector - two.vector).norm() / one.vector.norm()) < 1e-5


def test_counting_buffers_do_not_leak_between_clients(digits):
    class Cumulative(Normed):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(12, momentum=None)

    one, two = (
        ef.run(ef.methods.fedavg(), static(digits), Cumulative, **(FAST | {"workers": workers}))
        for workers in (1, 2)
    )
    torch.testing.assert_close(one.model.norm.running_mean, two.model.norm.running_mean)


@pytest.mark.parametrize("other", ["ewc", "lwf"])
def test_replay_beside_methods_of_the_new_slice(other):
    """A replayed sample of an old class competes with all classes seen; losses stay finite."""
    stream = ef.streams.classes(ef.data.digits(["plain"]), tasks=5, clients=3, rounds=3)
    options = {"local": ef.Local(lr=0.1, epochs=2), "workers": 1}
    model = ef.models.mlp(64, 32, 10)
    alone = ef.run(ef.methods.cfl_coreset(30), stream, model, **options)
    added = ef.methods.METHODS[other].build(lam=1.0)
    both = ef.run(ef.methods.cfl_coreset(30) + added, stream, model, **options)
    assert both.acc > alone.acc - 0.15
    for result in (alone, both):
        assert all(r["value"] is not None for r in result.records)


def test_fine_tuning_is_ewc_without_its_pull():
    """Among new classes alone, in both; among all seen it is another method."""
    stream = ef.streams.classes(ef.data.digits(["plain"]), tasks=5, clients=3, rounds=2)
    options = {"local": ef.Local(lr=0.1, epochs=2), "workers": 1}
    model = ef.models.mlp(64, 32, 10)
    new, ewc, seen = (
        ef.run(method, stream, model, **options)
        for method in (
            ef.methods.fedavg(among="new"), ef.methods.ewc(lam=0.0), ef.methods.fedavg(),
        )
    )  # fmt: skip
    torch.testing.assert_close(new.vector, ewc.vector)
    assert new.acc > seen.acc + 0.1


def test_labels_in_a_column_and_single_outputs():
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    options = {"local": ef.Local(lr=0.3, epochs=4), "workers": 1}

    def go(labels, outputs, **more):
        stream = ef.streams.static(ef.data.arrays(x, labels), clients=2, rounds=4)
        return ef.run(ef.methods.fedavg(), stream, ef.models.mlp(4, outputs), **options, **more)

    assert go(y[:, None], 2).acc == go(y, 2).acc > 0.9

    def logistic(z, t):
        return nn.functional.binary_cross_entropy_with_logits(z[:, 0], t.float(), reduction="none")

    single = go(y, 1, loss=logistic)
    assert not any(r["metric"] == "accuracy" for r in single.records)
    losses = [r["value"] for r in single.records if r["metric"] == "loss"]
    assert losses[-1] < losses[0]


def test_a_bad_probe_drops_the_client(digits):
    @dataclass(frozen=True)
    class BadProbe(ef.methods.Track):
        bad: tuple[int, ...] = (1,)

        def probe(self, w, c):
            up, mine = super().probe(w, c)
            return ({"g": up["g"] * torch.nan} if c.client in self.bad else up), mine

    result = ef.run(ef.Method(BadProbe()), static(digits), ef.models.mlp(64, 10), **FAST)
    assert result.summary.dropped_updates == 3
    assert result.summary.lost_rounds == 0
    none = ef.run(
        ef.Method(BadProbe(bad=(0, 1, 2, 3))), static(digits), ef.models.mlp(64, 10), **FAST
    )
    assert none.summary.lost_rounds == 3


def test_a_step_that_overflows_is_kept_out_of_the_folder(digits, tmp_path):
    options = FAST | {"folder": tmp_path, "checkpoint_seconds": 0}
    method = ef.methods.scaffold() + ef.Method(ef.methods.ServerRate(1e39))
    result = ef.run(method, static(digits), ef.models.mlp(64, 10), **options)
    assert result.summary.lost_rounds == 3
    assert any("smaller learning rate" in text for text in result.warnings)


def test_replay_and_aggregated_gradients_share_their_pieces(digits):
    """The table of IAG has a piece for every batch, replayed samples included: less is forgotten."""
    stream = ef.streams.domains(digits, clients=3, alpha=None, rounds=3)
    options = {"local": ef.Local(lr=0.05, epochs=3), "workers": 1}
    plain, replay = (
        ef.run(method, stream, ef.models.mlp(64, 16, 10), **options)
        for method in (ef.methods.fedtrack(), ef.methods.cfl_coreset(50) + ef.methods.fedtrack())
    )
    assert replay.matrix[1, 0] > plain.matrix[1, 0] + 0.05


def test_the_order_of_addition_does_not_matter(digits):
    """Stages decide: normalised updates are scaled, optimised and anchored in that order."""
    parts = [ef.methods.special(0.1), ef.methods.fednova(), ef.methods.fedavgm(0.5)]
    a, b, c = (ef.Method(*m.parts, average="samples") for m in parts)
    names = [[type(p).__name__ for p in (x + y + z).parts] for x, y, z in ((a, b, c), (c, b, a))]
    assert names[0] == names[1] == ["Nova", "ServerRate", "ServerMomentum", "Anchor"]


def test_training_that_leaves_all_bounds_is_told_once(digits):
    wild = ef.run(
        ef.methods.fedavg(),
        static(digits),
        ef.models.mlp(64, 10),
        **FAST | {"local": ef.Local(lr=1e6)},
    )
    (told,) = [text for text in wild.warnings if "clients' training loss" in text]
    assert told.startswith("round 1: the clients' training loss is")
    assert not ef.run(ef.methods.fedavg(), static(digits), ef.models.mlp(64, 10), **FAST).warnings


def test_tests_on_training_samples_are_told():
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    model = ef.models.mlp(3, 2)

    def notes(data):
        return ef.run(
            ef.methods.fedavg(), ef.streams.static(data, clients=2, rounds=1), model
        ).notes

    assert notes(ef.data.arrays(x, y)) == (
        "tests are on samples that clients train on: give the data test samples",
    )
    assert notes(ef.data.arrays(x, y, test=(x[:4], y[:4]))) == ()


def test_streams_are_checked(digits):
    class Mask(Odd):
        def samples(self, client, round_):
            return np.ones(len(self.data.train), dtype=bool)

    class Outside(Odd):
        def samples(self, client, round_):
            return np.array([0, 10**7])

    class Untested(Odd):
        def test(self, task):
            return self.data.test[:0]

    class Headed(Odd):
        head = "class"

    for stream, words in (
        (Mask, "must give indices"),
        (Outside, "indices from 0 to 10000000"),
        (Untested, "no test samples"),
        (Headed, "give task_classes"),
    ):
        with pytest.raises(EverfedError, match=words):
            ef.run(ef.methods.fedavg(), stream(digits), ef.models.mlp(64, 10), **FAST)


def test_an_upload_without_a_reduction_is_named(digits):
    @dataclass(frozen=True)
    class Loose(ef.Part):
        def finish(self, update, w, c):
            return update, {"norm": ef.sq(update)}, {}

    with pytest.raises(EverfedError, match="Loose uploads 'norm'"):
        ef.run(ef.Method(Loose()), static(digits), ef.models.mlp(64, 10), **FAST)


def test_sequences_of_tokens():
    """Whole-number inputs, a label for every position, a memory of samples without classes."""
    random = np.random.default_rng(0)
    x = random.integers(0, 9, (120, 6))
    data = ef.data.arrays(x, (x + 1) % 9, client=np.arange(120) % 4, task=np.arange(120) // 60)

    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 16), nn.Linear(16, 9)

        def forward(self, tokens):
            return self.out(self.embed(tokens))

    for name in ("fedavg", "cflag", "cfl_coreset"):
        result = ef.run(
            ef.methods.METHODS[name].build(), ef.streams.given(data, rounds=6), Next,
            local=ef.Local(lr=0.19, epochs=4, batch=8), workers=1,
        )  # fmt: skip
        assert result.acc > 0.4
    with pytest.raises(EverfedError, match="no classes to skew"):
        ef.streams.static(data)


@dataclass(frozen=True)
class Keeper(ef.Part):
    """Keeps the model it was given as it is, and what it sums up to."""

    def client_init(self, w):
        return {key: torch.zeros(0) for key in ("v", "sum", "closed", "closed sum")}

    def remember(self, w, c):
        return {"v": w, "sum": w.sum()}

    def close(self, w, c):
        return {}, {"closed": w, "closed sum": w.sum()}


def test_a_model_that_a_part_keeps_stays_as_it_was(digits, tmp_path):
    """The room in which it was trained is the next client's."""
    stream = ef.streams.domains(digits, clients=4, rounds=1)
    ef.run(ef.Method(Keeper()), stream, ef.models.mlp(64, 8, 10), folder=tmp_path, **FAST)
    folder = RunFolder.open(tmp_path)
    found, _ = folder.load()
    folder.close()
    assert len(found.fed.clients) == 4
    for (state,) in found.fed.clients.values():
        assert state["v"].sum() == state["sum"]
        assert state["closed"].sum() == state["closed sum"]


@dataclass(frozen=True)
class Twice(ef.Part):
    """Takes one gradient of a model, and the same twice in a list."""

    def close(self, w, c):
        one, both = c.gradient(w, c.ids), c.gradient(w, [c.ids, c.ids])
        torch.testing.assert_close(both, torch.stack([one, one]))
        return {}, {}


def test_a_list_of_gradients_is_of_the_model_that_was_given(digits):
    ef.run(
        ef.Method(Twice()), ef.streams.domains(digits, clients=4, rounds=1),
        ef.models.mlp(64, 8, 10), **FAST,
    )  # fmt: skip


def test_a_bias_that_two_layers_share_is_counted_in_both():
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    tied[3].bias = tied[1].bias
    nn.init.constant_(tied[1].bias, 3.0)
    compute = choose(tied, torch.zeros(1, 8, 8), torch.device("cpu"), "float32", "auto")
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compute.logits(compute.weights(), x), compute.module(x))


@pytest.mark.parametrize("order", [0, 1])
def test_a_table_of_gradients_sees_them_plain_beside_any_part(digits, order):
    """Of one piece a client the table is renewed as a whole: that is no table."""
    stream = ef.streams.domains(digits, clients=3, rounds=2)
    local = ef.Local(lr=0.05, epochs=3, batch=5000)
    ends = []
    for iag in (True, False):
        both = [ef.methods.fedtrack(iag=iag), ef.methods.cfl_regularization()]
        method = both[order] + both[1 - order]
        run = ef.run(method, stream, ef.models.mlp(64, 8, 10), local=local, workers=1)
        ends.append(run.vector)
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_two_memories_of_one_method_draw_each_their_own(digits):
    drawn = {}

    def noted(self, c, size, *purpose):
        out = original(self, c, size, *purpose)
        drawn.setdefault((c.round, c.client, c.step), []).append(out.tolist())
        return out

    original, stream = Rehearsal.draw, ef.streams.domains(digits, clients=3, rounds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "draw", noted)
        both = ef.methods.er(60) + ef.methods.agem(60)
        ef.run(both, stream, ef.models.mlp(64, 8, 10), local=ef.Local(lr=0.05, batch=16), workers=1)
    pairs = [own for own in drawn.values() if len(own) == 2 and own[0]]
    assert len(pairs) > 20
    assert sum(a == b for a, b in pairs) < len(pairs) / 10


class Masked(nn.Module):
    """A causal mask, as transformers have it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))

    def forward(self, x):
        return self.head(x.flatten(1)) * self.mask.exp()[0, 0]


def test_a_mask_of_infinities_is_no_running_statistic(digits):
    run = ef.run(ef.methods.fedavg(), static(digits), Masked, **FAST)
    assert (run.summary.lost_rounds, run.summary.dropped_updates) == (0, 0)


def test_empty_clients_are_counted_among_the_late_too(digits):
    """Three of six clients have no samples, whenever their replies would come."""

    class Half(Odd):
        def __init__(self, inner):
            self.inner, self.data = inner, inner.data
            self.clients, self.rounds = inner.clients, inner.rounds

        def samples(self, client, round_):
            return self.inner.samples(client, round_)[: 0 if client % 2 else None]

        def test(self, task):
            return self.inner.test(task)

    stream = Half(static(digits, rounds=4, clients=6))
    late = ef.Late(chance=0.5, rounds=1)
    run = ef.run(ef.methods.fedavg(), stream, ef.models.mlp(64, 8, 10), late=late, **FAST)
    told = [r["value"] for r in run.records if r["metric"] == "empty_clients"]
    assert told[0] == 3


def test_outputs_for_every_position_are_told(digits):
    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 10)

        def forward(self, x):
            return self.head(x[:, 0])

    with pytest.raises(EverfedError, match=r"outputs of shape \(2, 8, 10\) for labels"):
        ef.run(ef.methods.fedavg(), static(digits), All, **FAST)


def test_a_loss_that_cannot_leave_classes_out_is_told(digits):
    def smooth(z, y):
        return nn.functional.cross_entropy(z, y, label_smoothing=0.1, reduction="none")

    stream = ef.streams.classes(digits, tasks=5, clients=3, rounds=1)
    with pytest.raises(EverfedError, match="not finite where outputs are -inf"):
        ef.run(ef.methods.fedavg(), stream, ef.models.mlp(64, 10), loss=smooth, **FAST)
