"""Methods over Flower's real messages and apps, without processes: equal to the local engine, and
nothing lost or counted twice whatever happens to replies, sites and the server."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from logging import ERROR
from pathlib import Path

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="needs everfed[flower]")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.common.logger import FLOWER_LOGGER, ConsoleHandler, log  # noqa: E402

from everfed import config as configs  # noqa: E402
from everfed import deploy  # noqa: E402
from everfed.engines.flower import client_app, server_app  # noqa: E402
from everfed.engines.roll import Roll  # noqa: E402
from everfed.engines.site import RUNS, Store, run_folder  # noqa: E402
from everfed.engines.terms import Pace, Terms  # noqa: E402
from everfed.errors import EverfedError  # noqa: E402
from everfed.folder import RunFolder  # noqa: E402
from everfed.late import Late  # noqa: E402
from everfed.methods import METHODS  # noqa: E402
from everfed.methods.cfl_regularization import Taylor  # noqa: E402
from everfed.methods.privacy import epsilon  # noqa: E402
from everfed.methods.scaffold import Scaffold  # noqa: E402
from everfed.records import read_records  # noqa: E402
from loop import Loop  # noqa: E402

TRAIN = "train.train"  #: the kind of message that asks for an update

CONFIG = """
seed = 3
[data]
name = "digits"
domains = ["plain", "inverted"]
[stream]
name = "domains"
clients = 3
alpha = 1.0
rounds = 2
[model]
name = "mlp"
hidden = [12]
[local]
lr = 0.05
epochs = 1
batch = 64
[flower]
sites = 3
wait = 2.0
deadline = 1.0
poll = 0.001
"""


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "everfed.toml"
    path.write_text(CONFIG)
    return path


def federated(path: Path, changes=(), spoil=None, sites=("0", "1", "2"), folder="run", **more):
    """The model and the records of a run on Flower."""
    home = path.parent
    settings = {"set": ";".join(changes), "folder": str(home / folder)}
    grid = Loop(client_app(path), home, sites, settings, spoil, **more)
    server_app(path)(grid, Context(1, 0, {}, RecordDict(), settings))
    return model(home / folder), read_records(home / folder)[0], grid


def model(folder: Path) -> np.ndarray:
    place = RunFolder.open(folder)
    try:
        found, notes = place.load()
        assert not notes
        return found.fed.w.numpy()
    finally:
        place.close()


def local(path: Path, changes=()):
    made = configs.experiment(configs.read(path, list(changes)))
    return made.go(workers=1, grouping="single")


def states(home: Path, site: str) -> list[Path]:
    return sorted((home / "sites" / "federation" / site).glob("*/*.state"))


def distance(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("sample", [None, 2])
def test_every_method_is_the_local_engines(place, method, sample):
    if method == "krum" and sample == 2:
        pytest.skip("Krum needs three updates")
    changes = [f"method.name={method}"] + ([f"sample={sample}"] if sample else [])
    more = {"cflag": "lipschitz=1.0", "nccl": "lipschitz=1.0", "krum": "bad=0"}
    more |= {"privacy": "secret=false", "target": "batches=1 steps=2 size=16 width=2"}
    more |= {"mfcl": "iterations=2 size=16 width=2", "fedcil": "iterations=2 width=2"}
    changes += [f"method.{setting}" for setting in more.get(method, "").split()]
    got, records, _ = federated(place, changes)
    expected = local(place, changes)
    assert distance(got, expected.vector.numpy()) < 1e-5
    for metric in ("accuracy", "mb_up", "mb_down", "train_loss", "drift_period", "drift_client"):
        ours = [r["value"] for r in records if r["metric"] == metric]
        assert ours == pytest.approx(
            [r["value"] for r in expected.records if r["metric"] == metric], rel=1e-4, abs=1e-5
        )
        secret = method == "privacy" and metric in ("train_loss", "drift_client")
        assert bool(ours) != secret


def test_classes_that_arrive_task_by_task(place):
    for method in ("cflag", "lwf", "ewc", "icarl", "mfcl", "fedcil"):
        changes = [
            "data.domains=['plain']", "stream.name=classes", "stream.tasks=2", "stream.clients=3",
            "stream.rounds=2", f"method.name={method}",
        ]  # fmt: skip
        changes += ["method.lipschitz=1.0"] if method == "cflag" else []
        if method in ("mfcl", "fedcil"):  # standardised inputs are made as such, also at sites
            changes += ["method.width=2", "method.iterations=2", "standardise=true"]
        got, _, _ = federated(place, changes, folder=method)
        assert distance(got, local(place, changes).vector.numpy()) < 1e-5


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "cfl_regularization"])
def test_late_and_lost_replies_that_are_drawn_are_the_local_engines(place, method):
    changes = [f"method.name={method}", "stream.rounds=4", "late.chance=0.3", "late.lost=0.1",
               "late.rounds=2"]  # fmt: skip
    got, records, _ = federated(place, changes)
    assert any(r["metric"] == "late_updates" for r in records)
    assert distance(got, local(place, changes).vector.numpy()) < 1e-5


def test_sites_that_compare_their_data_find_the_task(place):
    """What they held last time is at the sites, as samples; only counts travel."""
    changes = ["method.name=special", "stream.rounds=4", "boundaries.by=clients"]
    got, records, _ = federated(place, changes)
    assert [r["round"] for r in records if r["metric"] == "found_task"] == [4]
    assert distance(got, local(place, changes).vector.numpy()) < 1e-5


class Slow(Loop):
    """One node's update of the second round comes in the third."""

    late, held = 102, ()

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        if messages[0].metadata.group_id == "2":
            self.replies |= dict(self.held)
        for number, message in zip(ids, messages, strict=True):
            told = message.metadata
            if (told.dst_node_id, told.group_id, told.message_type) == (self.late, "1", TRAIN):
                self.held = ((number, self.replies.pop(number)),)
        return ids


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedtrack"])
def test_an_answer_after_the_deadline_counts_in_the_next_round(place, method):
    """Site 2's answer of the second round comes in the third, and it is not asked meanwhile.
    FedTrack's comes during an exchange that is not training, and waits for that."""
    changes = [f"method.name={method}", "stream.rounds=4"]

    class Planned(Late):
        def draw(self, cohort, seed, round_):
            return {client: int((client, round_) == (2, 1)) for client in cohort}

    settings = {"set": ";".join([*changes, "flower.late=1"]), "folder": str(place.parent / "run")}
    grid = Slow(client_app(place), place.parent, ("0", "1", "2"), settings)
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    records, _ = read_records(place.parent / "run")
    assert [r["value"] for r in records if r["metric"] == "clients"] == [3, 2, 3, 3, 3, 3, 3, 3]
    assert [r["round"] for r in records if r["metric"] == "late_updates"] == [2]
    asked = [m.metadata for m in grid.requests if m.metadata.dst_node_id == 102]
    trained = [told.group_id for told in asked if told.message_type == TRAIN]
    assert trained == ["0", "1", "3", "4", "5", "6", "7"]
    made = configs.experiment(configs.read(place, changes))
    expected = made.go(workers=1, grouping="single", late=Planned())
    assert distance(model(place.parent / "run"), expected.vector.numpy()) < 1e-5


