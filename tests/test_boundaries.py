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
def test_found_in_its_first_round_a_task_is_as_if_announced(by):
    """The anchor is the model from before the change, and the server's rate that of the new task."""
    stream = domains("plain", "inverted", rounds=8)
    finds = go(ef.methods.special(0.25), stream, boundaries=BY[by])
    assert found(finds) == [8]
    assert torch.equal(finds.vector, go(ef.methods.special(0.25), stream).vector)
    assert not torch.equal(finds.vector, go(ef.methods.special(0.0), stream).vector)


@both
def test_learning_rates_begin_anew_in_the_round_after(by):
    stream = domains("plain", "inverted", rounds=8)
    runs = []
    for reset in (True, False):
        local = ef.Local(lr=0.3, epochs=2, batch=32, schedule="exponential", decay=0.7, reset=reset)
        runs.append(go(ef.methods.fedavg(), stream, local=local, boundaries=BY[by]))
        assert found(runs[-1]) == [8]
    anew, on = (run.matrix[1, 1] for run in runs)
    assert anew > on + 0.2


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
    """One task of two domains: some clients go over to the second one in round 4."""

    def __init__(self, moving: int) -> None:
        self.whole = ef.streams.domains(
            ef.data.digits(["plain", "inverted"]), clients=6, alpha=10.0, rounds=4
        )
        self.data, self.clients, self.rounds, self.moving = self.whole.data, 6, 8, moving

    @property
    def tasks(self):
        return ("all",)

    def samples(self, client: int, round_: int) -> np.ndarray:
        return self.whole.samples(client, round_ if client < self.moving else round_ % 4)

    def test(self, task: int) -> np.ndarray:
        return self.whole.test(0)

    def describe(self):
        return {"stream": "moved", "moving": self.moving}


@pytest.mark.parametrize(("moving", "begun"), [(3, []), (4, [4])])
def test_a_task_begins_where_most_clients_have_other_data(moving, begun):
    run = go(ef.methods.fedavg(), Moved(moving), sample=None, boundaries=BY["clients"])
    assert found(run) == begun
    surprises = [r["value"] for r in run.records if r["metric"] == "surprise"]
    assert surprises == [0, 0, 0, 0, 2 * moving / 6, 0, 0, 0]
