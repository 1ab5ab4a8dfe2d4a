"""Reproductions of papers' experiments: what they print and how they judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.metrics import summarise
from everfed.reproduce.special import PAPER_DIGITS, judge, settings


def like_paper(**changes):
    """Summaries with exactly the paper's figures, but for some."""
    nothing = summarise([])
    out = {}
    for method, row in PAPER_DIGITS.items():
        own = row._replace(**changes.get(method, {}))
        values = {"acc": own.acc / 100, "bwt": own.bwt / 100, "worst_drop": own.worst / 100}
        out[method] = [replace(nothing, **values, rounds_to_best=own.rounds)]
    return out


def test_the_papers_own_figures_are_a_reproduction():
    assert judge(like_paper(), PAPER_DIGITS).verdict == "reproduced"


def test_other_figures_in_the_papers_order_are_an_ordering():
    higher = {m: {"acc": row.acc + 12} for m, row in PAPER_DIGITS.items()}
    assert judge(like_paper(**higher), PAPER_DIGITS).verdict.startswith("ordering only: 0 of 2")


@pytest.mark.parametrize(
    ("method", "change"),
    [("sr_fdil", {"acc": 63}), ("fedavg", {"bwt": -20}), ("special", {"worst": -60}),
     ("fedavg", {"rounds": 50})],
)  # fmt: skip
def test_a_lost_lead_is_no_reproduction(method, change):
    verdict = judge(like_paper(**{method: change}), PAPER_DIGITS).verdict
    assert verdict == "not reproduced: 5 of 6 claims hold"


def test_settings_are_the_papers():
    for name, alpha, rounds in (("digits", 0.1, 20), ("pacs", 0.3, 30)):
        config = settings(name, quick=False)
        assert config.stream["alpha"] == alpha
        assert config.stream["rounds"] == rounds
        assert (config.stream["clients"], config.sample, config.local.epochs) == (8, 4, 5)
        assert config.compare.seeds == [25, 225, 2025]


def test_four_domains_of_real_digits_from_start_to_verdict(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["reproduce", "special-digits", "--quick"])
    assert told.exit_code == 0, told.output
    assert "too short for a verdict" in told.stdout
    assert "(62.1)" in told.stdout
    # once more: nothing is run again
    again = CliRunner().invoke(app, ["reproduce", "special-digits", "--quick"])
    assert again.exit_code == 0
    assert "finished" not in again.stderr
