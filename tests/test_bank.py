"""pFedDIL: a bank of models, and clients that train the one that fits them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import everfed as ef
from everfed.client import ClientProgram
from everfed.compute import choose
from everfed.compute.base import Seen
from everfed.engines.local import LocalEngine
from everfed.generators import spoiled
from everfed.local import Local
from everfed.methods.pfeddil import Bank, matched
from everfed.round import Federation, Rounds


def federation(digits, method, rounds=2, sample=None, clients=4):
    stream = ef.streams.domains(digits, clients=clients, alpha=1.0, rounds=rounds).seeded(0)
    torch.manual_seed(0)
    module = ef.models.mlp(64, 16, 10)()
    compute = choose(module, digits.x[0], torch.device("cpu"), "float32", "auto")
    local = Local(lr=0.1, epochs=1)
    program = ClientProgram(method, compute, stream, digits, local, 0)
    states = [part.init(compute.weights(), compute.layout) for part in method.parts]
    fed = Federation(compute.weights(), compute.read_buffers(), states)
    return fed, Rounds(method, stream, local, LocalEngine(program, 1), sample, 0)


def played(digits, method, **options):
    """The bank and the clients' states after each round of two tasks of two rounds."""
    fed, rounds = federation(digits, method, **options)
    out = []
    for t in range(4):
        rounds.play(fed)
        out.append((fed.w, fed.parts[0]["bank"], dict(fed.clients)))
        if rounds.stream.last_of_task(t):
            rounds.end_task(fed)
    return out, rounds


def test_matching_by_hand():
    assert matched(torch.tensor([0.85, 0.4]), 0.8) == 0
    assert matched(torch.tensor([0.7, 0.4]), 0.8) is None
    assert matched(torch.zeros(0), 0.0) is None


def test_migration_by_hand():
    """kappa sum_j s~_j |w - w_j|^2 with squared distances 1 and 4 is .020909, and its gradient."""
    bank = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    own = {"scores": torch.tensor([0.7, 0.4], dtype=torch.float64)}
    c = SimpleNamespace(scratch={"own": own}, down={"bank": bank})
    change = Bank(kappa=0.01).affine(c)
    w = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    share = own["scores"] / own["scores"].sum()
    penalty = 0.01 * (share * (w - bank).square().sum(1)).sum()
    assert penalty.item() == pytest.approx(0.020909, abs=1e-6)
    (slope,) = torch.autograd.grad(penalty, w)
    torch.testing.assert_close(change(torch.zeros(1, 2).double(), w.detach()), slope)


def test_predictions_are_mixed_by_hand():
    """Heads of log 3 and 0 weigh two models 3 to 1: probabilities .8 and .4 of a class mix to .7."""
    z = {0: torch.tensor([[0.8, 0.2]]).log(), 1: torch.tensor([[0.4, 0.6]]).log()}
    state = {
        "bank": torch.tensor([[0.0], [1.0]]),
        "heads": torch.tensor([[0.0, np.log(3.0)], [0.0, 0.0]]).float(),
    }
    mixed = Bank().predict(state, None, lambda w: Seen(z[int(w)], torch.ones(1, 1), []))
    torch.testing.assert_close(mixed.exp(), torch.tensor([[0.7, 0.3]]))


