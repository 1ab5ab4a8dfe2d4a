"""Chooses server rates for FedEve and its rivals, for docs/reproduction.md: two streams of the
preset fedeve-table1, a third of its rounds, and a seed that it does not use.

EVERFED_DATA=/path/to/data python docs/runs/server_rates.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everfed import config
from everfed.reproduce import preset

SEED, ROUNDS = 100, 500
GRID: dict[str, list[dict[str, float]]] = {
    "fedavg": [{"server_lr": rate} for rate in (1.0, 2.0, 5.0, 10.0)],
    "fedavgm": [{"server_lr": rate} for rate in (0.1, 0.2, 0.5, 1.0)],
    "fedadam": [{"server_lr": rate} for rate in (0.003, 0.01, 0.03, 0.1)],
    "fedeve": [{"server_lr": rate} for rate in (1.0, 2.0, 5.0)],
}
STREAMS: dict[str, dict[str, Any]] = {
    "natural": {"name": "given", "rounds": ROUNDS},
    "0.01": {"alpha": 0.01, "rounds": ROUNDS},
}


def score(method: str, settings: dict[str, float], stream: dict[str, Any]) -> float:
    """The mean of the last ten tests, in percent."""
    own = {"fedavgm": {"beta": 0.9}}.get(method, {}) | settings
    changes = {"stream": stream, "methods": {method: own}, "compare": {"methods": [method]}}
    values = preset.merged(preset.read("fedeve-table1").values | {"methods": {}}, changes)
    run = config.experiment(config.parse(values), method, SEED).go(workers=1)
    return preset.MEASURES["last 10"](run.records)


def main() -> None:
    names = " | ".join(f"alpha = {n}" if n != "natural" else n for n in STREAMS)
    lines = [f"| | server rate | {names} |", "|---|---:|" + "---:|" * len(STREAMS)]
    for method, grid in GRID.items():
        for settings in grid:
            found = [f"{score(method, settings, stream):.1f}" for stream in STREAMS.values()]
            lines.append(f"| `{method}` | {settings['server_lr']:g} | {' | '.join(found)} |")
            print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "server_rates.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
