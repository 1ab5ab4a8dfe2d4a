"""Data sets and streams: what users bring, and what can be wrong with it."""

from __future__ import annotations

import gzip
import struct
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everfed as ef
from everfed import config as configs
from everfed import memory
from everfed.data import files
from everfed.errors import EverfedError
from everfed.streams.partition import dirichlet, split

labels_ = st.lists(st.integers(0, 5), min_size=20, max_size=200).map(np.array)


@given(labels_, st.integers(1, 12), st.floats(0.001, 100), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_splits_are_disjoint_complete_and_without_empty_parts(labels, parts, alpha, seed):
    out = split(labels, parts, alpha, seed)
    assert len(out) == parts
    assert sorted(np.concatenate(out).tolist()) == list(range(len(labels)))
    assert min(map(len, out)) > 0
    again = split(labels, parts, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(out, again, strict=True))


def test_smaller_alpha_is_more_skewed():
    labels = np.repeat(np.arange(10), 500)

    def skew(alpha):
        parts = dirichlet(labels, 8, alpha, np.random.default_rng(0))
        shares = [np.bincount(labels[p], minlength=10) / len(p) for p in parts]
        return float(np.mean([np.square(s).sum() for s in shares]))

    assert skew(0.05) > skew(0.5) > skew(50) > 0.09
    # symmetric Dirichlet over clients: a class's largest share is near 1 for a tiny alpha
    assert skew(0.001) > 0.4


def test_iid_parts_are_equal():
    parts = split(np.zeros(103, int), 4, None, 0)
    assert sorted(map(len, parts)) == [25, 26, 26, 26]


@given(labels_, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_memories_keep_their_size_and_balance(labels, size):
    ids = np.arange(len(labels)) + 1000
    kept = memory.class_balanced(ids, labels, size, np.random.default_rng(0))
    assert len(kept) == len(set(kept)) == min(size, len(labels))
    counts = np.bincount(labels[kept - 1000], minlength=6)
    have = np.bincount(labels, minlength=6)
    # no class is short of another one unless it has no more samples
    assert all(counts[c] >= counts.max() - 1 for c in range(6) if counts[c] < have[c])
    herded = memory.herding(ids, labels, torch.randn(len(ids), 3), memory.quotas(labels, size))
    assert len(herded) == len(set(herded)) == min(size, len(labels))


def test_digits_domains_share_the_held_out_images():
    data = ef.data.digits(["plain", "inverted"])
    plain, inverted = (data.x[data.test[data.task[data.test] == k]] for k in (0, 1))
    torch.testing.assert_close(plain, 1 - inverted)
    assert data.x.min() >= 0
    assert data.x.max() <= 1


def test_domain_stream(digits):
    stream = ef.streams.domains(digits, clients=6, alpha=0.3, rounds=4).seeded(7)
    assert stream.rounds == 8
    assert [stream.task(t) for t in range(8)] == [0] * 4 + [1] * 4
    assert [t for t in range(8) if stream.last_of_task(t)] == [3, 7]
    for task in (0, 1):
        held = np.concatenate([stream.samples(i, 4 * task) for i in range(6)])
        own = digits.train[digits.task[digits.train] == task]
        assert sorted(held) == sorted(own)
        assert set(stream.test(task)).isdisjoint(held)
    other = ef.streams.domains(digits, clients=6, alpha=0.3, rounds=4).seeded(8)
    assert not np.array_equal(stream.samples(0, 0), other.samples(0, 0))
    turned = ef.streams.domains(digits, order=["inverted", "plain"], rounds=1)
    assert turned.tasks == ("inverted", "plain")


def test_class_stream(digits):
    data = ef.data.digits(["plain"])
    stream = ef.streams.classes(data, tasks=5, clients=3, rounds=2).seeded(1)
    groups = stream.task_classes
    assert sorted(c for group in groups for c in group) == list(range(10))
    for task, group in enumerate(groups):
        held = np.concatenate([stream.samples(i, 2 * task) for i in range(3)])
        assert set(data.y[held].tolist()) == set(group)
    y = torch.tensor([groups[1][0]])
    assert stream.mask(y, 1).sum() == 4  # all seen so far
    assert stream.mask(y, 1, new=True).sum() == 2
    task_head = ef.streams.classes(data, tasks=5, head="task", clients=3, seed=1)
    assert set(task_head.mask(y, 4)[0].nonzero()[:, 0].tolist()) == set(groups[1])
    assert ef.streams.classes(data, tasks=5).seeded(2).task_classes != groups


def test_given_stream_follows_the_ids():
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    data = ef.data.arrays(x, [0, 1] * 3, client=[0, 2, 0, 2, 0, 0], task=[0, 0, 0, 1, 1, 1])
    stream = ef.streams.given(data, rounds=2)
    assert stream.users.tolist() == [0, 2]
    assert stream.samples(0, 0).tolist() == [0, 2]
    assert stream.samples(1, 2).tolist() == [3]


def test_torch_datasets():
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, k):
            return torch.full((4,), float(k)), k % 3

    data = ef.data.from_dataset(Squares(), Squares(), client=[k % 5 for k in range(30)])
    assert (len(data.train), len(data.test), data.classes) == (30, 30, 3)
    assert ef.streams.given(data).clients == 5


def test_bytes_are_scaled_and_images_laid_out():
    grey = ef.data.arrays(np.full((2, 5, 6), 255, np.uint8), [0, 1])
    colour = ef.data.arrays(np.full((2, 5, 6, 3), 51, np.uint8), [0, 1])
    assert grey.x.shape == (2, 1, 5, 6)
    assert colour.x.shape == (2, 3, 5, 6)
    x, _ = colour.take(torch.tensor([[0], [1]]), torch.float32)
    assert x.shape == (2, 1, 3, 5, 6)
    assert x.unique().tolist() == pytest.approx([0.2])
    assert x[:, 0].is_contiguous(memory_format=torch.channels_last)


BAD = [
    (lambda: ef.data.arrays(np.zeros((3, 2)), [0, 1]), "3 inputs but 2 labels"),
    (lambda: ef.data.arrays(np.zeros((0, 2)), []), "no samples"),
    (lambda: ef.data.arrays(np.array([[1.0], [np.nan]]), [0, 1]), "1 of 2 inputs hold NaN"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), [-1, 0]), "smallest is -1"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), [0, 1], client=[0]), "client must be 2"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), [0, 1], client=[1, 2]), "these begin at 1"),
    (lambda: files.codes(np.array([1.0, np.nan])), "1 of 2 owners, tasks or labels hold NaN"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), [0, 1], task=[0, 1], test=(np.zeros((1, 2)), [0])),
     "test_task"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), [0, 1], test=(np.zeros((1, 3)), [0])), "test inputs"),
    (lambda: ef.data.digits(["plane"]), "no digit domain 'plane'"),
    (lambda: ef.data.digits("plane"), "no digit domain 'plane'"),
    (lambda: ef.data.arrays(np.zeros((2, 2)), ["a", "b"]), "labels must be numbers.*np.unique"),
    (lambda: ef.streams.domains(ef.data.arrays(np.zeros((2, 2)), [0, 1])), "no task column"),
    (lambda: ef.streams.given(ef.data.digits(["plain"])), "no client column"),
    (lambda: ef.streams.domains(ef.data.digits(), order=["plain", "x"]), "no domain 'x'"),
    (lambda: ef.streams.classes(ef.data.digits(["plain"]), tasks=3), "3 equal tasks"),
    (lambda: ef.streams.static(ef.data.digits(["plain"]), clients=0), "clients must be at least 1"),
    (lambda: ef.streams.static(ef.data.digits(["plain"]), rounds=[3]), r"rounds must be a whole number, not \[3\]"),
    (lambda: ef.streams.static(ef.data.arrays(np.zeros((2, 2)), [0, 1]), clients=3).samples(0, 0),
     "2 samples of task 'all' cannot be split over 3"),
    (lambda: split(np.zeros(5, int), 2, -1.0, 0), "alpha must be above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_data_is_told(make, words):
    with pytest.raises(EverfedError, match=words):
        make()


# files --------------------------------------------------------------------------------------------
def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """The published IDX files of Fashion-MNIST, made again from the arrays of the data folder."""
    import os

    source = os.environ.get("EVERFED_DATA")
    if not source:
        pytest.skip("EVERFED_DATA is not set: tests on larger real data are skipped")
    folder = tmp_path_factory.mktemp("data")
    (folder / "fashion-mnist").mkdir()
    with np.load(f"{source}/fashion_mnist.npz") as found:
        arrays = [found[k] for k in ("x_train", "y_train", "x_test", "y_test")]
    for name, array in zip(files.IDX_FILES, arrays, strict=True):
        (folder / "fashion-mnist" / f"{name}.gz").write_bytes(gzip.compress(idx(array), 1))
    return folder


def test_fashion_mnist_is_read(fashion):
    data = ef.data.fashion_mnist(fashion)
    assert (len(data.train), len(data.test), data.classes) == (60000, 10000, 10)
    assert data.x.shape[1:] == (1, 28, 28)


def test_truncated_and_foreign_files_are_told(fashion, tmp_path):
    target = tmp_path / "fashion-mnist"
    target.mkdir()
    for path in (fashion / "fashion-mnist").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    labels = target / "train-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    labels.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EverfedError, match="truncated or damaged"):
        ef.data.fashion_mnist(tmp_path)
    content = bytearray(gzip.decompress(whole))
    content[-1] ^= 1
    labels.write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(EverfedError, match="not the published file"):
        ef.data.fashion_mnist(tmp_path)


def test_missing_files_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(
        EverfedError, match=r"put train-images.* into .*fashion-mnist.*Get them from"
    ):
        ef.data.fashion_mnist(tmp_path)
    with pytest.raises(EverfedError, match="does not exist"):
        ef.data.mnist(tmp_path / "none")
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    with pytest.raises(EverfedError, match="EVERFED_DATA"):
        ef.data.mnist()


def test_npz_files(tmp_path):
    random = np.random.default_rng(0)
    x = random.random((50, 3)).astype(np.float32)
    y, site, year = np.tile([0, 1], 25), np.tile([7, 9, 9, 12, 12], 10), np.repeat([2024, 2025], 25)
    np.savez(tmp_path / "a.npz", x=x, y=y, site=site, year=year)
    data = ef.data.npz("a.npz", tmp_path, client="site", task="year")
    assert (len(data.train), len(data.test), len(data.tasks)) == (40, 10, 2)
    assert ef.streams.given(data).clients == 3
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9], site_train=site,
             site_test=site[:9])  # fmt: skip
    assert len(ef.data.npz("b.npz", tmp_path, client="site").train) == 50
    with pytest.raises(EverfedError, match="no array 'shop'"):
        ef.data.npz("a.npz", tmp_path, client="shop")
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:200])
    with pytest.raises(EverfedError, match=r"not a whole \.npz"):
        ef.data.npz("c.npz", tmp_path)
    np.save(tmp_path / "d.npy", x)
    with pytest.raises(EverfedError, match="single array"):
        ef.data.npz("d.npy", tmp_path)
    np.savez(tmp_path / "e.npz", x=x, y=y[:-1])
    with pytest.raises(EverfedError, match="one entry a sample"):
        ef.data.npz("e.npz", tmp_path)
    np.savez(tmp_path / "f.npz", x=x, y=np.array(["well", "ill"])[y])
    words, numbers = ef.data.npz("f.npz", tmp_path), ef.data.npz("a.npz", tmp_path)
    assert words.y.tolist() == (1 - numbers.y).tolist()  # sorted: ill, well
    np.savez(tmp_path / "g.npz", x=x, y=y + 0.5)
    config = configs.parse({"data": {"name": "npz", "file": str(tmp_path / "g.npz")}})
    with pytest.raises(EverfedError, match=r"labels of g are torch\.float64: save classes as"):
        configs.table(config)


