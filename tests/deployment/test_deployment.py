"""Real processes: a SuperLink with TLS and node keys, three SuperNodes, and what may happen to them.

All tests share one federation, so that each also begins where the one before has left it. Sites are
held at gates (files) where a test needs to know what they are doing.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs everfed[flower]")
if sys.platform != "linux":
    pytest.skip("processes are found in /proc", allow_module_level=True)

from deployment.federation import Federation, Network, distance, wait_for
from deployment.sites import CONFIG, DATA, reference

REHEARSAL = """
seed = 3
[data]
name = "digits"
domains = ["plain", "inverted"]
[stream]
name = "domains"
clients = 3
alpha = 1.0
rounds = 1
[model]
name = "mlp"
hidden = [12]
[local]
lr = 0.05
batch = 64
[flower]
sites = 3
quorum = 1.0
"""


class Gates:
    """A site that is held in a round begins it and does not go on; one that is spoiled sends what
    cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hold(self, site: str, round_: int) -> None:
        (self.folder / f"hold-{site}-{round_}").touch()

    def spoil(self, site: str, round_: int, how: str) -> None:
        (self.folder / f"spoil-{site}-{round_}").write_text(how)

    def wait(self, site: str, round_: int) -> None:
        place = self.folder / f"at-{site}-{round_}"
        wait_for(place.exists, f"site {site} in round {round_}")

    def release(self, site: str, round_: int) -> None:
        (self.folder / f"hold-{site}-{round_}").unlink()

    def passed(self, site: str, round_: int) -> bool:
        return (self.folder / f"at-{site}-{round_}").exists()

    def open(self) -> None:
        for path in self.folder.glob("hold-*"):
            path.unlink()


@pytest.fixture(scope="module")
def network():
    try:
        made = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        yield getattr(error, "stderr", None) or str(error)
        return
    yield made
    made.remove()


@pytest.fixture(scope="module")
def federation(tmp_path_factory, network):
    folder = tmp_path_factory.mktemp("federation")
    made = Federation(folder)
    (folder / "gates").mkdir()
    made.env["GATES"] = str(folder / "gates")
    try:
        yield made.start("0", "1", "2", network=network if isinstance(network, Network) else None)
    finally:
        made.stop()


@pytest.fixture
def gates(federation):
    folder = federation.folder / "gates"
    for path in folder.iterdir():
        path.unlink()
    made = Gates(folder)
    yield made
    made.open()


@pytest.fixture(scope="module")
def sites(federation):
    return federation.app("sites", CONFIG, DATA)


@pytest.fixture
def expected(sites, tmp_path):
    return partial(reference, sites, tmp_path)


METHODS = {
    "fedavg": (), "scaffold": (), "fedeve": (), "special": (), "cfl_coreset": (),
    "cflag": ("method.lipschitz=1.0",),
}  # fmt: skip


@pytest.fixture(scope="module")
def rehearsal(federation):
    return federation.app("rehearsal", REHEARSAL)


