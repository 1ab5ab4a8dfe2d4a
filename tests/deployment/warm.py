"""A `flower-superexec` that starts ClientApps and ServerApps by forking a process in which torch and
everfed are imported already. All else is Flower's own. Importing them takes more than all the rest of
a small round, so that a soak of many rounds would measure little else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec.executor import subprocess_executor

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {tests!r})
from deployment.warm import main
main()
"""


def install(folder: Path) -> None:
    """Write a `flower-superexec` into a folder that is to come first in PATH."""
    folder.mkdir()
    path = folder / "flower-superexec"
    tests = str(Path(__file__).resolve().parents[1])
    path.write_text(SCRIPT.format(python=sys.executable, tests=tests))
    path.chmod(0o755)


def main() -> None:
    """Flower's superexec, whose processes another one forks: it has no threads and no handlers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        serve(theirs)
    theirs.close()

    def start(words: list[str], **_: object) -> None:
        ours.send(json.dumps(words).encode())

    subprocess_executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=None)
    flower_superexec()


def serve(requests: socket.socket) -> None:
    """Fork an app for every request, until the superexec is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while raw := requests.recv(2**16):
        apps = load()
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.argv = json.loads(raw)
            name = sys.argv[0]
            Path("/proc/self/comm").write_text(name)  # found by it
            sys.exit(apps[name]())
    sys.exit()


def load() -> dict[str, Callable[[], None]]:
    """Flower's programs; not before the first request: a node that is refused gets none."""
    from flwr.superlink.cli import flwr_serverapp
    from flwr.supernode.cli import flwr_clientapp

    import everfed.engines.flower  # noqa: F401 - what the apps would import

    return {"flwr-clientapp": flwr_clientapp, "flwr-serverapp": flwr_serverapp}
