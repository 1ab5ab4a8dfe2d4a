"""C-FLAG's ablations (the paper's Figures 3, 4, 5 and 7, Table 8), on the permuted MNIST of the
preset cflag-permuted-mnist-iid with one seed; and Lemma 7 round by round.

Needs EVERFED_DATA. Writes results/cflag-ablations.md and cflag_gamma.png, as it goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everfed import config
from everfed.reproduce import preset
from everfed.runs import Run

HERE = Path(__file__).parent
SEED = 1234
PRESET = preset.read("cflag-permuted-mnist-iid")
#: (what is varied, its value, method, settings that change)
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("samples kept of a task", str(size), "cflag",
       {"methods": {"cflag": {"memory": size, "draw": size // 2}}}) for size in (10, 30, 80, 120)),
    *(("clients", str(clients), "cflag", {"stream": {"clients": clients}})
      for clients in (5, 15, 25, 50)),
    *(("zeta", f"{zeta:g}", method, {"stream": {"alpha": zeta}})
      for zeta in (1e5, 1.0, 0.1) for method in ("cflag", "ewc", "fedtrack")),
    *(("rates", adaptive, "cflag", {"methods": {"cflag": {"adaptive": adaptive}}})
      for adaptive in ("off", "average", "worst")),
]  # fmt: skip


def run(method: str, changes: dict[str, Any]) -> Run:
    settings = config.parse(preset.merged(PRESET.values, changes))
    return config.experiment(settings, method, SEED).go(workers=1)


def series(result: Run, metric: str) -> dict[int, float]:
    return {r["round"]: r["value"] for r in result.records if r["metric"] == metric}


def draw(curves: dict[str, dict[int, float]]) -> None:
    """Gamma over rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, own in curves.items():
        axes.plot([t + 1 for t in own], list(own.values()), label=name, linewidth=1.2)
    axes.set(xlabel="round", ylabel="Γ(t)", yscale="symlog")
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(HERE.parent / "cflag_gamma.png", dpi=110)


def main() -> None:
    lines = ["| varied | value | method | ACC % | Fgt |", "|---|---:|---|---:|---:|"]
    curves: dict[str, dict[int, float]] = {}
    told: list[str] = []
    done: dict[str, Run] = {}
    for what, value, method, changes in CASES:
        key = f"{method} {changes}"
        result = done.setdefault(key, run(method, changes)) if key not in done else done[key]
        lines.append(
            f"| {what} | {value} | `{method}` | {100 * result.acc:.1f} | "
            f"{100 * result.forgetting:.1f} |"
        )
        print(lines[-1], flush=True)
        if what == "zeta" and method == "cflag":
            curves[f"ζ = {value}"] = series(result, "gamma")
            draw(curves)
        if what == "rates" and value != "off":
            adapted, constant = (series(result, k) for k in ("gamma_rates", "gamma_constant"))
            lower = sum(adapted[t] <= constant[t] + 1e-6 for t in adapted)
            told.append(f"`{value}`: {lower} of {len(adapted)} rounds")
        (HERE / "results" / "cflag-ablations.md").write_text("\n".join(lines) + "\n")
    print("clients' parts of Γ at most those with constant rates:", *told)


if __name__ == "__main__":
    main()
