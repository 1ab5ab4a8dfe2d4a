"""Natural users: who is left out or held out, tables of any size, LEAF's and Hugging Face's files."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
import torch

import everfed as ef
from everfed.data import arrays
from everfed.errors import EverfedError


def people(sizes=(5, 1, 12, 3, 30), **more):
    """Users whose samples come in no order; x says which sample it is."""
    random = np.random.default_rng(0)
    user = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = np.arange(len(user), dtype=np.float32)[:, None]
    return arrays(x, random.integers(0, 3, len(user)), client=user, **more), user


def held_by(stream):
    return [stream.samples(client, 0) for client in range(stream.clients)]


def test_users_are_as_large_as_they_are():
    data, user = people()
    stream = ef.streams.given(data)
    assert [len(own) for own in held_by(stream)] == [5, 1, 12, 3, 30]
    assert all((user[own] == client).all() for client, own in enumerate(held_by(stream)))


def test_users_without_training_samples_are_no_clients():
    """Nobody is number 1."""
    data = ef.data.arrays(np.zeros((4, 2)), [0, 1, 0, 1], client=[0, 0, 2, 2])
    stream = ef.streams.given(data)
    assert stream.users.tolist() == [0, 2]
    assert [own.tolist() for own in held_by(stream)] == [[0, 1], [2, 3]]


def test_small_users_are_left_out_and_counted():
    data, user = people()
    stream = ef.streams.given(data, least=4)
    assert stream.users.tolist() == [0, 2, 4]
    assert [len(own) for own in held_by(stream)] == [5, 12, 30]
    assert all((user[own] == stream.users[k]).all() for k, own in enumerate(held_by(stream)))
    assert stream.data.notes == ("2 of 5 users with fewer than 4 samples are left out, 4 samples",)
    with pytest.raises(EverfedError, match="no user is left; the largest has 30"):
        ef.streams.given(data, least=31)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_share_of_every_user_is_held_out(ordered):
    data, user = people(ordered=ordered)
    stream = ef.streams.given(data, test="samples", share=0.25)
    trained, tested = held_by(stream), stream.test(0)
    assert sorted(np.concatenate([*trained, tested]).tolist()) == list(range(len(user)))
    # round(size / 4), at least one where there are two
    assert np.bincount(user[tested], minlength=5).tolist() == [1, 0, 3, 1, 8]
    late = [own.max() < tested[user[tested] == k].min() for k, own in enumerate(trained) if k != 1]
    assert all(late) == ordered


def test_whole_users_are_held_out():
    data, user = people(sizes=(4,) * 20)
    stream = ef.streams.given(data, test="users", share=0.25)
    tested = set(user[stream.test(0)])
    assert len(tested) == 5
    assert stream.clients == 15
    assert tested.isdisjoint(stream.users)
    assert len(stream.test(0)) == 20


def test_held_out_samples_of_the_data_are_used_too(tmp_path):
    """A table that names the users of its test samples is split anew as a whole."""
    write_npy(tmp_path, users=10, each=5)
    data = ef.data.npy("t", tmp_path, client="user")
    assert len(data.test) == 10
    stream = ef.streams.given(data, test="users", share=0.2)
    assert sum(map(len, held_by(stream))) + len(stream.test(0)) == 50


# tables of any size ---------------------------------------------------------------------------
def write_npy(folder, users, each, width=4):
    place = folder / "t"
    place.mkdir()
    random = np.random.default_rng(1)
    y = random.integers(0, 2, users * each)
    x = random.standard_normal((users * each, width)).astype(np.float32) + 2 * y[:, None]
    user = np.char.add("user ", random.permutation(np.repeat(np.arange(users), each)).astype(str))
    for name, column in {"x": x.astype(np.float32), "y": y, "user": user}.items():
        np.save(place / f"{name}.npy", column)
    return place


def test_a_mapped_table_is_not_read(tmp_path):
    """Inputs are the file's own pages; a run reads the rows that it trains on and learns."""
    place = write_npy(tmp_path, users=200, each=6)
    data = ef.data.npy("t", tmp_path, client="user")
    np.load(place / "x.npy", mmap_mode="r+")[7] = 3.0
    assert data.x[7].tolist() == [3.0] * 4
    stream = ef.streams.given(data, rounds=5)
    assert stream.clients == 200
    result = ef.run(ef.methods.fedavg(), stream, ef.models.mlp(4, 2), sample=20, workers=1,
                    local=ef.Local(lr=0.5))  # fmt: skip
    assert result.acc > 0.8


