"""Tasks that are found instead of announced."""

from __future__ import annotations

import pytest
import torch

import everfed as ef
from everfed.boundaries import Boundaries
from everfed.errors import EverfedError
from everfed.runs import Interrupted

FIND = Boundaries(detect=True)


def domains(*names, rounds):
    return ef.streams.domains(ef.data.digits(names), clients=6, alpha=1.0, rounds=rounds)


def go(method, stream, **more):
    local = ef.Local(lr=0.2, epochs=2, batch=32)
    options = {"local": local, "sample": 4, "workers": 1, "test_every": 10} | more
    return ef.run(method, stream, ef.models.mlp(64, 16, 10), **options)


def found(run) -> list[int]:
    return [r["round"] for r in run.records if r["metric"] == "found_task"]


def test_found_in_its_first_round_a_task_is_as_if_announced():
    """The anchor is the model from before the change, and the server's rate that of the new task."""
    stream = domains("plain", "inverted", rounds=8)
    finds = go(ef.methods.special(0.25), stream, boundaries=FIND)
    assert found(finds) == [8]
    assert torch.equal(finds.vector, go(ef.methods.special(0.25), stream).vector)
    assert not torch.equal(finds.vector, go(ef.methods.special(0.0), stream).vector)


def test_learning_rates_begin_anew_in_the_round_after():
    stream = domains("plain", "inverted", rounds=8)
    runs = []
    for reset in (True, False):
        local = ef.Local(lr=0.3, epochs=2, batch=32, schedule="exponential", decay=0.7, reset=reset)
        runs.append(go(ef.methods.fedavg(), stream, local=local, boundaries=FIND))
        assert found(runs[-1]) == [8]
    anew, on = (run.matrix[1, 1] for run in runs)
    assert anew > on + 0.2


def test_no_alarm_where_nothing_changes():
    data = ef.data.digits(["plain"])
    for seed in range(3):
        stream = ef.streams.static(data, clients=8, alpha=0.1, rounds=40)
        run = go(ef.methods.fedavg(), stream, sample=3, seed=seed, boundaries=FIND)
        assert found(run) == []
        assert max(r["value"] for r in run.records if r["metric"] == "surprise") < 1


def test_what_is_known_of_the_past_survives_a_resume(tmp_path):
    stream = domains("plain", "inverted", rounds=5)
    whole = go(ef.methods.special(0.25), stream, boundaries=FIND)
    assert found(whole) == [5]
    options = {"folder": tmp_path / "run", "checkpoint_seconds": 0, "boundaries": FIND}
    for k in range(1, 10):

        def stop(progress, k=k):
            if progress.round == k:
                raise Interrupted("")

        with pytest.raises(Interrupted):
            go(ef.methods.special(0.25), stream, on_round=stop, resume=k > 1, **options)
    again = go(ef.methods.special(0.25), stream, resume=True, **options)
    assert found(again) == [5]
    assert torch.equal(again.vector, whole.vector)


def test_where_tasks_cannot_be_found_it_is_said():
    stream = domains("plain", "inverted", rounds=2)
    with pytest.raises(EverfedError, match=r"at a task's end ewc asks clients"):
        go(ef.methods.ewc(), stream, boundaries=FIND)
    classes = ef.streams.classes(ef.data.digits(["plain"]), tasks=2, rounds=2)
    with pytest.raises(EverfedError, match="announced by their labels"):
        go(ef.methods.fedavg(), classes, boundaries=FIND)