def test_an_answer_that_comes_too_late_is_forgotten(place):
    """Then its site is asked again, and goes on from the state that counted."""

    def lose(site, message, reply):
        return None if (site, message.metadata.group_id) == ("2", "1") else reply

    changes = ["method.name=scaffold", "stream.rounds=4", "flower.late=1"]
    _, records, grid = federated(place, changes, lose)
    assert [r["value"] for r in records if r["metric"] == "clients"] == [3, 2, 2, 3, 3, 3, 3, 3]
    asked = [m.metadata.group_id for m in grid.requests if m.metadata.dst_node_id == 102]
    assert [group for group in asked if group] == ["0", "1", "3", "4", "5", "6", "7"]


def test_if_all_that_are_left_owe_answers_they_are_asked_anew(place):
    """Sites 0 and 1 go away while site 2 owes one: no round is lost."""

    class Leaving(Slow):
        def get_node_ids(self):
            gone = {100, 101} if self.held else set()
            return [node for node in self.sites if node not in gone]

    settings = {"set": "stream.rounds=4;flower.late=3;flower.sites=1"}
    settings["folder"] = str(place.parent / "run")
    grid = Leaving(client_app(place), place.parent, ("0", "1", "2"), settings)
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    records, _ = read_records(place.parent / "run")
    assert [r["value"] for r in records if r["metric"] == "clients"] == [3, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("sample", [None, 2])
def test_cflag_in_one_exchange(place, sample):
    """The local engine's model, half the messages of a round, and the model sent once."""
    changes = ["method.name=cflag", "method.lipschitz=1.0", "model.hidden=[100]", "stream.rounds=4"]
    changes += [f"sample={sample}"] if sample else []
    asked, sent = {}, {}
    for exchanges in (1, 2):
        own = [*changes, f"method.exchanges={exchanges}"]
        got, records, grid = federated(place, own, folder=f"of{exchanges}")
        expected = local(place, own)
        assert distance(got, expected.vector.numpy()) < 1e-5
        requests = [m for m in grid.requests if m.metadata.message_type != "query.hello"]
        asked[exchanges] = len(requests)
        sent[exchanges] = sum(size_of(m) for m in requests)
        for metric in ("mb_up", "mb_down"):
            ours = [r["value"] for r in records if r["metric"] == metric]
            theirs = [r["value"] for r in expected.records if r["metric"] == metric]
            assert ours == pytest.approx(theirs, rel=1e-4)
    clients = sample or 3
    assert asked[2] - asked[1] == 8 * clients  # rounds of both tasks
    assert sent[1] < 0.85 * sent[2]


def size_of(message: Message) -> int:
    """Bytes of the arrays in a message."""
    arrays = message.content.array_records.values()
    return sum(len(array.data) for record in arrays for array in record.values())


def test_clients_that_come_and_go_are_the_same(place):
    """A connected site that the stream has away is not asked; nobody at all is a lost round."""
    for method in ("scaffold", "ewc"):
        changes = [
            f"method.name={method}", "present.schedule.0=[[0, 2]]", "present.schedule.1=[[2, 3]]",
            "present.schedule.2=[[0, 1]]",
        ]  # fmt: skip
        got, records, _ = federated(place, changes, folder=method)
        expected = local(place, changes)
        assert distance(got, expected.vector.numpy()) < 1e-5
        assert any(r["metric"] == "lost_round" for r in records)
        assert any("no client was online" in text for text in expected.warnings)


STATEFUL = ["scaffold", "cfl_coreset", "cflag", "fedcurv"]


@pytest.mark.parametrize("method", STATEFUL)
def test_lost_replies_change_nothing(place, method):
    """Every third reply is lost on its way; the client had saved its state all the same."""
    changes = [f"method.name={method}", "local.lr=0.02"]
    whole, _, _ = federated(place, changes, folder="whole")
    count = itertools.count()

    def lose(site, message, reply):
        return None if next(count) % 3 == 1 else reply

    torn, records, _ = federated(place, [*changes, "flower.quorum=1.0"], lose, folder="torn")
    assert np.array_equal(torn, whole)
    assert not [r for r in records if r["metric"] == "dropped_updates"]


class Crash(Exception):
    pass


@pytest.mark.parametrize("method", STATEFUL)
def test_a_server_that_dies_anywhere_goes_on_to_the_same_model(place, method):
    changes = [f"method.name={method}", "local.lr=0.02"]
    whole, records, grid = federated(place, changes, folder="whole")
    asked = [m for m in grid.requests if m.metadata.message_type != "query.hello"]
    for dies in range(0, len(asked), 2):
        count = itertools.count()

        def die(site, message, reply, count=count, dies=dies):
            if next(count) == dies:
                raise Crash
            return reply

        name = f"dies{dies}"
        with pytest.raises(Crash):
            federated(place, changes, die, folder=name)
        torn, again, _ = federated(place, changes, folder=name)
        assert np.array_equal(torn, whole)
        timeless = [[r for r in log if r["metric"] != "seconds"] for log in (again, records)]
        assert timeless[0] == timeless[1]


PRIVATE = "plus=[{name='privacy', noise=3.0, where='central'}]"


def spent(records):
    """Releases behind the epsilon of each round."""
    known = {epsilon(3.0, k, 1e-5): k for k in range(1, 20)}
    return [known[r["value"]] for r in records if r["metric"] == "epsilon"]


def test_a_probe_that_was_answered_before_a_crash_counts(place):
    """The server dies when the clients have the mean of the first exchange: the repeat is another
    release of both exchanges, which were begun."""
    changes = ["method.name=fedtrack", "method.average=uniform", f"method.{PRIVATE}"]

    def die(site, message, reply):
        if (message.metadata.message_type, message.metadata.group_id) == ("train.train", "1"):
            raise Crash
        return reply

    with pytest.raises(Crash):
        federated(place, changes, die)
    _, records, _ = federated(place, changes)
    assert spent(records) == [2, 6, 8, 10]


def test_a_crash_between_aggregation_and_checkpoint_counts(place, monkeypatch):
    changes = ["method.name=fedavg", "method.average=uniform", f"method.{PRIVATE}"]
    save = RunFolder.save

    def die(folder, fed, *more):
        if fed.round == 2:
            raise Crash
        save(folder, fed, *more)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", die)
        with pytest.raises(Crash):
            federated(place, changes)
    _, records, _ = federated(place, changes)
    assert spent(records) == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("where", "releases"), [("central", [1, 2, 3, 4]), ("local", [1, 3, 4, 5])]
)
def test_a_site_that_is_asked_again_adds_other_noise(place, where, releases):
    """With local noise the upload that got lost may have been seen; with central noise only the
    server, which is trusted then."""
    private = PRIVATE.replace("central", where)
    changes = ["method.name=fedavg", "method.average=uniform", f"method.{private}"]
    lost = []

    def lose(site, message, reply):
        if (site, message.metadata.group_id) == ("1", "1") and not lost:
            lost.append(reply)
            return None
        return reply

    _, records, _ = federated(place, [*changes, "flower.quorum=1.0"], lose)
    assert spent(records) == releases


