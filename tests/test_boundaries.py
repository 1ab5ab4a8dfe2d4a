"""Tasks that are found instead of announced."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import everfed as ef
from everfed.boundaries import Boundaries, shift
from everfed.errors import EverfedError
from everfed.runs import Interrupted

BY = {by: Boundaries(by=by) for by in ("clients", "server")}
both = pytest.mark.parametrize("by", BY)


def domains(*names, rounds):
    return ef.streams.domains(ef.data.digits(names), clients=6, alpha=1.0, rounds=rounds)


def go(method, stream, **more):
    local = ef.Local(lr=0.2, epochs=2, batch=32)
    options = {"local": local, "sample": 4, "workers": 1, "test_every": 10} | more
    return ef.run(method, stream, ef.models.mlp(64, 16, 10), **options)


def found(run) -> list[int]:
    return [r["round"] for r in run.records if r["metric"] == "found_task"]


@both
@pytest.mark.parametrize(
    "method",
    [ef.methods.special(0.25), ef.methods.scaffold(), ef.methods.er(), ef.methods.cfl_coreset(),
     ef.methods.flwf2t(), ef.methods.pfeddil(), ef.methods.fedtrack() + ef.methods.special(0.1)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_found_in_its_first_round_a_task_is_as_if_announced(by, method):
    """The round is played again: anchors and control variates are those from before the change,
    memories keep what was held before, and rates are those of the new task. That costs traffic."""
    stream = domains("plain", "inverted", rounds=8)
    local = ef.Local(lr=0.2, epochs=2, batch=32, schedule="exponential", decay=0.9)
    finds = go(method, stream, local=local, boundaries=BY[by])
    told = go(method, stream, local=local)
    assert found(finds) == [8]
    assert torch.equal(finds.vector, told.vector)
    sent, expected = (
        [r["value"] for r in run.records if r["metric"] == "mb_down"] for run in (finds, told)
    )
    assert sent[:8] == expected[:8]
    assert sent[8] == pytest.approx(expected[8] + expected[7])
    assert sent[9:] == expected[9:]


def test_a_reply_from_before_a_found_boundary_begins_no_task():
    """It is the only one of its round that could compare."""

    class Planned(ef.Late):
        def draw(self, cohort, seed, round_):
            return {client: int((client, round_) == (0, 7)) for client in cohort}

    stream, late = domains("plain", "inverted", rounds=8), Planned()
    run = go(ef.methods.special(), stream, sample=None, late=late, boundaries=BY["clients"])
    assert found(run) == [8]
    lost = [(r["round"], r["value"]) for r in run.records if r["metric"] == "lost_replies"]
    assert lost == [(8, 1)]


def test_late_replies_have_no_vote():
    """They tell of the data that their clients held before."""
    stream = domains("plain", "inverted", rounds=6)
    for seed in range(4):
        late = {"late": ef.Late(chance=0.3, rounds=2), "sample": 6}
        run = go(ef.methods.special(), stream, boundaries=BY["clients"], seed=seed, **late)
        assert found(run) == [6]


def test_learning_rates_begin_anew_or_not_as_with_announced_tasks():
    stream, vectors = domains("plain", "inverted", rounds=8), []
    for reset in (True, False):
        local = ef.Local(lr=0.2, epochs=2, batch=32, schedule="exponential", decay=0.7, reset=reset)
        run = go(ef.methods.fedavg(), stream, local=local, boundaries=BY["clients"])
        assert torch.equal(run.vector, go(ef.methods.fedavg(), stream, local=local).vector)
        vectors.append(run.vector)
    assert not torch.equal(*vectors)


@both
def test_no_alarm_where_nothing_changes(by):
    data = ef.data.digits(["plain"])
    for seed in range(3):
        stream = ef.streams.static(data, clients=8, alpha=0.1, rounds=40)
        run = go(ef.methods.fedavg(), stream, sample=3, seed=seed, boundaries=BY[by])
        assert found(run) == []
        assert max(r["value"] for r in run.records if r["metric"] == "surprise") < 1


@both
def test_what_is_known_of_the_past_survives_a_resume(by, tmp_path):
    stream = domains("plain", "inverted", rounds=5)
    whole = go(ef.methods.special(0.25), stream, boundaries=BY[by])
    assert found(whole) == [5]
    options = {"folder": tmp_path / "run", "checkpoint_seconds": 0, "boundaries": BY[by]}
    for k in range(1, 10):

        def stop(progress, k=k):
            if progress.round == k:
                raise Interrupted("")

        with pytest.raises(Interrupted):
            go(ef.methods.special(0.25), stream, on_round=stop, resume=k > 1, **options)
    again = go(ef.methods.special(0.25), stream, resume=True, **options)
    assert found(again) == [5]
    assert torch.equal(again.vector, whole.vector)


@both
def test_where_tasks_cannot_be_found_it_is_said(by):
    stream = domains("plain", "inverted", rounds=2)
    with pytest.raises(EverfedError, match=r"at a task's end ewc asks clients"):
        go(ef.methods.ewc(), stream, boundaries=BY[by])
    classes = ef.streams.classes(ef.data.digits(["plain"]), tasks=2, rounds=2)
    with pytest.raises(EverfedError, match="announced by their labels"):
        go(ef.methods.fedavg(), classes, boundaries=BY[by])


def test_clients_that_cannot_compare_are_named():
    fresh = ef.streams.evolving(ef.data.digits(["plain"]), clients=4, rounds=2, order="fresh")
    with pytest.raises(EverfedError, match="another one in every round: use 'server'"):
        go(ef.methods.fedavg(), fresh, boundaries=BY["clients"])
    with pytest.raises(EverfedError, match=r"can never differ by boundaries\.change = 4"):
        Boundaries(by="clients", samples=11)
    with pytest.raises(EverfedError, match=r"boundaries\.window must be at least 3, not 2"):
        Boundaries(by="server", window=2)
    local = ef.Local(memory_bytes=5 * domains("plain", rounds=2).data.sample_bytes)
    with pytest.raises(EverfedError, match="room for 5 samples to compare with, too few"):
        go(ef.methods.fedavg(), domains("plain", rounds=2), local=local, boundaries=BY["clients"])
    with pytest.raises(EverfedError, match="announce the tasks"):
        go(ef.methods.cfl_coreset(), domains("plain", rounds=2), boundaries=BY["server"],
           information_loss=True)  # fmt: skip
    private = ef.methods.privacy(noise=1.0)
    with pytest.raises(EverfedError, match="noise of privacy: use 'server'"):
        go(private, domains("plain", rounds=2), boundaries=BY["clients"])


def test_mann_and_whitney_by_hand_and_by_chance():
    """All of 10 above all of 10: 1/2 / sqrt(21 / 1200). Of one kind, one deviation."""
    low, high = torch.arange(10.0), torch.arange(10.0) + 20
    assert shift(low, high) == pytest.approx(0.5 / (21 / 1200) ** 0.5)
    assert shift(high, low) == -shift(low, high)
    assert shift(low, low) == 0
    chance = torch.Generator().manual_seed(0)
    drawn = [shift(*torch.randn(2, 128, generator=chance)) for _ in range(2000)]
    assert np.std(drawn) == pytest.approx(1, abs=4 / (2 * 2000) ** 0.5)
    assert max(map(abs, drawn)) < 4.5


def test_clients_find_an_easier_domain_and_the_server_does_not():
    """A loss that falls is no sign to the server; to clients any difference is one."""
    stream = domains("occluded", "plain", rounds=8)
    finds = {by: found(go(ef.methods.fedavg(), stream, boundaries=BY[by])) for by in BY}
    assert finds == {"clients": [8], "server": []}


class Moved(ef.streams.Stream):
    """One task of two domains: some clients go over to the second one in round 4, or from then on
    one after another."""

    def __init__(self, moving: int, small: int = 0, later: int = 0) -> None:
        self.small, self.later = small, later
        self.whole = ef.streams.domains(
            ef.data.digits(["plain", "inverted"]), clients=6, alpha=10.0, rounds=4
        )
        self.data, self.clients, self.rounds, self.moving = self.whole.data, 6, 8, moving

    @property
    def tasks(self):
        return ("all",)

    def samples(self, client: int, round_: int) -> np.ndarray:
        moved = client < self.moving and round_ >= 4 + self.later * client
        held = self.whole.samples(client, round_ if moved else round_ % 4)
        return held if client >= self.small else held[:5]

    def test(self, task: int) -> np.ndarray:
        return self.whole.test(0)

    def describe(self):
        return {"stream": "moved", "moving": self.moving}


@pytest.mark.parametrize(("moving", "begun"), [(3, []), (4, [4])])
def test_a_task_begins_where_most_clients_have_other_data(moving, begun):
    run = go(ef.methods.fedavg(), Moved(moving), sample=None, boundaries=BY["clients"])
    assert found(run) == begun
    surprises = [r["value"] for r in run.records if r["metric"] == "surprise"]
    after = 0 if begun else 2 * moving / 6
    assert surprises == [0, 0, 0, 0, 2 * moving / 6, after, after, after]


def test_changes_of_one_client_after_another_add_up():
    """Scanners are replaced site by site: with the fourth of six most of the data are others."""
    run = go(ef.methods.fedavg(), Moved(6, later=1), sample=None, boundaries=BY["clients"])
    assert found(run) == [7]


def test_clients_with_too_few_samples_to_tell_are_not_asked():
    """Of five samples and five, no order is 4 deviations from chance."""
    run = go(ef.methods.fedavg(), Moved(6, small=5), sample=None, boundaries=BY["clients"])
    assert found(run) == [4]
    none = go(ef.methods.fedavg(), Moved(6, small=6), sample=None, boundaries=BY["clients"])
    assert found(none) == []
