"""Replies that come late or never: what they count, on every engine, across a resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import everfed as ef
from everfed.late import Late
from everfed.local import Local
from everfed.runs import Interrupted
from quadratics import Q2, Game

#: methods with a state of the server, of clients, uploads that are stacked, an aggregate
METHODS = {
    "fedavg": ef.methods.fedavg(),
    "fedeve": ef.methods.fedeve(),
    "scaffold": ef.methods.scaffold(),
    "cfl_regularization": ef.methods.cfl_regularization(),
    "median": ef.methods.fedavg() + ef.methods.median(),
}


class Planned(Late):
    """Client 1 is one round late in the first round."""

    def draw(self, cohort, seed, round_):
        return {client: int((client, round_) == (1, 0)) for client in cohort}


def test_a_late_update_counts_less_in_the_round_in_which_it_comes():
    """Steps are -0.1 (w - 1) and -0.2 (w - 4); client 1 is not asked while its reply is under way."""
    local = Local(lr=0.1, steps=1, batch=8)
    game = Game(ef.methods.fedavg(average="uniform"), [Q2], rounds=3, local=local)
    game.rounds.late = Planned(discount=0.5)
    first, second, third = (float(w[0]) for w in game.play_all())
    assert first == pytest.approx(0.1)
    assert second == pytest.approx(0.1 + (0.09 + 0.8 / np.sqrt(2)) / 2)
    assert third == pytest.approx(second - (0.1 * (second - 1) + 0.2 * (second - 4)) / 2)


def test_a_late_reply_outlives_a_round_that_is_lost():
    """Multi-Krum needs three replies. Client 1's comes in a round with too few, and
    counts in the next one, two rounds late; all steps are -0.1 (w - 1)."""

    class Few(Late):
        def draw(self, cohort, seed, round_):
            return {
                client: int(client == 1) if round_ == 0 else None if round_ == 1 else 0
                for client in cohort
            }

    local = Local(lr=0.1, steps=1, batch=8)
    game = Game(
        ef.methods.krum(bad=0, keep=4, average="uniform"), [Q2[:1] * 4], rounds=3, local=local
    )
    game.rounds.late = Few(discount=1.0)
    first, second, third = (float(w[0]) for w in game.play_all())
    assert first == pytest.approx(0.1)
    assert second == first
    assert third == pytest.approx(first + (3 * 0.1 * (1 - first) + 0.1 / 3) / 4)


def test_without_a_discount_a_step_of_the_anchor_is_the_same_a_round_later():
    """With one client whose every reply is a round late, FedAvg makes its steps in every second
    round, and they are the prompt client's."""
    local = Local(lr=0.1, steps=1, batch=8)
    prompt = Game(ef.methods.fedavg(), [Q2[:1]], rounds=3, local=local).play_all()
    game = Game(ef.methods.fedavg(), [Q2[:1]], rounds=6, local=local)
    game.rounds.late = Late(chance=1.0, discount=0.0)
    late = game.play_all()
    assert np.allclose(late[1::2], prompt)


@pytest.mark.parametrize("method", [ef.methods.fedcurv(), ef.methods.scaffold(reset=False)])
def test_what_clients_keep_and_the_servers_sum_of_it_agree_after_a_boundary(method):
    """A reply that comes when its task is over does not count, but its client has kept its part."""
    games = Game(method, [Q2, Q2, Q2], rounds=3, local=Local(lr=0.1, steps=2, batch=8))
    games.rounds.late = Late(chance=0.5, rounds=2)
    lost = 0
    for _ in range(9):
        games.play()
        fed, key = games.fed, "a" if method.name == "fedcurv" else "c"
        lost += sum(int(reply["at"][3]) < games.rounds._task(fed) for reply in fed.late)
        upload = "0.a" if key == "a" else "0.dc"
        under_way = sum(float(reply[upload]) for reply in fed.late)
        kept = sum(float(own[0][key]) for own in fed.clients.values())
        share = 1 if key == "a" else 2  # SCAFFOLD's is the mean over the two clients
        assert share * float(fed.parts[0][key]) + under_way == pytest.approx(kept, abs=1e-5)
    assert lost


class Absent(Late):
    """Client 1 never answers in the second round."""

    def draw(self, cohort, seed, round_):
        return {client: None if (client, round_) == (1, 1) else 0 for client in cohort}


def test_who_does_not_answer_counts_as_no_change_if_so_asked():
    """Steps are -0.1 (w - 1) and -0.2 (w - 4); in the second round there is only the first one."""
    local, halves = Local(lr=0.1, steps=1, batch=8), {"mean": 1.0, "zero": 0.5}
    for missing, part in halves.items():
        game = Game(ef.methods.fedavg(average="uniform"), [Q2], rounds=3, local=local)
        game.rounds.late = Absent(missing=missing)
        first, second, third = (float(w[0]) for w in game.play_all())
        assert first == pytest.approx((0.1 + 0.8) / 2)
        assert second == pytest.approx(first - part * 0.1 * (first - 1))
        assert third == pytest.approx(second - (0.1 * (second - 1) + 0.2 * (second - 4)) / 2)


def test_shares_of_lost_and_late_replies_are_those_asked_for():
    late = Late(lost=0.2, chance=0.3, rounds=3)
    drawn = [by for t in range(200) for by in late.draw(range(20), seed=1, round_=t).values()]
    shares = [np.mean([by == k for by in drawn]) for k in (None, 0, 1, 2, 3)]
    assert shares == pytest.approx(
        [0.2, 0.5, 0.1, 0.1, 0.1], abs=0.02
    )  # 3 deviations of 4000 draws


@pytest.fixture(scope="module")
def stream():
    digits = ef.data.digits(["plain", "inverted"])
    return ef.streams.domains(digits, clients=6, alpha=1.0, rounds=4)


def go(method, stream, **more):
    late = Late(lost=0.15, chance=0.3, rounds=2)
    return ef.run(
        method, stream, ef.models.mlp(64, 12, 10), sample=4, late=late, **({"workers": 1} | more)
    )


@pytest.mark.parametrize("name", METHODS)
def test_the_same_with_two_workers_and_after_a_resume(name, stream, tmp_path):
    method = METHODS[name]
    whole = go(method, stream)
    counted = {m: sum(r["value"] for r in whole.records if r["metric"] == m)
               for m in ("late_updates", "lost_replies")}  # fmt: skip
    assert all(counted.values())
    both = go(method, stream, workers=2)
    assert float((both.vector - whole.vector).norm() / whole.vector.norm()) < 1e-5
    options = {"folder": tmp_path / "run", "checkpoint_seconds": 0}
    for k in range(1, 8):  # killed after every round: replies are under way in some

        def stop(progress, k=k):
            if progress.round == k:
                raise Interrupted("")

        with pytest.raises(Interrupted):
            go(method, stream, on_round=stop, resume=k > 1, **options)
    again = go(method, stream, resume=True, **options)
    assert torch.equal(again.vector, whole.vector)


def test_a_round_in_which_nothing_comes_leaves_the_model(stream):
    result = ef.run(
        ef.methods.fedavg(), stream, ef.models.mlp(64, 12, 10), late=Late(lost=1.0), workers=1
    )
    assert sum(r["metric"] == "lost_round" for r in result.records) == 8
    assert "no client's update could be used" in result.warnings[0]