def test_a_run_never_takes_another_runs_states(place):
    """A run is stopped, another one of the same federation is made, then the first goes on."""
    changes = ["method.name=scaffold", "local.lr=0.02"]
    whole, _, _ = federated(place, changes, folder="whole")

    def die(site, message, reply):
        if message.metadata.group_id == "2":
            raise Crash
        return reply

    with pytest.raises(Crash):
        federated(place, changes, die, folder="torn")
    for name in ("b", "c"):
        federated(place, ["method.name=scaffold", "seed=9"], folder=name)
    torn, _, _ = federated(place, changes, folder="torn")
    assert np.array_equal(torn, whole)


def test_states_of_runs_long_past_are_forgotten(tmp_path):
    made = []
    for i in range(RUNS + 2):
        made.append(run_folder(tmp_path, f"{i:016x}"))
        os.utime(made[-1], (i, i))
    assert sorted(tmp_path.iterdir()) == made[2:]
    with pytest.raises(EverfedError, match="names its run"):
        run_folder(tmp_path, "../elsewhere")


def spoiled(reply, key, value):
    reply.content["uploads"] = ArrayRecord(dict(reply.content["uploads"]) | {key: Array(value)})
    return reply


def nan(reply):
    update = reply.content["uploads"]["update"].numpy().copy()
    update[3] = np.nan
    return spoiled(reply, "update", update)


