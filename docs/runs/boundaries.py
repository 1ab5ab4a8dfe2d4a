"""Counts the boundaries that are found on the bundled digits, for docs/reproduction.md.

python docs/runs/boundaries.py
"""

from __future__ import annotations

from itertools import product

import everfed as ef

ROUNDS, NAMES = 15, ("plain", "inverted", "rotated", "occluded")


def main() -> None:
    data, there, false, delays = ef.data.digits(NAMES), 0, 0, list[int]()
    for alpha, sample, seed in product((0.1, 1.0), (2, 4, 8), range(3)):
        stream = ef.streams.domains(data, clients=8, alpha=alpha, rounds=ROUNDS)
        run = ef.run(
            ef.methods.fedavg(average="uniform"), stream, ef.models.mlp(64, 64, 10),
            local=ef.Local(lr=0.2, epochs=3, batch=32), sample=sample, seed=seed,
            boundaries=ef.Boundaries(detect=True), test_every=ROUNDS, workers=1,
        )  # fmt: skip
        alarms = [r["round"] for r in run.records if r["metric"] == "found_task"]
        for begun in range(ROUNDS, stream.rounds, ROUNDS):
            there += 1
            late = [at - begun for at in alarms if 0 <= at - begun < 5][:1]
            delays += late
            alarms = [at for at in alarms if at - begun not in late]
        false += len(alarms)
    print(f"{len(delays)} of {there} found, {false} false alarms, {sum(delays)} rounds late in all")


if __name__ == "__main__":
    main()
