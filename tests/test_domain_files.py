"""Public data sets of domains: small cuts of the real ones, written in their formats and read back."""

from __future__ import annotations

import bz2
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import everfed as ef
from everfed import compare
from everfed import config as configs
from everfed.cli import app
from everfed.data.images import fit
from everfed.errors import EverfedError
from test_data import idx

Cut = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def cuts(data_dir):
    """The first 60 training and 30 test samples of each set."""
    files = {"usps": "usps", "svhn": "svhn_10k_4k", "mnist_m": "mnist_m_4k_1k"}
    files |= {"mnist": "mnist_writers"}
    out: dict[str, Cut] = {}
    for name, file in files.items():
        with np.load(data_dir / f"{file}.npz") as found:
            sizes = {"x_train": 60, "y_train": 60, "x_test": 30, "y_test": 30}
            out[name] = {key: found[key][:n].copy() for key, n in sizes.items()}
    return out


@pytest.fixture(scope="session")
def pacs(data_dir):
    """Twelve images of every domain and class."""
    with np.load(data_dir / "pacs_32px.npz") as found:
        x, y, domain = found["x"], found["y"], found["domain"]
        names, domains = found["classes"], found["domains"]
    return {
        (str(domains[d]), str(names[c])): x[(domain == d) & (y == c)][:12]
        for d in range(len(domains))
        for c in range(len(names))
    }


def same(data: ef.data.Data, cut: Cut) -> None:
    """The data hold exactly these images and labels."""
    whole = ef.data.arrays(cut["x_train"], cut["y_train"], test=(cut["x_test"], cut["y_test"]))
    assert torch.equal(data.x[data.train], whole.x[whole.train])
    assert torch.equal(data.x[data.test], whole.x[whole.test])
    assert torch.equal(data.y, whole.y)
    assert data.x.dtype == torch.uint8


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