@pytest.fixture(scope="module")
def methods(rehearsal):
    """All of them at once on one federation: sites keep their states apart."""
    changes = {name: (f"method.name={name}", *more) for name, more in METHODS.items()}
    return {name: (rehearsal.submit(name, *own), own) for name, own in changes.items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_local_engines_model(rehearsal, methods, method):
    run, changes = methods[method]
    assert distance(run.finish(600), rehearsal.local(*changes)) < 1e-5


def test_masked_sums_give_the_same_models(rehearsal):
    """Under SecAgg+ the server sees sums only; uploads are rounded to 2^-21 of their range."""
    more = ("method.average=uniform", "flower.secure=true", "data.domains=['plain']")
    changes = {name: (f"method.name={name}", *more) for name in ("fedavg", "special", "fedeve")}
    runs = {name: rehearsal.submit(f"masked-{name}", *own) for name, own in changes.items()}
    for name, run in runs.items():
        assert distance(run.finish(600), rehearsal.local(*changes[name])) < 2e-5, name


def test_a_key_that_is_not_registered_is_refused(federation):
    federation.start_node("stranger")
    refused = "Failed to activate SuperNode"
    wait_for(lambda: refused in federation.log("node-stranger"), "the refusal")
    federation.remove_node("stranger")
    assert not federation.connected("stranger")


TWO = ("stream.rounds=[2]",)


def test_a_node_killed_in_mid_round_comes_back(federation, sites, gates, expected):
    gates.hold("1", 1)
    before = federation.connected("1")
    run = sites.submit("node", *TWO)
    gates.wait("1", 1)
    federation.kill_node("1")
    gates.open()
    wait_for(lambda: federation.connected("1") > before, "the node's return")
    assert np.array_equal(run.finish(), expected(*TWO))


def test_a_client_app_killed_is_asked_again(federation, sites, gates, expected):
    gates.hold("1", 1)
    run = sites.submit("clientapp", *TWO)
    gates.wait("1", 1)
    assert federation.kill_client_app("1")
    gates.open()
    assert np.array_equal(run.finish(), expected(*TWO))


def test_a_server_app_killed_is_resumed(federation, sites, gates, expected):
    gates.hold("1", 1)
    run = sites.submit("server", *TWO)
    gates.wait("1", 1)
    federation.kill_server_app()
    gates.open()
    run = sites.submit("server", *TWO)
    assert np.array_equal(run.finish(), expected(*TWO))


def test_a_link_killed_is_started_again_and_the_run_resumed(federation, sites, gates, expected):
    gates.hold("1", 1)
    sites.submit("link", *TWO)
    gates.wait("1", 1)
    federation.kill_link()
    gates.open()
    run = sites.submit("link", *TWO)
    assert np.array_equal(run.finish(), expected(*TWO))


def test_a_slow_site_and_a_bad_one_are_left_out_and_counted(sites, gates, expected):
    """Site 2 misses the first round's deadline; site 1 sends NaN in the second, then an update of
    the wrong shape, a huge one, and one of an older round."""
    changes = ("stream.rounds=[5]", "flower.quorum=0.6", "flower.deadline=60")
    gates.hold("2", 0)
    for k, how in enumerate(("nan", "shape", "huge", "old"), 1):
        gates.spoil("1", k, how)
    run = sites.submit("slow", *changes)
    run.wait_rounds(1)
    gates.release("2", 0)
    got = run.finish()
    assert run.values("clients") == [2] * 5
    assert run.values("dropped_updates") == [1] * 5
    missing = {("2", 0), *(("1", k) for k in range(1, 5))}
    assert np.array_equal(got, expected(*changes, missing=missing))


def test_a_round_below_the_quorum_fails_loudly_and_is_resumed(sites, gates, expected):
    gates.hold("1", 1)
    gates.hold("2", 1)
    run = sites.submit("quorum", *TWO, "flower.deadline=60", "flower.retries=0")
    wait_for(run.ended, "the run's end")
    *_, last = run.said().strip().splitlines()
    assert "round 2, train: 1 of 3 clients have answered" in last
    assert last.endswith("3 are the quorum; the run can be resumed")
    assert "Traceback" not in run.said()
    assert "failed" in run.status()
    gates.open()
    assert np.array_equal(sites.submit("quorum", *TWO).finish(), expected(*TWO))


def test_a_node_cut_off_for_some_rounds_takes_part_again(
    network, federation, sites, gates, expected
):
    if not isinstance(network, Network):
        pytest.skip(f"no network namespaces here (root and iproute2 are needed): {network}")
    changes = (
        "stream.rounds=[5]", "flower.quorum=0.6", "flower.sites=2", "flower.deadline=90",
    )  # fmt: skip
    gates.hold("0", 0)
    gates.hold("0", 3)
    run = sites.submit("cut", *changes)
    wait_for(lambda: "client 2 is here" in run.said(), "the hello of site 2")
    gates.release("0", 0)
    run.wait_rounds(2)
    network.cut()
    try:
        gates.wait("0", 3)
    finally:
        network.mend()
    wait_for(lambda: federation.online("2"), "the node's return")
    gates.open()
    got = run.finish()
    counts = run.values("clients")
    assert (counts[1], counts[2], counts[4]) == (3, 2, 3)
    # who had not said hello before the first round; whom the cut has kept from answering
    missing = {(site, 0) for site in "012" if not gates.passed(site, 0)}
    missing |= {("2", at) for at, count in enumerate(counts[1:], 1) if count == 2}
    assert np.array_equal(got, expected(*changes, missing=missing))


def test_a_late_site_joins_and_one_leaves_for_good(federation, sites, gates, expected):
    changes = ("stream.clients=4", "flower.quorum=0.6", "flower.deadline=90")
    gates.hold("0", 0)
    gates.hold("0", 1)
    gates.hold("3", 3)
    run = sites.submit("change", *changes)
    gates.wait("0", 0)
    federation.register("3")
    federation.start_node("3")
    wait_for(lambda: federation.connected("3"), "the new node")
    gates.release("0", 0)
    wait_for(lambda: "client 3 is here" in run.said(), "the new site's hello")
    gates.release("0", 1)
    gates.wait("3", 3)
    federation.remove_node("3")
    got = run.finish()
    federation.flwr("supernode", "unregister", federation.number("3"), "here")
    counts = run.values("clients")
    assert (counts[0], counts[2], counts[3]) == (3, 4, 3)
    missing = {("3", at) for at, count in enumerate(counts) if count == 3}
    assert np.array_equal(got, expected(*changes, clients=("0", "1", "2", "3"), missing=missing))
