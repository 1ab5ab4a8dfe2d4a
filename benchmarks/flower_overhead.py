"""Time of a round on Flower, everfed's FedAvg beside Flower's own, in turn on the same nodes.

Real processes on this machine with TLS and node keys; both do the same local work (one SGD step on
20 samples) with the same model. Writes the section "On Flower" of docs/benchmarks.md.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path

import flwr
from run import PAGE, ROOT, machine, on_flower

import everfed
from everfed.engines.terms import Terms

sys.path.insert(0, str(ROOT / "tests"))

from deployment.federation import App, Federation

INPUTS, SAMPLES = 500, 20
#: MB of a model -> width of its hidden layer
WIDTHS = {1: 497, 45: 22365}
SITES = ("0", "1")

OURS = """
[data]
name = "sites"
shape = [{inputs}]
classes = 2
[stream]
name = "sites"
clients = 2
rounds = [{rounds}]
[model]
name = "mlp"
hidden = [{width}]
[local]
lr = 0.05
[method]
name = "fedavg"
[flower]
sites = 2
quorum = 1.0
"""
DATA = """
import numpy as np

def samples(site, round):
    x = np.random.default_rng([round, int(site)]).random(({samples}, {inputs}), dtype=np.float32)
    return x, (x[:, 0] > 0.5).astype(int)

tests = None
"""
PLAIN_SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from {package}.client_app import model

app = ServerApp()

@app.main()
def main(grid, context):
    def ended(round, arrays):
        if round:
            with open(context.run_config["folder"], "a") as file:
                file.write("round\\n")

    FedAvg(fraction_evaluate=0.0).start(
        grid, ArrayRecord(model().state_dict()), num_rounds={rounds}, evaluate_fn=ended
    )
"""
PLAIN_CLIENT = """
import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def model():
    return torch.nn.Sequential(
        torch.nn.Linear({inputs}, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 2)
    )

@app.train()
def train(message, context):
    torch.set_num_threads(1)
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x = torch.from_numpy(np.random.default_rng(0).random(({samples}, {inputs}), dtype=np.float32))
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    torch.nn.functional.cross_entropy(net(x), (x[:, 0] > 0.5).long()).backward()
    optimizer.step()
    numbers = MetricRecord({{"num-examples": len(x)}})
    content = {{"arrays": ArrayRecord(net.state_dict()), "metrics": numbers}}
    return Message(RecordDict(content), reply_to=message)
"""
SECTION = """## On Flower

Made by `python benchmarks/flower_overhead.py --rounds {rounds} --repeats {repeats}` on {date}:
seconds a round of a SuperLink and two SuperNodes on one machine (TLS, node keys), everfed's FedAvg
and Flower's own strategy in turn on the same nodes; of every run the first round does not count.
Both take one SGD step on {samples} samples with the same model. The median, in brackets the
smallest and the largest of {counted} rounds.

Machine: {machine}, everfed {everfed}, Flower {flower}; load average before the run {load:.1f}.

| model | everfed | Flower's FedAvg | ratio |
|---|---:|---:|---:|
{rows}

Both start a Python process with torch at every site in every round. Flower's own strategy looks for
answers every 3 s, everfed every {poll:g} s (`poll`).
"""


def intervals(count: Callable[[], int], rounds: int) -> list[float]:
    """Seconds from each round's end to the next one's; the first round is left out."""
    ends: list[float] = []
    until = time.monotonic() + 600
    while len(ends) < rounds:
        ends += [time.perf_counter()] * (count() - len(ends))
        if time.monotonic() > until:
            sys.exit("the federation does not come to an end")
        time.sleep(0.02)
    return [b - a for a, b in pairwise(ends)]


def lines(path: Path, word: str) -> int:
    return path.read_text().count(word) if path.exists() else 0


def ours(app: App, name: str, rounds: int) -> list[float]:
    run = app.submit(name)
    records = run.place / "records.jsonl"
    return intervals(lambda: lines(records, '"seconds"'), rounds)


def plain(app: App, name: str, rounds: int) -> list[float]:
    run = app.submit(name)
    run.place.parent.mkdir(exist_ok=True)
    return intervals(lambda: lines(run.place, "round"), rounds)


def apps(federation: Federation, size: int, rounds: int) -> tuple[App, App]:
    known = {"inputs": INPUTS, "samples": SAMPLES, "width": WIDTHS[size], "rounds": rounds + 1}
    own = federation.app(f"ours{size}", OURS.format(**known), DATA.format(**known))
    other = federation.app(f"plain{size}", "")
    known["package"] = other.package.name
    (other.package / "server_app.py").write_text(PLAIN_SERVER.format(**known))
    (other.package / "client_app.py").write_text(PLAIN_CLIENT.format(**known))
    return own, other


def section(
    times: dict[int, tuple[list[float], list[float]]], rounds: int, repeats: int, load: float
) -> str:
    """The page's section."""

    def cell(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"

    rows = [
        f"| {size} MB | {cell(own)} | {cell(other)} | "
        f"{statistics.median(own) / statistics.median(other):.2f} |"
        for size, (own, other) in times.items()
    ]
    return SECTION.format(
        date=date.today(), repeats=repeats, rounds=rounds, counted=repeats * rounds,
        samples=SAMPLES, machine=machine(), everfed=everfed.__version__, flower=flwr.__version__,
        load=load, rows="\n".join(rows), poll=Terms().poll,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in WIDTHS}
    with tempfile.TemporaryDirectory(prefix="everfed-overhead-") as folder:
        federation = Federation(Path(folder))
        try:
            federation.start(*SITES)
            made = {size: apps(federation, size, options.rounds) for size in WIDTHS}
            for turn in range(options.repeats):
                for size, (own, other) in made.items():
                    times[size][0].extend(ours(own, f"ours{size}-{turn}", options.rounds + 1))
                    times[size][1].extend(plain(other, f"plain{size}-{turn}", options.rounds + 1))
                    print(f"turn {turn + 1}, {size} MB: {times[size]}", flush=True)
        finally:
            federation.stop()
    text = section(times, options.rounds, options.repeats, load)
    page = PAGE.read_text().replace(on_flower(), "")
    PAGE.write_text(f"{page.rstrip()}\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
