"""What C-FLAG sends on Flower and how long it takes, with two exchanges a round and with one.

Three sites through Flower's real messages in one process, in turn; a model of 0.6 MB, two tasks of
five rounds. Prints the table of docs/methods/cflag.md.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from run import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from test_flower import CONFIG, federated, size_of

CHANGES = ["method.name=cflag", "method.lipschitz=1.0", "method.iag=false", "model.hidden=[2000]",
           "stream.rounds=5"]  # fmt: skip


def measure(exchanges: int) -> tuple[int, float, float, float]:
    """Requests, MB down, MB up, seconds of CPU."""
    received = 0

    def count(site: str, message: Any, reply: Any) -> Any:
        nonlocal received
        received += size_of(reply)
        return reply

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "everfed.toml")
        place.write_text(CONFIG)
        began = time.process_time()
        _, _, grid = federated(place, [*CHANGES, f"method.exchanges={exchanges}"], count)
        seconds = time.process_time() - began
    requests = [m for m in grid.requests if m.metadata.message_type != "query.hello"]
    return len(requests), sum(map(size_of, requests)) / 1e6, received / 1e6, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("| exchanges | requests | MB down | MB up | seconds of CPU |\n|---:|---:|---:|---:|---:|")
    for _ in range(options.repeats):
        for exchanges in (2, 1):
            asked, down, up, seconds = measure(exchanges)
            print(f"| {exchanges} | {asked} | {down:.1f} | {up:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
