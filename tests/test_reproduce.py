"""Reproductions: the presets are sound, and their verdicts follow from the runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from typer.testing import CliRunner

from everfed import config
from everfed.cli import app
from everfed.records import Loaded
from everfed.report.table import breadth, split
from everfed.reproduce import names, preset

PRESETS = [name for name in names() if name != "cfl-nqm"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_run_and_judged(name):
    """Every size is a valid configuration, and claims and figures name methods that are run."""
    chosen, ran = preset.read(name), set()
    for size in (None, *chosen.changes):
        settings = chosen.settings(size)
        for method in settings.compare.methods:
            config.method_of({"name": method}, settings)
        compared = set(settings.compare.methods)
        for claim in chosen.claims:
            parsed = preset.CLAIM.fullmatch(claim)
            assert parsed
            assert parsed["measure"] in chosen.figures
            assert {parsed["a"], parsed["b"]} <= compared
        ran |= compared
    assert all(set(own) <= ran for own in chosen.figures.values())
    assert set(chosen.figures) <= set(preset.MEASURES)


def loaded(method: str, tests: list[float]) -> list[Loaded]:
    records = [
        {"metric": "accuracy", "task": 0, "on": 0, "round": t, "value": value}
        for t, value in enumerate(tests)
    ]
    return [Loaded(Path(), {"method": {"name": method}}, records)]


def test_a_test_that_a_tasks_end_tells_again_counts_once():
    (run,) = loaded("fedavg", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    again = [*run.records, run.records[-1] | {"end": True}]
    assert preset.MEASURES["best 5"](again) == pytest.approx(40)  # (20 + ... + 60) / 5
    assert preset.MEASURES["last 10"](again) == pytest.approx(35)


@pytest.mark.parametrize(
    ("fedavg", "coreset", "verdict"),
    [
        (0.85, 0.88, "reproduced"),
        (
            0.75,
            0.88,
            "ordering only: 1 of 2 figures are as in the paper",
        ),  # ahead, but ten points from the paper
        (0.875, 0.88, "not reproduced: 3 of 4 claims hold"),
    ],
)
def test_verdicts(fedavg, coreset, verdict):
    chosen = preset.Preset(
        "x", "what", {"best 5": {"fedavg": 86.0, "coreset": 88.0}},
        ["best 5: coreset > fedavg", "best 5: coreset >= fedavg + 1"],
        ["best 5: fedavg > coreset + 50"],  # ours, and told without being counted
        {"best 5": 2.0}, {}, {},
    )  # fmt: skip
    # five good tests among bad ones count, in any order
    tests = np.array([-0.3, 0.01, 0.0, -0.5, -0.01, 0.02, -0.02, -0.4])
    runs = {"fedavg": loaded("fedavg", list(fedavg + tests)),
            "coreset": loaded("coreset", list(coreset + tests))}  # fmt: skip
    assert chosen.judge(runs).verdict == verdict


def test_without_figures_to_meet_there_is_only_an_ordering():
    chosen = preset.Preset(
        "x", "what", {"best 5": {"a": 86.0, "b": 88.0}}, ["best 5: b > a"], [], {}, {}, {}
    )
    runs = {"a": loaded("a", [0.3] * 5), "b": loaded("b", [0.4] * 5)}
    assert chosen.judge(runs).verdict.startswith("ordering only: the figures are of a larger")


def test_a_reproduction_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """A tiny preset through the command line: runs, tables, reproduction.md, a second call."""
    text = """
[data]
name = "digits"
domains = ["plain"]
[stream]
name = "evolving"
clients = 3
subsets = 4
rounds = 4
[compare]
methods = ["fedavg", "often"]
seeds = [0]
[methods]
often = { name = "fedavg", local = { epochs = 3 } }
[paper]
what = "more epochs"
claims = ["best 5: often > fedavg"]
[paper.figures."best 5"]
often = 90.0
"""
    (tmp_path / "tiny.toml").write_text(text)
    monkeypatch.setattr("everfed.reproduce.FOLDER", tmp_path)
    words = ["reproduce", "tiny", "--folder", str(tmp_path / "out"), "--jobs", "1"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "often > fedavg" in first.output
    page = (tmp_path / "out" / "reproduction.md").read_text()
    assert "| often | " in page
    stamp = (tmp_path / "out" / "often-seed0" / "records.jsonl").stat().st_mtime_ns
    CliRunner().invoke(app, words)
    assert (tmp_path / "out" / "often-seed0" / "records.jsonl").stat().st_mtime_ns == stamp
    assert (tmp_path / "out" / "reproduction.md").read_text() == page
    quick = CliRunner().invoke(app, [*words, "--quick"])
    assert "has no --quick" in str(quick.exception)


def test_an_unknown_reproduction_is_told():
    told = CliRunner().invoke(app, ["reproduce", "cfl-table"])
    assert "there are cfl-" in str(told.exception)


@pytest.mark.parametrize(("name", "alpha", "rounds"), [("digits", 0.1, 20), ("pacs", 0.3, 30)])
def test_domains_are_played_as_in_the_paper(name, alpha, rounds):
    config = preset.read(f"special-{name}").settings(None)
    assert (config.stream["alpha"], config.stream["rounds"]) == (alpha, rounds)
    assert (config.stream["clients"], config.sample, config.local.epochs) == (8, 4, 5)
    assert config.compare.seeds == [25, 225, 2025]


def test_four_domains_of_real_digits_from_start_to_end(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "special-digits", "--quick", "--folder", str(tmp_path / "out")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "too short for a verdict" in told.stdout
    assert "62.12" in told.stdout


def test_a_wide_table_is_cut_between_columns_not_within_cells():
    whole = Table(title="ours")
    for name in ("method", "ACC", "BWT", "worst drop"):
        whole.add_column(name)
    whole.add_row("special", "70.30 ± 0.66 (62.12)", "-0.24 ± 0.59 (-21.78)", "-2.57 ± 1.06")
    pieces = split(whole, 60)
    assert [[str(c.header) for c in piece.columns] for piece in pieces] == [
        ["method", "ACC", "BWT"],
        ["method", "worst drop"],
    ]
    assert all(breadth(piece) <= 60 for piece in pieces)
    assert len(split(whole, 200)) == 1
