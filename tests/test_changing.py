"""Streams that change with time: gradual drift, day and night, clients that come and go, blocks of
time, and real records of drift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import everfed as ef
from everfed import config as configs
from everfed.data import arrays
from everfed.streams import Stream
from everfed.streams.drift import look

PLAIN = {"workers": 1, "local": ef.Local(lr=0.1)}
EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "streams").glob("*.toml"))


@pytest.fixture(scope="module")
def plain() -> ef.data.Data:
    return ef.data.digits(["plain"])


# gradual drift --------------------------------------------------------------------------------
@pytest.mark.parametrize("correlation", [0.0, 0.37, 0.9])
@pytest.mark.parametrize("client_alpha", [None, 0.5])
def test_drift_has_the_correlation_asked_for(plain, correlation, client_alpha):
    """Mixtures' deviations from their known mean: E<d_t, d_t+k> = alpha^k (1 - sum pi^2) / (A + 1),
    with the Dirichlet's variance for k = 0; within four standard errors over 120 clients."""
    stream = ef.streams.drifting(
        plain, clients=120, correlation=correlation, alpha=0.2, client_alpha=client_alpha, rounds=50
    ).seeded(1)
    for k in (0, 1, 2, 5):
        own = []
        for i in range(120):
            mean = stream.mean(i)
            d = np.array([stream.shares(i, t) for t in range(50)]) - mean
            variance = (1 - (mean**2).sum()) / (0.2 * 10 + 1)
            own.append((d[: 50 - k] * d[k:]).sum(1).mean() / variance)
        error = np.std(own, ddof=1) / np.sqrt(120)
        assert np.mean(own) == pytest.approx(correlation**k, abs=4 * error)


def test_samples_follow_the_mixture(plain):
    """Of n samples, the shares' squared distance to the mixture p is (1 - sum p^2) / n."""
    stream = ef.streams.drifting(plain, clients=2, alpha=1.0, size=40, rounds=300).seeded(0)
    y = plain.y.numpy()
    found, expected = [], []
    for t in range(300):
        p = stream.shares(1, t)
        counts = np.bincount(y[stream.samples(1, t)], minlength=10)
        found.append(((counts / 40 - p) ** 2).sum())
        expected.append((1 - (p**2).sum()) / 40)
    error = np.std(found, ddof=1) / np.sqrt(300)
    assert np.mean(found) == pytest.approx(np.mean(expected), abs=4 * error)


def test_small_alphas_and_many_clients(plain):
    """Tiny concentrations do not underflow, and what is forgotten is drawn again the same."""
    stream = ef.streams.drifting(
        plain, clients=3000, alpha=1e-6, client_alpha=1e-6, correlation=0.99, rounds=3
    ).seeded(0)
    first = stream.samples(7, 2)
    assert all(np.isfinite(stream.shares(i, 2)).all() for i in range(1500))
    assert np.array_equal(stream.samples(7, 2), first)