def test_a_million_users_are_two_arrays():
    """No object a client: a stream of a million is made of arrays, and asks for little more."""
    import tracemalloc

    clients = 10**6
    user = np.repeat(np.arange(clients), 2)
    data = arrays(torch.zeros(len(user), 1), np.zeros(len(user), int), client=user)
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    stream = ef.streams.given(data)
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    made = sum(s.count_diff for s in after.compare_to(before, "filename"))
    assert stream.clients == clients
    assert stream.samples(999_999, 0).tolist() == [1_999_998, 1_999_999]
    assert made < 1000


BAD = [
    ({"y": np.zeros(3, int)}, "one entry a sample"),
    ({"x": np.zeros((4, 2))}, "holds float64"),
    ({"x": np.zeros((0, 2), np.float32)}, "no samples"),
    ({"y": np.array([0, -1, 1, 0])}, "labels must be"),
]


@pytest.mark.parametrize(("columns", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_mapped_tables_are_told(columns, said, tmp_path):
    table = {"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, int)} | columns
    for name, column in table.items():
        np.save(tmp_path / f"{name}.npy", column)
    with pytest.raises(EverfedError, match=said):
        ef.data.npy(str(tmp_path))
    with pytest.raises(EverfedError, match=r"z\.npy does not exist|" + said):
        ef.data.npy(str(tmp_path), client="z")


def test_parquet_files(tmp_path, monkeypatch):
    """Numbers, lists and images; what is for tests; a second reading takes the cache."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    (tmp_path / "shop").mkdir()
    for name, n in (("train-0", 30), ("train-1", 11), ("test-0", 9)):
        columns = {"a": random.random(n), "b": random.integers(0, 9, n), "who": ["u", "v", "w"] * n,
                   "kind": ["good", "bad"] * n, "many": [[1.0, 2.0, k] for k in range(n)]}  # fmt: skip
        table = pa.table({key: list(values)[:n] for key, values in columns.items()})
        parquet.write_table(table, tmp_path / "shop" / f"{name}.parquet")
    data = ef.data.parquet("shop", tmp_path, inputs=["a", "b"], label="kind", client="who")
    assert (len(data.train), len(data.test), data.classes) == (41, 9, 2)
    assert data.x.shape == (50, 2)
    assert np.unique(data.client).tolist() == [0, 1, 2]
    listed = ef.data.parquet("shop", tmp_path, inputs=["many"], label="kind")
    assert listed.x[data.test][:, 2].tolist() == list(range(9))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    again = ef.data.parquet("shop", tmp_path, inputs=["many"], label="kind")
    assert torch.equal(again.x, listed.x)
    with pytest.raises(EverfedError, match="no column 'c'; it has a, b, who"):
        ef.data.parquet("shop", tmp_path, inputs=["c"], label="kind")
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(EverfedError, match="not whole Parquet"):
        ef.data.parquet("half.parquet", tmp_path, inputs=["a"], label="kind")


# LEAF -----------------------------------------------------------------------------------------
def leaf(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(y) for _, y in users.values()]
    held = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": held}))


def writers(names, each=6):
    """Images as LEAF writes them: 784 bytes over 255."""
    random = np.random.default_rng(0)
    return {name: ((random.integers(0, 256, (each, 784)) / 255).round(4).tolist(),
                   random.integers(0, 62, each).tolist()) for name in names}  # fmt: skip


def test_femnist_of_leaf(tmp_path):
    first, second = writers(["f0", "f1"]), writers(["f2"], 8)
    leaf(tmp_path / "femnist" / "all_data_0.json", first)
    leaf(tmp_path / "femnist" / "all_data_1.json", second)
    data = ef.data.femnist(tmp_path)
    assert data.x.shape == (20, 1, 28, 28)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert np.bincount(data.client).tolist() == [6, 6, 8]
    wanted = np.rint(255 * np.array(second["f2"][0])).astype(np.uint8)
    assert np.array_equal(data.x[12:].reshape(8, -1).numpy(), wanted)  # no pixel is lost
    stream = ef.streams.given(data, test="samples", least=4)
    assert stream.clients == 3


def test_femnist_of_leaf_with_its_own_tests(tmp_path):
    leaf(tmp_path / "femnist" / "data" / "train" / "a.json", writers(["f0", "f1"]))
    leaf(tmp_path / "femnist" / "data" / "test" / "b.json", writers(["f1", "f0"], 2))
    data = ef.data.femnist(tmp_path)
    assert (len(data.train), len(data.test)) == (12, 4)
    assert data.client[data.test].tolist() == [1, 1, 0, 0]  # the same people


def test_femnist_in_parquet(tmp_path, monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from PIL import Image

    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (10, 28, 28)).astype(np.uint8)
    files = []
    for image in pixels:
        out = BytesIO()
        Image.fromarray(image).save(out, "png")
        files.append({"bytes": out.getvalue(), "path": None})
    table = pa.table({"image": files, "writer_id": ["f1", "f0"] * 5, "hsf_id": [0] * 10,
                      "character": list(range(10))})  # fmt: skip
    (tmp_path / "femnist").mkdir()
    parquet.write_table(table, tmp_path / "femnist" / "train-00000.parquet")
    data = ef.data.femnist(tmp_path)
    assert np.array_equal(data.x[:, 0].numpy(), pixels)
    assert data.client.tolist() == [1, 0] * 5
    assert data.y.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"users": ["a"]', "not a whole file"),
        ('{"users": ["a"], "num_samples": [2], "user_data": {}}', "not a whole file"),
        ('{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0]], "y": [1]}}}',
         "should have 2 samples"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0]], "y": [1]}}}',
         "no FEMNIST images"),
        ('{"users": [], "num_samples": [], "user_data": {}}', "no samples"),
    ],
)  # fmt: skip
def test_damaged_files_of_leaf_are_told(text, said, tmp_path):
    (tmp_path / "femnist").mkdir()
    with pytest.raises(EverfedError, match="FEMNIST is not there"):
        ef.data.femnist(tmp_path)
    (tmp_path / "femnist" / "all_data_0.json").write_text(text)
    with pytest.raises(EverfedError, match=said):
        ef.data.femnist(tmp_path)


def test_shakespeare_of_leaf(tmp_path):
    said = {"ROMEO": (["to be", "o be "], [" ", "o"]), "NURSE": (["be or"], ["!"])}
    leaf(tmp_path / "shakespeare" / "all_data.json", said)
    data = ef.data.shakespeare(tmp_path)
    letters = sorted(set(" !beort"))
    assert data.x[2].tolist() == [letters.index(c) for c in "be or"]
    assert data.y.tolist() == [letters.index(c) for c in " o!"]
    assert np.bincount(data.client).tolist() == [1, 2]


def test_real_speakers(data_dir):
    """309 speakers; the next character is learnt, and no test overlaps what was trained on."""
    data = ef.data.shakespeare(data_dir, length=20, stride=7)
    assert data.notes == ("20 of 309 speakers say no more than 20 characters to train on",)
    stream = ef.streams.given(data, rounds=4, least=200)
    model = ef.models.lstm(data.classes, data.classes, width=16, layers=1)
    local = ef.Local(lr=1.0, batch=20, steps=20)
    result = ef.run(ef.methods.fedavg(), stream, model, sample=4, local=local, workers=1,
                    test_every=4)  # fmt: skip
    counts = np.bincount(data.y[data.test].numpy())
    assert result.acc >= counts.max() / counts.sum() - 0.01  # at least the commonest, the space


def test_real_drawers(data_dir):
    """Omniglot's 20 drawers: five of them are only tested on."""
    data = ef.data.npz("omniglot_small_drawers.npz", data_dir, client="drawer")
    stream = ef.streams.given(data, test="users", share=0.25)
    assert stream.clients == 15


def test_owners_in_an_npz_file_are_known_for_tests_too(tmp_path):
    """A fifth is held out of x and y, and may be a user's only samples."""
    client = np.repeat([f"user {k}" for k in range(30)], 2)
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 3)), y=np.arange(60) % 2, who=client)
    data = ef.data.npz("a.npz", tmp_path, client="who")
    stream = ef.streams.given(data, test="samples")
    held = {int(i) for k in range(stream.clients) for i in stream.samples(k, 0)}
    assert stream.clients == 30
    assert held | set(stream.test(0).tolist()) == set(range(60))


