"""Real processes: a SuperLink with TLS and node keys, three SuperNodes, and what may happen to them.

All tests share one federation, so that each also begins where the one before has left it. Sites are
held at gates (files) where a test needs to know what they are doing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs everfed[flower]")
if sys.platform != "linux":
    pytest.skip("processes are found in /proc", allow_module_level=True)

from deployment.federation import Federation, Network, distance, model, wait_for  # noqa: E402
from flwr.app import Context, RecordDict  # noqa: E402
from loop import Loop  # noqa: E402

from everfed.engines.flower import client_app, server_app  # noqa: E402

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

#: data at the sites and a method with states there
SITES = """
[data]
name = "sites"
shape = [8]
classes = 2
[stream]
name = "sites"
clients = 3
rounds = [4]
[model]
name = "mlp"
hidden = [6]
[local]
lr = 0.05
[method]
name = "scaffold"
[flower]
sites = 3
quorum = 1.0
deadline = 90
"""

DATA = """
import os, time
from pathlib import Path
import numpy as np

def samples(site, round):
    if "GATES" in os.environ:
        gates = Path(os.environ["GATES"])
        (gates / f"at-{site}-{round}").touch()
        while (gates / f"hold-{site}-{round}").exists():
            time.sleep(0.05)
    random = np.random.default_rng([round, int(site)])
    x = random.standard_normal((20, 8)).astype(np.float32)
    if "site" == site:
        x[0, 0] = np.nan
    return x, (x[:, 0] > 0).astype(int)

tests = None
"""


class Gates:
    """Where sites wait: a site that is held in a round begins it and does not go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hold(self, site: str, round_: int) -> None:
        (self.folder / f"hold-{site}-{round_}").touch()

    def wait(self, site: str, round_: int) -> None:
        place = self.folder / f"at-{site}-{round_}"
        wait_for(place.exists, f"site {site} in round {round_}")

    def open(self) -> None:
        for path in self.folder.iterdir():
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
    made = Gates(federation.folder / "gates")
    made.open()
    yield made
    made.open()


@pytest.fixture(scope="module")
def sites(federation):
    return federation.app("sites", SITES, DATA)


@pytest.fixture
def expected(sites, tmp_path):
    """The same app without processes: the model when only some clients' replies come in."""
    spec = importlib.util.spec_from_file_location("data", sites.package / "data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)

    def run(*changes, clients=("0", "1", "2"), missing=()):
        def lose(site, message, reply):
            return None if (site, int(message.metadata.group_id)) in missing else reply

        short = ("flower.deadline=0.1", "flower.poll=0.001", "flower.retries=0")
        settings = {"set": ";".join((*changes, *short)), "folder": str(tmp_path / "run")}
        grid = Loop(client_app(sites.config, data.samples), tmp_path, clients, settings, lose)
        server_app(sites.config)(grid, Context(1, 0, {}, RecordDict(), settings))
        return model(tmp_path / "run")

    return run


METHODS = {
    "fedavg": (), "scaffold": (), "fedeve": (), "special": (), "cfl_coreset": (),
    "cflag": ("method.lipschitz=1.0",),
}  # fmt: skip


@pytest.fixture(scope="module")
def methods(federation):
    """All of them at once on one federation, told apart at the sites by their names."""
    app = federation.app("rehearsal", REHEARSAL)
    changes = {
        name: (f"method.name={name}", f"flower.name={name}", *more)
        for name, more in METHODS.items()
    }
    return app, {name: (app.submit(name, *own), own) for name, own in changes.items()}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_local_engines_model(methods, method):
    app, runs = methods
    run, changes = runs[method]
    assert distance(run.finish(600), app.local(*changes)) < 1e-5


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