def test_each_model_is_averaged_over_those_who_trained_it():
    uploads = {
        "update": torch.tensor([[1.0], [2.0], [6.0]]),
        "1.slot": torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
        "1.head": torch.tensor([[1.0, 1.0], [0.0, 4.0], [8.0, 0.0]]),
        "0.count": torch.tensor([[1.0], [1.0], [0.0]]),  # another part's, to be summed
    }
    means = frozenset(uploads) - {"0.count"}
    out = Bank().aggregate(uploads, torch.tensor([1.0, 1.0, 3.0]), means)
    torch.testing.assert_close(out["0.count"], torch.tensor([2.0]))
    torch.testing.assert_close(out["1.updates"], torch.tensor([[5.0], [0.0], [1.0]]))
    torch.testing.assert_close(out["1.heads"], torch.tensor([[6.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(out["1.mass"], torch.tensor([4.0, 0.0, 1.0]))
    torch.testing.assert_close(out["update"], torch.tensor([4.2]))


def test_spoiled_copies_are_shuffled_or_noised(digits):
    x = digits.x[:10]
    bad = spoiled(x, np.random.default_rng(0))
    assert (bad != x).flatten(1).any(1).all()
    same = [
        torch.equal(a.flatten().sort()[0], b.flatten().sort()[0])
        for a, b in zip(x, bad, strict=True)
    ]
    assert same == [True, False] * 5


def test_an_unmatched_task_opens_a_model_and_leaves_the_old_one(digits):
    """threshold = 1 is never reached: the first task's model stays bit by bit, the second begins at
    the server's newest and moves away."""
    seen, _ = played(digits, ef.methods.pfeddil(threshold=1.0, kappa=0.0))
    assert [len(bank) for _, bank, _ in seen] == [1, 1, 2, 2]
    assert torch.equal(seen[3][1][0], seen[1][1][0])
    assert not torch.equal(seen[3][1][1], seen[2][1][1])
    for w, bank, _ in seen:
        torch.testing.assert_close(w, bank[-1])
    plain, _ = played(digits, ef.methods.pfeddil(threshold=0.0, kappa=0.0))
    # with nothing else to pull it the new model's first round is FedAvg's
    torch.testing.assert_close(seen[2][1][1], plain[2][1][0])


def test_migration_pulls_to_the_models_of_before(digits):
    far = played(digits, ef.methods.pfeddil(threshold=1.0, kappa=0.0))[0][-1][1]
    near = played(digits, ef.methods.pfeddil(threshold=1.0, kappa=0.5))[0][-1][1]
    assert (near[1] - near[0]).norm() < 0.8 * (far[1] - far[0]).norm()


def test_choices_belong_to_clients_and_last_for_a_task(digits):
    """Two of four clients a round: a client that is met first, late in a task, joins its model."""
    seen, rounds = played(digits, ef.methods.pfeddil(threshold=1.0), sample=2)
    met: set[int] = set()
    for t, (_, bank, clients) in enumerate(seen):
        cohort, _ = rounds.draw(t, 2)
        met |= set(cohort)
        assert set(clients) == met
        for i in cohort:
            assert (int(clients[i][0]["slot"]), int(clients[i][0]["task"])) == (t // 2, t // 2)
        assert len(bank) == t // 2 + 1


def test_a_head_knows_its_own_kind(digits):
    """Digits of the domain that it was fitted on belong more than inverted ones and spoiled ones."""
    fed, rounds = federation(digits, ef.methods.pfeddil(steps=50), rounds=6)
    for _ in range(6):
        rounds.play(fed)
    head, w = fed.parts[0]["heads"][0], fed.parts[0]["bank"][0]
    compute = rounds.engine.program.compute
    test = {name: digits.x[rounds.stream.test(k)] for k, name in enumerate(digits.tasks)}
    test["spoiled"] = spoiled(test["plain"], np.random.default_rng(0))
    score = {
        name: float((compute.features(w, x) @ head[:-1] + head[-1]).sigmoid().mean())
        for name, x in test.items()
    }
    assert score["plain"] > 0.5
    assert score["plain"] > score["inverted"] + 0.2
    assert score["plain"] > score["spoiled"] + 0.4


def test_less_is_forgotten(digits):
    stream = ef.streams.domains(digits, clients=4, alpha=1.0, rounds=8)
    options = {"local": Local(lr=0.2, epochs=2), "workers": 1}
    kept = [
        ef.run(method, stream, ef.models.mlp(64, 32, 10), **options).bwt
        for method in (ef.methods.fedavg(), ef.methods.pfeddil())
    ]
    assert kept[0] < -0.1
    assert kept[1] > kept[0] + 0.1


def test_two_ways_of_averaging_do_not_go_together():
    with pytest.raises(ef.EverfedError, match="several models, and Trimmed knows of one"):
        ef.methods.pfeddil() + ef.methods.median()


def test_tokens_cannot_be_spoiled():
    data = ef.data.arrays(np.zeros((40, 6), dtype=np.int64), np.arange(40) % 2)
    embedded = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 2))
    with pytest.raises(ef.EverfedError, match="floats, not tokens"):
        ef.run(ef.methods.pfeddil(), ef.streams.static(data, clients=2, rounds=1), embedded)
