"""Lemma 7 of the C-FLAG paper on the server's step: the forgetting term with adaptive rates beside
that of the same round with constant ones. Clients upload their travel as well for that.

Needs EVERFED_DATA. Writes results/lemma7.md, a line for each split of permuted MNIST.
"""

from __future__ import annotations

import statistics
from importlib import import_module
from pathlib import Path

from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import config
from everfed.method import Context, Method, Reduced, State
from everfed.reproduce import preset
from everfed.vector import dot, sq

HERE = Path(__file__).parent
CFlag = import_module("everfed.methods.cflag").CFlag


@dataclass(frozen=True)
class Both(CFlag):  # type: ignore[misc, valid-type]
    """C-FLAG that records what constant rates would have made of the round."""

    reduces = CFlag.reduces | {"travel": "mean", "along_travel": "mean"}

    def step(self, f: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State]:
        update, about = super().step(f, w, c)
        travel, less = c.start - w, 1 - self.lipschitz * (self.alpha or c.lr)
        return update, about | {"travel": travel, "along_travel": less * dot(f, travel)}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        update, state = super().fold(s, update, r)
        if state:
            state["plain"] = self.lipschitz / 2 * sq(r["travel"]) - r["along_travel"]
        return update, state

    def metrics(self, s: State) -> dict[str, float]:
        return super().metrics(s) | ({"plain": float(s["plain"])} if s else {})


def row(split: str, name: str) -> str:
    """What a preset's C-FLAG has in the end, and how often its forgetting terms are the lower."""
    made = config.experiment(preset.read(name).settings(None), "cflag", 1234)
    part = made.method.parts[0]
    own = {key: getattr(part, key) for key in part.__dataclass_fields__}
    result = config.run(Method(Both(**own)), made.stream, made.model, **made.options)
    by = {
        metric: [r["value"] for r in result.records if r["metric"] == metric]
        for metric in ("gamma", "plain", "gamma_rates", "gamma_constant")
    }
    lower, parts = (
        f"{sum(a <= b + 1e-6 for a, b in zip(by[rates], by[constant], strict=True))} "
        f"of {len(by[rates])}"
        for rates, constant in (("gamma", "plain"), ("gamma_rates", "gamma_constant"))
    )
    means = [f"{statistics.mean(by[key]):.2f}" for key in ("gamma", "plain")]
    scores = [f"{100 * value:.1f}" for value in (result.acc, result.forgetting)]
    return f"| {' | '.join([split, *scores, lower, *means, parts])} |"


def main() -> None:
    names = (
        "split", "ACC %", "Fgt", "rounds with a lower or equal Γ", "mean Γ",
        "with constant rates", "clients' parts lower or equal",
    )  # fmt: skip
    lines = [f"| {' | '.join(names)} |", "|---|---:|---:|---:|---:|---:|---:|"]
    for split, name in (("iid", "iid"), ("Dirichlet 0.1", "noniid")):
        lines.append(row(split, f"cflag-permuted-mnist-{name}"))
        print(lines[-1], flush=True)
    (HERE / "results" / "lemma7.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
