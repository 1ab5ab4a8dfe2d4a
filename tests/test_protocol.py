"""The protocol of domain-incremental federations: who is asked, what is tested when, what it costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

import everfed as ef
from everfed.report import table

ROUNDS = 4
D = 64 * 16 + 16 + 16 * 10 + 10  # parameters of the model


@pytest.fixture(scope="module")
def data():
    return ef.data.digits(["plain", "inverted", "rotated"])


def run(method, data, **options):
    stream = ef.streams.domains(data, clients=8, alpha=0.3, rounds=ROUNDS)
    local = ef.Local(lr=0.1)
    options = {"sample": 4, "local": local, "workers": 1} | options
    return ef.run(method, stream, ef.models.mlp(64, 16, 10), **options)


def of(records, metric, **keys):
    return [r for r in records if r["metric"] == metric and keys.items() <= r.items()]


def test_every_domain_is_tested_whole_at_each_tasks_end_and_the_seen_ones_each_round(data):
    result = run(ef.methods.special(0.1), data)
    assert not np.isnan(result.matrix).any()  # unseen domains, too
    for at in range(3 * ROUNDS):
        each = [r for r in of(result.records, "accuracy", round=at) if not r.get("end")]
        assert [r["on"] for r in each] == list(range(at // ROUNDS + 1))
    # accuracies are multiples of one over a domain's whole test set
    whole = len(data.test) // 3
    right = result.matrix * whole
    assert np.allclose(right, np.rint(right), atol=1e-6)


def test_four_of_eight_clients_without_replacement(data):
    stream = ef.streams.domains(data, clients=8, alpha=0.3, rounds=ROUNDS).seeded(0)
    from everfed.round import draw_cohort

    cohorts = [draw_cohort(stream, None, t, 4, 0)[0] for t in range(300)]
    assert all(len(set(cohort)) == 4 for cohort in cohorts)
    share = np.bincount(np.concatenate(cohorts), minlength=8) / 300
    # each client is in half of the rounds, with standard error sqrt(1/4/300) = 0.029
    assert abs(share - 0.5).max() < 4 * 0.029


SAMPLE = 64 * 4  # bytes of one sample: floats

HELD = [
    (ef.methods.fedavg(), 1, 0),
    (ef.methods.special(0.1), 1, 0),
    (ef.methods.special_c(0.1), 2, 0),  # the anchor
    (ef.methods.lwf(), 2, 0),  # the teacher
    (ef.methods.scaffold(), 3, 0),  # both control variates
    (ef.methods.cfl_coreset(20), 1, 3 * 20),  # at most 20 samples of each domain
]


@pytest.mark.parametrize(("method", "models", "samples"), HELD, ids=[m.name for m, *_ in HELD])
def test_what_a_client_holds_at_the_most(method, models, samples, data):
    """As in SPECIAL's Table 15: parameters of all kinds and samples kept."""
    summary = run(method, data).summary
    expected = (4 * D * models + SAMPLE * samples) / 1e6
    # beside models and samples a state may hold a few numbers: tasks, blocks
    assert summary.client_mb == pytest.approx(expected, abs=1e-3)


def test_costs_of_a_run(data):
    result = run(ef.methods.fedavg(), data)
    summary, seconds = result.summary, of(result.records, "seconds")
    assert len(seconds) == 3 * ROUNDS
    assert summary.seconds_per_round == pytest.approx(summary.seconds / (3 * ROUNDS))
    # a process that has torch holds more than a hundred MB, and this one less than this machine
    assert 100 < summary.peak_mb < 20_000
    assert summary.mb_sent == pytest.approx(3 * ROUNDS * 4 * 2 * 4 * D / 1e6)
    shown = table.latex({"fedavg": [summary]})
    for column in ("s/round", "MB sent", "client MB", "peak MB", "rounds to best"):
        assert column in shown


def test_old_records_without_costs_still_have_a_summary():
    old = [{"round": 0, "task": 0, "metric": "seconds", "value": 1.0}]
    summary = ef.metrics.summarise(old)
    assert math.isnan(summary.client_mb)
    assert math.isnan(summary.peak_mb)
    assert "–" in table.markdown({"fedavg": [summary]})