def test_the_row_with_nan_is_the_files(tmp_path):
    """Not its place after some rows were held out."""
    x, y = np.zeros((60, 3)), np.tile([0, 1], 30)
    x[7, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", x_train=y, y_train=y, x_test=x, y_test=y)
    for file, name in (("a.npz", "x"), ("b.npz", "x_test")):
        with pytest.raises(EverfedError, match=rf"1 of 60 inputs in {name} hold NaN .*at row 7,"):
            ef.data.npz(file, tmp_path)


def test_standardised_channels():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (40, 8, 8, 3)).astype(np.uint8) // np.array(
        [1, 2, 4], np.uint8
    )
    data = ef.data.arrays(images[:30], np.zeros(30), test=(images[30:], np.zeros(10)))
    x, _ = ef.data.standardised(data).take(torch.arange(40), torch.float32)
    own = torch.as_tensor(images[:30] / 255).permute(0, 3, 1, 2)
    for channel in range(3):
        mean, spread = own[:, channel].mean(), own[:, channel].std(correction=0)
        raw = torch.as_tensor(images[..., channel] / 255)  # test samples by the same numbers
        torch.testing.assert_close(x[:, channel], ((raw - mean) / spread).float())
    with pytest.raises(EverfedError, match="neither bytes nor floats"):
        ef.data.standardised(ef.data.arrays(np.zeros((4, 3), np.int64), [0, 1, 0, 1]))


