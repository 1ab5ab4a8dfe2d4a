"""Masked sums by Flower's SecAgg+, over real messages: the same model up to rounding, uploads that the
server cannot read, and clients that drop out."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs everfed[flower]")

from flwr.app import Context, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    Key,
    Stage,
)

from everfed.engines.flower import client_app, server_app
from everfed.errors import EverfedError
from everfed.records import read_records
from loop import Loop
from test_flower import CONFIG, local, model

RANGE = 1.0
METERS = ("drift_period", "drift_client", "signal_to_noise")
#: a mean of three clients, each rounded to 2 R / 2^22 at random
STEP = 2 * RANGE / 2**22


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "everfed.toml"
    path.write_text(CONFIG + "secure = true\nretries = 1\n")
    return path


def federated(path, changes=("method.name=fedavg",), spoil=None):
    home = path.parent
    settings = {"set": ";".join([*changes, "method.average=uniform"]), "folder": str(home / "run")}
    grid = Loop(client_app(path), home, ("0", "1", "2"), settings, spoil)
    server_app(path)(grid, Context(1, 0, {}, RecordDict(), settings))
    return model(home / "run"), read_records(home / "run")[0], grid


LAYERS = ("fedeve", "method.gain=layer")


@pytest.mark.parametrize(
    "method",
    [("fedavg",), ("special",), ("fedeve",), LAYERS, ("scaffold",), ("fedtrack",), ("ewc",)],
)
def test_the_model_is_the_local_engines_up_to_rounding(place, method):
    changes = [f"method.name={method[0]}", *method[1:]]
    got, records, _ = federated(place, changes)
    expected = local(place, [*changes, "method.average=uniform"])
    # rounding errors of four rounds, carried on by training
    assert np.abs(got - expected.vector.numpy()).max() < 100 * STEP
    for metric in ("kalman_gain", "clients", *METERS):
        ours = [r["value"] for r in records if r["metric"] == metric]
        theirs = [r["value"] for r in expected.records if r["metric"] == metric]
        # the spread is a difference of sums, which are rounded
        assert ours == pytest.approx(theirs, rel=1e-2 if metric in METERS else 1e-3, abs=1e-3)


def test_the_server_cannot_read_an_upload(place):
    """What a client sends looks like uniform numbers below 2^32, and is not its update."""
    seen = []

    def look(site, message, reply):
        assert not any(reply.content.array_records[k] for k in reply.content.array_records)
        said = reply.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS in said:
            seen.append(bytes_to_ndarray(said[Key.MASKED_PARAMETERS][-1]).astype(float))
        return reply

    federated(place, spoil=look)
    assert len(seen) == 12  # three clients, four rounds
    for upload in seen:
        # mean 2^31 and standard deviation 2^32 / sqrt(12), here of some 900 numbers
        assert upload.mean() == pytest.approx(2**31, rel=0.1)
        assert upload.std() == pytest.approx(2**32 / np.sqrt(12), rel=0.1)


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS])
def test_a_client_that_drops_out_is_left_out_of_the_sum(place, stage):
    """Client 1 dies before its keys are shared, or after: then its masks are taken out with the
    others' shares."""

    def lose(site, message, reply):
        said = message.content.config_records.get(RECORD_KEY_CONFIGS)
        now = said is not None and said[Key.STAGE] == stage
        return None if now and site == "1" and message.metadata.group_id == "0" else reply

    got, records, _ = federated(place, spoil=lose)
    clients = [r["value"] for r in records if r["metric"] == "clients"]
    assert clients == [2, 3, 3, 3]
    assert np.isfinite(got).all()
    assert np.abs(got).max() < 10  # a mask that stays is 2^31 steps


def test_what_does_not_fit_into_the_range_is_refused(place):
    with pytest.raises(EverfedError, match="too few"):
        federated(place, ["method.name=fedavg", "flower.range=0.0001"])


def test_methods_that_cannot_say_so(place):
    with pytest.raises(EverfedError, match="single uploads"):
        federated(place, ["method.name=median"])
    settings = {"folder": str(place.parent / "run")}
    grid = Loop(client_app(place), place.parent, ("0", "1", "2"), settings)
    with pytest.raises(EverfedError, match="average = 'uniform'"):
        server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))


def test_a_plain_request_is_refused(place):
    """A server that asks for unmasked uploads gets none."""
    plain = place.parent / "plain.toml"
    plain.write_text(CONFIG)
    settings = {"folder": str(place.parent / "run")}
    grid = Loop(client_app(place), place.parent, ("0", "1", "2"), settings)
    with pytest.raises(EverfedError, match="only given masked"):
        server_app(plain)(grid, Context(1, 0, {}, RecordDict(), settings))


def test_who_starts_a_run_cannot_take_the_masks_off(place):
    """Neither where the app's file asks for them nor where the SuperNode does."""
    plain = place.parent / "plain.toml"
    plain.write_text(CONFIG)
    off = "method.name=fedavg;method.average=uniform;flower.secure=false"
    for path, node in ((place, {}), (plain, {"secure": True})):
        settings = {"set": off, "folder": str(place.parent / path.stem)}
        grid = Loop(client_app(path), place.parent, ("0", "1", "2"), settings, node_config=node)
        with pytest.raises(EverfedError, match="only given masked"):
            server_app(path)(grid, Context(1, 0, {}, RecordDict(), settings))


def test_more_clients_than_a_masked_sum_can_tell_are_refused(place, monkeypatch):
    monkeypatch.setattr("everfed.engines.secure.MOST", 2)
    with pytest.raises(EverfedError, match="2 clients at most, and 3 were drawn"):
        federated(place)
