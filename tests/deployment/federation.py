"""A real Flower federation on this machine: SuperLink, SuperNodes and runs as processes, with TLS and
node keys, as `everfed flower new` sets it up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from everfed import config as configs
from everfed import deploy, keys
from everfed.folder import RunFolder, read_records

BIN = Path(sys.executable).parent
CONFIG = """
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
deadline = 60
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(what: Callable[[], object], why: str, seconds: float = 90) -> object:
    """What is waited for, once it is there."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:g} s in vain: {why}")


class Federation:
    """Processes and files of one federation."""

    def __init__(self, folder: Path, config: str = CONFIG, data: str | None = None) -> None:
        self.folder, self.app, self.port = folder, folder / "app", free_port()
        deploy.new(self.app)
        self.config = self.app / "app" / "everfed.toml"
        self.config.write_text(config)
        if data is not None:
            (self.app / "app" / "data.py").write_text(data)
        keys.certificates(self.app / "keys", ["127.0.0.1", "localhost"])
        home = folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.app}/keys/ca.crt"\n'
        )
        more = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
                "FLWR_DISABLE_UPDATE_CHECK": "1", "EVERFED_STORE": str(folder / "sites"),
                "PATH": f"{BIN}:{os.environ['PATH']}"}  # fmt: skip
        self.env = os.environ | more
        self.link: subprocess.Popen[bytes] | None = None
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    # processes -------------------------------------------------------------------------------
    def _start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115 - the process writes to it
        command = [str(word) for word in words]
        return subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_link(self) -> None:
        before = self.log("link").count("Uvicorn running")
        script = self.app / "deploy" / "superlink.sh"
        self.link = self._start("link", script, "--host", "127.0.0.1", "--port", self.port)
        wait_for(lambda: self.log("link").count("Uvicorn running") > before, "the link's start")

    def register(self, site: str) -> None:
        keys.site(self.app / "keys", site)
        self.flwr("supernode", "register", self.app / "keys" / f"{site}.pub", "here")

    def start_node(self, site: str, *more: object, link: str | None = None) -> None:
        keys.site(self.app / "keys", site)
        script = self.app / "deploy" / "supernode.sh"
        address = link or f"127.0.0.1:{self.port}"
        words = (script, site, address, "--port", free_port(), *more)
        self.nodes[site] = self._start(f"node-{site}", *words)

    def start(self, *sites: str) -> Federation:
        """The link and these sites, registered."""
        self.start_link()
        for site in sites:
            self.register(site)
            self.start_node(site)
        return self

    def flwr(self, *words: object) -> str:
        command = [str(BIN / "flwr"), *map(str, words)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
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
            except OSError:
                continue
            named = any(Path(word.decode(errors="replace")).name == program for word in words[:2])
            if named and mine in environment:
                found.append(int(entry.name))
        return found

    def kill(self, *programs: str) -> None:
        for program in programs:
            for pid in self.pids(program):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def kill_node(self, site: str) -> None:
        """SIGKILL to a node and to all that it has started."""
        _kill_tree(self.nodes[site].pid)
        self.nodes.pop(site).wait()

    def kill_link(self) -> None:
        assert self.link is not None
        _kill_tree(self.link.pid)
        self.link.wait()

    def stop(self) -> None:
        for process in [*self.nodes.values(), *([self.link] if self.link else [])]:
            _kill_tree(process.pid)
            process.wait()
        self.kill("flwr-serverapp", "flwr-clientapp", "flower-superexec")

    # runs ------------------------------------------------------------------------------------
    def submit(self, name: str, *changes: str) -> Path:
        """Start a run (or go on with one); its folder."""
        place = self.folder / name
        settings = f'folder="{place}" set="{";".join(changes)}"'
        self.flwr("run", self.app, "here", "--run-config", settings)
        return place

    def finish(self, place: Path, seconds: float = 180) -> np.ndarray:
        """Wait for the run's end; its model."""

        def done() -> bool:
            return (place / "config.json").exists() and RunFolder(place).done()

        wait_for(done, f"the end of the run; the link said:\n{self.log('link')[-3000:]}", seconds)
        return model(place)

    def run(self, name: str, *changes: str) -> np.ndarray:
        return self.finish(self.submit(name, *changes))

    def rounds(self, place: Path) -> int:
        """Rounds that are recorded."""
        if not (place / "records.jsonl").exists():
            return 0
        return sum(r["metric"] == "seconds" for r in read_records(place)[0])

    def local(self, *changes: str) -> np.ndarray:
        """The model that the local engine trains."""
        made = configs.experiment(configs.read(self.config, list(changes)))
        return made.go(workers=1).vector.numpy()


def model(place: Path) -> np.ndarray:
    folder = RunFolder(place)
    (newest, *_) = folder._checkpoints()
    return folder._load(newest).fed.w.numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _kill_tree(pid: int) -> None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
    except (OSError, ProcessLookupError):
        return
    for child in children:
        _kill_tree(int(child))