def test_jpeg_files_in_an_npz(tmp_path):
    """The pictures that went in, as JPEG keeps them; a broken file is told."""
    from PIL import Image

    random = np.random.default_rng(0)
    pictures = [np.full((8, 8, 3), random.integers(0, 256, 3), np.uint8) for _ in range(5)]
    files = []
    for picture in pictures:
        out = BytesIO()
        Image.fromarray(picture).save(out, "jpeg", quality=95)
        files.append(np.frombuffer(out.getvalue(), np.uint8))
    ends = np.cumsum([0, *map(len, files)])
    table = {f"{key}_{part}": value for part in ("train", "test") for key, value in
             (("jpeg", np.concatenate(files)), ("offset", ends), ("y", np.arange(5)))}  # fmt: skip
    np.savez(tmp_path / "a.npz", **table)
    data = ef.data.npz("a.npz", tmp_path)
    found = data.x[:5].permute(0, 2, 3, 1).numpy().astype(int)
    assert np.abs(found - np.stack(pictures)).max() <= 3
    np.savez(tmp_path / "b.npz", **table | {"jpeg_test": np.zeros(ends[-1], np.uint8)})
    with pytest.raises(EverfedError, match="cannot be read"):
        ef.data.npz("b.npz", tmp_path)


def test_half_precision_images_are_not_taken_for_nan():
    data = ef.data.arrays(np.full((3, 9000), 60.0, np.float16), [0, 1, 2])
    assert data.x.dtype == torch.float32


