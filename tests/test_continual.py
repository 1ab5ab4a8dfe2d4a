"""Continual baselines in federated form: their formulas followed step by step, and the mistakes
that public implementations make.

The formulas are written anew here as scalar losses of a small linear model, and descended along
central differences, so a term without a gradient, of a wrong slice or of a wrong model shows.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import everfed as ef
from everfed import memory
from everfed.client import ClientProgram
from everfed.compute import Objective, choose
from everfed.engines.local import LocalEngine
from everfed.local import Local
from everfed.method import Method
from everfed.methods.agem import project
from everfed.methods.cflag import Rates
from everfed.methods.refed import importance, pull_strength
from everfed.prototypes import class_sums, nearest, renewed
from everfed.round import Federation, Rounds
from quadratics import Q2, Game

LR = 0.3
FULL = Local(lr=LR, steps=1, batch=1000)


def slope(loss, w: torch.Tensor) -> torch.Tensor:
    """The gradient of a scalar loss by central differences."""
    h = 1e-6 * torch.eye(len(w), dtype=w.dtype)
    return torch.stack([(loss(w + e) - loss(w - e)) / 2e-6 for e in h])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


def logits(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ w[:12].view(4, 3).T + w[12:]


def soft(z: torch.Tensor, teacher: torch.Tensor, temperature: float = 2.0) -> torch.Tensor:
    """Cross-entropy of softened outputs, the mean over samples."""
    p = torch.softmax(teacher / temperature, 1)
    return -(p * torch.log_softmax(z / temperature, 1)).sum(1).mean()


def table(classes_of_task=((0, 1, 2, 3), (0, 1, 2, 3)), clients: int = 2, each: int = 6):
    """Random samples of two tasks; client i holds `each` + i samples of every task."""
    random = np.random.default_rng(0)
    x, y, task, client = [], [], [], []
    for t, own in enumerate(classes_of_task):
        for i in range(clients):
            n = each + i
            x.append(random.normal(t, 1, (n, 3)))
            y.append(np.resize(own, n))
            task += [t] * n
            client += [i] * n
    x, y = np.concatenate(x).astype(np.float32), np.concatenate(y)
    return ef.data.arrays(x, y, task=task, client=client)


def held(data, t: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = np.flatnonzero((data.task == t) & (data.client == i))
    return data.x[ids].double(), data.y[ids]


def vectors(method, data, rounds: int, model=linear, **options) -> list[torch.Tensor]:
    """The server's model after each round, two tasks of `rounds` rounds."""
    out = []
    for k in range(1, 2 * rounds + 1):
        stream = Cut(ef.streams.given(data, rounds=rounds), k)
        options = {"local": FULL, "workers": 1} | options
        out.append(ef.run(method, stream, model(), **options).vector)
    return out


class Cut(ef.streams.Stream):
    """The first rounds of a stream."""

    def __init__(self, whole, rounds):
        self.whole, self.rounds = whole, rounds
        self.data, self.clients, self.head = whole.data, whole.clients, whole.head
        ends = np.minimum(np.cumsum(whole.task_rounds), rounds)
        self.task_rounds = tuple(int(n) for n in np.diff(ends, prepend=0) if n)
        self.task_classes = whole.task_classes and whole.task_classes[: len(self.task_rounds)]

    def samples(self, client, round_):
        return self.whole.samples(client, round_)


def federation(method, stream) -> tuple[Federation, Rounds]:
    """A federation of digits to play round by round."""
    data, local = stream.data, Local()
    module = ef.models.mlp(64, 8, 10)()
    compute = choose(module, data.x[0], torch.device("cpu"), "float32", "auto")
    program = ClientProgram(method, compute, stream, data, local, 0)
    states = [part.init(compute.weights(), compute.layout) for part in method.parts]
    fed = Federation(compute.weights(), compute.read_buffers(), states)
    return fed, Rounds(method, stream, local, LocalEngine(program, 1), None, 0)


def first() -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in linear().parameters()])


