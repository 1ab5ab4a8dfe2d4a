"""Table 3 and Figure 2 of Towards Federated Learning on Time-evolving Heterogeneous Data."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from everfed.reproduce import Finding, Outcome, Reproduction
from everfed.theory.nqm import (
    CFL,
    CFL_BIG,
    CLIENTS,
    FEDAVG,
    FEDPROX,
    RULES,
    SETTINGS,
    Rule,
    Setting,
    floor,
    simulate,
)

GRID = (0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.15, 0.2, 0.3, 0.35)
#: Table 3's best learning rates, in the order of SETTINGS
PAPER = {
    FEDAVG: (0.03, 0.08, 0.33, 0.09, 0.02, 0.01, 0.09, 0.02),
    FEDPROX: (0.04, 0.07, 0.35, 0.09, 0.02, 0.01, 0.26, 0.02),
    CFL: (0.2, 0.09, 0.35, 0.09, 0.25, 0.08, 0.3, 0.08),
}
BIG = [k for k, setting in enumerate(SETTINGS) if setting.drift > 1]
LAST = 50  #: rounds over which a final loss is averaged


def best_rate(setting: Setting, rule: Rule, seeds: int) -> float:
    """The rate with the smallest loss, averaged over all rounds and seeds."""
    with np.errstate(over="ignore"):  # some rates diverge
        return GRID[int(simulate(setting, rule, GRID, seeds).mean((1, 2)).argmin())]


def final(curves: np.ndarray) -> float:
    return float(curves[0, :, -LAST:].mean())


def roughness(curves: np.ndarray) -> float:
    """How far the loss jumps from round to round at the end."""
    return float(np.abs(np.diff(curves[0, :, -LAST:])).mean())


def go(quick: bool) -> Outcome:
    """All settings; `quick` takes fewer seeds."""
    seeds = 15 if quick else 40
    rates = {rule: [best_rate(s, rule, 2 if quick else 5) for s in SETTINGS] for rule in PAPER}
    curves = {
        (k, rule): simulate(setting, rule, [PAPER.get(rule, PAPER[CFL])[k]], seeds)
        for k, setting in enumerate(SETTINGS)
        for rule in RULES
    }
    auto = Rule("CFL auto", loss=CFL_BIG.loss, weights="auto")
    auto_ratio = max(
        final(simulate(setting, auto, [PAPER[CFL][k]], seeds)) / final(curves[k, CFL_BIG])
        for k, setting in enumerate(SETTINGS)
    )
    return Outcome(
        [_rates(rates), _losses({key: final(value) for key, value in curves.items()})],
        [*_findings(rates, curves), Finding(
            "estimated D² and R² do as well as the true ones, within 10 %",
            f"loss at most {auto_ratio:.3f} times as large", auto_ratio < 1.1, ours=True,
        )],
    )  # fmt: skip


def _findings(
    rates: dict[Rule, list[float]], curves: dict[tuple[int, Rule], np.ndarray]
) -> list[Finding]:
    faster = min(rates[CFL][k] / rates[FEDAVG][k] for k in BIG)
    lower = max(final(curves[k, CFL]) / final(curves[k, FEDAVG]) for k in BIG)
    rough = max(roughness(curves[k, CFL]) / roughness(curves[k, FEDAVG]) for k in BIG)
    small = final(curves[0, CFL]) / floor(curves[0, CFL].shape[1])
    t = curves[0, CFL].shape[-1] - LAST / 2
    big = final(curves[BIG[0], CFL]) / np.sqrt(SETTINGS[BIG[0]].drift / (CLIENTS * t))
    return [
        Finding("big round drift: CFL's best rate is at least 5 times FedAvg's",
                f"at least {faster:.0f} times", faster >= 5),
        Finding("big round drift: CFL's loss is at most a quarter of FedAvg's",
                f"at most {lower:.2f} of it", lower <= 0.25),
        Finding("CFL's curves are smoother",
                f"jumps of at most {rough:.3f} of FedAvg's", rough < 1),
        Finding("small round drift: CFL ends at |mean delta| of the same clients (within 10 %)",
                f"{small:.2f} of it", abs(small - 1) < 0.1),
        Finding("big round drift: CFL's loss falls as sqrt(D²/(N t)) (within 10 %)",
                f"{big:.2f} of it", abs(big - 1) < 0.1),
    ]  # fmt: skip


def _rates(rates: dict[Rule, list[float]]) -> Table:
    table = _table("Best learning rate, ours (paper's Table 3)", list(rates))
    for k, setting in enumerate(SETTINGS):
        cells = (f"{rates[rule][k]:g} ({PAPER[rule][k]:g})" for rule in rates)
        table.add_row(setting.name, *cells)
    return table


def _table(title: str, rules: list[Rule]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for rule in rules:
        table.add_column(rule.name, justify="right")
    return table


def _losses(losses: dict[tuple[int, Rule], float]) -> Table:
    table = _table("Loss over the last 50 of 300 rounds at the paper's rates", RULES)
    for k, setting in enumerate(SETTINGS):
        table.add_row(setting.name, *(f"{losses[k, rule]:.4f}" for rule in RULES))
    return table


REPRODUCTION = Reproduction("cfl-nqm", "the noisy quadratic model (CFL, Table 3, Figure 2)", go)
