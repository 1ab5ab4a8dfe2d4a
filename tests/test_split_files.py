"""CIFAR, Tiny-ImageNet and permuted images: written in their public formats and read back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

import everfed as ef
from everfed import config as configs
from everfed.errors import EverfedError


@pytest.fixture
def images():
    """Some colour images with labels of ten classes; training and test."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (25, 3072), dtype=np.uint8)
    return x, np.arange(25) % 10


def write_python(folder, x, y):
    folder.mkdir(parents=True)
    for k in range(5):
        rows = {b"data": x[4 * k : 4 * k + 4], b"labels": y[4 * k : 4 * k + 4].tolist()}
        (folder / f"data_batch_{k + 1}").write_bytes(pickle.dumps(rows, 4))
    (folder / "test_batch").write_bytes(
        pickle.dumps({b"data": x[20:], b"labels": y[20:].tolist()}, 4)
    )


def write_binary(folder, x, y):
    folder.mkdir(parents=True)
    rows = np.concatenate([y[:, None].astype(np.uint8), x], 1)
    for k in range(5):
        rows[4 * k : 4 * k + 4].tofile(folder / f"data_batch_{k + 1}.bin")
    rows[20:].tofile(folder / "test_batch.bin")


WRITERS = {"cifar-10-batches-py": write_python, "cifar-10-batches-bin": write_binary}


@pytest.mark.parametrize("place", WRITERS)
def test_cifar10_in_both_versions(place, images, tmp_path):
    x, y = images
    WRITERS[place](tmp_path / place, x, y)
    data = ef.data.cifar10(tmp_path)
    assert data.x.shape == (25, 3, 32, 32)
    assert torch.equal(data.x.flatten(1), torch.from_numpy(x))
    assert data.y.tolist() == y.tolist()
    assert (len(data.train), len(data.test)) == (20, 5)


@pytest.mark.parametrize("binary", [False, True])
def test_cifar100_has_fine_labels(images, tmp_path, binary):
    x, y = images
    place = tmp_path / ("cifar-100-binary" if binary else "cifar-100-python")
    place.mkdir()
    for name, ids in {"train": slice(0, 20), "test": slice(20, 25)}.items():
        coarse, fine = (y[ids] // 5).astype(np.uint8), (y[ids] * 9).astype(np.uint8)
        if binary:
            np.concatenate([coarse[:, None], fine[:, None], x[ids]], 1).tofile(
                place / f"{name}.bin"
            )
        else:
            rows = {
                b"data": x[ids],
                b"coarse_labels": coarse.tolist(),
                b"fine_labels": fine.tolist(),
            }
            (place / name).write_bytes(pickle.dumps(rows, 4))
    data = ef.data.cifar100(tmp_path)
    assert data.y.tolist() == (y * 9).tolist()
    assert torch.equal(data.x.flatten(1), torch.from_numpy(x))


def test_a_pickle_that_runs_code_is_refused(images, tmp_path):
    """What such a file asks for is neither looked up nor called."""
    write_python(tmp_path / "cifar10", *images)
    witness = tmp_path / "witness"

    class Bad:
        def __reduce__(self):
            return (open, (str(witness), "w"))

    (tmp_path / "cifar10" / "data_batch_3").write_bytes(pickle.dumps({b"data": Bad()}, 4))
    with pytest.raises(EverfedError, match=r"data_batch_3 is not CIFAR's file.*io.open"):
        ef.data.cifar10(tmp_path)
    assert not witness.exists()
    # nor numpy's own functions, beyond those of arrays of bytes
    raw = b"cnumpy\nfromfile\n(S'x'\ntR."
    (tmp_path / "cifar10" / "data_batch_3").write_bytes(raw)
    with pytest.raises(EverfedError, match=r"asks for numpy.fromfile"):
        ef.data.cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not CIFAR's file"),
        (pickle.dumps({b"data": np.zeros((4, 3072)), b"labels": [0] * 4}, 4), "else than bytes"),
        (pickle.dumps({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0]}, 4), "4 images"),
        (pickle.dumps({b"labels": [0]}, 4), "data"),
    ],
)
def test_damaged_pickles(images, tmp_path, content, why):
    write_python(tmp_path / "cifar10", *images)
    (tmp_path / "cifar10" / "data_batch_1").write_bytes(content)
    with pytest.raises(EverfedError, match=why):
        ef.data.cifar10(tmp_path)


def test_damaged_rows_and_missing_files(images, tmp_path):
    with pytest.raises(EverfedError, match=r"data_batch_1, .*cifar-10-batches-py.*toronto"):
        ef.data.cifar10(tmp_path)
    write_binary(tmp_path / "cifar10", *images)
    path = tmp_path / "cifar10" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EverfedError, match="truncated"):
        ef.data.cifar10(tmp_path)