# distillation -------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", [ef.methods.lwf, ef.methods.flwf2t], ids=lambda b: b.__name__)
def test_distillation_acts_on_old_classes_alone(build):
    """Only new classes compete in the loss, so what moves the old ones' outputs is the teacher; the
    outputs of classes that are still to come, which no teacher knows, stay."""
    data = table([range(6)], each=30)
    stream = ef.streams.classes(data, tasks=3, clients=2, rounds=3, seed=0)
    order = torch.tensor(stream.task_classes)
    local = Local(lr=LR, epochs=1, batch=4)
    rows = []
    for tasks in (1, 2):
        cut, model = Cut(stream, 3 * tasks), ef.models.mlp(3, 8, 6)
        trained = ef.run(build(), cut, model, local=local, workers=1).model
        rows.append(trained[-1].weight.detach())
    moved = (rows[1] - rows[0]).abs().amax(1)[order]
    assert moved[:2].min() > 1e-4  # rounding would be 1e-7
    assert moved[2].max() == 0


def second_task(loss, data) -> torch.Tensor:
    """One client, two tasks of two full-batch steps; the second descends `loss(v, x, y, w, xs, ys)`,
    w the model at the first task's end and xs, ys that task's samples."""
    (xs, ys), (x, y) = held(data, 0, 0), held(data, 1, 0)
    v = first()
    for _ in range(2):
        v = v - LR * slope(lambda u: F.cross_entropy(logits(u, xs), ys), v)
    w = v
    for _ in range(2):
        v = v - LR * slope(lambda u: loss(u, x, y, w, xs, ys), v)
    return v


def test_lwf_follows_its_formula():
    def loss(v, x, y, w, xs, ys):
        return F.cross_entropy(logits(v, x), y) + 0.6 * soft(logits(v, x), logits(w, x))

    data = table(clients=1)
    got = vectors(ef.methods.lwf(lam=0.6), data, 2)[-1]
    torch.testing.assert_close(got, second_task(loss, data), rtol=1e-6, atol=1e-7)


def test_ewc_penalises_the_trained_model():
    """The penalty has a gradient, that of the model in training (a penalty on the global copy has
    none), with the Fisher information of the first task's single samples."""

    def loss(v, x, y, w, xs, ys):
        each = [
            slope(lambda u, k=k: F.cross_entropy(logits(u, xs[k : k + 1]), ys[k : k + 1]), w)
            for k in range(len(ys))
        ]
        fisher = torch.stack(each).square().mean(0)
        return F.cross_entropy(logits(v, x), y) + 5.0 / 2 * (fisher * (v - w).square()).sum()

    data = table(clients=1)
    got = vectors(ef.methods.ewc(lam=5.0), data, 2)[-1]
    torch.testing.assert_close(got, second_task(loss, data), rtol=1e-5, atol=1e-6)


# FLwF-2T ------------------------------------------------------------------------------------------
def test_flwf2t_follows_its_formula():
    """Two clients, two tasks of two rounds: the own teacher is the local model of the last round
    of the first task (not the mean, not the newest), the server's is the model received."""
    data = table()
    w, own, newest, expected = first(), [], [], []
    for t in range(4):
        task, start, locals_ = t // 2, w, []
        own = newest if t == 2 else own
        for i in range(2):
            x, y = held(data, task, i)

            def loss(v, x=x, y=y, i=i, start=start, task=task, own=own):
                z = logits(v, x)
                ce = F.cross_entropy(z, y)
                if task == 0:
                    return ce
                return 0.5 * ce + 0.2 * soft(z, logits(own[i], x)) + 0.3 * soft(z, logits(start, x))

            locals_.append(start - LR * slope(loss, start))
        newest = locals_
        w = sum(locals_) / 2
        expected.append(w)
    got = vectors(ef.methods.flwf2t(alpha=0.5, beta=0.2, average="uniform"), data, 2)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_flwf2t_loss_adds_up():
    """CE 1.2, teachers .8 and .6 with alpha = .5, beta = .25: .6 + .2 + .15."""
    y = torch.zeros(1, 1)
    fixed = Objective(
        lambda z, y: torch.tensor([1.2]),
        extra=lambda z, x, y: torch.tensor([[0.25 * 0.8 + 0.25 * 0.6]]),
        weight=0.5,
    )
    assert fixed(torch.zeros(1, 1, 2), y, y).item() == pytest.approx(0.95)


