"""Drift meters: right by hand, the same wherever clients train, silent where they would tell too
much, and able to tell the kinds of drift apart. And FedEve's gain for each layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import everfed as ef
from everfed.local import Local
from everfed.meters import of_cohort
from everfed.method import Method, Reduced
from everfed.methods.fedeve import FedEve
from everfed.metrics import drift
from everfed.reduce import Reducer, cohort_spread
from everfed.vector import Layout, Slot
from quadratics import Game

METERS = ("drift_period", "drift_client", "signal_to_noise", "effective_clients", "update_norm")


def series(records, metric):
    return [r["value"] for r in records if r["metric"] == metric]


# by hand --------------------------------------------------------------------------------------
def test_meters_of_two_unequal_clients():
    """One step of rate 0.1 is -0.1 of the gradient: u_1 = (0.1, 0) with one sample, u_2 =
    (0.3, 0.4) with three, so p = (1/4, 3/4) and u = (0.25, 0.3)."""
    first = np.array([[1.0, 0.0]]), np.array([[3.0, 4.0]] * 3)
    clients = [(np.ones_like(c), c) for c in first]
    game = Game(Method(), [clients], rounds=2, local=Local(lr=0.1, steps=1, batch=8))
    said = game.rounds.play(game.fed).values
    length = 0.25 * 0.01 + 0.75 * 0.25
    u_sq = 0.25**2 + 0.3**2
    spread = length - u_sq
    effective = 1 / (1 / 16 + 9 / 16)
    assert said["update_norm"] == pytest.approx(math.sqrt(u_sq))
    assert said["effective_clients"] == pytest.approx(effective)
    assert said["drift_client"] == pytest.approx(spread / length)
    assert said["signal_to_noise"] == pytest.approx(u_sq / (spread / (effective - 1)))
    assert "drift_period" not in said
    # the second round's mean update is 0.9 of the first: the same direction
    assert game.rounds.play(game.fed).values["drift_period"] == pytest.approx(0, abs=1e-12)


def test_a_turn_by_a_right_angle():
    tasks = [[(np.ones((1, 2)), np.array([c]))] for c in ([1.0, 0.0], [0.1, 5.0])]
    game = Game(Method(), tasks, rounds=1, local=Local(lr=0.1, steps=1, batch=8))
    game.play()  # to (0.1, 0), then towards (0.1, 5)
    said = game.rounds.play(game.fed).values
    assert said["drift_period"] == pytest.approx(1)
    assert "drift_client" not in said  # one client has nothing to differ from


def test_the_variance_of_the_mean_is_that_of_cohorts_drawn_at_random():
    """Cohorts of 10 with random weights from a population with a known spread: the noise that the
    meter sees within cohorts is the variance of their means around the population's."""
    random = np.random.default_rng(0)
    noise, means = [], []
    for _ in range(400):
        u, weights = random.normal(0, 1, (10, 40)), torch.from_numpy(random.uniform(1, 4, 10))
        reducer = Reducer({"update": "mean"}, {"update": (40,)}, pieces=(40,))
        reducer.add(list(range(10)), {"update": torch.from_numpy(u + 1)}, weights)
        mean = reducer.values()["update"]
        effective = reducer.weight**2 / reducer.weight_sq
        length = reducer.lengths / reducer.weight
        said = of_cohort(mean, length, effective)
        noise.append(float(mean @ mean) / said["signal_to_noise"])
        means.append(float((mean - 1).square().sum()))
    assert np.mean(noise) == pytest.approx(np.mean(means), rel=0.05)


# everywhere the same --------------------------------------------------------------------------
def run(method, digits, **options):
    stream = ef.streams.domains(digits, clients=5, alpha=0.5, rounds=3)
    options = {"workers": 1, "sample": 3, "local": ef.Local(lr=0.05)} | options
    return ef.run(method, stream, ef.models.mlp(64, 16, 10), **options).records


@pytest.mark.parametrize("name", ["fedavg", "fedeve", "scaffold", "median", "cflag", "fednova"])
def test_engines_agree_on_the_meters(name, digits):
    build = ef.methods.METHODS[name].build
    method = build(lipschitz=1.0) if name == "cflag" else build()
    alone = run(method, digits, grouping="single")
    for other in (run(method, digits), run(method, digits, workers=2)):
        for metric in METERS:
            expected = series(alone, metric)
            assert len(expected) == 6 - (metric == "drift_period")
            assert series(other, metric) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_secret_mean_is_told_once(digits):
    """Under central noise the sum of squares would be one more release: nothing is told of the
    clients' spread, and the turn is that of means with noise."""
    private = ef.methods.privacy(clip=0.1, noise=1.0, secret=False)
    for method in (private, ef.methods.fedeve(average="uniform") + private):
        records = run(method, digits)
        told = {r["metric"] for r in records} & set(METERS)
        assert told == {"drift_period", "effective_clients", "update_norm"}
        assert drift(records).period == pytest.approx(1, abs=0.1)
        assert str(drift(records)).endswith(", 3.0 effective clients")


