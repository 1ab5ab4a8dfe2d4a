"""The theory's tools: optimal weights, drift estimates, the noisy quadratic model."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.optimize import minimize
from torch import nn
from typer.testing import CliRunner

import everfed as ef
from everfed.cli import app
from everfed.data import arrays
from everfed.report.stream import drifts
from everfed.theory import nqm, rates
from everfed.theory.drift import Drift, estimate, scattered
from everfed.theory.measure import measure
from everfed.theory.weights import bounded, correlated, independent
from everfed.vector import folded
from quadratics import Point, energy
from test_cli import everfed


def dense(t, drift, loss, alpha):
    """Q of Theorem 4.9 as it is written."""
    i = np.arange(t)
    past = i < t - 1
    return drift * alpha ** np.abs(i[:, None] - i) + loss * np.outer(past, past)


@pytest.mark.parametrize(
    ("t", "drift", "loss", "weights", "variance"),
    [(4, 4, 1, (0.210526, 0.368421), 1.473684), (10, 1, 0.25, (0.081633, 0.265306), 0.265306)],
)
def test_theorem_4_1(t, drift, loss, weights, variance):
    past, now = independent(t, drift, loss)
    assert (past, now) == pytest.approx(weights, abs=1e-6)
    assert (t - 1) * past + now == pytest.approx(1)
    value = drift * ((t - 1) * past**2 + now**2) + loss * (1 - now) ** 2
    assert value == pytest.approx(variance, abs=1e-6)
    assert correlated(t, drift, loss, 0.0) == pytest.approx([past] * (t - 1) + [now])


def test_theorem_4_1_at_its_ends():
    assert independent(5, 2, 0) == pytest.approx((0.2, 0.2))  # nothing is lost: all rounds alike
    assert independent(5, 0, 0) == pytest.approx((0.2, 0.2))
    assert independent(5, 1, 1e12) == pytest.approx((0, 1))  # the past is worthless: FedAvg


@pytest.mark.parametrize(
    ("drift", "bound", "expected"), [(4, 1, (0.2, 0.4)), (1, 0.5, (0.1, 0.7)), (1, 1.5, (0, 1))]
)
def test_theorem_4_7(drift, bound, expected):
    assert bounded(4, drift, 1, bound) == pytest.approx(expected)


# the paper's Table 2, whose columns D and R must hold D^2 and R^2 (erratum)
TABLE_2 = [
    (0.0, 2, 1.0, (0.1818, 0.1818, 0.1818, 0.4545)),
    (0.5, 1, 0.5, (0.2857, 0.1429, 0.0, 0.5714)),
    (0.5, 1, 1.0, (0.2632, 0.1316, -0.0789, 0.6842)),
    (0.8, 1, 0.5, (0.3870, 0.0774, -0.2077, 0.7434)),
    (0.8, 2, 0.5, (0.3960, 0.0792, -0.1188, 0.6436)),
    # the columns read literally
    (0.8, 4, 0.25, (0.4094, 0.0819, 0.0120, 0.4968)),
]


@pytest.mark.parametrize(("alpha", "drift", "loss", "expected"), TABLE_2)
def test_table_2(alpha, drift, loss, expected):
    assert correlated(4, drift, loss, alpha) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("seed", range(10))
def test_weights_are_optimal(seed):
    """Against a dense solve, and without negative weights against a general optimiser."""
    random = np.random.default_rng(seed)
    t, alpha = int(random.integers(2, 12)), float(random.uniform(0, 0.97))
    drift, loss = random.uniform(0.1, 3, 2)
    q = dense(t, drift, loss, alpha)
    solved = np.linalg.solve(q, np.ones(t))
    assert correlated(t, drift, loss, alpha) == pytest.approx(solved / solved.sum())
    p = correlated(t, drift, loss, alpha, negative=False)
    assert p.min() >= 0
    assert p.sum() == pytest.approx(1)
    best = minimize(
        lambda p: p @ q @ p, np.full(t, 1 / t), jac=lambda p: 2 * q @ p, method="SLSQP",
        bounds=[(0, None)] * t, constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert p @ q @ p <= best.fun * (1 + 1e-9)


def test_ten_thousand_rounds_satisfy_the_conditions():
    """Q p is the same for all rounds: a banded product, as Q is too large to write down."""
    t, drift, loss, alpha = 10_000, 1.0, 0.3, 0.9
    p = correlated(t, drift, loss, alpha)
    left, right = np.zeros(t), np.zeros(t)  # sums over earlier and later rounds
    for k in range(1, t):
        left[k] = alpha * (left[k - 1] + p[k - 1])
        right[t - 1 - k] = alpha * (right[t - k] + p[t - k])
    qp = drift * (p + left + right)
    qp[:-1] += loss * p[:-1].sum()
    assert np.ptp(qp) < 1e-9 * abs(qp[0])
    assert p.sum() == pytest.approx(1)


def test_drift_is_found_in_gradients():
    """400 rounds of 8 clients: client drift 2^2, time drift 1 with correlation 0.7, in 50 d."""
    random = np.random.default_rng(1)
    xi = np.zeros((400, 8, 50))
    for t in range(1, 400):
        xi[t] = 0.7 * xi[t - 1] + np.sqrt(1 - 0.49) * random.standard_normal((8, 50))
    own = 2 * random.standard_normal((8, 50))
    common = random.standard_normal((400, 1, 50))  # the way of the model itself
    found = estimate(common + own + xi, correlated=True)
    spread = ((own - own.mean(0)) ** 2).sum() / 7
    assert found.alpha == pytest.approx(0.7, abs=0.03)
    assert found.time == pytest.approx(50, rel=0.1)
    assert found.client == pytest.approx(spread, rel=0.05)
    with pytest.raises(ValueError, match="at least 2 rounds"):
        estimate(xi[:1])


def test_noisy_quadratic_floors():
    """Without time drift's noise what stays is |mean delta|; with it, D / sqrt(N t)."""
    small = nqm.simulate(nqm.SETTINGS[0], nqm.CFL, [0.2], seeds=60)[0, :, -50:].mean()
    assert small == pytest.approx(np.sqrt(0.01 / 10), rel=0.1)
    big = nqm.simulate(nqm.SETTINGS[4], nqm.CFL, [0.25], seeds=30)[0, :, -50:].mean()
    assert big == pytest.approx(np.sqrt(100 / (10 * 275)), rel=0.1)
    fedavg = nqm.simulate(nqm.SETTINGS[4], nqm.FEDAVG, [0.02], seeds=5)[0, :, -50:].mean()
    assert big < fedavg / 4