def wrong_shape(reply):
    return spoiled(reply, "update", np.zeros(3, np.float32))


def huge(reply):
    return spoiled(reply, "0.dc", np.zeros(10**6, np.float32))


def wrong_type(reply):
    return spoiled(reply, "update", reply.content["uploads"]["update"].numpy().astype(np.float64))


def unknown_key(reply):
    return spoiled(reply, "7.evil", np.zeros(3, np.float32))


def liar(reply):
    update = reply.content["uploads"]["update"]
    other = Array(np.zeros(3, np.float32))
    update.data = other.data
    return reply


def old_round(reply):
    reply.content["site"]["round"] -= 1
    return reply


def weightless(reply):
    reply.content["numbers"] = MetricRecord({"weight": -1.0, "loss": 0.0})
    return reply


def garbage(reply):
    reply.content["uploads"]["update"].data = b"no numbers"
    return reply


def other_form(reply):
    reply.content["uploads"]["update"].stype = "pickle"
    return reply


def empty_handed(reply):
    del reply.content["uploads"]
    return reply


def zipped(reply):
    reply.content["uploads"]["update"].data = b"PK\x03\x04" + bytes(100)
    return reply


def larger_than_memory(reply):
    header = io.BytesIO()
    about = {"descr": "<f4", "fortran_order": False, "shape": (10**13,)}
    np.lib.format.write_array_header_1_0(header, about)
    reply.content["uploads"]["update"].data = header.getvalue() + bytes(100)
    return reply


def overflowing(reply):
    update = reply.content["uploads"]["update"].numpy().copy()
    update[3] = 1e36
    reply.content["numbers"] = MetricRecord({"weight": 1000.0, "loss": 0.0})
    return spoiled(reply, "update", update)


def heavier_than_floats(reply):
    reply.content["numbers"] = MetricRecord({"weight": 1e300, "loss": 0.0})
    return reply


def another_length(reply):
    return spoiled(reply, "0.dc", np.zeros(5, np.float32))


def without_a_part(reply):
    kept = dict(reply.content["uploads"])
    del kept["0.dc"]
    reply.content["uploads"] = ArrayRecord(kept)
    return reply


@pytest.mark.parametrize(
    "harm",
    [
        nan,
        wrong_shape,
        huge,
        wrong_type,
        unknown_key,
        liar,
        old_round,
        weightless,
        garbage,
        other_form,
        empty_handed,
        zipped,
        larger_than_memory,
        overflowing,
        heavier_than_floats,
        another_length,
        without_a_part,
    ],
)
def test_a_bad_reply_is_dropped_and_counted(place, harm):
    """Client 0 spoils all its replies: the run is that of the other two."""
    changes = ["method.name=scaffold", "method.average=samples", "local.lr=0.02"]

    def spoil(site, message, reply):
        return harm(reply) if site == "0" else reply

    got, records, _ = federated(place, changes, spoil)
    assert [r["value"] for r in records if r["metric"] == "dropped_updates"] == [1] * 4
    alone = [*changes, "flower.sites=2"]
    expected, _, _ = federated(place, alone, sites=("1", "2"), folder="alone")
    assert np.array_equal(got, expected)


def test_where_clients_count_alike_none_can_count_for_more(place):
    changes = ["method.name=fedavg", "method.average=uniform"]

    def spoil(site, message, reply):
        return heavier_than_floats(reply) if site == "0" else reply

    got, _, _ = federated(place, changes, spoil)
    expected, _, _ = federated(place, changes, folder="honest")
    assert np.array_equal(got, expected)


