"""Makes the table of docs/drift.md: what the meters show on several streams, what `everfed advise`
makes of it, and what became of that and of FedAvg.

python docs/runs/advise.py [NAME ...]    all, or some of the rows; the others stay as they are
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import everfed as ef
from everfed import advise, config
from everfed.engines.terms import Terms
from everfed.streams import Stream

PAGE = Path(__file__).parent / "results" / "advise.md"
HEAD = [
    "| stream | turn (explained) | client drift | lost | advice | FedAvg % | advised % |",
    "|---|---:|---:|---:|---|---:|---:|",
]
KINDS = {"iid": "no drift", "period": "period drift", "client": "client drift", "both": "both"}
SEEDS = (0, 1, 2)


def digits(kind: str) -> config.Experiment:
    stream = regime(ef.data.digits(["plain"]), kind, clients=100, cohort=5, alpha=0.05)
    return made(stream, ef.models.mlp(64, 32, 10), ef.Local(lr=0.2, epochs=3, batch=8))


def fashion(kind: str) -> config.Experiment:
    data = ef.data.npz("fashion_mnist.npz")
    stream = regime(data, kind, clients=500, cohort=10, alpha=0.03)
    return made(stream, ef.models.mlp(784, 64, 10), ef.Local(lr=0.03, epochs=1, batch=20))


def demo() -> config.Experiment:
    return config.experiment(config.read(None), "fedavg")


def changing() -> config.Experiment:
    data = ef.data.digits(["plain"])
    stream = ef.streams.evolving(data, clients=5, subsets=10, alpha=0.1, rounds=60)
    return made(stream, ef.models.mlp(64, 32, 10), ef.Local(lr=0.1, epochs=2, batch=8))


def regime(data: ef.data.Data, drift: Any, **more: Any) -> Stream:
    return ef.streams.regimes(data, drift=drift, rounds=60, prior=False, **more)


def made(stream: Stream, model: Any, local: ef.Local) -> config.Experiment:
    options = {"local": local, "sample": None, "seed": 0, "workers": 1}
    return config.Experiment(ef.methods.fedavg(), stream, model, options, Terms())


ROWS: dict[str, Any] = {
    **{f"digits, {what}": lambda kind=kind: digits(kind) for kind, what in KINDS.items()},
    **{f"fashion, {what}": lambda kind=kind: fashion(kind) for kind, what in KINDS.items()},
    "digits in four domains (the demo)": demo,
    "digits, labels change at clients": changing,
}


def row(name: str) -> str:
    """A pilot on seed 0, then FedAvg and what was advised on all seeds."""
    first = ROWS[name]()
    signs = advise.read(advise.pilot(first))
    advice = advise.advise(signs)
    method = ef.methods.METHODS[advice.method].build(**advice.settings)
    drift, lost = signs.drift, 100 * signs.lost
    assert drift is not None
    cells = [
        name, f"{drift.period:.2f} ({drift.sampling:.2f})", f"{drift.client:.2f}",
        "–" if np.isnan(lost) else f"{lost:.0f}", f"`{advice}`",
        score(first, ef.methods.fedavg()), score(first, method),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def score(first: config.Experiment, method: ef.Method) -> str:
    """Mean over the last ten rounds of the mean accuracy on the tasks seen; ± over seeds."""
    found = []
    for seed in SEEDS:
        options = first.options | {"seed": seed, "workers": 1, "config": None}
        done = ef.run(method, first.stream, first.model, **options)
        last = first.stream.rounds - 10
        tests = [r for r in done.records if r["metric"] == "accuracy" and not r.get("end")]
        found.append(100 * np.mean([r["value"] for r in tests if r["round"] >= last]))
    return f"{np.mean(found):.1f} ± {np.std(found, ddof=1):.1f}"


def main(names: list[str]) -> None:
    before = PAGE.read_text().splitlines() if PAGE.exists() else []
    known = {line.split(" | ")[0].removeprefix("| "): line for line in before[2:]}
    for name in names:
        known[name] = row(name)
        lines = [*HEAD, *(known[each] for each in ROWS if each in known)]
        PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ROWS))
