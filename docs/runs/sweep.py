"""Chooses each method's settings for a comparison, on a seed that the comparison does not use.

python docs/runs/sweep.py docs/runs/domains.toml prints the [methods] section to put there.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everfed import config as configs

SEED = 100
#: learning rates, as shares of the comparison's own
RATES = (1.0, 0.5, 0.25)
#: what a method is most sensitive to
GRID: dict[str, dict[str, list[float]]] = {
    "fedprox": {"mu": [0.01, 0.1, 1.0]},
    "fedavgm": {"beta": [0.5, 0.7, 0.9]},
    "fedadagrad": {"server_lr": [0.03, 0.1, 0.3]},
    "fedadam": {"server_lr": [0.01, 0.03, 0.1]},
    "fedyogi": {"server_lr": [0.01, 0.03, 0.1]},
    "mimelite": {"beta": [0.01, 0.5, 0.9]},
    "ewc": {"lam": [1.0, 10.0, 100.0]},
    "lwf": {"lam": [0.3, 1.0, 3.0]},
    "special": {"lam": [0.01, 0.03, 0.1, 0.3]},
    "special_c": {"lam": [0.001, 0.01, 0.1]},
}


def main(path: Path) -> None:
    config = configs.read(path)
    print("[methods]")
    for name in config.compare.methods:
        grid = GRID.get(name, {})
        scores = []
        for share, *values in itertools.product(RATES, *grid.values()):
            own = dict(config.methods.get(name, {})) | dict(zip(grid, values, strict=True))
            own["local"] = {"lr": config.local.lr * share}
            trial = config.model_copy(update={"methods": {name: own}, "test_every": 1000})
            acc = configs.experiment(trial, name, SEED).go(workers=1).acc
            scores.append((acc if acc == acc else 0.0, own))
        best, chosen = max(scores, key=lambda score: score[0])
        if chosen["local"]["lr"] == config.local.lr:
            del chosen["local"]
        if chosen:
            print(f"{name} = {inline(chosen)}  # {100 * best:.1f} %", flush=True)


def inline(table: Mapping[str, Any]) -> str:
    """A TOML table on one line."""
    items = (f"{k} = {inline(v) if isinstance(v, dict) else v}" for k, v in table.items())
    return "{ " + ", ".join(items) + " }"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