def test_a_late_answer_of_a_task_that_is_over_is_nobodys_row(place, monkeypatch):
    """Site 1's answer of the first task's last round comes in the second task."""

    rows = []

    def fold(self, s, update, r):
        rows.append((len(r["h"]), r.clients))
        return original(self, s, update, r)

    original = Taylor.fold
    monkeypatch.setattr(Taylor, "fold", fold)
    changes = "method.name=cfl_regularization;method.weights=auto;flower.late=1"
    settings = {"set": changes, "folder": str(place.parent / "run")}
    grid = Slow(client_app(place), place.parent, ("0", "1", "2"), settings)
    grid.late = 101
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    assert rows == [(3, (0, 1, 2)), (2, (0, 2)), (2, (0, 2)), (3, (0, 1, 2))]


def test_an_answer_may_be_as_late_as_rounds_are_apart(place):
    """A message must live until the last round in which its answer counts."""
    assert Terms(deadline=5, late=2).life == 15
    assert Terms(deadline=5, late=2, every=7).life == 19
    _, _, grid = federated(place, ["method.name=fedavg", "flower.late=2", "flower.every=1.1"])
    trained = [m.metadata.ttl for m in grid.requests if m.metadata.message_type == TRAIN]
    assert trained == pytest.approx([1 + 2 * 1.1] * 12)


def test_a_site_that_moves_to_another_node_and_back_is_found(place):
    """A node keeps its number when it is restarted, whoever is at it."""
    grid = Loop(client_app(place), place.parent, ("oslo", "berlin"))
    roll = Roll(grid, Terms(poll=0.001, deadline=1.0))
    assert len(roll.greet()) == 2
    grid.sites = {101: "berlin", 200: "oslo"}
    assert len(roll.greet()) == 2
    grid.sites = {101: "berlin", 100: "oslo"}
    assert len(roll.greet()) == 2
    assert set(roll.nodes.values()) == {100, 101}


def test_a_clock_that_is_set_back_deletes_no_new_state(tmp_path):
    store, ahead = Store(tmp_path), time.time() + 3600
    for token in range(12):
        store.save(token, {"x": torch.tensor([token])}, token - 1)
        assert store.load(token)["x"] == token
        if token < 8:
            for path in tmp_path.iterdir():
                os.utime(path, (ahead, ahead))
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_round_below_the_quorum_fails_loudly_and_can_be_resumed(place):
    changes = ["method.name=scaffold", "local.lr=0.02", "flower.quorum=0.8"]
    whole, _, _ = federated(place, changes, folder="whole")
    rounds = []

    def cut_off(site, message, reply):
        round_ = int(message.metadata.group_id)
        rounds.append(round_)
        return None if round_ == 2 and site != "0" else reply

    with pytest.raises(
        EverfedError, match=r"round 3, train: 1 of 3 clients.*no answer in 1 s.*3 are the quorum"
    ):
        federated(place, changes, cut_off)
    assert rounds.count(2) == 3 + 2 + 2  # asked, and those without an answer twice again
    torn, _, _ = federated(place, changes)
    assert np.array_equal(torn, whole)


def test_a_node_that_died_is_given_time_to_come_back(place):
    """The link answers for a dead node at once: that must not use up all the retries."""
    changes = ["method.name=scaffold", "flower.quorum=1.0", "flower.deadline=5"]
    whole, _, _ = federated(place, changes, folder="whole")

    class Mortal(Loop):
        looks = 0  # until the node is back

        def get_node_ids(self):
            self.looks -= 1
            return [node for node in self.sites if node != 101 or self.looks < 0]

        def push_messages(self, messages):
            sent = super().push_messages(messages)
            for message, number in zip(messages, sent, strict=True):
                if self.looks > 0 and message.metadata.dst_node_id == 101:
                    self.replies[number] = Message(Error(3, "Node Unavailable"), reply_to=message)
            return sent

    def die(site, message, reply):
        if (site, message.metadata.group_id) == ("0", "1"):
            grid.looks = 20
        return reply

    settings = {"set": ";".join(changes), "folder": str(place.parent / "torn")}
    grid = Mortal(client_app(place), place.parent, ("0", "1", "2"), settings, die)
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    assert np.array_equal(model(place.parent / "torn"), whole)


def test_a_reply_that_never_becomes_whole_holds_nobody_up(place):
    """Node 101 dies while it sends its reply of round 2: Flower's grid waits for the rest."""
    for_ever = threading.Event()

    class Slow(Loop):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if (reply.metadata.src_node_id, reply.metadata.group_id) == (101, "1"):
                    for_ever.wait()
            return replies

    settings = {"set": "flower.quorum=0.6", "folder": str(place.parent / "run")}
    grid = Slow(client_app(place), place.parent, ("0", "1", "2"), settings)
    try:
        server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    finally:
        for_ever.set()
    records, _ = read_records(place.parent / "run")
    assert [r["value"] for r in records if r["metric"] == "clients"] == [3, 2, 3, 3]


