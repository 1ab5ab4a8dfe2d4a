"""Streams that change from round to round: exact sizes, skew as the theory says, windows, chance."""

from __future__ import annotations

import numpy as np
import pytest

import everfed as ef
from everfed.data import arrays
from everfed.streams.partition import dirichlet, lda

LABELS = np.repeat(np.arange(10), 6000)


def shares(labels, part):
    return np.bincount(labels[part], minlength=10) / len(part)


@pytest.mark.parametrize("alpha", [1e-12, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("prior", [True, False])
def test_parts_are_disjoint_and_of_one_size(alpha, prior):
    parts = lda(LABELS, 210, alpha, np.random.default_rng(0), prior=prior)
    assert {len(part) for part in parts} == {285}
    assert len(np.unique(np.concatenate(parts))) == 210 * 285


@pytest.mark.parametrize("alpha", [1e-320, 1e-300])
def test_with_next_to_no_alpha_a_class_is_one_clients(alpha):
    """However small: the logarithms of the shares must not overflow."""
    labels = np.repeat(np.arange(10), 50)
    parts = dirichlet(labels, 5, alpha, np.random.default_rng(0))
    owners = [{k for k, part in enumerate(parts) if (labels[part] == c).any()} for c in range(10)]
    assert all(len(own) == 1 for own in owners)


@pytest.mark.parametrize("alpha", [1e300, 1e308])
@pytest.mark.parametrize("prior", [True, False])
def test_with_a_huge_alpha_parts_are_even(alpha, prior):
    labels = np.repeat(np.arange(10), 600)
    for part in lda(labels, 2, alpha, np.random.default_rng(0), size=1000, prior=prior):
        assert np.abs(shares(labels, part) - 0.1).max() < 0.05


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0])
def test_skew_is_that_of_the_dirichlet(alpha, prior):
    """E sum theta^2 = (1 + a/C) / (1 + a) for Dirichlet(a p), (a + 1) / (C a + 1) for Dirichlet(a).
    Of the first parts only, before classes are used up; a part of 285 adds (1 - s) / 285."""
    s = (1 + alpha / 10) / (1 + alpha) if prior else (alpha + 1) / (10 * alpha + 1)
    found = [
        (shares(LABELS, lda(LABELS, 1, alpha, np.random.default_rng(k), size=285, prior=prior)[0])
         ** 2).sum()
        for k in range(300)
    ]  # fmt: skip
    assert np.mean(found) == pytest.approx(s + (1 - s) / 285, abs=4 * np.std(found) / np.sqrt(300))


def test_all_samples_can_be_used_up():
    """Classes of unequal size are emptied one after another, and the last part takes the rest."""
    labels = np.repeat([0, 1, 2], [7, 50, 3])
    parts = lda(labels, 4, 0.05, np.random.default_rng(3))
    assert sorted(np.concatenate(parts).tolist()) == list(range(60))
    with pytest.raises(ef.EverfedError, match="too few"):
        lda(labels, 7, 0.1, np.random.default_rng(0), size=9)


def table(n=4200):
    random = np.random.default_rng(0)
    x, y = random.random((n + 100, 4)).astype(np.float32), random.integers(0, 10, n + 100)
    return arrays(x[:n], y[:n], test=(x[n:], y[n:]))


def test_a_client_draws_among_its_own_subsets():
    stream = ef.streams.evolving(table(), clients=7, subsets=30, rounds=400).seeded(1)
    sets = {i: {} for i in range(7)}
    for t in range(400):
        for i in range(7):
            ids, block = stream.samples(i, t), stream.block(i, t)
            assert len(ids) == 20
            assert sets[i].setdefault(block, ids.tolist()) == ids.tolist()
    assert all(len(own) == 30 for own in sets.values())
    met = np.concatenate([ids for own in sets.values() for ids in own.values()])
    assert len(np.unique(met)) == 4200


def test_two_levels_make_clients_one_sided():
    """With one split a client's subsets are of all classes; with two of few."""
    one, two = (
        ef.streams.evolving(table(), clients=7, subsets=30, split=split, prior=True).seeded(0)
        for split in ("one", "two")
    )
    y = one.data.y.numpy()

    def skew(stream):
        return np.mean([(shares(y, stream._sequences[i]) ** 2).sum() for i in range(7)])

    assert skew(one) < 0.3
    assert skew(two) > 2 * skew(one)


@pytest.mark.parametrize(("stride", "period"), [(285, 30), (213, 2850), (142, 4275)])
def test_windows_overlap_and_repeat(stride, period):
    """285 of 8550 samples, moved on by 285, 213 or 142: overlaps of 0, 25.26 and 50.18 %."""
    data = table(7 * 8550)
    stream = ef.streams.evolving(data, order="window", stride=stride, rounds=5000).seeded(0)
    first, second = (set(stream.samples(3, t).tolist()) for t in (0, 1))
    assert len(first & second) == 285 - stride
    starts = [stream.block(3, t) for t in range(period + 1)]
    assert len(set(starts[:-1])) == period
    assert starts[-1] == starts[0]
    last = stream.samples(3, 40)  # wraps around
    assert len(set(last.tolist())) == 285