def test_a_federation_of_natural_writers(data_dir):
    """539 writers of MNIST as clients; the two collections (staff, students) as tasks."""
    data = ef.data.npz("mnist_writers.npz", data_dir, client="writer", task="hsf")
    stream = ef.streams.given(data, rounds=3)
    assert stream.clients == 539
    local = ef.Local(lr=0.1, batch=20)
    result = ef.run(ef.methods.fedavg(), stream, ef.models.mlp(784, 32, 10), sample=20, local=local)
    assert result.matrix.shape == (2, 2)
    assert result.summary.empty_clients > 0  # each writer is in one collection only
    assert result.acc > 0.5


@pytest.mark.parametrize("kind", ["npz", "npy", "csv"])
def test_tasks_that_are_text_come_in_the_order_of_the_file(kind, tmp_path):
    """In alphabetical order autumn would be first, and another experiment made of it."""
    season = np.repeat(["winter", "summer", "autumn"], 20)
    x, y = np.random.default_rng(0).random((60, 3)).astype(np.float32), np.arange(60) % 2
    if kind == "npz":
        np.savez(tmp_path / "shop.npz", x=x, y=y, season=season)
        data = ef.data.npz("shop.npz", tmp_path, task="season")
    elif kind == "npy":
        (tmp_path / "shop").mkdir()
        for name, values in {"x": x, "y": y, "season": season}.items():
            np.save(tmp_path / "shop" / f"{name}.npy", values)
        data = ef.data.npy("shop", tmp_path, task="season")
    else:
        rows = [f"{a},{b},{c},{s},{k}" for (a, b, c), s, k in zip(x, season, y, strict=True)]
        (tmp_path / "shop.csv").write_text("\n".join(["a,b,c,season,y", *rows]))
        data = ef.data.series("shop.csv", tmp_path, task="season")
    assert data.tasks == ("winter", "summer", "autumn")
    assert data.task is not None
    for k in range(3):  # the label of a row tells which it was
        assert sum(data.task == k) == 20
    if kind != "csv":  # whose inputs are scaled
        first = data.x[torch.from_numpy(np.flatnonzero(data.task == 0))]
        assert set(first[:, 0].tolist()) == set(x[:20, 0].tolist())


