"""Makes the table of lost and late replies and of found boundaries in docs/reproduction.md.

EVERFED_DATA=/path/to/data python docs/runs/unreliable.py [special-digits|special-pacs]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from everfed import Boundaries, Late, config
from everfed.reproduce import preset

LOST, LATE = Late(lost=0.3), {"chance": 0.3, "rounds": 3}
SHORT = Late(lost=0.3, missing="zero")
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("fedavg", "all replies in time", {}),
    ("fedavg", "30 % lost", {"late": LOST}),
    ("fedavg", '30 % lost, `missing = "zero"`', {"late": SHORT}),
    ("special", "all replies in time", {}),
    ("special", "30 % lost", {"late": LOST}),
    ("special", '30 % lost, `missing = "zero"`', {"late": SHORT}),
    ("special", "30 % lost, six clients drawn for four", {"late": LOST, "sample": 6}),
    ("special", 'the same, `missing = "zero"`', {"late": SHORT, "sample": 6}),
    ("special", "30 % late by 1 to 3 rounds", {"late": Late(**LATE)}),
    ("special", "the same, `discount = 0`", {"late": Late(**LATE, discount=0.0)}),
    ("special", "boundaries found by clients", {"boundaries": Boundaries(by="clients")}),
    ("special", "boundaries found by the server", {"boundaries": Boundaries(by="server")}),
]


def main(name: str) -> None:
    settings = preset.read(name).settings(None)
    lines = ["| method | | ACC % | BWT |", "|---|---|---:|---:|"]
    data = config.table(settings)
    for method, what, more in ROWS:
        scores, found = [], []
        for seed in settings.compare.seeds:
            made = config.experiment(settings, method, seed, data)
            rounds = made.stream.length(0)
            run = made.go(**more, workers=1, config=None, test_every=rounds)
            scores.append((100 * run.acc, 100 * run.bwt))
            found.append([r["round"] for r in run.records if r["metric"] == "found_task"])
        (acc, bwt), spread = np.mean(scores, 0), np.std(scores, 0, ddof=1)
        said = f"; tasks found in rounds {found}" if "boundaries" in more else ""
        lines.append(f"| `{method}` | {what} | {acc:.1f} ± {spread[0]:.1f} | {bwt:+.1f} |")
        print(lines[-1] + said, flush=True)
    (Path(__file__).parent / f"results/unreliable-{name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["special-digits"])