def test_rates_above_two_over_l_diverge():
    curves = nqm.simulate(nqm.SETTINGS[0], nqm.FEDAVG, [0.3, 0.45], seeds=2)
    assert curves[0, :, -1].max() < 0.1
    assert curves[1, :, -1].min() > 1e6


def test_estimated_constants_do_as_well():
    rule = nqm.Rule("auto", loss=0.01, weights="auto")
    for setting in (nqm.SETTINGS[0], nqm.SETTINGS[4]):
        auto, true = (
            nqm.simulate(setting, r, [0.2], seeds=10)[0, :, -50:].mean()
            for r in (rule, nqm.CFL_BIG)
        )
        assert auto < 1.1 * true


def test_on_the_command_line():
    told = CliRunner().invoke(app, ["theory", "weights", "4", "--loss", "1", "--alpha", "0.5"])
    assert [float(x) for x in told.stdout.split()] == pytest.approx(
        [0.263158, 0.131579, -0.078947, 0.684211]
    )
    told = CliRunner().invoke(app, ["reproduce", "cfl-nqm", "--quick"])
    assert told.exit_code == 0
    assert "reproduced" in told.stdout
    assert "not reproduced" not in told.stdout


def test_drift_of_changing_cohorts():
    """Each round has its own clients; the mean of many estimates is the truth."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(60):
        delta = random.normal(0, 2, (12, 30))
        drawn = delta + random.normal(0, 1, (40, 12, 30)) + random.normal(0, 5, (40, 1, 30))
        some = np.concatenate([t * 12 + random.choice(12, 4, replace=False) for t in range(40)])
        drift = scattered(drawn.reshape(-1, 30)[some], some % 12, some // 12)
        found.append((drift.client - ((delta - delta.mean(0)) ** 2).sum() / 11, drift.time - 30))
    error = np.std(found, axis=0) / np.sqrt(60)
    assert (np.abs(np.mean(found, axis=0)) < 4 * error).all()


def test_drift_of_the_same_cohort_or_of_strangers():
    random = np.random.default_rng(0)
    drawn = random.normal(0, 2, (12, 30)) + random.normal(0, 1, (40, 12, 30))
    flat, who, when = drawn.reshape(-1, 30), np.tile(np.arange(12), 40), np.repeat(range(40), 12)
    whole, same = estimate(drawn), scattered(flat, who, when)
    assert (same.client, same.time) == pytest.approx((whole.client, whole.time))
    strangers = scattered(flat, np.arange(480), when)  # nobody comes twice
    assert (strangers.client, strangers.time) == pytest.approx((0, whole.client + whole.time))


@pytest.mark.parametrize(
    ("client", "time", "loss", "stateful", "once"),
    [(0.25, 4, 1, 1.05, 0.809524), (1, 1, 1, 1.5, 0.666667)],
)
def test_variance_of_the_rates(client, time, loss, stateful, once):
    k = rates.Constants(1, client=client, time=time, loss=loss)
    assert rates.VARIANCE["CFL"](k) == pytest.approx(stateful, abs=1e-6)
    assert rates.VARIANCE["CFL, clients seen once"](k) == pytest.approx(once, abs=1e-6)


@pytest.mark.parametrize("convex", [0.0, 0.5])
def test_a_worthless_past_gives_fedavg_and_a_perfect_one_takes_the_time_drift_away(convex):
    def needed(method, **changes):
        given = {"client": 0.5, "time": 3.0, "noise": 2.0, "convex": convex} | changes
        return rates.rounds(method, rates.Constants(0.1, clients=5, steps=4, **given))

    assert needed("CFL", loss=1e12) == pytest.approx(needed("FedAvg"))
    assert needed("CFL", loss=0.0) == pytest.approx(needed("FedAvg", time=0.0))
    assert needed("CFL", loss=1.0, correlation=1.0) == pytest.approx(
        needed("CFL", loss=1.0, time=2.0)
    )
    assert needed("FedAvg", noise=0.0, client=0.0, time=0.0) == pytest.approx(
        1 / convex if convex else 10
    )


def test_rounds_on_the_command_line():
    result = CliRunner().invoke(app, ["theory", "rounds", "0.1", "--time", "4", "--loss", "1"])
    lines = dict(line.rsplit(maxsplit=1) for line in result.output.splitlines()[:3])
    assert float(lines["FedAvg"]) == pytest.approx(410)  # 1 / 0.1 + 4 / 0.01
    assert float(lines["CFL"]) == pytest.approx(90)  # 1 / 0.1 + 0.8 / 0.01


# drift measured on streams -----------------------------------------------------------------------
class Wandering(ef.Stream):
    """Client i's samples in round t lie round own_i + xi_ti, AR(1), with unit noise in every
    coordinate: for the loss |w - c|^2 / 2 its gradient is w less their mean."""

    def __init__(self, alpha, own, time, clients=10, rounds=50, size=12, d=20):
        random = np.random.default_rng(7)
        self.clients, self.rounds, self.size = clients, rounds, size
        xi = random.standard_normal((clients, d))
        centres = []
        delta = np.sqrt(own / d) * random.standard_normal((clients, d))
        for _ in range(rounds):
            centres.append(delta + np.sqrt(time / d) * xi)
            xi = alpha * xi + np.sqrt(1 - alpha**2) * random.standard_normal((clients, d))
        c = np.repeat(np.array(centres), size, 1) + random.standard_normal(
            (rounds, clients * size, d)
        )
        x = np.stack([np.ones_like(c), c], 2).reshape(-1, 2, d)
        self.data = arrays(x, np.zeros(len(x)))
        self.spread = ((delta - delta.mean(0)) ** 2).sum() / (clients - 1)

    def samples(self, client, round_):
        begin = (round_ * self.clients + client) * self.size
        return np.arange(begin, begin + self.size)

    def block(self, client, round_):
        return round_


@pytest.mark.parametrize(("alpha", "own", "time"), [(0.0, 2.0, 6.0), (0.8, 4.0, 3.0)])
def test_known_drift_is_measured(alpha, own, time):
    """G^2, D^2 and alpha within four standard errors, and N^2 = d / size."""
    stream = Wandering(alpha, own, time)
    found = measure(stream, Point(20), loss=energy)
    assert found.chance == pytest.approx(20 / 12, rel=0.05)
    assert found.drift.time == pytest.approx(time, abs=4 * found.error.time)
    assert found.drift.client == pytest.approx(stream.spread, abs=4 * found.error.client + 0.02)
    assert found.drift.alpha == pytest.approx(alpha, abs=4 * found.error.alpha + 0.01)
    assert found.error.time < time / 2
    assert found.common < 0.1


def test_drift_of_a_stream_is_what_its_mixtures_say():
    """At w = 0 a linear model's gradient is the mixture's mean of its classes' gradients g_c, so
    D^2 = sum cov(p)_cd <g_c, g_d> with the Dirichlet's cov(p) = (diag pi - pi pi') / (A + 1)."""
    data = ef.data.digits(["plain"])
    stream = ef.streams.drifting(data, clients=12, correlation=0.6, alpha=0.2, size=80, rounds=40)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    found = measure(stream, model, clients=12, rounds=40)
    x = np.concatenate([data.x.reshape(-1, 64).numpy(), np.ones((len(data.x), 1))], 1)
    y = data.y.numpy()
    g = []
    for c in range(10):
        mean = x[data.train[y[data.train] == c]].mean(0)
        g.append(np.outer(0.1 - np.eye(10)[c], mean).ravel())
    pi = np.bincount(y[data.train]) / len(data.train)
    products = np.array(g) @ np.array(g).T
    time = ((np.diag(pi) - np.outer(pi, pi)) / (0.2 * 10 + 1) * products).sum()
    assert found.drift.time == pytest.approx(time, abs=4 * found.error.time)
    assert found.error.time < time / 4
    assert found.drift.alpha == pytest.approx(0.6, abs=4 * found.error.alpha + 0.01)


def test_drift_that_is_not_there_is_not_found():
    """Data that stand still have client drift only; a day for all at once is common drift only."""
    data = ef.data.digits(["plain", "inverted"])
    still = measure(ef.streams.static(data, clients=6, rounds=9), ef.models.mlp(64, 8, 10))
    assert still.drift.time < 1e-6 * still.drift.client
    day = measure(ef.streams.periodic(data, clients=6, period=8), ef.models.mlp(64, 8, 10))
    assert day.drift.time < 0.2 * day.common
    assert day.drift.client < 0.2 * day.common


def test_a_fit_at_its_limit_is_not_certainty():
    """Clients with skewed labels in two or four domains: after one change nobody knows what stays;
    after three the fit has no client drift, whoever is left out, and says no ± 0."""
    few, more = (
        measure(
            ef.streams.domains(ef.data.digits(domains), clients=4, alpha=0.1, rounds=4),
            ef.models.mlp(64, 8, 10),
        )
        for domains in (["plain", "rotated"], ["plain", "inverted", "rotated", "occluded"])
    )
    assert (few.changes, more.changes) == (1, 3)
    shown = printed(drifts(few))
    assert "too few changes (1) to tell" in shown
    assert "±" not in shown
    assert f"{few.drift.client + few.drift.time:.3g} with G²" in shown
    assert "fewer than 3 times" in shown
    assert "too few" not in printed(drifts(more))
    limit = replace(more, drift=Drift(0.0, 2.0, 0.5), error=Drift(0.0, 0.2, 0.1))
    assert "0, at the limit" in printed(drifts(limit))
    assert "2 ± 0.2" in printed(drifts(limit))
    assert "limit" not in printed(drifts(replace(limit, error=Drift(0.1, 0.2, 0.1))))


def printed(table):
    console = Console(width=60, record=True, file=StringIO())
    console.print(table)
    text = " ".join(console.export_text().split())
    assert "…" not in text
    return text


def test_products_survive_folding():
    random = np.random.default_rng(0)
    a = torch.from_numpy(random.normal(size=50_000))
    b = 0.5 * a + torch.from_numpy(random.normal(size=50_000))
    lengths = float(a.norm() * b.norm())
    assert float(folded(a) @ folded(b)) == pytest.approx(float(a @ b), abs=4 * 0.016 * lengths)


def test_drift_on_the_command_line():
    words = ["theory", "drift", "--set", "stream.name=drifting", "--set", "stream.rounds=12"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0
    for word in ("G²", "client drift", "D²", "α", "rounds 1 to 12"):
        assert word in told.stdout
    few = CliRunner().invoke(app, [*words, "--set", "stream.rounds=2"])
    assert "at least 3 rounds of 3 clients" in str(few.exception)


@pytest.mark.parametrize(
    "words",
    [("rounds", "1e-200", "--time", "1"), ("special", "--lam", "1e200")],
)
def test_numbers_beyond_floats_are_one_line(words):
    told = everfed("theory", *words, expect=1)
    assert "too large or too small" in told.stderr