# what they are for ----------------------------------------------------------------------------
def test_meters_tell_the_kinds_of_drift_apart():
    """FedEve's four regimes. Where only rounds differ, they turn more than their clients explain;
    where only clients differ, less, because the differences of a cohort cancel."""
    data, seen = ef.data.digits(["plain"]), {}
    for kind in ("iid", "period", "client", "both"):
        stream = ef.streams.regimes(
            data, drift=kind, clients=50, cohort=5, rounds=12, alpha=0.05, prior=False
        )
        done = ef.run(
            ef.methods.fedavg(), stream, ef.models.mlp(64, 32, 10), workers=1,
            local=ef.Local(lr=0.1, epochs=2, batch=8), test_every=12,
        )  # fmt: skip
        seen[kind] = drift(done.records, since=2)
    excess = {kind: own.period / own.sampling for kind, own in seen.items()}
    assert excess["period"] > 4 * excess["both"]
    assert excess["client"] < 0.7 * excess["both"]
    assert min(seen["client"].client, seen["both"].client) > 1.3 * seen["iid"].client
    assert min(seen["period"].period, seen["both"].period) > 1.5 * seen["iid"].period


# FedEve layer by layer ------------------------------------------------------------------------
def eve(u, sizes, gain, s=None):
    """FedEve's step for the updates u, (clients, d), of modules with these sizes."""
    cuts = np.cumsum([0, *sizes])
    slots = [Slot(f"{k}.w", (n,), cuts[k], cuts[k + 1]) for k, n in enumerate(sizes)]
    layout, d = Layout(tuple(slots)), sum(sizes)
    part = FedEve(gain=gain)
    pieces = layout.pieces() if part.layered else (d,)
    reducer = Reducer({"update": "mean"}, {"update": (d,)}, True, False, pieces)
    reducer.add(list(range(len(u))), {"update": u}, torch.tensor([1.0, 3.0, 2.0][: len(u)]))
    values = reducer.values()
    s = s or part.init(torch.zeros(d, dtype=u.dtype), layout)
    spread = cohort_spread(values, reducer.n, pieces)
    r = Reduced({}, torch.zeros(d), reducer.n, reducer.weight, 9, 0, 0, spread)
    return part.fold(s, values["update"], r)


def test_a_gain_for_each_layer_is_a_filter_for_each_layer():
    """Two rounds of three unequal clients: layers of 300 and 5 as two models would be."""
    random = torch.Generator().manual_seed(1)
    rounds = torch.randn(2, 3, 305, generator=random, dtype=torch.float64)
    rounds[:, :, 300:] *= 0.1
    rounds[:, :, 300:] += 1
    both = left = right = None
    for u in rounds:
        step, both = eve(u, (300, 5), "layer", both)
        one, left = eve(u[:, :300], (300,), "model", left)
        two, right = eve(u[:, 300:], (5,), "model", right)
        torch.testing.assert_close(step, torch.cat([one, two]))
    gains = both["gain"].tolist()
    assert gains == pytest.approx([left["gain"].item(), right["gain"].item()])
    assert gains[1] > gains[0] + 0.2  # the clients agree on the second layer


def test_the_spread_from_sums_is_the_spread():
    """Around the weighted mean, clients counted alike, piece by piece; float32 uploads."""
    u = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 1e-2 + 0.1
    weights = torch.tensor([1.0, 3.0, 2.0])
    reducer = Reducer({"update": "mean"}, {}, True, False, (700, 300))
    reducer.add([0], {"update": u[:1]}, weights[:1])
    reducer.add([1, 2], {"update": u[1:]}, weights[1:])
    exact = u.double()
    mean = (weights.double() @ exact) / 6
    by_hand = [float((exact - mean)[:, s].square().mean()) for s in (slice(700), slice(700, 1000))]
    found = cohort_spread(reducer.values(), 3, (700, 300))
    assert found.tolist() == pytest.approx(by_hand, rel=1e-4)
