"""What one exchange instead of two costs C-FLAG in accuracy, on two of the page's comparisons.

Writes results/exchanges.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from everfed import config
from everfed.metrics import Summary

HERE = Path(__file__).parent
SEQUENCES = {
    "domains": "four domains of digits",
    "known_tasks": "five tasks of two digits, task known",
}


def runs(name: str, exchanges: int) -> list[Summary]:
    """C-FLAG's runs of a comparison, seed by seed."""
    settings = config.read(HERE / f"{name}.toml", [f"methods.cflag.exchanges={exchanges}"])
    return [
        config.experiment(settings, "cflag", seed).go(workers=1, loggers=[]).summary
        for seed in settings.compare.seeds
    ]


def said(own: list[Summary], what: str) -> str:
    values = 100 * np.array([getattr(summary, what) for summary in own])
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def main() -> None:
    lines = ["| sequence | exchanges | ACC % | BWT | MB sent |", "|---|---:|---:|---:|---:|"]
    for name, what in SEQUENCES.items():
        for exchanges in (2, 1):
            own = runs(name, exchanges)
            sent = np.mean([summary.mb_sent for summary in own])
            lines.append(
                f"| {what} | {exchanges} | {said(own, 'acc')} | {said(own, 'bwt')} | {sent:.1f} |"
            )
            print(lines[-1], flush=True)
    (HERE / "results" / "exchanges.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
