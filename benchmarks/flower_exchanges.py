"""Seconds a round of C-FLAG on Flower, with two exchanges and with one, in turn on the same nodes.

Real processes on this machine, as in flower_overhead.py; prints the table of docs/methods/cflag.md.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from flower_overhead import DATA, INPUTS, OURS, SAMPLES, SITES, WIDTHS, ours
from run import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from deployment.federation import App, Federation

SIZE = 1  # MB of the model


def made(federation: Federation, exchanges: int, rounds: int) -> App:
    """C-FLAG with a first task of one round, so that the others have a memory."""
    known = {"inputs": INPUTS, "samples": SAMPLES, "width": WIDTHS[SIZE]}
    method = f'name = "cflag"\nexchanges = {exchanges}\nmemory = {SAMPLES}'
    text = OURS.format(**known, rounds=f"1, {rounds}").replace('name = "fedavg"', method)
    return federation.app(f"of{exchanges}", text, DATA.format(**known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    seconds: dict[int, list[float]] = {2: [], 1: []}
    with tempfile.TemporaryDirectory(prefix="everfed-exchanges-") as folder:
        federation = Federation(Path(folder))
        try:
            federation.start(*SITES)
            apps = {k: made(federation, k, options.rounds) for k in seconds}
            for turn in range(options.repeats):
                for k, app in apps.items():
                    # the second task's first round still has the task's end before it
                    seconds[k] += ours(app, f"of{k}-{turn}", options.rounds + 1)[1:]
                    print(f"turn {turn + 1}, {k} exchange(s): {seconds[k]}", flush=True)
        finally:
            federation.stop()
    print(f"load average before the run {load:.1f}")
    for k, own in seconds.items():
        print(f"| {k} | {statistics.median(own):.1f} ({min(own):.1f}–{max(own):.1f}) |")


if __name__ == "__main__":
    main()