def test_flwf2t_shares_must_leave_room():
    with pytest.raises(ef.EverfedError, match="must not exceed 1"):
        ef.methods.flwf2t(alpha=0.8, beta=0.4)


# memories -----------------------------------------------------------------------------------------
REHEARSALS = [
    build(**size)
    for build in (ef.methods.er, ef.methods.agem, ef.methods.derpp, ef.methods.nccl)
    for size in ({"memory": 9}, {"memory": 3, "per_task": True})
] + [ef.methods.cflag_code(memory=3)]


@pytest.mark.parametrize("method", [*REHEARSALS, ef.methods.nccl(0.01)], ids=lambda m: m.name)
def test_without_a_past_it_is_fedavg(method, digits):
    """A step of NCCL's own along the memory does not change one without a memory."""
    stream, local = ef.streams.static(digits, clients=4, rounds=3), Local(lr=0.05, epochs=2)
    own, plain = (
        ef.run(m, stream, ef.models.mlp(64, 16, 10), local=local, workers=1)
        for m in (method, ef.methods.fedavg(average=method.average))
    )
    torch.testing.assert_close(own.vector, plain.vector)


@pytest.mark.parametrize("method", REHEARSALS, ids=lambda m: m.name)
def test_memories_are_bounded_and_belong_to_clients(method):
    """Two of five clients a round, three tasks: everyone remembers samples of its own only, of all
    the tasks it has met, and never more than the bound."""
    tasks = [[(np.ones((6, 1)), np.zeros((6, 1)))] * 5] * 3
    game = Game(method, tasks, rounds=4, local=Local(lr=0.1, batch=4), sample=2)
    met: dict[int, set[int]] = {}
    for t in range(12):
        cohort, _ = game.rounds.draw(t, 2)
        game.play()
        for i in cohort:
            met.setdefault(i, set()).add(t // 4)
        for i, blocks in met.items():
            kept = game.fed.clients[i][0]["ids"].tolist()
            owner, task = game.stream.data.client[kept], game.stream.data.task[kept]
            assert len(set(kept)) == len(kept) <= 9
            assert set(owner) == {i}
            assert set(task) == blocks
    assert max(len(blocks) for blocks in met.values()) == 3
    assert set(game.fed.clients) == set(met)


#: and how many of a task's six samples are kept
CLOSING = [
    (ef.methods.refed(memory=12, steps=1), 6),
    (Method(ef.methods.Exemplars(12)), 6),
    (ef.methods.cflag(memory=4, lipschitz=2.0), 4),
    (ef.methods.cflag(memory=4, lipschitz=2.0, exchanges=1), 4),
]


@pytest.mark.parametrize(("method", "of_task"), CLOSING)
def test_memories_made_at_a_tasks_end_belong_to_clients(method, of_task):
    """The same where memories are made at the end of a task, by everyone."""
    tasks = [[(np.ones((6, 1)), np.arange(6.0)[:, None] + i) for i in range(5)]] * 3
    game = Game(method, tasks, rounds=2, local=Local(lr=0.1, batch=4), sample=2)
    for t in range(6):
        game.play()
        for i, state in game.fed.clients.items():
            kept = state[0]["ids"].tolist()
            assert len(set(kept)) == len(kept) <= 12
            assert set(game.stream.data.client[kept]) <= {i}
            assert set(game.stream.data.task[kept]) <= set(range((t + 1) // 2))
            assert len(kept) == min(12, of_task * ((t + 1) // 2)) or not t % 2


def test_a_ring_holds_the_newest_of_every_class():
    # a, b, c of one class in two slots: c has taken a's
    assert memory.ring(np.array([0, 0, 0]), 2).tolist() == [1, 2]
    assert memory.ring(np.array([0, 1, 0, 0, 1, 0]), 4).tolist() == [1, 3, 4, 5]
    assert memory.ring(np.array([0, 0, 0, 1]), 3).tolist() == [1, 2, 3]  # class 1 leaves its slot
    assert memory.ring(np.array([], dtype=int), 3).tolist() == []


def remembered(*centres: float):
    """A task whose samples are 1/2 (w - c)^2, as many for each client as in Q2."""
    counts = [len(a) for a, _ in Q2]
    return [(np.ones((n, 1)), np.full((n, 1), c)) for n, c in zip(counts, centres, strict=True)]


def after_memory(method, centres, **local) -> float:
    """The model after one round of Q2 from 0, with memories 1/2 (w - c)^2."""
    settings = Local(**{"lr": 0.1, "steps": 2, "batch": 8} | local)
    game = Game(method, [remembered(*centres), Q2], rounds=1, local=settings)
    game.play()
    game.fed.w = torch.zeros(1, dtype=torch.float64)
    return float(game.play()[0])


# ER -----------------------------------------------------------------------------------------------
def test_er_is_the_mean_of_both_gradients():
    # A: 1/2 ((w - 1) + (w + 1)) = w stays at 0. B: 1/2 (2 (w - 4) + (w - 3)) = 1.5 w - 5.5:
    # 0 -> .55 -> .55 + .1 (5.5 - .825) = 1.0175
    got = after_memory(ef.methods.er(average="uniform"), (-1, 3))
    assert got == pytest.approx(1.0175 / 2)


def test_er_counts_a_small_memory_as_half():
    """One remembered sample beside a batch of three: not a quarter of the step."""
    got = after_memory(ef.methods.er(memory=1, average="uniform"), (-1, 3))
    assert got == pytest.approx(1.0175 / 2)


def test_a_ring_for_each_task_takes_nothing_from_the_others(digits):
    """As many samples of each domain, and those of earlier ones stay who they are."""
    stream = ef.streams.domains(digits, clients=2, alpha=None, rounds=1).seeded(0)
    fed, rounds = federation(ef.methods.er(memory=20, per_task=True), stream)
    kept: list[set[int]] = []
    for task in range(2):
        rounds.play(fed)
        rounds.end_task(fed)
        state = fed.clients[0][0]
        assert np.bincount(state["block"]).tolist() == [20] * (task + 1)
        kept.append({*state["ids"].tolist()})
        assert kept[0] <= kept[-1]
    assert np.bincount(digits.y[sorted(kept[-1])]).tolist() == [4] * 10


def test_er_does_not_go_with_a_table_of_gradients():
    with pytest.raises(ef.EverfedError, match="iag = false"):
        ef.methods.er() + ef.methods.fedtrack()


# A-GEM --------------------------------------------------------------------------------------------
def test_agem_projection():
    f = torch.tensor([2.0, 0.0])
    # against f: <g, f> = -2, so g + 2/4 f loses just the first coordinate
    assert project(torch.tensor([[-1.0, 3.0]]), f).tolist() == [[0.0, 3.0]]
    assert project(torch.tensor([[1.0, 3.0]]), f).tolist() == [[1.0, 3.0]]
    assert project(torch.tensor([[1.0, 3.0]]), 0 * f).tolist() == [[1.0, 3.0]]


def test_agem_round():
    """A is pulled to 1 and its memory to -1: it stays. B is pulled to 4 and its memory to 3 while
    it is below: as in FedAvg, 0 -> .8 -> 1.44."""
    got = after_memory(ef.methods.agem(average="uniform"), (-1, 3))
    assert got == pytest.approx(1.44 / 2)


# C-FLAG's released code ---------------------------------------------------------------------------
def test_cflag_code_round():
    """Two epochs of one step. A stays, as in A-GEM, but for the memory's step, 0 -> -.1. B goes 0 ->
    .8 and then at 1/sqrt(2) of the rate to .8 + .64 / sqrt(2); its memory's step is 0 -> .3."""
    got = after_memory(ef.methods.cflag_code(), (-1, 3), steps=None, epochs=2)
    assert got == pytest.approx((-0.1 + 0.8 + 0.64 / 2**0.5 + 0.3) / 2)


def test_cflag_code_trains_on_in_a_tasks_later_rounds():
    """Its optimisers hold on to the first round's models, so that steps on current data are lost
    from then on; and its rate shrinks from round to round. Here a round is a round: one client that
    agrees with its memory goes on as if it had none, but for the memory's own step."""
    tasks = [[(np.ones((1, 1)), np.full((1, 1), c))] for c in (4.0, 4.0)]
    game = Game(ef.methods.cflag_code(), tasks, rounds=3, local=Local(lr=0.1, epochs=2, batch=8))
    for _ in range(3):
        game.play()
    for _ in range(3):
        left = 4 - float(game.fed.w)
        # two steps of the data, the second at 1/sqrt(2) of the rate, and one of the memory
        gone = 0.1 + 0.9 * 0.1 / 2**0.5 + 0.1
        assert 4 - float(game.play()[0]) == pytest.approx(left * (1 - gone))


# DER++ --------------------------------------------------------------------------------------------
def test_derpp_round():
    """Outputs of a sample are (a, w - c), so their mean squared distance is 1/2 (w - m)^2, m the
    client's model when it stored them: A went 0 -> -.1 -> -.19, B 0 -> .3 -> .57. Then
    A: w - 1 + .5 (w + .19) + .25 (w + 1) = 1.75 w - .655: .0655, .1195375
    B: 2 (w - 4) + .5 (w - .57) + .25 (w - 3) = 2.75 w - 9.035: .9035, 1.5585375"""
    got = after_memory(ef.methods.derpp(alpha=0.5, beta=0.25, average="uniform"), (-1, 3))
    assert got == pytest.approx((0.1195375 + 1.5585375) / 2)


def test_derpp_keeps_the_outputs_of_then():
    """Rows belong to samples: of the current data set the newest local model's, of earlier ones
    those of the last round in which they were current, through drops from the ring."""
    tasks = [[(np.ones((6, 1)), np.full((6, 1), 1.0 + t))] * 2 for t in range(3)]
    local = Local(lr=0.1, steps=2, batch=8)
    game = Game(ef.methods.derpp(memory=7), tasks, rounds=2, local=local)
    stored: dict[int, float] = {}  # of client 0: task -> its model after its last round
    for t in range(6):
        w = float(game.fed.w)
        game.play()
        state = game.fed.clients[0][0]
        c = game.stream.data.x[state["ids"], 1, 0].double()
        models = state["outputs"][:, 1, 0] + c
        fresh = state["block"] == t // 2
        (stored[t // 2],) = set(models[fresh].tolist())
        assert stored[t // 2] != pytest.approx(w)
        for k in range(t // 2 + 1):
            own = models[state["block"] == k].tolist()
            assert own == pytest.approx([stored[k]] * len(own))
            assert len(own) >= 2


# NCCL ---------------------------------------------------------------------------------------------
def test_nccl_rates():
    """f = (1, 0), L = 5, alpha = .1: g = (2, 1) agrees, beta = .5 * 2 / (5 * 5) = .04; g = (-1, 2)
    does not, alpha = .1 (1 + 1)."""
    f, one = torch.tensor([[1.0, 0.0]]), torch.ones(1, 1)
    for g, expected in (((2.0, 1.0), (0.1, 0.04)), ((-1.0, 2.0), (0.2, 0.1))):
        a, b = Rates(5.0, "average", 1.0)(f, torch.tensor([g]), 0.1, 0.1, one, one)
        assert (a.item(), b.item()) == pytest.approx(expected)


@pytest.mark.parametrize(("clip", "b"), [(1.0, 1.1), (float("inf"), 1.5)])
def test_nccl_round(clip, b):
    """One step from 0 with L = 2. A: f = 1, g = -1, so alpha = .2 and it goes to -.2 + .1 = -.1.
    B: f = -3, g = -8, beta = .8 * 24 / (2 * 64) = .15, at most clip * .1: .3 + 8 beta."""
    method = ef.methods.nccl(lipschitz=2.0, clip=clip, average="uniform")
    assert after_memory(method, (-1, 3), steps=1) == pytest.approx((b - 0.1) / 2)


def test_nccl_needs_room_for_its_rates(digits):
    stream = ef.streams.static(digits, clients=2, rounds=1)
    with pytest.raises(ef.EverfedError, match="NCCL's adaptive rates need alpha < 1/lipschitz"):
        ef.run(ef.methods.nccl(), stream, ef.models.mlp(64, 10), local=Local(lr=0.5))


# iCaRL --------------------------------------------------------------------------------------------
def test_icarl_keeps_the_first_of_each_herding_order(digits):
    """20 exemplars: 10 of each of 2 classes, then 5 of 4, 3 of 6, and 2 of 8 and of 10."""
    method = ef.methods.icarl(memory=20)
    stream = ef.streams.classes(digits, tasks=5, clients=1, rounds=1, seed=0)
    fed, rounds = federation(method, stream)
    before: dict[int, list[int]] = {}
    for k, each in enumerate((10, 5, 3, 2, 2)):
        rounds.play(fed)
        rounds.end_task(fed)
        ids = fed.clients[0][0]["ids"].numpy()
        kept = {c: ids[digits.y[ids].numpy() == c].tolist() for c in range(10)}
        kept = {c: own for c, own in kept.items() if own}
        assert set(kept) == {c for own in stream.task_classes[: k + 1] for c in own}
        assert {len(own) for own in kept.values()} == {each}
        assert all(own[:each] == kept[c] for c, own in before.items())
        before = kept


def test_icarl_follows_its_formula():
    """One client that keeps all: new samples and exemplars in one set, all seen classes compete,
    and the model of the first task's end teaches the old ones (from the second step on: at first
    the model is its own teacher)."""
    data = table([range(4)], clients=1, each=20)
    stream = ef.streams.classes(data, tasks=2, clients=1, rounds=2, seed=0)
    old, new = (list(own) for own in stream.task_classes)
    w, teacher = first(), None
    for t in range(4):
        ids = np.concatenate([stream.samples(0, k) for k in ((0, 2) if t > 1 else (0,))])
        x, y = data.x[ids].double(), data.y[ids]
        seen = torch.tensor(old + new if t > 1 else old)
        teacher = w if t == 2 else teacher

        def loss(v, x=x, y=y, seen=seen, teacher=teacher):
            z = logits(v, x)
            ce = (torch.logsumexp(z[:, seen], 1) - z[torch.arange(len(y)), y]).mean()
            kd = 0 if teacher is None else soft(z[:, old], logits(teacher, x)[:, old])
            return ce + 0.7 * kd

        w = w - LR * slope(loss, w)
    options = {"local": FULL, "workers": 1}
    got = ef.run(ef.methods.icarl(lam=0.7), stream, linear(), **options).vector
    torch.testing.assert_close(got, w, rtol=1e-6, atol=1e-7)


def test_icarl_share_of_a_class():
    """2000 exemplars of 40 classes are 50 of each; with 60 classes the first 33 of each stay."""
    order = np.repeat(np.arange(40), 50)
    kept = memory.first(order, 2000 // 60)
    assert np.bincount(order[kept]).tolist() == [33] * 40
    assert kept[33:36].tolist() == [50, 51, 52]


def test_nearest_mean_needs_no_head():
    """A model that has hardly learnt tells digits apart by the means of its features only."""
    stream = ef.streams.classes(ef.data.digits(["plain"]), tasks=5, clients=3, rounds=2, seed=0)
    crawl = Local(lr=1e-6, batch=64)
    acc = {}
    for predict in ("head", "means"):
        method = ef.methods.icarl(predict=predict)
        acc[predict] = ef.run(method, stream, ef.models.mlp(64, 64, 10), local=crawl).acc
    assert acc["head"] < 0.3
    assert acc["means"] > 0.7


def test_nearest_mean_by_hand():
    """Sums of two clients; directions count, lengths do not; a class nobody has seen is not chosen,
    and one that is not seen again keeps its mean."""
    one = class_sums(torch.tensor([[2.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 0]), 3)
    two = class_sums(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), 3)
    both = {key: one[key] + two[key] for key in one}
    s = renewed({}, **both)
    assert s["means"].tolist() == [[3, 0], [0, 1], [0, 0]]
    scores = nearest(torch.tensor([[9.0, 8.0], [0.1, 0.2], [-1.0, -1.0]]), **s)
    assert scores.argmax(1).tolist() == [0, 1, 0]
    assert scores[:, 2].isneginf().all()
    again = renewed(s, **two)
    assert again["means"].tolist() == [[3, 0], [0, 1], [0, 0]]
    assert again["seen"].tolist() == [1, 1, 0]


# FedProto -----------------------------------------------------------------------------------------
def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


@pytest.mark.parametrize("grouping", ["single", "auto"])
def test_fedproto_follows_its_formula(grouping):
    """Means of the clients' own features, weighted by samples, pull from the second round on; class
    0, which nobody holds in the second task, and class 3, which is new there, as they should."""
    data, lam = table(((0, 1, 2), (1, 2, 3))), 0.8
    w = torch.cat([p.detach().reshape(-1) for p in deep().parameters()])
    means, expected = torch.full((4, 5), torch.nan, dtype=w.dtype), []

    def features(v, x):
        return torch.tanh(x @ v[:15].view(5, 3).T + v[15:20])

    for t in range(4):
        locals_, sums = [], {}
        for i in range(2):
            x, y = held(data, t // 2, i)

            def loss(v, x=x, y=y, means=means):
                f = features(v, x)
                pull = (f - means[y]).square().mean(1).nan_to_num(0).mean()
                return F.cross_entropy(f @ v[20:40].view(4, 5).T + v[40:], y) + lam * pull

            locals_.append(w - LR * slope(loss, w))
            for f, label in zip(features(locals_[-1], x), y.tolist(), strict=True):
                sums.setdefault(label, []).append(f)
        means = means.clone()
        for label, own in sums.items():
            means[label] = torch.stack(own).mean(0)
        w = sum(locals_) / 2
        expected.append(w)
    method = ef.methods.fedproto(lam, average="uniform")
    got = vectors(method, data, 2, model=deep, grouping=grouping)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_fedproto_by_hand():
    """Features (3, 4), the class's mean at 0: lam (9 + 16) / 2, with the slope lam (3, 4)."""
    part = ef.methods.Prototypes(lam=2.0)
    context = SimpleNamespace(down={"means": torch.zeros(2, 2), "seen": torch.tensor([1.0, 0.0])})
    f = torch.tensor([[[3.0, 4.0], [3.0, 4.0]]], requires_grad=True)
    loss = part.feature_loss(f, torch.tensor([[0, 1]]), context)
    assert loss.tolist() == [[25.0, 0.0]]
    loss.sum().backward()
    assert f.grad.tolist() == [[[6.0, 8.0], [0.0, 0.0]]]


def test_features_of_convolutions_get_their_slope():
    """A convolution as the last layer, groups of clients: the same as by autograd."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 4), nn.Flatten())
    x, y = torch.rand(2, 5, 1, 6, 6), torch.randint(0, 3, (2, 5))
    objective = Objective(features=lambda f, y: (f - 0.1).square().sum(-1) * (y + 1))
    scale = torch.full((2, 5), 0.2)
    device = torch.device("cpu")
    written = choose(module, x[0, 0], device, "float32", "batched")
    w = torch.stack([written.weights(), written.weights() * 1.1])
    g, loss = written.grad(w, x, y, scale, objective)
    g, loss = g.clone(), loss.clone()
    single = choose(module, x[0, 0], device, "float32", "single")
    for i in range(2):
        own = single.grad(w[i], x[i : i + 1], y[i : i + 1], scale[i : i + 1], objective)
        torch.testing.assert_close(g[i], own[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(loss[i], own[1][0])


# ReFed and SR-FDIL --------------------------------------------------------------------------------
def points(*samples: tuple[float, float]):
    """One client with samples 1/2 a (w - c)^2."""
    a, c = np.array(samples).T
    return [(a[:, None], c[:, None])]


def cached(method, task, local) -> tuple[list[float], torch.Tensor]:
    """The minimisers of the cached samples after one round of a task, and the personal model."""
    game = Game(method, [task, task], rounds=1, local=local)
    game.play()
    state = game.fed.clients[0][0]
    return game.stream.data.x[state["ids"], 1, 0].tolist(), state["v"]


def test_refed_importance():
    assert pull_strength(0.5) == 0.5
    assert pull_strength(1.0) == 0
    norms = torch.tensor([[2.0, 0.0], [1.0, 4.0], [1.0, 0.0]])
    assert importance(norms).tolist() == pytest.approx([2 + 1 / 2 + 1 / 3, 2.0])


def test_refed_personal_model_and_cache():
    """One step to w = .15, then v: 0 - .1 (-1.5 - .5 * .15) = .1575, and once more .1575 - .1
    (.1575 - 1.5 + .5 (.1575 - .15)) = .291375; the sample at 3 has the longer gradients."""
    method = ef.methods.refed(memory=1, steps=2)
    task = points((1, 0), (1, 3))
    kept, v = cached(method, task, Local(lr=0.1, steps=1, batch=8))
    assert v.item() == pytest.approx(0.291375)
    assert kept == [3.0]


@pytest.mark.parametrize(("mix", "expected"), [(1.0, {5.0, 1.0}), (0.0, {5.0, 0.0})])
def test_sr_fdil_mixes_the_clients_and_the_global_view(mix, expected):
    """v stays near 0, where gradients are 0, 1 and 1.5 long; w has gone to 1.07, where they are
    1.07, .07 and 1.18. mix = 1 is ReFed's choice."""
    task = points((1, 0), (1, 1), (0.3, 5))
    method = ef.methods.sr_fdil(memory=2, mix=mix, lam=1.0, steps=1)
    kept, _ = cached(method, task, Local(lr=0.1, steps=50, batch=8))
    assert set(kept) == expected


def test_refed_trains_on_the_cache_and_its_data():
    """One step from 0 along the mean of the current sample 1 and the cached 3: .1 * 2."""
    game = Game(
        ef.methods.refed(), [points((1, 3)), points((1, 1))], rounds=1,
        local=Local(lr=0.1, steps=1, batch=8),
    )  # fmt: skip
    game.play()
    game.fed.w = torch.zeros(1, dtype=torch.float64)
    assert game.play()[0] == pytest.approx(0.2)


# odd clients --------------------------------------------------------------------------------------
class Odd(ef.Stream):
    """Two tasks. Client 0 has nothing at first, 1 a single sample, 2 a single class, 3 plenty and
    then nothing."""

    task_rounds = (2, 2)

    def __init__(self, data):
        self.data, self.clients, self.rounds = data, 4, 4

    def samples(self, client, round_):
        own = self.data.train[self.data.task[self.data.train] == self.task(round_)]
        one_class = own[self.data.y[own].numpy() == 3]
        first, then = own[:0], own[50:150]
        if self.task(round_):
            first, then = then, first
        return [first, own[:1], one_class[:40], then][client]


class Normed(nn.Module):
    """BatchNorm and dropout: measurements of other models must leave the trained one alone."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(64, 12), nn.BatchNorm1d(12)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(12, 10)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.norm(self.a(x.flatten(1))))))


TAUGHT = ["lwf", "flwf2t", "icarl", "fedproto"]
NEW = [
    "flwf2t", "er", "agem", "derpp", "nccl", "icarl", "fedproto", "refed", "sr_fdil", "cflag_code",
]  # fmt: skip


@pytest.mark.parametrize("name", NEW)
def test_odd_clients_and_normed_models(digits, name):
    method = ef.methods.METHODS[name].build()
    result = ef.run(method, Odd(digits), Normed, local=Local(lr=0.02), workers=1)
    assert result.summary.lost_rounds == 0
    assert torch.isfinite(result.vector).all()
    assert all(torch.isfinite(buffer).all() for buffer in result.model.buffers())
    assert not [text for text in result.warnings if "dropped" in text]


@pytest.mark.parametrize("name", ["lwf", *NEW])
def test_targets_that_are_not_classes(name):
    """Regression: what has a meaning works; distillation and prototypes say what they need."""
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 4)).astype(np.float32)
    task = np.repeat([0, 1], 60)
    data = ef.data.arrays(x, x[:, 0] * (1.0 - 2 * task), task=task)
    stream = ef.streams.domains(data, clients=3, alpha=None, rounds=2)
    local = Local(lr=0.01)

    def go():
        return ef.run(
            ef.methods.METHODS[name].build(), stream, ef.models.mlp(4, 8, 1), local=local,
            loss=lambda z, y: (z[:, 0] - y).square(), workers=1,
        )  # fmt: skip

    if name in TAUGHT:
        with pytest.raises(ef.EverfedError, match="needs one class a sample"):
            go()
    else:
        assert np.isfinite(go().records[-2]["value"])
