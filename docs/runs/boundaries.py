"""Counts the boundaries that are found, for docs/reproduction.md: on the bundled digits, and with a
data folder on the real sequences of domains.

EVERFED_DATA=/path/to/data python docs/runs/boundaries.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import everfed as ef
from everfed import config
from everfed.reproduce import preset

ROUNDS, NAMES = 15, ("plain", "inverted", "rotated", "occluded")
#: a boundary found later than this many rounds is missed, and the alarm false
LATEST = 5

#: rounds of a task, and a run
Played = tuple[int, ef.Run]


def bundled(boundaries: ef.Boundaries) -> Iterator[Played]:
    """2, 4 or 8 of 8 clients, two skews of labels, three seeds."""
    data = ef.data.digits(NAMES)
    for alpha, sample, seed in product((0.1, 1.0), (2, 4, 8), range(3)):
        stream = ef.streams.domains(data, clients=8, alpha=alpha, rounds=ROUNDS)
        yield ROUNDS, ef.run(
            ef.methods.fedavg(average="uniform"), stream, ef.models.mlp(64, 64, 10),
            local=ef.Local(lr=0.2, epochs=3, batch=32), sample=sample, seed=seed,
            boundaries=boundaries, test_every=ROUNDS, workers=1,
        )  # fmt: skip


def real(name: str, boundaries: ef.Boundaries) -> Iterator[Played]:
    """A preset's FedAvg and SPECIAL, on its seeds."""
    settings = preset.read(name).settings(None)
    data = config.table(settings)
    for method, seed in product(("fedavg", "special"), settings.compare.seeds):
        made = config.experiment(settings, method, seed, data)
        rounds = made.stream.length(0)
        options: dict[str, Any] = {"workers": 1, "config": None, "test_every": rounds}
        yield rounds, made.go(boundaries=boundaries, **options)


def count(runs: Iterator[Played]) -> str:
    there, false, delays = 0, 0, list[int]()
    for rounds, run in runs:
        alarms = [r["round"] for r in run.records if r["metric"] == "found_task"]
        for begun in range(rounds, rounds * len(run.tasks), rounds):
            there += 1
            late = [at - begun for at in alarms if 0 <= at - begun < LATEST][:1]
            delays += late
            alarms = [at for at in alarms if at - begun not in late]
        false += len(alarms)
    return f"{len(delays)} of {there} | {sum(delays)} | {false}"


def main() -> None:
    print("| sequence | told by | found | rounds late, in all | false alarms |")
    print("|---|---|---:|---:|---:|")
    ways: list[Literal["clients", "server"]] = ["clients", "server"]
    for by in ways:
        boundaries = ef.Boundaries(by=by)
        print(f"| bundled digits | {by} | {count(bundled(boundaries))} |", flush=True)
        for name in ("special-digits", "special-pacs") if os.environ.get("EVERFED_DATA") else ():
            print(f"| `{name}` | {by} | {count(real(name, boundaries))} |", flush=True)


if __name__ == "__main__":
    main()
