"""Every method against every property. A new method is one row of conformance.py."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import everfed as ef
import reference
from conformance import ROWS
from everfed.local import Local, batches
from everfed.method import Method
from quadratics import Game

NAMES = list(ROWS)
WITH_REFERENCE = [name for name in NAMES if ROWS[name].reference]
WITH_OFF = [name for name in NAMES if ROWS[name].off]


def test_every_method_has_a_row():
    assert {row.build.__name__ for row in ROWS.values()} == set(ef.methods.METHODS)


# the maths ----------------------------------------------------------------------------------------
def problem(seed: int, tasks: int = 3, clients: int = 4, d: int = 3):
    """Random tasks of clients with unequal numbers of samples."""
    random = np.random.default_rng(seed)

    def client(n: int):
        a = random.uniform(0.5, 2.0, (n, d)).astype(np.float32)
        return a, random.normal(0, 2, (n, d)).astype(np.float32)

    return [[client(1 + (i + t) % clients) for i in range(clients)] for t in range(tasks)]


def as_reference(tasks):
    return [[reference.Client(a.astype(float), c.astype(float)) for a, c in t] for t in tasks]


def cohorts_of(game: Game, tasks: int, rounds: int):
    flat = [game.rounds.draw(t, game.rounds.sample)[0] for t in range(tasks * rounds)]
    return [flat[k : k + rounds] for k in range(0, len(flat), rounds)]


@pytest.mark.parametrize("average", ["samples", "uniform"])
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_equals_the_numpy_reference(name, average):
    """Three tasks, unequal clients, partial participation, every round's model."""
    tasks, rounds = problem(1), 4
    row = ROWS[name]
    local = Local(lr=0.1, steps=3, batch=64)
    game = Game(row.method(average=average), tasks, rounds=rounds, local=local, sample=3)
    settings = {"steps": 3, "lr": 0.1, "average": average} | row.given
    if "beta" in settings and name.startswith("cfl_reg"):
        settings["beta"] = np.full(3, settings["beta"])
    cohorts = cohorts_of(game, 3, rounds)
    expected = row.reference(as_reference(tasks), np.zeros(3), cohorts, **settings)
    np.testing.assert_allclose(game.play_all(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_equals_the_reference(rho):
    """Clients of 1 to 4 copies of a sample at batch 1 take 1 to 4 full-batch steps."""
    tasks = [
        [(np.repeat(a[:1], len(a), 0), np.repeat(c[:1], len(c), 0)) for a, c in task]
        for task in problem(2)
    ]
    local = Local(lr=0.1, epochs=1, batch=1, momentum=rho)
    method = ef.methods.fednova(mu=0.0 if rho else 0.5)
    game = Game(method, tasks[:1], rounds=4, local=local, sample=3)
    taus = [len(a) for a, _ in tasks[0]]
    settings = {"taus": taus, "steps": 0, "lr": 0.1, "rho": rho, "mu": 0.0 if rho else 0.5}
    cohorts = cohorts_of(game, 1, 4)
    expected = reference.fednova(as_reference(tasks[:1]), np.zeros(3), cohorts, **settings)
    np.testing.assert_allclose(game.play_all(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("adaptive", ["off", "average"])
@pytest.mark.parametrize(("iag", "batch"), [(True, 1), ("samples", 64)])
def test_iag_equals_the_reference(adaptive, iag, batch):
    """One component a sample, drawn by the engine; the reference is told the same draws."""
    tasks, rounds = problem(3, tasks=2), 3
    local = Local(lr=0.1, steps=5, batch=batch)
    settings = {"iag": iag, "alpha": 0.1, "lipschitz": 2.0, "clip": 10.0, "memory": 99, "draw": 999}
    method = ef.methods.cflag(adaptive=adaptive, printed=False, **settings)
    game = Game(method, tasks, rounds=rounds, local=local)

    def picks(t: int, i: int) -> list[int]:
        ids = game.stream.samples(i, t)
        plan = batches(ids, local, 0, t, i, components=iag)
        return [int(np.flatnonzero(ids == step[0])[0]) for step in plan.steps[1:]]

    drawn = [
        [[picks(k * rounds + r, i) for i in range(4)] for r in range(rounds)] for k in range(2)
    ]
    cohorts = cohorts_of(game, 2, rounds)
    expected = reference.cflag(
        as_reference(tasks), np.zeros(3), cohorts, steps=5, lr=0.1, alpha=0.1, L=2.0, clip=10.0,
        adaptive=adaptive, picks=drawn,
    )  # fmt: skip
    np.testing.assert_allclose(game.play_all(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", WITH_OFF)
def test_reduces_to_fedavg(name, digits):
    """A coefficient at 0 leaves FedAvg, on a real task sequence."""
    off = ROWS[name].off
    if "layers" in off:
        off = {"layers": {"1": 0.0}}
    off_method = ROWS[name].method(average="samples", **off)
    assert distance(run(off_method, digits), run(ef.methods.fedavg(), digits)) < 1e-6


def test_fedeve_with_identical_clients_is_fedavg_at_first():
    same = [(np.ones((2, 1)), np.full((2, 1), 3.0))] * 3
    local = Local(lr=0.1, steps=2, batch=8)
    eve = Game(ef.methods.fedeve(), [same], rounds=1, local=local).play()
    assert eve == pytest.approx(Game(Method(), [same], rounds=1, local=local).play())


# engines ------------------------------------------------------------------------------------------
def small(name):
    """The row's method with layer names of the digits' model."""
    row = ROWS[name]
    more = {"layers": {"3": 0.3, "1": 0.1}} if "" in row.settings.get("layers", ()) else {}
    return row.method(**more)


def run(method, digits, rounds=3, **options):
    stream = ef.streams.domains(digits, clients=5, alpha=0.5, rounds=rounds)
    local = options.pop("local", ef.Local(lr=0.05, epochs=1, batch=32))
    model, dtype = ef.models.mlp(64, 16, 10), options.pop("dtype", torch.float32)
    options = {"workers": 1, "sample": 3} | options
    return ef.run(method, stream, lambda: model().to(dtype), local=local, **options)


def distance(a, b) -> float:
    """Relative distance of two runs' models."""
    return float((a.vector - b.vector).norm() / b.vector.norm())


@pytest.mark.parametrize("name", NAMES)
def test_engines_agree(name, digits):
    """Batched or one by one, one worker or two: the same model and the same traffic."""
    # models that play against generators amplify rounding, on some processors a thousandfold
    dtype = torch.float64 if name == "fedcil" else torch.float32
    alone = run(small(name), digits, grouping="single", dtype=dtype)
    batched = run(small(name), digits, grouping="auto", dtype=dtype)
    both = run(small(name), digits, grouping="auto", workers=2, dtype=dtype)
    assert distance(batched, alone) < 1e-5
    assert distance(both, alone) < 1e-5
    for other in (batched, both):
        assert other.summary.mb_sent == pytest.approx(alone.summary.mb_sent)
        assert other.acc == pytest.approx(alone.acc, abs=0.005)


@pytest.mark.parametrize("name", ["er", "agem", "derpp", "nccl", "cflag_code"])
def test_a_group_in_which_only_some_have_a_memory(name, digits):
    """Client 1 has met another task; clients 0 and 4, trained beside it, have not."""
    alone, batched = (run(small(name), digits, rounds=1, grouping=g) for g in ("single", "auto"))
    first, second, *_ = (r["value"]["clients"] for r in alone.records if r["metric"] == "labels")
    assert [client in first for client in second] == [False, True, False]
    assert distance(batched, alone) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_trains_in_every_round_of_every_task(name, digits):
    """An optimiser bound to a stale model, or a state that is lost, stops the model."""
    seen = []
    stream = ef.streams.domains(digits, clients=5, alpha=0.5, rounds=3)
    for rounds in (1, 2, 3):
        part = ef.streams.domains(digits, clients=5, alpha=0.5, rounds=rounds)
        result = ef.run(small(name), part, ef.models.mlp(64, 16, 10), workers=1, sample=3)
        seen.append(result.vector)
    assert stream.rounds == 6
    assert all(float((a - b).norm()) > 1e-4 for a, b in pairwise(seen))
    # clients under privacy keep their training loss to themselves
    metric = "loss" if "privacy" in name else "train_loss"
    losses = [r["value"] for r in result.records if r["metric"] == metric and r["task"] == 0]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_resumes_bit_identically(name, digits, tmp_path):
    """Crash after every possible round, resume, and compare all metrics and the model."""

    class Crash(Exception):
        pass

    def crash_at(k):
        def tell(progress):
            if progress.round == k:
                raise Crash

        return tell

    whole = run(small(name), digits)
    for k in range(1, 6):
        folder = tmp_path / str(k)
        options = {"folder": folder, "checkpoint_seconds": 0}
        with pytest.raises(Crash):
            run(small(name), digits, on_round=crash_at(k), **options)
        again = run(small(name), digits, resume=True, **options)
        assert torch.equal(again.vector, whole.vector)
        assert timeless(again.records) == timeless(whole.records)


def timeless(records):
    return [r for r in records if r["metric"] != "seconds"]


# composition --------------------------------------------------------------------------------------
CFL = [
    ef.methods.cfl_coreset(20),
    ef.methods.cfl_regularization(),
    ef.methods.cfl_generative(count=20, steps=3),
]
PAIRS = [
    (ef.methods.fedprox(0.1), ef.methods.special(0.25)),
    (ef.methods.fedprox(0.1), ef.methods.fedeve(gain="layer")),
    (ef.methods.scaffold(), ef.methods.fedeve()),
    (ef.methods.scaffold(), ef.methods.special(0.25)),
    (ef.methods.ewc(1.0), ef.methods.fedadam()),
    (ef.methods.fedcurv(0.1), ef.methods.fedavgm()),
    (ef.methods.lwf(), ef.methods.fednova()),
    (ef.methods.cfl_coreset(20), ef.methods.fedtrack()),
    (ef.methods.special_c(0.2), ef.methods.fedtrack(iag=False)),
    # approximations of the past with what acts on clients and on the server
    *(
        (past, other)
        for past in CFL
        for other in (ef.methods.fedprox(0.1), ef.methods.fedavgm(), ef.methods.fedeve())
    ),
    (ef.methods.cfl_coreset(20), ef.methods.cfl_regularization()),
    (ef.methods.er(20), ef.methods.scaffold()),
    (ef.methods.derpp(memory=20), ef.methods.special(0.25)),
    (ef.methods.flwf2t(), ef.methods.agem(20)),
    (ef.methods.mfcl(size=8, iterations=2, width=2), ef.methods.special(0.25)),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[f"{a.name}+{b.name}" for a, b in PAIRS])
def test_methods_compose(a, b, digits):
    """Both parts act: the sum differs from each alone, and engines agree on it."""
    together = a + b
    result = run(together, digits)
    assert distance(result, run(together, digits, grouping="single", workers=2)) < 1e-5
    for single in (a, b):
        alone = Method(*single.parts, average=together.average)
        assert distance(result, run(alone, digits)) > 1e-4


def test_prox_under_the_anchor_is_both_formulas():
    """FedProx + SPECIAL on a quadratic, by hand: one step of each kind."""
    one = [[(np.ones((1, 1)), np.zeros((1, 1)))], [(np.ones((1, 1)), np.full((1, 1), 4.0))]]
    method = ef.methods.fedprox(1.0) + ef.methods.special(0.25)
    game = Game(method, one, rounds=1, local=Local(lr=0.1, steps=2, batch=1))
    game.play()  # stays at 0, which becomes the anchor
    # steps: 0 -> .4 -> .4 + .1 (3.6 - .4) = .72; halved by gamma_G = 1/2; pulled: .36 / 1.25
    assert game.play()[0] == pytest.approx(0.36 / 1.25)


# federations --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_one_client_of_one_batch_is_gradient_descent(name):
    """With a single client there is no client drift to correct: first task, first step."""
    row = ROWS[name]
    if row.build.__name__ in ("fedadagrad", "fedadam", "fedyogi", "mimelite"):
        pytest.skip("rescales the first step by design")
    tasks = [[(np.full((2, 1), 0.5), np.full((2, 1), 3.0))]]
    if row.build.__name__ == "krum":
        pytest.skip("needs neighbours")
    if row.build.__name__ in ("target", "mfcl", "fedcil"):
        pytest.skip("needs classes")
    plain = {
        "fedavg": {"server_lr": 1.0},
        "fedavgm": {"server_lr": 1.0, "beta": 0.0},
        "privacy": {"noise": 0.0},
        "norm_bound": {"clip": 1.0},
    }
    more = plain.get(row.build.__name__, {})
    game = Game(row.method(**more), tasks, rounds=1, local=Local(lr=0.1, steps=1, batch=8))
    assert game.play()[0] == pytest.approx(0.1 * 0.5 * 3.0)


def test_state_belongs_to_clients_not_to_slots():
    """Clients 0 and 3 of five take part: their states are theirs, the others have none."""
    tasks = problem(5, tasks=1, clients=5)
    local = Local(lr=0.1, steps=2, batch=64)
    game = Game(ef.methods.scaffold(), tasks, rounds=6, local=local, sample=2)
    met: dict[int, float] = {}
    for t in range(6):
        before = {i: s[0]["c"].clone() for i, s in game.fed.clients.items()}
        cohort, _ = game.rounds.draw(t, 2)
        game.play()
        assert set(game.fed.clients) == set(met) | set(cohort)
        for i, state in game.fed.clients.items():
            changed = i not in before or not torch.equal(before[i], state[0]["c"])
            assert changed == (i in cohort)
        met |= dict.fromkeys(cohort, 0.0)


def test_core_sets_hold_own_samples_only(digits):
    stream = ef.streams.domains(digits, clients=4, alpha=0.5, rounds=2).seeded(0)
    from everfed.client import ClientProgram
    from everfed.compute import choose
    from everfed.engines.local import LocalEngine
    from everfed.round import Federation, Rounds

    method = ef.methods.cfl_coreset(size=7)
    compute = choose(
        ef.models.mlp(64, 8, 10)(), digits.x[0], torch.device("cpu"), "float32", "auto"
    )
    program = ClientProgram(method, compute, stream, digits, Local(), 0)
    fed = Federation(compute.weights(), compute.read_buffers(), [{}])
    rounds = Rounds(method, stream, Local(), LocalEngine(program, 1), None, 0)
    for _ in range(4):
        rounds.play(fed)
    for i in range(4):
        kept = set(fed.clients[i][0]["ids"].tolist())
        own = {k for t in (0, 2) for k in stream.samples(i, t).tolist()}
        assert kept <= own
        assert len(kept) == sum(min(7, len(stream.samples(i, t))) for t in (0, 2))