# digits -------------------------------------------------------------------------------------------
def libsvm(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    rows = []
    for image, digit in zip(x, y, strict=True):
        values = image.reshape(-1) / 127.5 - 1
        rows.append(f"{digit + 1} " + " ".join(f"{k + 1}:{v:.6f}" for k, v in enumerate(values)))
    path.write_bytes(bz2.compress("\n".join(rows).encode()))


def usps_h5(folder: Path, cut: Cut) -> None:
    import h5py

    with h5py.File(folder / "usps.h5", "w") as file:
        for part in ("train", "test"):
            flat = cut[f"x_{part}"].reshape(-1, 256).astype(np.float32) / 255
            file[f"{part}/data"], file[f"{part}/target"] = flat, cut[f"y_{part}"].astype(int)


def usps_bz2(folder: Path, cut: Cut) -> None:
    (folder / "USPS").mkdir()
    libsvm(folder / "USPS/usps.bz2", cut["x_train"], cut["y_train"])
    libsvm(folder / "USPS/usps.t.bz2", cut["x_test"], cut["y_test"])


def svhn_mat(folder: Path, cut: Cut) -> None:
    from scipy.io import savemat

    for part in ("train", "test"):
        x, y = cut[f"x_{part}"].transpose(1, 2, 3, 0), cut[f"y_{part}"].astype(np.uint8)
        savemat(folder / f"{part}_32x32.mat", {"X": x, "y": np.where(y == 0, 10, y)[:, None]})


def emnist_idx(folder: Path, cut: Cut) -> None:
    (folder / "EMNIST/raw").mkdir(parents=True)
    for part in ("train", "test"):
        start = folder / f"EMNIST/raw/emnist-digits-{part}"
        turned = np.ascontiguousarray(cut[f"x_{part}"].transpose(0, 2, 1))
        Path(f"{start}-images-idx3-ubyte").write_bytes(idx(turned))
        labels = gzip.compress(idx(cut[f"y_{part}"]))
        Path(f"{start}-labels-idx1-ubyte.gz").write_bytes(labels)


def mnist_m_png(folder: Path, cut: Cut) -> None:
    for part in ("train", "test"):
        lines = []
        for k, (image, y) in enumerate(zip(cut[f"x_{part}"], cut[f"y_{part}"], strict=True)):
            save(folder / f"mnist_m/mnist_m_{part}/{k:08d}.png", image)
            lines.append(f"{k:08d}.png {y}")
        (folder / f"mnist_m/mnist_m_{part}_labels.txt").write_text("\n".join(lines) + "\n")


WRITERS = [
    ("usps", usps_h5),
    ("usps", usps_bz2),
    ("svhn", svhn_mat),
    ("mnist_m", mnist_m_png),
    ("emnist_digits", emnist_idx),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[w.__name__ for _, w in WRITERS])
def test_public_digit_files_are_read_back_exactly(name, write, cuts, tmp_path):
    cut = cuts["mnist" if name == "emnist_digits" else name]
    write(tmp_path, cut)
    same(getattr(ef.data, name)(tmp_path), cut)


@pytest.mark.parametrize("name", ["usps", "svhn", "mnist_m"])
def test_digits_as_npz(name, cuts, tmp_path):
    np.savez(tmp_path / f"{name}.npz", **cuts[name])
    same(getattr(ef.data, name)(tmp_path), cuts[name])


@pytest.mark.parametrize(
    "name", ["usps", "svhn", "mnist_m", "emnist_digits", "pacs", "vlcs", "dn4il"]
)
def test_what_is_missing_says_where_to_put_what(name, tmp_path):
    with pytest.raises(EverfedError, match=r"is not there: .*"):
        getattr(ef.data, name)(tmp_path)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGED = [
    ("usps", usps_h5, "usps.h5", "not the USPS file"),
    ("usps", usps_bz2, "USPS/usps.bz2", "not a whole LIBSVM"),
    ("svhn", svhn_mat, "train_32x32.mat", "not a whole SVHN"),
    ("emnist_digits", emnist_idx, "EMNIST/raw/emnist-digits-train-images-idx3-ubyte", "truncated"),
    (
        "emnist_digits",
        emnist_idx,
        "EMNIST/raw/emnist-digits-test-labels-idx1-ubyte.gz",
        "truncated",
    ),
    ("mnist_m", mnist_m_png, "mnist_m/mnist_m_test_labels.txt", "lists 15 images, but .* holds 30"),
]


@pytest.mark.parametrize(("name", "write", "file", "words"), DAMAGED, ids=[d[2] for d in DAMAGED])
def test_damaged_files_are_told(name, write, file, words, cuts, tmp_path):
    write(tmp_path, cuts["mnist" if name == "emnist_digits" else name])
    cut_short(tmp_path / file)
    with pytest.raises(EverfedError, match=words):
        getattr(ef.data, name)(tmp_path)


# joining ------------------------------------------------------------------------------------------
def test_images_are_brought_to_size_as_pillow_does_it(cuts):
    grey, colour = cuts["mnist"]["x_train"][:5], cuts["svhn"]["x_train"][:5]
    larger = fit(torch.from_numpy(grey).unsqueeze(1), 32, 3)
    smaller = fit(torch.from_numpy(colour).permute(0, 3, 1, 2), 16, 1)
    for k in range(5):
        image = Image.fromarray(grey[k]).resize((32, 32), Image.Resampling.BILINEAR)
        assert np.array_equal(larger[k, 0].numpy(), np.asarray(image))
        assert torch.equal(larger[k, 0], larger[k, 2])
        image = Image.fromarray(colour[k]).convert("L").resize((16, 16), Image.Resampling.BILINEAR)
        assert np.abs(smaller[k, 0].numpy().astype(int) - np.asarray(image)).max() <= 1


def test_joined_domains_keep_their_own_samples(cuts, tmp_path):
    for name, cut in cuts.items():
        np.savez(tmp_path / f"{name}_cut.npz", **cut)
    sources = {"U": ["usps", "usps_cut.npz"], "S": "svhn_cut.npz", "M": "mnist_cut.npz"}
    data = ef.data.join_files(sources, tmp_path, limit=40, test_limit=10)
    assert data.tasks == ("U", "S", "M")
    assert (len(data.train), len(data.test), data.x.shape[1:]) == (120, 30, (3, 32, 32))
    assert data.x.dtype == torch.uint8
    for k, name in enumerate(("usps", "svhn", "mnist")):
        cut = cuts[name]
        whole = ef.data.arrays(cut["x_train"], cut["y_train"])
        known = {
            x.numpy().tobytes(): int(y) for x, y in zip(fit(whole.x, 32, 3), whole.y, strict=True)
        }
        mine = data.train[data.task[data.train] == k]
        assert len(mine) == 40
        assert all(known[data.x[i].contiguous().numpy().tobytes()] == data.y[i] for i in mine)
        assert set(mine).isdisjoint(data.test)
    with pytest.raises(EverfedError, match="usps is not there"):
        ef.data.join_files({"U": ["usps", "none.npz"]}, tmp_path)
    with pytest.raises(EverfedError, match="no data set 'upss'"):
        ef.data.join_files({"U": "upss"}, tmp_path)
    with pytest.raises(EverfedError, match="digits has no byte images"):
        ef.data.join({"digits": ef.data.digits(["plain"])})


# folders ------------------------------------------------------------------------------------------
def write_pacs(root: Path, pacs: dict[tuple[str, str], np.ndarray], names: dict[str, str]) -> None:
    for (domain, label), images in pacs.items():
        for k, image in enumerate(images):
            save(root / names.get(domain, domain) / label / f"pic_{k:03d}.png", image)


def test_pacs_folders(pacs, tmp_path):
    write_pacs(tmp_path / "PACS", pacs, {})
    data = ef.data.pacs(tmp_path)
    assert data.tasks == ("sketch", "cartoon", "photo", "art_painting")
    assert (len(data.train), len(data.test), data.classes) == (4 * 7 * 10, 4 * 7 * 2, 7)
    assert set(data.train).isdisjoint(data.test)
    for k, domain in enumerate(data.tasks):
        for y, label in enumerate(sorted({label for _, label in pacs})):
            mine = np.flatnonzero((data.task == k) & (data.y.numpy() == y))
            found = data.x[torch.from_numpy(mine)].permute(0, 2, 3, 1).numpy()
            assert np.array_equal(found, pacs[domain, label])
    assert not data.notes
    general = ef.data.folders(
        "PACS", tmp_path, domains=["photo"], classes=["house", "dog"], size=16
    )
    assert (general.tasks, general.classes, general.x.shape[1:]) == (("photo",), 2, (3, 16, 16))
    with pytest.raises(EverfedError, match="has no folder 'photos'; it has art_painting"):
        ef.data.folders("PACS", tmp_path, domains=["photos"])


def test_pacs_arrays_are_brought_to_size(pacs, tmp_path):
    """The smallest file that is large enough, in the channels that are asked for."""
    x = np.concatenate(list(pacs.values()))
    y = np.repeat(np.arange(len(pacs)) % 7, 12)
    domain = np.repeat(np.arange(len(pacs)) // 7, 12)
    np.savez(tmp_path / "pacs_32px.npz", x=x, y=y, domain=domain, domains=["a", "b", "c", "d"])
    np.savez(tmp_path / "pacs_64px.npz", x=x[:0], y=y[:0])
    data = ef.data.pacs(tmp_path, size=16, channels=1)
    assert data.x.shape == (len(x), 1, 16, 16)
    whole = ef.data.pacs(tmp_path).x.float().mean().item()
    assert data.x.float().mean().item() == pytest.approx(whole, rel=0.05)
    with pytest.raises(EverfedError, match="pacs is not there"):
        ef.data.pacs(tmp_path, size=128)


def test_folders_that_are_divided_or_listed(pacs, tmp_path):
    first_five = sorted({label for _, label in pacs})[:5]
    vlcs = {"photo": "CALTECH", "art_painting": "LABELME", "cartoon": "SUN", "sketch": "PASCAL"}
    lists: dict[str, list[str]] = {}
    for (domain, label), images in pacs.items():
        for k, image in enumerate(images):
            if label in first_five:
                part = ("train", "crossval", "test")[k % 3]
                save(tmp_path / f"VLCS/{vlcs[domain]}/{part}/{label}/{k}.png", image)
            save(tmp_path / f"net/{domain}/{label}/{k}.png", image)
            part = "test" if k < 3 else "train"
            if k < 9:  # the others are not listed
                line = f"{domain}/{label}/{k}.png {ord(label[0])}"
                lists.setdefault(f"{domain}_{part}", []).append(line)
    for name, lines in lists.items():
        (tmp_path / f"net/{name}.txt").write_text("\n".join(lines))
    data = ef.data.vlcs(tmp_path)
    assert data.tasks == ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    assert (len(data.train), len(data.test), data.classes) == (4 * 5 * 8, 4 * 5 * 4, 5)
    with pytest.raises(EverfedError, match="should hold the folders sketch, infograph"):
        ef.data.dn4il(tmp_path)
    listed = ef.data.folders("net", tmp_path)
    assert (len(listed.train), len(listed.test)) == (4 * 7 * 6, 4 * 7 * 3)


def test_a_missing_class_is_noted_and_a_missing_one_of_seven_refused(pacs, tmp_path):
    some = {key: images for key, images in pacs.items() if key != ("photo", "dog")}
    write_pacs(tmp_path / "PACS", some, {})
    assert ef.data.pacs(tmp_path).notes == ("photo has no images of dog",)
    none = {key: images for key, images in pacs.items() if key[1] != "dog"}
    write_pacs(tmp_path / "other/PACS", none, {})
    with pytest.raises(EverfedError, match="6 classes, not the 7 of pacs"):
        ef.data.pacs(tmp_path / "other")


def test_unreadable_images_are_left_out_and_counted(pacs, tmp_path, monkeypatch):
    write_pacs(tmp_path / "PACS", pacs, {})
    cut_short(tmp_path / "PACS/photo/dog/pic_003.png")
    (tmp_path / "PACS/sketch/house/pic_000.png").write_bytes(b"not an image")
    data = ef.data.pacs(tmp_path)
    assert len(data.train) + len(data.test) == 4 * 7 * 12 - 2
    (note,) = data.notes
    assert note.startswith("2 of 336 images cannot be read and are left out: ")
    assert "photo/dog/pic_003.png" in note
    assert "sketch/house/pic_000.png" in note
    # a user of the command line sees it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERFED_DATA", str(tmp_path))
    told = CliRunner().invoke(app, ["stream", "--set", "data.name=pacs"])
    assert told.exit_code == 0, told.output
    assert "2 of 336 images cannot be read" in told.stderr
    # and in a comparison once, not for every run
    values = {"data": {"name": "pacs"}, "stream": {"name": "static", "clients": 2, "rounds": 1},
              "model": {"name": "mlp", "hidden": [4]},
              "compare": {"methods": ["fedavg", "special"], "seeds": [0]}}  # fmt: skip
    assert compare.run_all(configs.parse(values), tmp_path / "runs", 1) == [note]
    for path in (tmp_path / "PACS").rglob("*.png"):
        path.write_bytes(b"not an image")
    with pytest.raises(EverfedError, match="336 of 336 images cannot be read"):
        ef.data.pacs(tmp_path)


def test_decoding_is_kept_until_a_file_changes(cuts, tmp_path):
    mnist_m_png(tmp_path, cuts["mnist_m"])
    first = ef.data.mnist_m(tmp_path)
    path = tmp_path / "mnist_m/mnist_m_train/00000000.png"
    facts = path.stat()
    path.write_bytes(bytes(facts.st_size))  # same size and time: the cache does not look again
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert torch.equal(ef.data.mnist_m(tmp_path).x, first.x)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert len(ef.data.mnist_m(tmp_path).train) == 59


def test_without_a_place_for_the_cache_images_are_read_all_the_same(cuts, tmp_path, monkeypatch):
    mnist_m_png(tmp_path, cuts["mnist_m"])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "file"))
    same(ef.data.mnist_m(tmp_path), cuts["mnist_m"])


