"""C-FLAG beyond the conformance suite: what it records, Adam, one exchange, and budgets of memories."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import everfed as ef
from everfed import memory, methods
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.method import Method
from everfed.methods.cflag import _closing, forgetting_of_step
from everfed.methods.er import Replay
from quadratics import Q2, Game, q2
from test_conformance import problem


def with_memory(method: Method, centres, local: Local) -> Game:
    """Two quadratics, before a round from 0 with memories 1/2 (w - m)^2."""
    past = [
        (np.ones((n, 1)), np.full((n, 1), float(m))) for n, m in zip((1, 3), centres, strict=True)
    ]
    game = Game(method, [past, Q2], rounds=1, local=local)
    game.play()
    game.fed.w = torch.zeros(1, dtype=torch.float64)
    return game


# what is recorded ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("beta", "gamma"), [(0.1, 0.0375), (0.02, -0.0025)])
def test_forgetting_of_a_step(beta, gamma):
    """Clients a = (2, 1) and (-1, 2) with equal weights, grad f = (1, 0), L = 5, alpha = 0.1."""
    f, alpha = torch.tensor([1.0, 0.0]).double(), torch.tensor(0.1).double()
    dx = alpha * f + beta * torch.tensor([0.5, 1.5]).double()
    found = forgetting_of_step(dx, f @ dx, alpha, f @ f, 5.0)
    assert found.item() == pytest.approx(gamma)


def test_a_round_records_its_forgetting_term():
    """METHODS' scalar round: a = (-1.55, -15.1), grad f = -1, alpha = beta = 0.1, L = 2. The step
    along current data is v = -0.8325, so Gamma = v^2 - 0.8 * 0.8325; Lambda is the mean of -a."""
    method = methods.cflag(alpha=0.1, lipschitz=2.0, adaptive="off", iag=False, average="uniform")
    game = with_memory(method, (-1, 3), Local(lr=0.1, steps=2, batch=8))
    values = game.rounds.play(game.fed).values
    assert game.fed.w.item() == pytest.approx(0.9325)
    assert values["gamma"] == pytest.approx(0.8325**2 - 0.8 * 0.8325, abs=1e-6)
    assert values["lambda"] == pytest.approx((1.55 + 15.1) / 2)
    assert (values["transference"], values["interference"]) == (2, 0)
    # sum p (L/2 p beta^2 a^2 - beta (1 - L alpha) Lambda_i), the same where rates are constant
    parts = [0.5 * 0.01 * a**2 - 0.1 * 0.8 * a for a in (1.55, 15.1)]
    assert values["gamma_rates"] == pytest.approx(np.mean(parts))
    assert values["gamma_constant"] == pytest.approx(np.mean(parts))


@pytest.mark.parametrize("adaptive", ["average", "worst"])
def test_adapting_never_raises_the_clients_parts(digits, adaptive):
    stream = ef.streams.domains(digits, clients=4, alpha=0.3, rounds=6)
    method = methods.cflag(lipschitz=2.0, adaptive=adaptive)
    result = ef.run(method, stream, ef.models.mlp(64, 16, 10), workers=1)
    by = {
        name: [r["value"] for r in result.records if r["metric"] == name]
        for name in ("gamma_rates", "gamma_constant")
    }
    assert len(by["gamma_rates"]) == 6
    assert all(a <= b + 1e-6 for a, b in zip(*by.values(), strict=True))


# Adam ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("adaptive", "centres", "expected"),
    [
        # Adam's first step is lr along the sign: both clients reach 0.1; grad f = -1
        ("off", (-1, 3), 0.1 + 0.1),
        # grad f = 1, a = -1: interference, alpha = 0.2, and what is left is -alpha grad f
        ("average", (-3, 1), 0.1 - 0.2),
    ],
)
def test_travel_of_adam_counts_whole(adaptive, centres, expected):
    method = methods.cflag(
        alpha=0.1, lipschitz=2.0, adaptive=adaptive, iag=False, average="uniform"
    )
    local = Local(lr=0.1, steps=1, batch=8, optimizer="adam")
    assert with_memory(method, centres, local).play()[0] == pytest.approx(expected, abs=1e-6)


# one exchange -------------------------------------------------------------------------------------
def test_one_exchange_without_a_memory_is_scaffold():
    """The mean of a client's gradients is SCAFFOLD's control variate (option 2)."""
    once = methods.cflag(exchanges=1, iag=False, average="uniform", lipschitz=2.0)
    assert q2(once, 3) == pytest.approx([0.815, 1.4215, 1.860653], abs=1e-6)


def test_one_exchange_of_single_steps_is_exact():
    """With one local step each, corrections cancel in the mean, and the memory's gradient is the
    present one: three tasks are those of two exchanges."""
    settings = {"adaptive": "off", "iag": False, "alpha": 0.1, "average": "uniform"}
    local, tasks = Local(lr=0.1, steps=1, batch=64), problem(7)
    games = [
        Game(methods.cflag(exchanges=k, **settings), tasks, rounds=4, local=local) for k in (1, 2)
    ]
    ends = [[game.play() for _ in range(11)] for game in games]
    np.testing.assert_allclose(*ends, rtol=1e-7, atol=1e-9)
    gammas = [float(game.fed.parts[0]["gamma"]) for game in games]
    assert gammas[0] == pytest.approx(gammas[1])


def test_one_exchange_who_trained_but_did_not_close_is_not_corrected():
    """The means of a task's end are of those who closed it; whose own gradient is not among them
    must not subtract one of the round before."""
    part = methods.cflag(exchanges=1).parts[0]
    mine = {"at": torch.tensor([5, _closing(5)]), "f": torch.ones(2, 1)}
    beside = SimpleNamespace(down={"at": torch.tensor(_closing(5))}, mine=mine)
    assert part.change("f", torch.full((2, 1), 3.0), beside).tolist() == [[0], [2]]


def test_one_exchange_sends_the_model_once(digits):
    stream = ef.streams.domains(digits, clients=3, rounds=2)
    counts = {}
    for exchanges in (1, 2):
        method = methods.cflag(exchanges=exchanges, lipschitz=2.0)
        assert method.needs.exchanges == exchanges
        assert method.needs.client_state
        result = ef.run(method, stream, ef.models.mlp(64, 8, 10), workers=1)
        counts[exchanges] = result.summary.mb_sent
    # the same gradients travel; the task's end brings those of the new memory instead of a probe
    assert counts[1] == pytest.approx(counts[2], rel=0.1)


def test_one_exchange_under_partial_participation_stays_near():
    """Clients that were away are not corrected by a mean they are not part of."""
    tasks = problem(8, tasks=2, clients=5)
    local = Local(lr=0.05, steps=3, batch=64)
    ends = [
        Game(methods.cflag(exchanges=k, iag=False, lipschitz=2.0), tasks, rounds=30, local=local,
             sample=3).play_all()[-1] for k in (1, 2)
    ]  # fmt: skip
    assert np.linalg.norm(ends[0] - ends[1]) < 0.2 * np.linalg.norm(ends[1])


# memories -----------------------------------------------------------------------------------------
def test_the_memory_is_balanced_and_frozen_during_a_task(digits):
    stream = ef.streams.domains(digits, clients=2, alpha=None, rounds=2).seeded(0)
    from test_continual import federation

    fed, rounds = federation(methods.cflag(memory=20, lipschitz=1.0), stream)
    kept = []
    for t in range(4):
        rounds.play(fed)
        kept.append(fed.clients[0][0]["ids"].tolist())
        if stream.last_of_task(t):
            rounds.end_task(fed)
    assert kept[0] == kept[1] == []
    assert kept[2] == kept[3]
    assert np.bincount(digits.y[kept[3]]).tolist() == [2] * 10


BUDGETED = [
    "er", "agem", "derpp", "nccl", "icarl", "refed", "sr_fdil", "cfl_coreset", "cflag", "cflag_code",
]  # fmt: skip


@pytest.mark.parametrize("name", BUDGETED)
def test_memories_stay_within_their_bytes(name, digits):
    """11 samples of 64 floats and a label; of both domains, because none may be pushed out."""
    from test_continual import federation

    each = digits.sample_bytes
    assert each == 64 * 4 + 8
    stream = ef.streams.domains(digits, clients=2, alpha=None, rounds=1).seeded(0)
    fed, rounds = federation(methods.METHODS[name].build(), stream)
    rounds.engine.program.local = Local(memory_bytes=12 * each - 1)
    seen = []
    for _ in range(2):
        seen.append(rounds.play(fed).values["memory_mb"])
        rounds.end_task(fed)
    assert max(seen) <= 11 * each / 1e6
    part = rounds.method.parts[0]
    for state in fed.clients.values():
        assert memory.held_bytes(part, state[0], each) <= 11 * each
        ids = state[0]["ids"].numpy()
        assert 2 <= len(ids) <= 11
        if name not in ("refed", "sr_fdil"):  # which take the most telling samples of all
            assert set(digits.task[ids]) == {0, 1}


def test_a_budget_below_one_sample_is_told(digits):
    stream = ef.streams.domains(digits, clients=2, rounds=1)
    with pytest.raises(EverfedError, match="no room for a sample of 264 bytes"):
        ef.run(
            methods.er(), stream, ef.models.mlp(64, 10), local=Local(memory_bytes=200), workers=1
        )


def test_a_memory_that_ignores_its_budget_is_told(digits):
    @dataclass(frozen=True)
    class Greedy(Replay):
        def remember(self, w, c):
            return {"ids": torch.from_numpy(c.ids), "block": torch.zeros(len(c.ids)).long()}

    stream = ef.streams.domains(digits, clients=2, rounds=1)
    with pytest.raises(EverfedError, match=r"Greedy keeps .* local.memory_bytes is 1000"):
        ef.run(
            Method(Greedy()),
            stream,
            ef.models.mlp(64, 10),
            local=Local(memory_bytes=1000),
            workers=1,
        )