# Tiny-ImageNet ------------------------------------------------------------------------------------
@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "tiny-imagenet-200"
    colours = {"n02": 200, "n01": 40, "n03": 120}
    lines = []
    for title, grey in colours.items():
        own = root / "train" / title / "images"
        own.mkdir(parents=True)
        for k in range(2):
            Image.new("RGB", (64, 64), (grey, grey, grey)).save(own / f"{title}_{k}.JPEG")
    (root / "val" / "images").mkdir(parents=True)
    for k, (title, grey) in enumerate(sorted(colours.items())):
        Image.new("L", (64, 64), grey).save(root / "val" / "images" / f"val_{k}.JPEG")
        lines.append(f"val_{k}.JPEG\t{title}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_tiny_imagenet(tiny):
    data = ef.data.tiny_imagenet(tiny, size=32)
    assert data.x.shape == (9, 3, 32, 32)
    assert (len(data.train), len(data.test)) == (6, 3)
    # labels are the classes by name, and images those of their labels
    shade = data.x.float().mean((1, 2, 3)).round().long()
    assert torch.equal(shade, torch.tensor([40, 200, 120])[data.y])
    assert data.y[data.test].tolist() == [0, 1, 2]


def test_tiny_imagenet_that_is_not_whole(tiny):
    notes = tiny / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    notes.write_text("val_0.JPEG\tn77\t0\n")
    with pytest.raises(EverfedError, match="images of n77"):
        ef.data.tiny_imagenet(tiny)
    notes.write_text("val_0.JPEG\n")
    with pytest.raises(EverfedError, match="line 1"):
        ef.data.tiny_imagenet(tiny)
    notes.unlink()
    with pytest.raises(EverfedError, match=r"cs231n"):
        ef.data.tiny_imagenet(tiny)


# permuted -----------------------------------------------------------------------------------------
def test_permuted_tasks_are_the_same_images_in_another_order():
    plain = ef.data.digits(["plain"])
    data = ef.data.permute(plain, tasks=3, seed=5)
    assert data.tasks == ("plain", "order 1", "order 2")
    tasks = [data.x[data.train[data.task[data.train] == k]].flatten(1) for k in range(3)]
    assert torch.equal(tasks[0], plain.x[plain.train].flatten(1))
    for k in (1, 2):
        assert not torch.equal(tasks[k], tasks[0])
        assert torch.equal(tasks[k].sort(1).values, tasks[0].sort(1).values)
    # one order for all images of a task: equal pixels stay equal
    column = [int((tasks[1] == tasks[0][:, [j]]).all(0).nonzero()[0]) for j in (20, 35)]
    assert column[0] != column[1]
    assert not torch.equal(tasks[1], tasks[2])
    again, other = (ef.data.permute(plain, tasks=3, seed=seed) for seed in (5, 6))
    assert torch.equal(again.x, data.x)
    assert not torch.equal(other.x, data.x)


def test_channels_of_a_pixel_stay_together():
    x = np.random.default_rng(0).integers(0, 9, (4, 3, 5, 5), dtype=np.uint8)
    data = ef.data.permute(ef.data.arrays(x, [0, 1, 0, 1]), tasks=2)
    before, after = (set(map(tuple, t.flatten(1).T.tolist())) for t in (data.x[0], data.x[8]))
    assert before == after


def test_split_tiny_imagenet_of_real_images(data_dir):
    """Ten tasks of 20 classes, tested on what the file calls val."""
    sources = {"images": ["tiny_imagenet", "tinyimagenet32_200cls_jpeg.npz"]}
    data = ef.data.join_files(sources, data_dir, limit=2000)
    assert (len(data.train), len(data.test), data.classes) == (2000, 4000, 200)
    stream = ef.streams.classes(data, tasks=10, clients=5, head="task").seeded(0)
    held = [{*data.y[stream.test(task)].tolist()} for task in range(10)]
    assert [len(own) for own in held] == [20] * 10
    assert len(set.union(*held)) == 200


def test_permuted_mnist_from_a_configuration(data_dir):
    values = {
        "data_dir": str(data_dir),
        "data": {"name": "permuted", "source": ["mnist", "mnist_writers.npz"], "tasks": 3,
                 "limit": 50, "test_limit": 20},
        "stream": {"name": "domains", "clients": 2, "rounds": 1},
    }  # fmt: skip
    made = configs.experiment(configs.parse(values))
    assert made.stream.tasks == ("plain", "order 1", "order 2")
    assert [len(made.stream.test(k)) for k in range(3)] == [20] * 3


@pytest.mark.parametrize(("head", "clients", "alpha"), [("task", 5, 1e5), ("class", 50, 0.1)])
def test_split_sequences_of_real_images(data_dir, head, clients, alpha):
    """The paper's protocol: classes in the seed's order, both heads, 5 to 50 clients, both skews."""
    sources = {"images": ["cifar100", "cifar100_10k_2k.npz"]}
    data = ef.data.join_files(sources, data_dir, limit=2000, test_limit=500)
    streams = [
        ef.streams.classes(data, tasks=5, clients=clients, alpha=alpha, head=head, seed=seed)
        for seed in (1234, 1235)
    ]
    assert streams[0].task_classes != streams[1].task_classes
    stream, y = streams[0], data.y.numpy()
    for task, classes in enumerate(stream.task_classes):
        held = [stream.samples(i, 20 * task) for i in range(clients)]
        ids = np.concatenate(held)
        assert len(set(ids)) == len(ids) == np.isin(y[data.train], classes).sum()
        assert set(y[ids]) <= set(classes)
        assert set(y[stream.test(task)]) <= set(classes)
    competing = stream.mask(torch.from_numpy(y[:1]), 1)
    seen = stream.task_classes[0] + stream.task_classes[1]
    own = next(group for group in stream.task_classes if y[0] in group)
    assert set(competing[0].nonzero()[:, 0].tolist()) == set(own if head == "task" else seen)