def test_a_reply_that_is_slow_to_come_in_is_pulled_once(place):
    """Flower answers a second pull with an error: the reply is with the first one."""
    pulled = []

    class Slow(Loop):
        def pull_messages(self, message_ids):
            ids = list(message_ids)
            twice = [m for m in self.requests if m.metadata.message_id in set(ids) & set(pulled)]
            replies = super().pull_messages(ids)
            pulled.extend(reply.metadata.reply_to_message_id for reply in replies)
            threading.Event().wait(0.05 if replies else 0)  # many looks long
            return replies + [Message(Error(1, "missing"), reply_to=m) for m in twice]

    settings = {"set": "flower.deadline=60", "folder": str(place.parent / "run")}
    grid = Slow(client_app(place), place.parent, ("0", "1", "2"), settings)
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    records, _ = read_records(place.parent / "run")
    assert [r["value"] for r in records if r["metric"] == "clients"] == [3, 3, 3, 3]


def test_too_few_sites_is_an_error_that_says_so(place):
    with pytest.raises(EverfedError, match="2 of at least 3 sites"):
        federated(place, ["flower.wait=0.05"], sites=("0", "2"))


def test_the_log_of_a_failed_run_ends_in_one_line(place):
    """Logged as Flower's process does it: our errors without traceback and exit code, bugs as ever."""
    out = io.StringIO()
    handler = ConsoleHandler(colored=False, stream=out)
    FLOWER_LOGGER.addHandler(handler)
    try:
        for wrong, error in (("flower.wait=0.05", EverfedError), ("local.epoch=1", EverfedError)):
            with pytest.raises(error) as caught:
                federated(place, [wrong], sites=("0", "2"))
            log(ERROR, "%s raised an exception", "ServerApp", exc_info=caught.value)
            log(ERROR, "Exit Code: 201\nAn unhandled exception occurred in the ServerApp.")
        *_, few, setting = out.getvalue().splitlines()
        assert few.endswith(
            "2 of at least 3 sites are connected after 0.05 s; the run can be resumed"
        )
        assert "unknown key local.epoch; did you mean 'epochs'?" in setting
        assert "Traceback" not in out.getvalue()
        log(ERROR, "ServerApp raised an exception", exc_info=ZeroDivisionError("a bug"))
        log(ERROR, "Exit Code: 201")
        assert "ZeroDivisionError: a bug" in out.getvalue()
        assert out.getvalue().endswith("Exit Code: 201\n")
    finally:
        FLOWER_LOGGER.removeHandler(handler)


def test_a_sites_own_words_reach_the_server(place):
    """Flower wraps an app's exception; the operator reads what the site has said."""

    class Wrapped(Loop):
        def push_messages(self, messages):
            sent = super().push_messages(messages)
            for message, number in zip(messages, sent, strict=True):
                if message.metadata.message_type != "query.hello":
                    text = "<class 'everfed.errors.EverfedError'>:<'the store's key is not one'>"
                    self.replies[number] = Message(Error(2, text), reply_to=message)
            return sent

    settings = {"set": "flower.retries=0", "folder": str(place.parent / "run")}
    grid = Wrapped(client_app(place), place.parent, ("0", "1", "2"), settings)
    with pytest.raises(EverfedError, match=r"client 0: the store's key is not one; client 1: "):
        server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))


def test_a_site_that_lost_its_disk_begins_anew(place, caplog):
    changes = ["method.name=cfl_coreset"]

    def lose(site, message, reply):
        if site == "1" and message.metadata.group_id == "1":
            for path in states(place.parent, "1"):
                path.unlink()
        return reply

    federated(place, changes, lose)
    assert "client 1 has lost its state and begins anew" in caplog.text


def test_states_are_bounded_and_can_be_encrypted(place, tmp_path):
    from cryptography.fernet import Fernet

    key = tmp_path / "key"
    key.write_bytes(Fernet.generate_key())
    changes = ["method.name=cfl_coreset", "method.size=5", "stream.rounds=6"]
    plain, _, _ = federated(place, changes, folder="plain")
    kept = states(tmp_path, "1")
    assert 1 <= len(kept) <= 7
    assert b"memory.x" in kept[-1].read_bytes()
    for path in kept:
        path.unlink()
    secret, _, _ = federated(place, changes, folder="secret", node_config={"store-key": str(key)})
    assert np.array_equal(plain, secret)
    kept = states(tmp_path, "1")
    assert b"memory.x" not in kept[-1].read_bytes()
    other = Store(kept[0].parent, Fernet.generate_key().decode())
    assert other.load(int(kept[-1].stem)) is None