def test_a_stray_label_is_told_before_it_makes_a_huge_model():
    y = np.arange(2000) % 3
    y[5] = 9999
    with pytest.raises(EverfedError, match="labels go up to 9999, and there are 2000 samples"):
        ef.data.arrays(np.zeros((2000, 4), dtype=np.float32), y)


def test_a_table_without_rows_is_told(tmp_path):
    (tmp_path / "head.csv").write_text("a,b,y\n")
    with pytest.raises(EverfedError, match="no rows"):
        ef.data.series("head.csv", tmp_path)


def test_images_of_16_bits_keep_their_shades(tmp_path):
    """As scanners write them; Pillow alone would make nearly all pixels white."""
    image = pytest.importorskip("PIL.Image")
    shades = np.linspace(0, 65535, 16 * 16).reshape(16, 16).astype(np.uint16)
    for name in ("a", "b"):
        (tmp_path / "scans" / "all" / name).mkdir(parents=True)
        for k in range(5):
            image.fromarray(shades).save(tmp_path / "scans" / "all" / name / f"{k}.png")
    image.fromarray(shades.astype(np.float32)).save(tmp_path / "scans" / "all" / "a" / "f.tiff")
    data = ef.data.folders("scans", tmp_path, size=16, channels=1)
    expected = (shades // 257).astype(np.uint8)
    assert (data.x[0, 0].numpy() == expected).all()
    assert len(data.train) + len(data.test) == 10
    assert any("f.tiff" in note and "floats" in note for note in data.notes)


@pytest.mark.parametrize(
    ("head", "last"), [("0,1,2,label", "1"), ("0,1,2,3", "1"), ("a,b,c,d", "1"), ("", "yes")]
)
def test_names_of_columns_are_no_row(head, last, tmp_path):
    lines = [f"{k}.5,{k},{-k},{k % 2 if last == '1' else ('no', last)[k % 2]}" for k in range(40)]
    (tmp_path / "a.csv").write_text("\n".join([head, *lines] if head else lines) + "\n")
    data = ef.data.series("a.csv", tmp_path)
    assert (len(data.y), data.classes) == (40, 2)


def test_large_numbers_are_labels_of_their_own(tmp_path):
    labels = (9007199254740992, 9007199254740993)
    (tmp_path / "a.csv").write_text("".join(f"{k},{labels[k % 2]}\n" for k in range(40)))
    assert ef.data.series("a.csv", tmp_path).classes == 2


def test_a_column_that_does_not_move_in_training_does_not_explode(tmp_path):
    """The deviation of 0.1, 0.1, ... is 1e-17 and not 0."""
    lines = [f"{0.1 if k < 30 else 0.2},{k},{k % 2}" for k in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    assert float(ef.data.series("a.csv", tmp_path).x.abs().max()) < 10


def test_all_pixels_of_images_without_channels_are_permuted():
    x = torch.arange(16.0).reshape(1, 4, 4).repeat(10, 1, 1)
    made = ef.data.permute(ef.data.arrays(x, [0, 1] * 5), tasks=2)
    order = made.x[-1].flatten()
    assert sorted(order.tolist()) == list(range(16))
    columns = (order.reshape(4, 4) % 4).tolist()
    assert any(row != columns[0] for row in columns)