def test_every_task_has_tests_where_the_last_samples_are_held_out():
    data = arrays(
        np.zeros((40, 2)), np.arange(40) % 2, client=np.arange(40) % 2,
        task=np.arange(40) // 20, ordered=True,
    )  # fmt: skip
    stream = ef.streams.given(data, test="samples")
    assert [len(stream.test(task)) for task in (0, 1)] == [4, 4]
    assert stream.test(0).tolist() == [16, 17, 18, 19]


@pytest.mark.parametrize(
    "make",
    [
        lambda data: ef.streams.given(data, test="sample"),
        lambda data: ef.streams.regimes(data, clients=4, cohort=2, drift="iiid"),
        lambda data: ef.streams.evolving(data, clients=2, subsets=2, order="draw"),
        lambda data: ef.streams.evolving(data, clients=2, subsets=2, split="three"),
        lambda data: ef.streams.blocks(data, clients=2, blocks=2, cut="turn"),
        lambda data: ef.streams.periodic(data, shape="smoth"),
    ],
)
def test_a_misspelt_choice_is_refused(make):
    """One of them would have tested on what is trained on."""
    data = arrays(np.zeros((40, 2)), np.arange(40) % 2, client=np.arange(40) % 2, ordered=True)
    with pytest.raises(EverfedError, match="must be one of"):
        make(data)


