"""Loggers with the real TensorBoard and MLflow, on this machine's disk."""

from __future__ import annotations

import os

import pytest

import everfed as ef
from everfed import config as configs
from everfed import loggers
from everfed.errors import EverfedError
from test_cli import everfed
from test_conformance import run


def accuracy_of(records, task):
    """A task's accuracy by round, from records."""
    return {
        r["round"] + 1: r["value"]
        for r in records
        if r["metric"] == "accuracy" and r.get("on") == task and not r.get("end")
    }


def events(folder):
    """What TensorBoard shows: values by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_shows_the_records(digits, tmp_path):
    made = loggers.TensorBoard()
    result = run(ef.methods.fedeve(), digits, folder=tmp_path, loggers=[made])
    shown = events(tmp_path / "tensorboard")
    plain = dict(shown["accuracy/plain"])
    assert plain == pytest.approx(accuracy_of(result.records, 0))
    assert {"kalman_gain", "mb_up", "seconds", "accuracy/inverted"} <= set(shown)
    sent = {r["round"] + 1: r["value"] for r in result.records if r["metric"] == "mb_up"}
    assert dict(shown["mb_up"]) == pytest.approx(sent)


def test_a_resumed_run_is_one_curve_in_tensorboard(digits, tmp_path):
    def crash(progress):
        if progress.round == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run(
            ef.methods.fedavg(), digits, folder=tmp_path, loggers=[loggers.TensorBoard()],
            checkpoint_seconds=1000, on_round=crash,
        )  # fmt: skip
    again = run(
        ef.methods.fedavg(), digits, folder=tmp_path, resume=True, loggers=[loggers.TensorBoard()]
    )
    curve = events(tmp_path / "tensorboard")["accuracy/plain"]
    expected = accuracy_of(again.records, 0)
    assert dict(curve) == pytest.approx(expected)


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    """An MLflow database of its own."""
    import mlflow

    place = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}")
        yield mlflow.MlflowClient()


def test_mlflow_shows_the_records(digits, tmp_path, tracking):
    method = ef.methods.special(0.25)
    result = run(method, digits, folder=tmp_path / "run", loggers=[loggers.MLflow("try")])
    experiment = tracking.get_experiment_by_name("try")
    (found,) = tracking.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "special-seed0"
    assert found.data.params["Anchor.lam"] == "0.25"
    assert found.data.params["seed"] == "0"
    history = tracking.get_metric_history(found.info.run_id, "accuracy/plain")
    assert {m.step: m.value for m in history} == pytest.approx(accuracy_of(result.records, 0))


def test_a_resumed_run_is_one_run_in_mlflow(digits, tmp_path, tracking):
    def crash(progress):
        if progress.round == 4:
            raise RuntimeError

    def go(**more):
        options = {"folder": tmp_path / "run", "checkpoint_seconds": 0} | more
        return run(ef.methods.fedavg(), digits, loggers=[loggers.MLflow("again")], **options)

    with pytest.raises(RuntimeError):
        go(on_round=crash)
    place = tracking.get_experiment_by_name("again").experiment_id
    assert [found.info.status for found in tracking.search_runs([place])] == ["KILLED"]
    again = go(resume=True)
    (found,) = tracking.search_runs([place])
    assert found.info.status == "FINISHED"
    history = tracking.get_metric_history(found.info.run_id, "accuracy/plain")
    assert {m.step: m.value for m in history} == pytest.approx(accuracy_of(again.records, 0))


class Broken:
    """Fails in its third round, as a server that goes away."""

    def __init__(self):
        self.steps = []

    def start(self, begun):
        self.begun = begun

    def write(self, values, step):
        if step == 3:
            raise ConnectionError("the server went away\nand more")
        self.steps.append(step)

    def close(self, finished):
        raise AssertionError("it was switched off before")


def test_a_failing_logger_does_not_stop_a_run(digits):
    broken = Broken()
    result = run(ef.methods.fedavg(), digits, loggers=[broken])
    assert broken.steps == [1, 2]
    assert result.warnings == ("round 3: Broken is switched off: the server went away",)
    assert ef.metrics.matrix(result.records).shape == (2, 2)
    assert (broken.begun.name, broken.begun.round) == ("fedavg-seed0", 0)


def test_loggers_do_not_change_a_run(digits, tmp_path):
    plain = run(ef.methods.fedavg(), digits)
    logged = run(ef.methods.fedavg(), digits, loggers=[loggers.TensorBoard(tmp_path)])
    assert (plain.vector == logged.vector).all()


def test_a_configuration_names_loggers(tmp_path):
    quick = ["--set", "stream.rounds=1", "--set", "local.epochs=1", "--set", "log=['tensorboard']"]
    everfed("run", *quick, "--folder", tmp_path / "run")
    assert "accuracy/occluded" in events(tmp_path / "run" / "tensorboard")
    with pytest.raises(
        configs.ConfigError,
        match="log should be 'tensorboard', 'mlflow' or 'wandb', not 'tensorbord'",
    ):
        configs.parse({"log": ["tensorbord"]})


def test_a_missing_logger_says_what_to_install(monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(EverfedError, match=r"pip install 'everfed\[wandb\]'"):
        loggers.named("wandb")


@pytest.mark.skipif(not os.environ.get("EVERFED_WANDB"), reason="EVERFED_WANDB=1 tries W&B offline")
def test_wandb_offline(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(ef.methods.fedavg(), digits, folder=tmp_path, loggers=[loggers.WandB()])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