def test_without_classes_times_are_mixed():
    x = np.arange(400, dtype=np.float32)[:, None]
    data = arrays(x[:300], np.sin(x[:300]), test=(x[300:], np.sin(x[300:])))
    stream = ef.streams.drifting(data, clients=3, alpha=0.01, size=20, rounds=4).seeded(0)
    blocks = [len(np.unique(stream.samples(i, 0) // 30)) for i in range(3)]
    assert max(blocks) <= 3  # of ten


# day and night --------------------------------------------------------------------------------
def test_day_and_night_take_turns():
    data = ef.data.digits(["plain", "inverted"])
    smooth = ef.streams.periodic(data, clients=4, period=8, zones=2).seeded(0)
    share = [smooth.shares(0, t)[0] for t in range(9)]
    assert share == pytest.approx([(1 + np.cos(np.pi * t / 4)) / 2 for t in range(9)])
    assert smooth.shares(1, 0)[0] == pytest.approx(0)  # the other side of the earth
    assert smooth.shares(2, 3) == pytest.approx(smooth.shares(0, 3))
    abrupt = ef.streams.periodic(data, period=6, shape="abrupt", size=30).seeded(0)
    domain = [set(data.task[abrupt.samples(0, t)].tolist()) for t in range(7)]
    assert domain == [{0}, {0}, {0}, {1}, {1}, {1}, {0}]
    seen = look(smooth, 0)
    assert (seen.counted, seen.names) == ("domain", ["plain", "inverted"])
    assert seen.held.sum(2).min() == 100


def test_day_and_night_of_classes(plain):
    stream = ef.streams.periodic(plain, shape="abrupt", period=2, day=[7, 1], size=40).seeded(0)
    y = plain.y.numpy()
    assert set(y[stream.samples(0, 0)]) == {1, 7}
    assert set(y[stream.samples(0, 1)]) == {0, 2, 3, 4, 5, 6, 8, 9}


# who is there ---------------------------------------------------------------------------------
def test_a_schedule_is_kept(plain):
    inner = ef.streams.static(plain, clients=4, rounds=12)
    stream = ef.streams.present(inner, schedule={1: [(3, 6), (9, 99)], 2: [(0, 3)]})
    there = [stream.online(t).tolist() for t in range(12)]
    assert [1 in ids for ids in there] == [3 <= t < 6 or t >= 9 for t in range(12)]
    assert [2 in ids for ids in there] == [t < 3 for t in range(12)]
    assert all({0, 3} <= set(ids) for ids in there)


def test_clients_come_and_go_at_the_rates_asked_for(plain):
    """A chain with rates join and leave is there join / (join + leave) of the time, and leaves after
    1 / leave rounds; within four standard errors over 400 clients."""
    inner = ef.streams.static(plain, clients=400, rounds=200)
    stream = ef.streams.present(inner, start=0.25, join=0.05, leave=0.15, seed=2)
    there = np.array([np.isin(np.arange(400), stream.online(t)) for t in range(200)])
    assert there[0].mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 400))
    share = there.mean(0)  # begun with the long run's share
    assert share.mean() == pytest.approx(0.25, abs=4 * share.std() / 20)
    left = there[:-1] & ~there[1:]
    rate = left.sum() / there[:-1].sum()
    assert rate == pytest.approx(0.15, abs=4 * np.sqrt(0.15 * 0.85 / there[:-1].sum()))
    assert np.array_equal(stream.online(50), np.flatnonzero(there[50]))  # asked again, backwards


def test_clients_are_there_by_their_time_of_day(plain):
    """The share that is there is the cosine between night and 1, zone by zone; within four standard
    errors over 600 clients."""
    inner = ef.streams.static(plain, clients=600, alpha=None, rounds=24)
    stream = ef.streams.present(inner, period=12, night=0.2, zones=3, seed=1)
    for t in range(24):
        there = np.isin(np.arange(600), stream.online(t))
        for zone in range(3):
            p = 0.2 + 0.8 * (1 + np.cos(2 * np.pi * (t / 12 + zone / 3))) / 2
            spread = 4 * np.sqrt(p * (1 - p) / 200) + 1e-9
            assert there[zone::3].mean() == pytest.approx(p, abs=spread)


def test_a_day_of_regions_biases_cohorts(plain):
    """Zones by labels: at noon of one zone hardly any sample of another zone's classes is held,
    however large the cohort; with zones in turn all classes are there at any time. Churn stays."""
    inner = ef.streams.regimes(plain, clients=140, cohort=140, alpha=0.01, rounds=40).seeded(0)

    def share(by, t):
        """Of the first five classes among what is held by those who are there."""
        stream = ef.streams.present(inner, period=20, zones=2, by=by, seed=0)
        ids = np.concatenate([stream.samples(int(i), t) for i in stream.online(t)])
        return np.mean(plain.y.numpy()[ids] < 5)

    assert share("labels", 0) > 0.9
    assert share("labels", 10) < 0.1
    assert 0.3 < share("turn", 0) < 0.7
    leaving = ef.streams.present(inner, period=20, zones=2, leave=0.2, seed=0)
    assert len(leaving.online(0)) > 30
    assert len(leaving.online(20)) < 10  # noon again, and most have left for good


def streams_of(data: ef.data.Data) -> dict[str, Stream]:
    """One of each kind, small."""
    rows = arrays(data.x, data.y, ordered=True)
    return {
        "domains": ef.streams.domains(data, clients=4, rounds=3),
        "classes": ef.streams.classes(data, tasks=2, clients=4, rounds=3),
        "evolving": ef.streams.evolving(data, clients=4, subsets=5, rounds=6),
        "drifting": ef.streams.drifting(data, clients=4, size=30, rounds=6),
        "periodic": ef.streams.periodic(data, clients=4, period=4, size=30, rounds=6),
        "blocks": ef.streams.blocks(rows, clients=4, blocks=2, rounds=3),
        "regimes": ef.streams.regimes(data, clients=9, cohort=4, drift="both", rounds=6),
    }


@pytest.mark.parametrize(
    "name", ["domains", "classes", "evolving", "drifting", "periodic", "blocks", "regimes"]
)
def test_any_stream_with_clients_that_come_and_go_resumes_the_same(name, digits, tmp_path):
    """Interrupted in mid-run, on one worker or two, trained one by one or together."""
    stream = ef.streams.present(streams_of(digits)[name], start=0.5, join=0.5, leave=0.3)
    model, method = ef.models.mlp(64, 8, 10), ef.methods.cfl_coreset(size=5)

    def crash(progress):
        if progress.round == 3:
            raise RuntimeError

    whole = ef.run(method, stream, model, seed=3, **PLAIN)
    options = {"seed": 3, "folder": tmp_path, "checkpoint_seconds": 0, **PLAIN}
    with pytest.raises(RuntimeError):
        ef.run(method, stream, model, on_round=crash, **options)
    again = ef.run(method, stream, model, resume=True, **options)
    assert torch.equal(again.vector, whole.vector)
    other = ef.run(
        method, stream, model, seed=3, grouping="single", workers=2, local=PLAIN["local"]
    )
    torch.testing.assert_close(other.vector, whole.vector, rtol=1e-4, atol=1e-5)
    assert (again.tasks, again.matrix.shape) == (whole.tasks, whole.matrix.shape)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ewc", "lwf", "special", "cflag"])
def test_nobody_online(method, digits):
    """Not in the first round, and not at the first task's end: told, and the model stays."""
    inner = ef.streams.domains(digits, clients=3, rounds=2)
    stream = ef.streams.present(inner, schedule={i: [(2, 4)] for i in range(3)})
    build = ef.methods.METHODS[method].build
    made = build(lipschitz=1.0) if method == "cflag" else build()
    result = ef.run(made, stream, ef.models.mlp(64, 8, 10), **PLAIN)
    assert result.warnings[:2] == tuple(
        f"round {t}: no client was online: the model stays as it was" for t in (1, 2)
    )
    assert result.summary.lost_rounds == 2
    assert np.isfinite(result.matrix).all()


# blocks of time -------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", ["runs", "turns"])
def test_blocks_keep_time(cut):
    """Every row is trained on by one client or tested on, and no test row is before its block's
    training rows, nor in an earlier block's time."""
    data = arrays(np.zeros((103, 2)), np.zeros(103), ordered=True)
    stream = ef.streams.blocks(data, clients=3, blocks=4, rounds=2, cut=cut)
    used: list[int] = []
    for k in range(4):
        trained = np.concatenate([stream.samples(i, 2 * k) for i in range(3)])
        assert trained.max() < stream.test(k).min()
        assert not used or trained.min() > max(used)
        assert max(len(stream.samples(i, 2 * k)) for i in range(3)) <= len(trained) / 3 + 1
        used += [*trained.tolist(), *stream.test(k).tolist()]
    assert sorted(used) == list(range(103))


def test_numbers_are_predicted_block_by_block():
    """Without labels to skew: a line whose slope changes is followed."""
    random = np.random.default_rng(0)
    x = random.normal(size=(800, 1)).astype(np.float32)
    slope = np.where(np.arange(800) < 400, 1.0, -1.0).astype(np.float32)
    data = arrays(x, x[:, 0] * slope, ordered=True)
    stream = ef.streams.blocks(data, clients=4, blocks=4, rounds=5)
    result = ef.run(
        ef.methods.fedavg(),
        stream,
        ef.models.mlp(1, 1),
        loss=lambda z, y: (z[:, 0] - y) ** 2,
        **PLAIN,
    )
    loss = ef.metrics.matrix(result.records, "loss")
    assert loss[1, 1] < 0.01  # learnt
    assert loss[1, 2] > 2  # 4 in the mean, (2 x)^2, before the change was seen
    assert loss[3, 3] < 0.01
    assert np.isnan(result.prequential)  # there is no accuracy


# tables in time order ---------------------------------------------------------------------------
def test_one_table_from_three_kinds_of_files(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(3, 2, (50, 2)).round(3)
    y = random.integers(0, 2, 50)
    words = np.array(["down", "up"])[y]
    rows = [f"{k},{a},{b},{w}" for k, ((a, b), w) in enumerate(zip(x, words, strict=True))]
    (tmp_path / "a.csv").write_text("when,a,b,way\n" + "\n".join(rows) + "\n")
    head = "@relation r\n@attribute when numeric\n@attribute a real\n@attribute b real\n"
    head += "@attribute way {up,down}\n@data\n"
    (tmp_path / "a.arff").write_text(head + "\n".join(rows) + "\n")
    np.savez(tmp_path / "a.npz", x=x, y=y)
    made = [ef.data.series(f"a.{end}", tmp_path, drop=["when"]) for end in ("csv", "arff")]
    made.append(ef.data.series("a.npz", tmp_path))
    expected = (x - x[:40].mean(0)) / x[:40].std(0)
    for data in made:
        assert data.ordered
        assert (len(data.train), len(data.test), data.classes) == (40, 10, 2)
        assert np.allclose(data.x, expected, atol=1e-5)
        assert np.array_equal(data.y, y)


TABLES = {
    "text.csv": ("a,b,c\n1,2,0\n2,y,1\n", {}, r"column 'b' holds text \('y' in row 3\)"),
    "cell.csv": ("a,b,c\n1,2,0\n, ,1\n", {"drop": "a"}, r"column 'b' has 1 empty cells .* row 3"),
    "class.csv": ("a,c\n1,0\n2,\n", {}, r"column 'c' has 1 empty cells \(the first in row 3\)"),
    "semi.csv": ("a;b;c\n1;2;0\n", {"label": "c"}, "is it separated by ';'"),
    "owner.csv": ("a,b,c\n1,2,0\n", {"client": "d"}, "no column 'd'; it has a, b, c"),
    "bare.csv": ("a,b\n1,2\n", {"client": "a", "task": "b"}, "no columns to predict b from"),
    "single.csv": ("a,t,c\n1,x,0\n2,x,0\n2,y,1\n", {"task": "t"}, "too few rows to keep some"),
    "short.csv": ("a,b,c\n1,2,0\n2,1\n", {}, "row 3: 2 cells, not 3"),
    "hole.csv": ("a,b,c\n1,2,0\n2,nan,1\n", {}, "'b' holds NaN .* in row 3"),
    "empty.csv": ("", {}, "is empty"),
    "label.csv": ("a,b,c\n1,2,0\n", {"label": "d"}, "no column 'd'; it has a, b, c"),
    "drop.csv": ("a,b,c\n1,2,0\n", {"drop": ["a", "b"]}, "no columns to predict c from"),
    "bad.arff": ("@relation r\n@data\nnonsense", {}, "ARFF|no columns"),
    "a.txt": ("a", {}, "must end in"),
}


def test_a_table_with_owners_and_tasks(tmp_path):
    """Two wards take turns in winter and in spring, the first season as long as both of the next."""
    rows = [f"{'AB'[k % 2]},{'spring' if k >= 20 else 'winter'},{k},{k % 3}" for k in range(30)]
    (tmp_path / "a.csv").write_text("\ufeffward,season,heat,outcome\n" + "\n".join(rows) + "\n")
    data = ef.data.series("a.csv", tmp_path, client="ward", task="season")
    assert data.tasks == ("winter", "spring")  # as they come, not by name
    assert data.x.shape == (30, 1)
    assert data.test.tolist() == [16, 17, 18, 19, 28, 29]  # the last fifth of each, in each season
    assert float(data.x[data.train].mean()) == pytest.approx(0, abs=1e-6)
    stream = ef.streams.given(data, rounds=2)
    assert (stream.clients, stream.rounds) == (2, 4)
    assert stream.samples(1, 2).tolist() == [21, 23, 25, 27]
    assert stream.test(1).tolist() == [28, 29]


@pytest.mark.parametrize("file", list(TABLES))
def test_bad_tables_are_told_in_one_line(file, tmp_path):
    text, options, said = TABLES[file]
    (tmp_path / file).write_text(text)
    with pytest.raises(ef.EverfedError, match=said) as caught:
        ef.data.series(file, tmp_path, **options)
    assert "\n" not in str(caught.value)


def published(folder: Path, data_dir: Path) -> None:
    """The public files, from the arrays in the folder of real data."""
    path = data_dir / "drift_elec2_weather_outdoor.npz"
    if not path.exists():
        pytest.skip(f"no {path.name} in EVERFED_DATA: tests on real drift are skipped")
    held = np.load(path, allow_pickle=False)
    head = "date,day,period,nswprice,nswdemand,vicprice,vicdemand,transfer,class\n"
    price = np.array(["UP", "DOWN"])[held["elec2_y"]]
    for name, top, x, y in (
        ("electricity.csv", head, held["elec2_x"], price),
        ("weather.csv", "", held["weather_x"], held["weather_y"]),
    ):
        lines = [",".join([*(f"{v:g}" for v in row), str(c)]) for row, c in zip(x, y, strict=True)]
        (folder / name).write_text(top + "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["elec2", "weather"])
def test_fedavg_beats_the_majority_on_real_drift(name, tmp_path, data_dir, monkeypatch):
    """Tested on each block before it is trained on, against always saying the commoner class."""
    published(tmp_path, data_dir)
    monkeypatch.setenv("EVERFED_DATA", str(tmp_path))
    path = next(path for path in EXAMPLES if path.stem == name)
    made = configs.experiment(configs.read(path))
    result = made.go(workers=1)
    stream = made.stream
    later = np.concatenate([stream.test(k) for k in range(1, len(stream.tasks))])
    majority = np.bincount(stream.data.y[later].numpy()).max() / len(later)
    assert result.prequential > majority + 0.03
    (tmp_path / ("electricity.csv" if name == "elec2" else "weather.csv")).write_text(
        "1,2,0\n3,4,1\n"
    )
    with pytest.raises(ef.EverfedError, match=r"no column 'class'|not the published table"):
        configs.experiment(configs.read(path))


# all of them ----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path):
    config = configs.read(path, ["stream.rounds=15"])
    if config.data["name"] == "digits":  # the others are run on real data above
        assert configs.experiment(config).go(workers=1).acc > 0.2


WRONG = [
    (lambda d: ef.streams.drifting(d, correlation=1.0), "correlation must be"),
    (lambda d: ef.streams.drifting(d, alpha=np.inf), "'static'"),
    (lambda d: ef.streams.drifting(d, alpha=1e308), "never changes"),
    (lambda d: ef.streams.drifting(d, seed=-1).samples(0, 0), "a seed must be 0 or more, not -1"),
    (lambda d: ef.streams.drifting(d, client_alpha=0), "client_alpha must be above 0"),
    (lambda d: ef.streams.drifting(d, size=0), "size must be at least 1"),
    (lambda d: ef.streams.periodic(d, day=["winter"]), "no 'winter' for the day; it has plain"),
    (lambda d: ef.streams.periodic(d, day=list(range(10))), "the night has no training"),
    (lambda d: ef.streams.blocks(d), "not known to be in time order"),
    (lambda d: ef.streams.blocks(arrays(d.x, d.y, ordered=True), blocks=900), "rows are too few"),
    (lambda d: ef.streams.present(ef.streams.static(d), leave=1.5), "between 0 and 1"),
    (lambda d: ef.streams.present(ef.streams.static(d), start=0), "nobody is ever there"),
    (lambda d: ef.streams.present(ef.streams.static(d), schedule={0: [(3, 3)]}), "cannot be there"),
    (lambda d: ef.streams.present(ef.streams.static(d), schedule={99: [(0, 3)]}), "names client 99"),
    (lambda d: ef.streams.present(ef.streams.static(d), zones=3), "give its present.period"),
    (lambda d: ef.streams.present(ef.streams.static(d), period=5, night=2), "between 0 and 1"),
    (lambda d: ef.streams.present(ef.streams.sites(ef.data.sites())), "by themselves"),
]  # fmt: skip


def test_a_mixture_that_hardly_changes(plain):
    """Numbers at which one draw more or less is lost in rounding."""
    stream = ef.streams.drifting(plain, correlation=1 - 1e-12, client_alpha=1e308, rounds=2)
    first, second = (stream.shares(0, t) for t in range(2))
    np.testing.assert_allclose(first, second, atol=1e-3)


@pytest.mark.parametrize(("make", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_settings(make, said, plain):
    with pytest.raises(ef.EverfedError, match=said):
        make(plain)