def test_a_cohort_that_shares_its_data_out_cannot_be_absent():
    data = arrays(np.zeros((40, 2)), np.arange(40) % 2)
    both, client = (
        ef.streams.regimes(data, clients=8, cohort=4, drift=drift) for drift in ("both", "client")
    )
    with pytest.raises(EverfedError, match="the absent"):
        ef.streams.present(client, start=0.5)
    with pytest.raises(EverfedError, match="draws cohorts of 4"):
        ef.run(ef.methods.fedavg(), ef.streams.present(both), ef.models.mlp(2, 2), sample=3)


@pytest.mark.parametrize(
    ("columns", "inputs", "said"),
    [
        ({"y": ["a", None]}, ["x"], "'y' has rows without a value"),
        ({"y": [0, None]}, ["x"], "'y' has rows without a value"),
        ({"who": ["a", None]}, ["x"], "'who' has rows without a value"),
        ({"x": [0.0, float("nan")]}, ["x"], "hold NaN"),
        ({"many": [[1.0], [2.0]]}, ["many", "x"], "or one of lists"),
        ({"y": [0, 2**40]}, ["x"], "number the classes"),
    ],
)
def test_parquet_files_with_gaps_are_told(columns, inputs, said, tmp_path, monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    whole = {"x": [0.0, 1.0], "y": [0, 1], "who": ["a", "b"]} | columns
    parquet.write_table(pa.table(whole), tmp_path / "a.parquet")
    with pytest.raises(EverfedError, match=said):
        ef.data.parquet("a.parquet", tmp_path, inputs=inputs, label="y", client="who")


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "file"))
    parquet.write_table(pa.table({"x": [0.0, 1.0], "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(EverfedError, match="set EVERFED_CACHE"):
        ef.data.parquet("a.parquet", tmp_path, inputs=["x"], label="y")