def test_fresh_data_are_for_methods_without_client_state(digits):
    stream = ef.streams.evolving(digits, clients=3, subsets=8, order="fresh", rounds=2)
    first = stream.seeded(0)
    assert set(first.samples(0, 0).tolist()) != set(first.samples(0, 1).tolist())
    model = ef.models.mlp(64, 8, 10)
    assert ef.run(ef.methods.mimelite(), stream, model, workers=1).summary.acc > 0
    with pytest.raises(ef.EverfedError, match="another one in every round"):
        ef.run(ef.methods.scaffold(), stream, model)


def test_without_classes_blocks_of_time_are_skewed():
    x = np.arange(500, dtype=np.float32)[:, None]
    data = arrays(x[:400], np.sin(x[:400]), test=(x[400:], np.sin(x[400:])))
    stream = ef.streams.evolving(data, clients=2, subsets=10, alpha=0.05, rounds=3).seeded(0)
    spans = [np.ptp(stream._sequences[0].reshape(10, 20), axis=1)]
    assert np.median(spans) < 300  # random parts of 20 from 400 span some 360


def test_wrong_settings():
    for options, match in (
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"subsets": 5000}, "too few"),
        ({"stride": 3}, "order = 'window'"),
    ):
        with pytest.raises(ef.EverfedError, match=match):
            ef.streams.evolving(table(), **options)


# client drift and period drift ----------------------------------------------------------------
def regime(drift, alpha=0.05, **more):
    options = {"clients": 100, "cohort": 10, "rounds": 30, "alpha": alpha} | more
    return ef.streams.regimes(table(), drift=drift, **options).seeded(2)


def held(stream, t):
    return [stream.samples(int(client), t) for client in stream.online(t)]


@pytest.mark.parametrize("drift", ["iid", "period", "client", "both"])
def test_what_is_dealt_out_again_is_what_the_cohort_has(drift):
    """The union of a round's data is that of its clients' own parts, in equal and disjoint parts."""
    stream = regime(drift)
    for t in (0, 7, 3):  # in any order
        parts, cohort = held(stream, t), stream.online(t)
        own = stream.data.train[stream.parts[cohort].ravel()]
        assert len(cohort) == 10
        assert {len(part) for part in parts} == {42}
        assert sorted(np.concatenate(parts).tolist()) == sorted(own.tolist())
    assert len(np.unique(stream.parts)) == stream.parts.size


def test_each_regime_has_the_drift_it_is_named_after():
    """Client drift: clients differ from their cohort. Period drift: cohorts differ from all."""
    y = table().y.numpy()

    def distances(drift):
        stream, client, period = regime(drift), [], []
        for t in range(20):
            parts = held(stream, t)
            pool = shares(y, np.concatenate(parts))
            client += [np.abs(shares(y, part) - pool).sum() / 2 for part in parts]
            period.append(np.abs(pool - shares(y, stream.data.train)).sum() / 2)
        return np.mean(client), np.mean(period)

    found = {drift: distances(drift) for drift in ("iid", "period", "client", "both")}
    for drift, (client, period) in found.items():
        assert (client > 0.6) == (drift in ("client", "both")), found
        assert (period > 0.25) == (drift in ("period", "both")), found


def test_all_regimes_draw_the_same_cohorts():
    streams = [regime(drift) for drift in ("iid", "period", "client", "both")]
    for t in range(5):
        assert len({tuple(stream.online(t)) for stream in streams}) == 1


def test_smaller_alphas_are_more_skewed():
    y = table().y.numpy()
    skew = [np.mean([(shares(y, part) ** 2).sum() for part in regime("both", a).parts])
            for a in (1.0, 0.1, 0.01)]  # fmt: skip
    assert 0.3 < skew[0] < skew[1] < skew[2]
    assert skew[2] > 0.9


def test_a_cohort_of_a_regime_takes_part_as_a_whole():
    """Its data have been pooled and dealt out: with a part of it the union would be another."""
    stream, model = regime("period"), ef.models.mlp(4, 8, 10)
    with pytest.raises(ef.EverfedError, match=r"draws cohorts of 10 itself.*cohort to 4"):
        ef.run(ef.methods.fedavg(), stream, model, sample=4)


def test_wrong_regimes():
    for options, match in (
        ({"cohort": 101}, "cohort of 101"),
        ({"clients": 5000}, "cannot be split"),
        ({"alpha": 0}, "alpha must be above 0"),
    ):
        with pytest.raises(ef.EverfedError, match=match):
            regime("both", **options)
