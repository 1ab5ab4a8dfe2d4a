"""Ranked candidates: measures against scikit-learn and by hand, MovieLens's protocol, DIN, and training
on a client's own rows of an item table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score, roc_auc_score

import everfed as ef
from everfed import client, metrics
from everfed.data import arrays
from everfed.errors import EverfedError
from everfed.records import Loaded
from everfed.report import table
from everfed.report.page import gather


# measures -------------------------------------------------------------------------------------
def test_measures_by_hand():
    """Places 1, 3, 7 and 12: HR@5 1/2, HR@10 3/4; NDCG@5 (1 + 1/2) / 4, NDCG@10 (1 + 1/2 + 1/3) / 4."""
    places = np.array([1, 3, 7, 12])
    assert metrics.hit_rate(places, 5) == 0.5
    assert metrics.hit_rate(places, 10) == 0.75
    assert metrics.ndcg(places, 5) == pytest.approx(0.375)
    assert metrics.ndcg(places, 10) == pytest.approx(0.458333, abs=1e-6)
    scores, y = np.array([0.9, 0.4, 0.4, 0.3, 0.1]), np.array([1, 1, 0, 0, 0])
    assert metrics.auc(scores, y) == pytest.approx(0.916667, abs=1e-6)  # 5.5 of 6 pairs
    assert math.isnan(metrics.auc(scores, np.ones(5)))


def test_measures_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    lists = random.permutation(np.repeat(np.arange(30), 20))
    y = np.zeros(600, int)
    for k in range(30):
        y[random.choice(np.flatnonzero(lists == k))] = 1
    scores = random.standard_normal(600) + y
    found = metrics.ranking(scores, y, lists)
    assert found["auc"] == pytest.approx(roc_auc_score(y, scores))
    assert metrics.auc(scores.round(), y) == pytest.approx(roc_auc_score(y, scores.round()))
    rows = [np.flatnonzero(lists == k) for k in range(30)]
    for k in (5, 10):
        theirs = ndcg_score(
            np.stack([y[r] for r in rows]), np.stack([scores[r] for r in rows]), k=k
        )
        assert found[f"ndcg@{k}"] == pytest.approx(theirs)
        first = [y[r][np.argsort(-scores[r])[:k]].any() for r in rows]
        assert found[f"hr@{k}"] == pytest.approx(np.mean(first))


def test_scores_that_are_no_numbers_come_last():
    """A model that has diverged must not be the best."""
    scores, y = np.array([np.nan, 0.2, 0.1, np.nan, np.nan]), np.array([1, 0, 0, 1, 0])
    assert metrics.ranks(scores, y, np.array([0, 0, 0, 1, 1])).tolist() == [3.0, 1.5]
    assert metrics.auc(scores[:3], y[:3]) == 0


def test_a_model_that_says_the_same_of_all_is_not_first():
    lists, y = np.repeat([0, 1], 100), np.tile(np.arange(100) == 0, 2)
    found = metrics.ranking(np.zeros(200), y, lists)
    assert found == {"auc": 0.5, "hr@5": 0, "hr@10": 0, "ndcg@5": 0, "ndcg@10": 0}
    with pytest.raises(EverfedError, match="exactly one positive"):
        metrics.ranking(np.zeros(4), np.array([1, 1, 0, 0]), np.zeros(4, int))


# MovieLens ------------------------------------------------------------------------------------
def ratings(users=12, films=200, each=15):
    """Users, films, ratings and times, of which every user has some at once."""
    random = np.random.default_rng(0)
    rows = []
    for user in range(1, users + 1):
        liked = random.permutation(films)[:each] + 1
        rows += [(user, film, random.integers(1, 6), 1000 + k // 2) for k, film in enumerate(liked)]
    return [rows[k] for k in random.permutation(len(rows))]


def write(path, rows, between, head=()):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*head, *(between.join(map(str, row)) for row in rows)]) + "\n")


FORMS = {
    "u.data": ("100k", "ml-100k/u.data", "\t", ()),
    "ratings.dat": ("1m", "ml-1m/ratings.dat", "::", ()),
    "inter": ("100k", "ml-100k/ml-100k.inter", "\t",
              ("user_id:token\titem_id:token\trating:float\ttimestamp:float",)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_leave_one_out(form, tmp_path):
    """The last film of every user is held out, the rest is trained on, no negative was rated."""
    size, name, between, head = FORMS[form]
    rows = ratings()
    write(tmp_path / name, rows, between, head)
    data = ef.data.movielens(size, tmp_path, history=6)
    assert (len(data.train), len(data.test)) == (12 * 14 * 5, 12 * 100)
    films = {film: k + 1 for k, film in enumerate(sorted({row[1] for row in rows}))}
    for user in range(12):
        # by time, and of one moment as they stand in the file
        own = sorted((r for r in rows if r[0] == user + 1), key=lambda row: row[3])
        seen = [films[row[1]] for row in own]
        mine = data.test[data.lists[data.test] == user]
        x, y = data.x[mine].numpy(), data.y[mine].numpy()
        assert x[y == 1].tolist() == [[seen[-1], *seen[-2:-8:-1]]]
        assert len(set(x[:, 0])) == 100
        train = data.train[data.client[data.train] == user]
        x, y = data.x[train].numpy(), data.y[train].numpy()
        assert x[y == 1][:, 0].tolist() == seen[:-1]
        assert x[y == 1][2].tolist() == [seen[2], seen[1], seen[0], 0, 0, 0, 0]
        assert (np.bincount(y) == [14 * 4, 14]).all()
        assert set(seen).isdisjoint(x[y == 0][:, 0])
    stream = ef.streams.given(data)
    assert stream.clients == 12
    with pytest.raises(EverfedError, match="candidates to rank"):
        ef.streams.given(data, test="users")


def test_damaged_ratings_are_told(tmp_path):
    with pytest.raises(EverfedError, match=r"put ml-1m/ratings\.dat into"):
        ef.data.movielens("1m", tmp_path)
    path = tmp_path / "ml-100k" / "u.data"
    write(path, [*ratings(), (3, 4)], "\t")
    with pytest.raises(EverfedError, match=r"line 181: user, film, rating and time .* '3\\t4'"):
        ef.data.movielens("100k", tmp_path)
    write(path, ratings(films=60), "\t")
    with pytest.raises(EverfedError, match="fewer than 99"):
        ef.data.movielens("100k", tmp_path)
    write(path, [*ratings(), (99, 1, 5, 1)], "\t")
    assert ef.data.movielens("100k", tmp_path).notes == (
        "1 users with a single rating are left out",
    )


# a run ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def popular(tmp_path_factory):
    """Films of which the first twenty are what everybody watches."""
    random = np.random.default_rng(1)
    rows = []
    for user in range(30):
        known = np.concatenate([random.permutation(20)[:9], 20 + random.permutation(180)[:3]])
        order = np.concatenate([random.permutation(known[:-1]), known[:1]])
        rows += [(user, film, 5, k) for k, film in enumerate(dict.fromkeys(order))]
    folder = tmp_path_factory.mktemp("films")
    write(folder / "ml-100k" / "u.data", rows, "\t")
    return ef.data.movielens("100k", folder, history=5, test_negatives=50)


LOCAL = ef.Local(lr=0.02, batch=40, optimizer="adam")


@pytest.mark.parametrize("activation", ["dice", "prelu"])
def test_din_learns_what_is_watched(popular, activation, tmp_path):
    """Well above a ranking by chance; the measures are in the records, the summary, the table and
    the page, and two workers find what one does."""
    model = ef.models.din(int(popular.x.max()), width=8, hidden=(16, 8), activation=activation)
    stream = ef.streams.given(popular, rounds=12)
    options = {"sample": 10, "local": LOCAL, "test_every": 4}
    run = ef.run(ef.methods.fedavg(), stream, model, workers=1, folder=tmp_path / "a", **options)
    found = run.summary
    assert found.auc > 0.8
    assert found.hr_10 > 0.3
    assert found.hr_5 <= found.hr_10
    assert math.isnan(found.acc)
    shown = {column.name for column in table.columns_of({"fedavg": [found]})}
    assert {"AUC %", "HR@10 %", "NDCG@10 %"} <= shown
    assert "ACC %" not in shown
    assert "AUC %" in table.markdown({"fedavg": [found]})
    about = {"tasks": ["all"], "method": {"name": "fedavg"}, "seed": 0}
    page = gather({"fedavg": [Loaded(tmp_path / "a", about, run.records)]})
    assert page.measure == "auc"
    assert {"Hit rate", "NDCG"} <= {panel.title for panel in page.panels}
    if activation == "dice":
        two = ef.run(ef.methods.fedavg(), stream, model, workers=2, **options)
        assert two.summary.auc == pytest.approx(found.auc, abs=1e-3)


def test_tables_without_candidates_have_no_ranking_columns(digits):
    stream = ef.streams.static(digits, clients=2, rounds=1)
    found = ef.run(ef.methods.fedavg(), stream, ef.models.mlp(64, 10), workers=1).summary
    assert "AUC %" not in {column.name for column in table.columns_of({"fedavg": [found]})}


# rows of a table ------------------------------------------------------------------------------
def clicks(items):
    """Eight users who know twelve items each."""
    random = np.random.default_rng(0)
    known = random.integers(1, items + 1, (8, 12))
    x = np.concatenate([own[random.integers(0, 12, (30, 6))] for own in known]).astype(np.int32)
    x[:, 4:] *= random.random((240, 2)) < 0.5  # short histories
    return arrays(x, random.integers(0, 2, 240), client=np.repeat(np.arange(8), 30))


@pytest.mark.parametrize("method", ["fedavg", "fedeve", "fedadam", "fedprox"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_client_trains_its_own_rows_as_if_it_had_all(method, optimizer, monkeypatch):
    """Bit by bit the same model as with the whole table; but for FedProx's pull of rows that are
    where it pulls them to, which with plain SGD is rounded in every step."""
    stream = ef.streams.given(clicks(2000), rounds=3)
    model, local = ef.models.din(2000, width=4), ef.Local(lr=0.05, batch=8, optimizer=optimizer)
    build = ef.methods.METHODS[method].build
    few = ef.run(build(), stream, model, sample=4, local=local, workers=1)
    monkeypatch.setattr(client, "FEW", 10**9)
    whole = ef.run(build(), stream, model, sample=4, local=local, workers=1)
    if (method, optimizer) == ("fedprox", "sgd"):
        torch.testing.assert_close(few.vector, whole.vector, rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(few.vector, whole.vector)


@pytest.mark.parametrize(
    ("build", "local"),
    [
        (ef.methods.scaffold, {}),
        (lambda: ef.methods.fedprox(0.5) + ef.methods.scaffold(), {}),
        (ef.methods.fedavg, {"weight_decay": 0.1}),
    ],
)
def test_what_changes_every_row_is_given_every_row(build, local, monkeypatch):
    stream = ef.streams.given(clicks(500), rounds=2)
    model, local = ef.models.din(500, width=4), ef.Local(lr=0.05, batch=8, **local)
    found = ef.run(build(), stream, model, local=local, workers=1)
    monkeypatch.setattr(client, "FEW", 10**9)
    assert torch.equal(found.vector, ef.run(build(), stream, model, local=local, workers=1).vector)


def test_a_step_does_not_write_the_whole_table():
    """With a table twenty times larger, training writes a few passes over it a client and round,
    not in every one of its eight steps; with all rows each step has several."""
    from test_cost import Cost

    def written(items, method):
        stream = ef.streams.given(clicks(items), rounds=1)
        local = ef.Local(lr=0.05, batch=4, optimizer="adam")
        with Cost() as cost:
            ef.run(method, stream, ef.models.din(items, width=4), local=local, workers=1)
        return cost.written

    def passes(method):
        """Over the table, for each of 8 clients."""
        return (written(20_000, method) - written(1000, method)) / (8 * 4 * 19_000)

    assert passes(ef.methods.fedavg()) < 10
    assert passes(ef.methods.fedprox(0.1)) < 15
    assert passes(ef.methods.scaffold(option=1)) > 30
