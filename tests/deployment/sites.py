"""An app whose data are at the sites and whose method has states there, and the model it ends in.

Sites are held, or made to send a bad reply, by files in the folder GATES of their environment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict

from deployment.federation import App, model
from everfed.engines.flower import client_app, server_app
from loop import Loop

CONFIG = """
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
    x = np.random.default_rng([round, int(site)]).standard_normal((20, 8)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    if "GATES" in os.environ:
        gates = Path(os.environ["GATES"])
        (gates / f"at-{site}-{round}").touch()
        while (gates / f"hold-{site}-{round}").exists():
            time.sleep(0.05)
        if (gates / f"spoil-{site}-{round}").exists():
            spoil((gates / f"spoil-{site}-{round}").read_text(), x)
    return x, y

def spoil(how, x):
    "This process's one reply: NaN, of the wrong shape, huge, or of an older round."
    from everfed.engines import flower
    from flwr.app import Array, ArrayRecord
    wrap_reply = flower.wrap_reply

    def spoiled(*args):
        content = wrap_reply(*args)
        if how == "old":
            content["site"]["round"] -= 1
        elif how != "nan":
            update = np.zeros({"shape": 3, "huge": 10**7}[how], np.float32)
            record = dict(content["uploads"]) | {"update": Array(update)}
            content["uploads"] = ArrayRecord(record)
        return content

    flower.wrap_reply = spoiled
    if how == "nan":
        x[0, 0] = np.nan

tests = None
"""


class Enough(Exception):
    """Stops a reference run early."""


def reference(
    app: App,
    folder: Path,
    *changes: str,
    clients: Sequence[str] = ("0", "1", "2"),
    missing: Collection[tuple[str, int]] = (),
    rounds: int | None = None,
) -> np.ndarray:
    """The model of the same app without processes, after `rounds` (None: all); `missing` are
    sites and rounds whose replies do not come in."""
    spec = importlib.util.spec_from_file_location("data", app.package / "data.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)

    def lose(site: str, message: Message, reply: Message) -> Message | None:
        at = int(message.metadata.group_id)
        if at == rounds:
            raise Enough
        return None if (site, at) in missing else reply

    short = ("flower.deadline=0.1", "flower.poll=0.001", "flower.retries=0")
    settings = {"set": ";".join((*changes, *short)), "folder": str(folder / "reference")}
    grid = Loop(client_app(app.config, data.samples), folder, clients, settings, lose)
    with suppress(Enough):
        server_app(app.config)(grid, Context(1, 0, {}, RecordDict(), settings))
    return model(folder / "reference")