# objects that users have --------------------------------------------------------------------------
class Pictures(torch.utils.data.Dataset):
    """As torchvision's data sets give them: Pillow images of several sizes, and labels."""

    def __init__(self, cut, part, keys):
        self.x, self.y, self.keys = cut[f"x_{part}"], cut[f"y_{part}"], keys

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        image = Image.fromarray(self.x[k]).resize((16 + k % 3, 16))
        return {"image": image, "label": int(self.y[k])} if self.keys else (image, int(self.y[k]))


@pytest.mark.parametrize("keys", [False, True], ids=["pairs", "dictionaries"])
def test_pillow_images_of_several_sizes(keys, cuts):
    train, test = (Pictures(cuts["svhn"], part, keys) for part in ("train", "test"))
    data = ef.data.from_dataset(train, test, size=16, channels=1)
    assert (len(data.train), data.x.shape[1:], data.x.dtype) == (60, (1, 16, 16), torch.uint8)
    assert data.y[:60].tolist() == cuts["svhn"]["y_train"].tolist()
    with pytest.raises(EverfedError, match="different shapes"):
        ef.data.from_dataset(train)


def test_hugging_face_datasets(cuts):
    hf = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    cut = cuts["mnist"]
    rows = {"img": [Image.fromarray(x) for x in cut["x_train"]], "label": cut["y_train"].tolist()}
    kinds = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(10)})
    dataset = hf.Dataset.from_dict(rows, features=kinds)
    data = ef.data.from_dataset(dataset, inputs="img")
    assert np.array_equal(data.x[:, 0].numpy(), cut["x_train"])
    with pytest.raises(EverfedError, match="samples have img, label; say which"):
        ef.data.from_dataset(dataset)


def test_npz_names_its_domains(pacs, tmp_path):
    x, y = pacs["photo", "dog"], np.zeros(12, int)
    domain = np.arange(12) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y, domain=domain, domains=["photo", "art", "sketch"])
    assert ef.data.npz("a.npz", tmp_path, task="domain").tasks == ("photo", "art", "sketch")
    np.savez(tmp_path / "b.npz", x=x, y=y, domain=domain + 1, domains=["photo", "art", "sketch"])
    assert ef.data.npz("b.npz", tmp_path, task="domain").tasks == ("task 1", "task 2", "task 3")
