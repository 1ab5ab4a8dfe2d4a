"""A real Flower federation on this machine: SuperLink, SuperNodes and runs as processes, with TLS and
node keys, as `everfed flower new` sets it up. Like under systemd, what dies is started again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from deployment import warm
from everfed import config as configs
from everfed import deploy, keys
from everfed.folder import RunFolder
from everfed.records import read_records

BIN = Path(sys.executable).parent
Found = TypeVar("Found")
#: what systemd's Restart=always does
ALWAYS = 'while :; do "$@"; sleep 3; done'
#: a network of two addresses: this machine's, and that of a node with a network of its own;
#: another one in another process, as tests may run twice on one machine
NETWORK = [f"10.213.{os.getpid() % 256}.{number}" for number in (1, 2)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(
    what: Callable[[], Found], why: str | Callable[[], str], seconds: float = 180
) -> Found:
    """What is waited for, once it is there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:g} s in vain: {why if isinstance(why, str) else why()}")


class Federation:
    """Processes and files of one federation; `warmed`: its apps start without imports."""

    def __init__(self, folder: Path, warmed: bool = False) -> None:
        self.folder, self.port = folder, free_port()
        self.home = App(self, folder / "home", "")  # its scripts and keys serve all apps
        self.keys = self.home.folder / "keys"
        keys.certificates(self.keys, ["127.0.0.1", NETWORK[0]])
        flwr = folder / "flwr"
        flwr.mkdir()
        (flwr / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys}/ca.crt"\n'
        )
        more = {"FLWR_HOME": str(flwr), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
                "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
                "EVERFED_STORE": str(folder / "states"),
                "PATH": f"{BIN}:{os.environ['PATH']}"}  # fmt: skip
        self.env = os.environ | more
        if warmed:
            warm.install(folder / "bin")
            self.env["PATH"] = f"{folder / 'bin'}:{self.env['PATH']}"
        self.link: subprocess.Popen[bytes] | None = None
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    # processes -------------------------------------------------------------------------------
    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", ALWAYS, "sh", *map(str, words)]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_link(self, host: str = "127.0.0.1") -> None:
        script = self.home.folder / "deploy" / "superlink.sh"
        self.link = self._start("link", script, "--host", host, "--port", self.port)
        self.wait_link(0)

    def wait_link(self, before: int) -> None:
        """Until the link has started once more than `before` times."""
        wait_for(lambda: self.log("link").count("Uvicorn running") > before, "the link's start")

    def register(self, site: str) -> None:
        keys.site(self.keys, site)
        self.flwr("supernode", "register", self.keys / f"{site}.pub", "here")

    def start_node(self, site: str, network: Network | None = None) -> None:
        """A site's node: on this network, or on one of its own."""
        keys.site(self.keys, site)
        script = self.home.folder / "deploy" / "supernode.sh"
        host = NETWORK[0] if network else "127.0.0.1"
        inside = network.inside if network else ()
        words = (*inside, script, site, f"{host}:{self.port}", "--port", free_port())
        self.nodes[site] = self._start(f"node-{site}", *words)

    def connected(self, site: str) -> int:
        """How often a site's node was taken by the link."""
        return self.log(f"node-{site}").count("SuperNode ID")

    def number(self, site: str) -> str:
        """The number that the link knows a site's node by."""
        return re.findall(r"SuperNode ID: (\d+)", self.log(f"node-{site}"))[-1]

    def online(self, site: str) -> bool:
        """Whether the link has heard from a site's node lately."""
        known = json.loads(self.flwr("supernode", "list", "here", "--format", "json"))["nodes"]
        (status,) = (node["status"] for node in known if node["node-id"] == self.number(site))
        return bool(status == "online")

    def start(self, *sites: str, network: Network | None = None) -> Federation:
        """The link and these sites, registered; the last one on a network of its own."""
        # asked to end, end the processes too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        self.start_link("0.0.0.0" if network else "127.0.0.1")
        for site in sites:
            self.register(site)
            self.start_node(site, network if site == sites[-1] else None)
        return self

    def app(self, name: str, config: str, data: str | None = None) -> App:
        return App(self, self.folder / name, config, data)

    def flwr(self, *words: object) -> str:
        command = [str(BIN / "flwr"), *map(str, words)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pids(self, program: str) -> list[int]:
        """This federation's processes of one program (flwr-serverapp, flwr-clientapp)."""
        found = []
        mine = f"FLWR_HOME={self.env['FLWR_HOME']}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes()
                names = {(entry / "comm").read_text().strip()}
            except OSError:
                continue
            names |= {Path(word.decode(errors="replace")).name for word in words[:2]}
            if program in names and mine in environment:
                found.append(int(entry.name))
        return found

    def kill_server_app(self) -> None:
        for pid in self.pids("flwr-serverapp"):
            _kill(pid)
        wait_for(lambda: not self.pids("flwr-serverapp"), "the ServerApp's end")

    def kill_client_app(self, site: str) -> bool:
        """SIGKILL to the ClientApp that a site's node has started; whether there was one."""
        mine = set(_below(self.nodes[site].pid)) & set(self.pids("flwr-clientapp"))
        for pid in mine:
            _kill(pid)
        return bool(mine)

    def kill_node(self, site: str) -> None:
        """SIGKILL to a node and to all that it has started; it is started again."""
        _kill_below(self.nodes[site].pid)

    def remove_node(self, site: str) -> None:
        """SIGKILL to a node that does not come back."""
        process = self.nodes.pop(site)
        _kill(process.pid, *_below(process.pid))
        process.wait()

    def kill_link(self) -> None:
        """SIGKILL to the link, the ServerApp included; the link is started again."""
        assert self.link is not None
        before = self.log("link").count("Uvicorn running")
        _kill_below(self.link.pid)
        self.wait_link(before)

    def stop(self) -> None:
        for process in [*self.nodes.values(), *([self.link] if self.link else [])]:
            _kill(process.pid, *_below(process.pid))
            process.wait()
        for program in ("flwr-serverapp", "flwr-clientapp", "flower-superexec"):
            _kill(*self.pids(program))


@dataclass
class App:
    """A Flower app as `everfed flower new` writes it, with another configuration and data."""

    federation: Federation
    folder: Path
    settings: str
    data: str | None = None

    def __post_init__(self) -> None:
        deploy.new(self.folder)
        self.package = self.folder / self.folder.name
        self.config = self.package / "everfed.toml"
        self.config.write_text(self.settings)
        if self.data is not None:
            (self.package / "data.py").write_text(self.data)

    def submit(self, name: str, *changes: str) -> Run:
        """Start a run, or go on with the one of that name."""
        place = self.federation.folder / "runs" / name
        settings = f'folder="{place}" set="{";".join(changes)}"'
        words = ("run", self.folder, "here", "--run-config", settings, "--format", "json")
        said = json.loads(self.federation.flwr(*words))
        return Run(self.federation, place, str(said["run-id"]))

    def local(self, *changes: str) -> np.ndarray:
        """The model that the local engine trains."""
        made = configs.experiment(configs.read(self.config, list(changes)))
        return made.go(workers=1).vector.numpy()


@dataclass
class Run:
    """A run that was submitted."""

    federation: Federation
    place: Path
    number: str

    def finish(self, seconds: float = 300) -> np.ndarray:
        """Wait for the run's end; its model."""
        wait_for(lambda: self.done() or self.ended(), self._why("the end of the run"), seconds)
        assert self.done(), self._why("the run has ended too early")()
        return model(self.place)

    def _why(self, what: str) -> Callable[[], str]:
        return lambda: f"{what}; it said:\n{self.said()}"

    def began(self) -> bool:
        """Whether there is or was a ServerApp."""
        return self._logged("Started task")

    def ended(self) -> bool:
        """Whether the ServerApp has come to an end of its own, good or bad."""
        return self._logged("Finished task")

    def _logged(self, what: str) -> bool:
        lines = self.federation.log("link").splitlines()
        return any(what in line and self.number in line for line in lines)

    def done(self) -> bool:
        return (self.place / "config.json").exists() and RunFolder(self.place).done()

    def said(self) -> str:
        """What the ServerApp has logged, as an operator reads it."""
        return self.federation.flwr("log", self.number, "here", "--show")

    def status(self) -> str:
        said = json.loads(
            self.federation.flwr("list", "here", "--run-id", self.number, "--format", "json")
        )
        return str(said["runs"][0]["status"])

    def values(self, metric: str) -> list[float]:
        """A metric of every round that has it; none before the first round."""
        if not (self.place / "records.jsonl").exists():
            return []
        return [r["value"] for r in read_records(self.place)[0] if r["metric"] == metric]

    def rounds(self) -> int:
        """Rounds that are recorded."""
        return len(self.values("seconds"))

    def wait_rounds(self, count: int, seconds: float = 300) -> None:
        wait_for(lambda: self.rounds() >= count, self._why(f"round {count}"), seconds)


class Network:
    """A network of its own for one node: a namespace, joined to this machine by a cable."""

    def __init__(self) -> None:
        self.name = f"everfed-{os.getpid()}"
        self.cable = f"ef{os.getpid()}"
        self.inside = ("ip", "netns", "exec", self.name)
        far = f"{self.cable}b"
        try:
            for words in (
                ("netns", "add", self.name),
                ("link", "add", self.cable, "type", "veth", "peer", "name", far),
                ("link", "set", far, "netns", self.name),
                ("addr", "add", f"{NETWORK[0]}/30", "dev", self.cable),
                ("link", "set", self.cable, "up"),
                ("-n", self.name, "addr", "add", f"{NETWORK[1]}/30", "dev", far),
                ("-n", self.name, "link", "set", far, "up"),
                ("-n", self.name, "link", "set", "lo", "up"),
            ):
                _ip(*words)
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            raise

    def cut(self) -> None:
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "up")

    def remove(self) -> None:
        for words in (("link", "del", self.cable), ("netns", "del", self.name)):
            if shutil.which("ip"):
                subprocess.run(["ip", *words], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def model(place: Path) -> np.ndarray:
    """The model of a run's newest checkpoint."""
    folder = RunFolder(place)
    (newest, *_) = folder._checkpoints()
    return folder._load(newest).fed.w.numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in (int(child), *_below(int(child)))]


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _kill_below(pid: int) -> None:
    _kill(*_below(pid))
