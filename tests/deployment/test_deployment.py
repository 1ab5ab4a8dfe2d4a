"""Real processes: a SuperLink with TLS and node keys, three SuperNodes, and what may happen to them."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs everfed[flower]")
if sys.platform != "linux":
    pytest.skip("processes are found in /proc", allow_module_level=True)

from deployment.federation import CONFIG, Federation, distance, wait_for  # noqa: E402

from everfed.folder import read_records  # noqa: E402

LONG = ("stream.rounds=3", "method.name=scaffold", "local.lr=0.02")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("federation")).start("0", "1", "2")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def undisturbed(federation):
    return federation.run("undisturbed", *LONG)


METHODS = {
    "fedavg": (), "scaffold": (), "fedeve": (), "special": (), "cfl_coreset": (),
    "cflag": ("method.lipschitz=1.0",),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_local_engines_model(federation, method):
    changes = (f"method.name={method}", *METHODS[method])
    assert distance(federation.run(method, *changes), federation.local(*changes)) < 1e-5


def test_a_key_that_is_not_registered_is_refused(federation):
    federation.start_node("stranger")
    process = federation.nodes.pop("stranger")
    assert process.wait(60) != 0
    assert "Failed to activate SuperNode" in federation.log("node-stranger")


def after_round(federation, place, count):
    wait_for(lambda: federation.rounds(place) >= count, f"round {count}", 120)


def test_a_node_killed_in_mid_round_comes_back(federation, undisturbed):
    place = federation.submit("node", *LONG)
    after_round(federation, place, 2)
    wait_for(lambda: federation.pids("flwr-clientapp"), "a client at work")
    federation.kill_node("1")
    time.sleep(2)
    federation.start_node("1")
    assert np.array_equal(federation.finish(place, 300), undisturbed)


def test_a_client_app_killed_is_asked_again(federation, undisturbed):
    place = federation.submit("clientapp", *LONG)
    after_round(federation, place, 1)
    wait_for(lambda: federation.pids("flwr-clientapp"), "a client at work")
    federation.kill("flwr-clientapp")
    assert np.array_equal(federation.finish(place, 300), undisturbed)


def test_a_server_app_killed_is_resumed(federation, undisturbed):
    place = federation.submit("server", *LONG)
    after_round(federation, place, 2)
    federation.kill("flwr-serverapp")
    wait_for(lambda: not federation.pids("flwr-serverapp"), "the server's end")
    federation.submit("server", *LONG)
    assert np.array_equal(federation.finish(place, 300), undisturbed)


def test_a_link_killed_is_restarted_and_the_run_resumed(federation, undisturbed):
    place = federation.submit("link", *LONG)
    after_round(federation, place, 2)
    federation.kill_link()
    federation.kill("flwr-serverapp")
    federation.start_link()
    federation.submit("link", *LONG)
    assert np.array_equal(federation.finish(place, 300), undisturbed)


def test_a_slow_site_misses_the_deadline_and_is_counted(tmp_path):
    """Site 2 sleeps longer than the deadline: the others go on without it."""
    data = """
import time
import numpy as np
def samples(site, round):
    if site == "2":
        time.sleep(60)
    x = np.random.default_rng([round, int(site)]).random((20, 4), dtype=np.float32)
    return x, (x[:, 0] > 0.5).astype(int)
tests = None
"""
    config = """
[data]
name = "sites"
shape = [4]
classes = 2
[stream]
name = "sites"
rounds = [2]
[flower]
sites = 3
quorum = 0.6
deadline = 20
"""
    federation = Federation(tmp_path, config, data).start("0", "1", "2")
    try:
        place = federation.submit("slow")
        federation.finish(place, 200)
    finally:
        federation.stop()
    records, _ = read_records(place)
    assert [r["value"] for r in records if r["metric"] == "dropped_updates"] == [1, 1]
    assert [r["value"] for r in records if r["metric"] == "clients"] == [2, 2]


def test_a_late_site_joins_and_one_leaves_for_good(tmp_path):
    config = CONFIG.replace("sites = 3", "sites = 2").replace("quorum = 1.0", "quorum = 0.5")
    config = config.replace("deadline = 60", "deadline = 25").replace("rounds = 1", "rounds = 4")
    federation = Federation(tmp_path, config).start("0", "1")
    try:
        place = federation.submit("change")
        after_round(federation, place, 1)
        federation.register("2")
        federation.start_node("2")
        wait_for(lambda: 3 in _clients(place), "the third site's first round", 120)
        federation.kill_node("0")
        federation.finish(place, 400)
    finally:
        federation.stop()
    counts = _clients(place)
    assert counts[0] == 2
    assert max(counts) == 3
    assert counts[-1] == 2


def _clients(place):
    return [r["value"] for r in read_records(place)[0] if r["metric"] == "clients"]
