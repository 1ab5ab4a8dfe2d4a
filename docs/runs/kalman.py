"""When FedEve's gain tells of drift: the gain of runs beside the one that chance alone would give.

Writes results/kalman.md. The preset fedeve-fashion-mnist with 200 rounds, seed 0; the gain is the
mean over the second half. "By chance" is everfed.theory.gain, from the records' effective cohort
alone. Needs EVERFED_DATA; two minutes of one core.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from everfed import config as configs
from everfed.reproduce import preset
from everfed.theory.gain import by_chance

HERE = Path(__file__).parent
ROUNDS = 200


def equal(alpha: float, cohort: int = 10, drift: str = "both", epochs: int = 1) -> dict[str, Any]:
    """Clients of the same size."""
    stream = {"alpha": alpha, "cohort": cohort, "drift": drift, "rounds": ROUNDS}
    return {"sample": cohort, "stream": stream, "local": {"epochs": epochs}}


def unequal(alpha: float) -> dict[str, Any]:
    """Every class is shared out by a draw of its own: some clients get far more than others."""
    return {"stream": {"name": "static", "clients": 500, "rounds": ROUNDS, "alpha": alpha}}


ROWS = {
    "equal sizes, α = 1": equal(1.0),
    "equal sizes, α = 0.1": equal(0.1),
    "equal sizes, α = 0.01": equal(0.01),
    "the same, 3 epochs": equal(0.01, epochs=3),
    "the same, 5 epochs": equal(0.01, epochs=5),
    "the same, 50 clients a round": equal(0.01, cohort=50),
    "the same, client drift alone": equal(0.01, drift="client"),
    "the same, period drift alone": equal(0.01, drift="period"),
    "sizes by Dirichlet, α = 1": unequal(1.0),
    "sizes by Dirichlet, α = 0.1": unequal(0.1),
    "sizes by Dirichlet, α = 0.01": unequal(0.01),
}


def main() -> None:
    lines = ["| | effective cohort | gain | by chance |", "|---|---:|---:|---:|"]
    values = preset.read("fedeve-fashion-mnist").values | {"test_every": ROUNDS}
    for name, changes in ROWS.items():
        settings = configs.parse(preset.merged(values, changes))
        done = configs.experiment(settings, "fedeve", 0).go(workers=1, loggers=[])

        def half(metric: str, records: Any = done.records) -> np.ndarray:
            return preset.scores(records, metric)[ROUNDS // 2 :]

        clients, effective = half("clients").mean(), 1 / (1 / half("effective_clients")).mean()
        chance = by_chance(float(clients), float(effective))
        gain = half("kalman_gain").mean()
        lines.append(f"| {name} | {effective:.1f} | {gain:.2f} | {chance:.2f} |")
        print(lines[-1], flush=True)
    (HERE / "results" / "kalman.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