def test_a_late_site_joins_and_one_leaves(place):
    """Site 2 comes after round 1, site 0 leaves after round 2: those that are there take part."""
    changes = ["method.name=fedavg", "flower.sites=2", "sample=3"]
    grids = []

    def come_and_go(site, message, reply):
        grid = grids[0]
        round_ = int(message.metadata.group_id)
        if round_ == 0:
            grid.sites[102] = "2"
        if round_ == 1:
            grid.sites.pop(100, None)
        return reply

    settings = {"set": ";".join(changes), "folder": str(place.parent / "run")}
    grids.append(Loop(client_app(place), place.parent, ("0", "1"), settings, come_and_go))
    server_app(place)(grids[0], Context(1, 0, {}, RecordDict(), settings))
    asked = [
        (int(m.metadata.group_id), m.metadata.dst_node_id)
        for m in grids[0].requests
        if m.metadata.message_type == "train.train"
    ]
    by_round = {r: sorted(node - 100 for at, node in asked if at == r) for r in range(4)}
    assert by_round == {0: [0, 1], 1: [0, 1, 2], 2: [1, 2], 3: [1, 2]}


def test_a_site_joins_although_rounds_last_longer_than_a_hello(place):
    """The answer of node 102 comes while the others train, and has expired when they are done."""

    class Busy(Loop):
        hello, working = "", False

        def get_node_ids(self):
            self.working = False
            if self.hello in self.replies:
                request = next(m for m in self.requests if m.metadata.message_id == self.hello)
                self.replies[self.hello] = Message(Error(1, "expired"), reply_to=request)
                self.hello = ""
            return super().get_node_ids()

        def push_messages(self, messages):
            sent = super().push_messages(messages)
            for message, number in zip(messages, sent, strict=True):
                self.working = message.metadata.message_type != "query.hello"
                if not self.working and message.metadata.dst_node_id == 102:
                    self.hello = number
            return sent

        def pull_messages(self, message_ids):
            return super().pull_messages(i for i in message_ids if i != self.hello or self.working)

    settings = {"set": "flower.sites=2", "folder": str(place.parent / "run")}
    grid = Busy(client_app(place), place.parent, ("0", "1", "2"), settings)
    server_app(place)(grid, Context(1, 0, {}, RecordDict(), settings))
    records, _ = read_records(place.parent / "run")
    assert [r["value"] for r in records if r["metric"] == "clients"] == [2, 3, 3, 3]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_systemd_units_are_sound(tmp_path):
    """In the template's place: settings that systemd knows, programs that are there."""
    deploy.new(tmp_path / "hospital")
    units = sorted((tmp_path / "hospital" / "deploy").glob("*.service"))
    for unit in units:
        unit.write_text(unit.read_text().replace("/opt/", f"{tmp_path}/"))
    words = ["systemd-analyze", "verify", *map(str, units)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (len(units), done.returncode, done.stderr) == (2, 0, "")


AT_SITES = """
[data]
name = "sites"
shape = [4]
classes = 2
[model]
name = "mlp"
hidden = [8]
[local]
lr = 0.5
[flower]
sites = 2
poll = 0.001
"""


def test_data_that_live_at_the_sites(tmp_path):
    """The server knows shape, classes and calendar; a site's samples change from round to round."""
    path = tmp_path / "everfed.toml"
    path.write_text(
        AT_SITES
        + """
[stream]
name = "sites"
clients = 2
rounds = [2, 2]
tasks = ["before", "after"]
[method]
name = "cfl_coreset"
size = 4
"""
    )
    seen = []

    def samples(site, round_):
        random = np.random.default_rng([round_, len(site)])
        if site == "berlin" and round_ == 3:
            return np.zeros((0, 4)), np.zeros(0)  # nothing new today
        seen.append((site, round_))
        x = random.standard_normal((6 + round_, 4)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(int)

    def tests():
        x = np.random.default_rng(9).standard_normal((50, 4)).astype(np.float32)
        return [(x, (x[:, 0] > 0).astype(int))]

    settings = {"folder": str(tmp_path / "run")}
    grid = Loop(client_app(path, samples), tmp_path, ("berlin", "oslo"), settings)
    server_app(path, tests)(grid, Context(1, 0, {}, RecordDict(), settings))
    records, _ = read_records(tmp_path / "run")
    assert {r["on"] for r in records if r["metric"] == "accuracy"} == {0}
    assert [r["value"] for r in records if r["metric"] == "empty_clients"] == [1]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["tasks"] == [
        "before",
        "after",
    ]
    kept = Store(states(tmp_path, "oslo")[0].parent).load(3 * 3 + 1)
    assert kept["memory.x"].shape == (8, 4)  # 4 of each task's last data set
    with pytest.raises(EverfedError, match="live at the sites"):
        configs.experiment(configs.read(path)).go()
    assert torch.equal(kept["memory.y"], (kept["memory.x"][:, 0] > 0).long())


CALENDAR = """
[stream]
name = "sites"
clients = 2
rounds = {rounds}
[method]
name = "special"
"""


def fresh(site, round_, size=20):
    """Other samples at every site in every round."""
    x = np.random.default_rng([round_, len(site)]).random((size, 4)).astype(np.float32)
    return x, (x[:, 0] > 0.5).astype(int)


def at_sites(home, rounds, folder, sites=("berlin", "oslo"), changes="", spoil=None, samples=fresh):
    """A run of SPECIAL on data that live at the sites."""
    path = home / "everfed.toml"
    path.write_text(AT_SITES + CALENDAR.format(rounds=rounds))
    settings = {"folder": str(home / folder), "set": changes}
    grid = Loop(client_app(path, samples), home, sites, settings, spoil)
    server_app(path)(grid, Context(1, 0, {}, RecordDict(), settings))
    return grid


def test_sites_find_the_day_on_which_their_scanners_were_replaced(tmp_path):
    """New samples in every round; from the fourth on, all of them 20 % brighter, with other labels."""

    def samples(site, round_):
        x, y = fresh(site, round_, 200)
        return (1.2 * x, (x[:, 1] > 0.5).astype(int)) if round_ >= 4 else (x, y)

    at_sites(tmp_path, [8], "run", changes="boundaries.by=clients", samples=samples)
    records, _ = read_records(tmp_path / "run")
    assert [r["round"] for r in records if r["metric"] == "found_task"] == [4]


def test_a_federation_that_has_come_to_its_end_is_prolonged(tmp_path):
    """By rounds of the last task, then by a task, whose anchor is the model at the other's end."""
    for rounds in ([2], [3], [3, 2]):
        at_sites(tmp_path, rounds, "grown")
    at_sites(tmp_path, [3, 2], "whole")
    assert np.array_equal(model(tmp_path / "grown"), model(tmp_path / "whole"))
    grown, whole = (
        [(r["round"], r["task"], r["value"]) for r in read_records(tmp_path / name)[0]
         if r["metric"] == "train_loss"]
        for name in ("grown", "whole")
    )  # fmt: skip
    assert grown == whole
    for other in ([2, 3], [3], [3, 1]):
        with pytest.raises(EverfedError, match="was run with another stream"):
            at_sites(tmp_path, other, "grown")


def test_sites_beyond_the_expected_count_in_scaffolds_mean(tmp_path, monkeypatch):
    """Of three sites two were expected; what the server has is the mean of the three's variates."""
    ends = []

    def fold(self, s, update, r):
        step, state = original(self, s, update, r)
        ends.append((r.population, state["c"]))
        return step, state

    original = Scaffold.fold
    monkeypatch.setattr(Scaffold, "fold", fold)
    at_sites(tmp_path, [2], "run", sites=("berlin", "oslo"), changes="method.name=scaffold")
    sites = ("berlin", "oslo", "rome")
    at_sites(tmp_path, [4], "run", sites=sites, changes="method.name=scaffold")
    assert [population for population, _ in ends] == [2, 2, 3, 3]
    own = [Store(states(tmp_path, site)[-1].parent).load(int(states(tmp_path, site)[-1].stem))
           for site in sites]  # fmt: skip
    mean = torch.stack([state["0/c"] for state in own]).mean(0)
    torch.testing.assert_close(ends[-1][1], mean)


def test_a_round_waits_for_its_time(tmp_path):
    began = []

    def note(site, message, reply):
        if message.metadata.message_type == TRAIN:
            began.append((site, time.monotonic()))
        return reply

    at_sites(tmp_path, [3], "run", sites=("0", "1"), changes="flower.every=0.3", spoil=note)
    times = [at for site, at in began if site == "0"]
    assert len(times) == 3
    # answers are given when they are asked for, at the earliest when the round begins
    assert times[2] - times[0] >= 0.3


def test_the_pace_outlives_a_restart(tmp_path, monkeypatch):
    """A round that was interrupted goes on at once; the next one waits for its time, and not for
    longer than it should if the clock was set back meanwhile."""

    class Clock:
        now = 1e9

        def time(self):
            return self.now

        monotonic = time

        def sleep(self, seconds):
            self.now += seconds

    clock, file = Clock(), tmp_path / "begun"
    monkeypatch.setattr("everfed.engines.terms.time", clock)
    for round_, began in ((5, 1e9), (5, 1e9), (6, 1e9 + 3600)):
        Pace(3600.0, file).wait(round_)
        assert clock.now == pytest.approx(began)
        os.utime(file, (clock.now, clock.now))
    os.utime(file, (1e10, 1e10))
    Pace(3600.0, file).wait(7)
    assert clock.now == pytest.approx(1e9 + 7200)


def test_sites_are_called_by_their_names(tmp_path, caplog):
    def spoil(site, message, reply):
        return garbage(reply) if site == "oslo" and reply.content.array_records else reply

    with caplog.at_level("WARNING", logger="flwr"):
        at_sites(tmp_path, [1], "run", spoil=spoil)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "dropped 1 update(s): site oslo:" in said
