"""The model of a run, taken out of its folder."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import everfed as ef
from everfed.cli import app
from everfed.runs import Interrupted


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Convolutions, which lie channels last in the vector, and BatchNorm's statistics."""
    folder, model = tmp_path_factory.mktemp("runs") / "mine", ef.models.cnn(1, 8, 10, 4, "batch")
    stream = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=2)
    return ef.run(ef.methods.fedavg(), stream, model, folder=folder, workers=1), folder, model


def same(a, b):
    """The same weights; outputs up to rounding, as memory may be laid out otherwise."""
    named = zip([*a.named_parameters(), *a.named_buffers()],
                [*b.named_parameters(), *b.named_buffers()], strict=True)  # fmt: skip
    assert all(torch.equal(v, w) for (name, v), (_, w) in named if v.is_floating_point())
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(a(x), b(x))


def test_a_model_predicts_as_the_trained_one(trained):
    run, folder, model = trained
    for recipe in (model, model()):
        same(ef.load_model(folder, recipe), run.model)


def test_exported_weights_go_into_a_module(trained, tmp_path):
    run, folder, model = trained
    file = tmp_path / "model.safetensors"
    done = CliRunner().invoke(app, ["export", str(folder), str(file)])
    assert done.exit_code == 0, done.output
    assert "after 2 rounds" in done.output
    module = model()
    left = module.load_state_dict(load_file(file), strict=False)
    assert not left.unexpected_keys
    assert all("num_batches_tracked" in key for key in left.missing_keys)
    same(module.eval(), run.model)


def test_a_run_that_goes_on_has_a_model_already(tmp_path):
    stream = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=3)
    model = ef.models.mlp(64, 8, 10)

    def stop(progress):
        if progress.round == 2:
            raise Interrupted("")

    with pytest.raises(Interrupted):
        ef.run(
            ef.methods.fedavg(), stream, model, folder=tmp_path / "run", workers=1,
            checkpoint_seconds=0, on_round=stop,
        )  # fmt: skip
    two = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=2)
    short = ef.run(ef.methods.fedavg(), two, model, workers=1)
    assert torch.equal(ef.load_model(tmp_path / "run", model)[1].weight, short.model[1].weight)


def test_what_cannot_be_taken_out_is_told(trained, tmp_path):
    _, folder, model = trained
    with pytest.raises(ef.EverfedError, match=r"it is another model"):
        ef.load_model(folder, ef.models.mlp(64, 8, 10))
    with pytest.raises(ef.EverfedError, match=r"not a run's folder"):
        ef.load_model(tmp_path, model)
    (folder.parent / "compare.json").write_text("{}")
    with pytest.raises(ef.EverfedError, match=r"several runs: name one of mine"):
        ef.load_model(folder.parent, model)
