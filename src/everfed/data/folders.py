"""Image files in folders by domain and class: PACS, VLCS, DomainNet and the like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.files import Missing, data_folder, npz
from everfed.data.images import Channels, decoded, fit
from everfed.data.table import Data, arrays, names
from everfed.errors import EverfedError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
#: subfolders of a domain that divide it, where there are any
TRAIN, TEST = ("train", "crossval", "val"), ("test",)


@dataclass(frozen=True)
class Known:
    """A public data set of domains."""

    places: tuple[str, ...]  #: where it may lie below the data folder
    domains: Mapping[str, tuple[str, ...]]  #: names of the domains, and of their folders
    classes: int
    source: str


PACS = Known(
    ("PACS", "pacs", "PACS/kfold", "pacs/kfold", "kfold"),
    {name: (name,) for name in ("sketch", "cartoon", "photo", "art_painting")},
    7,
    "github.com/MachineLearning2020/Homework3-PACS or the Hugging Face set flwrlabs/pacs",
)
VLCS = Known(
    ("VLCS", "vlcs"),
    {
        "Caltech101": ("Caltech101", "CALTECH"),
        "LabelMe": ("LabelMe", "LABELME"),
        "SUN09": ("SUN09", "SUN"),
        "VOC2007": ("VOC2007", "PASCAL"),
    },
    5,
    "the archive VLCS.tar.gz of DomainBed",
)
DN4IL = Known(
    ("DN4IL", "dn4il", "domain_net", "domainnet", "DomainNet"),
    {k: (k,) for k in ("sketch", "infograph", "painting", "quickdraw", "real", "clipart")},
    100,
    "ai.bu.edu/M3SDA (DomainNet), with the lists of github.com/NeurAI-Lab/DN4IL-dataset",
)


def folders(
    path: str,
    folder: str | Path | None = None,
    *,
    domains: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    size: PositiveInt = 32,
    channels: Channels = 3,
) -> Data:
    """Image files in folders, PATH/domain/class/*.jpg.

    Which are for tests: those named in PATH/domain_test.txt (domain_train.txt names the others), or
    those in PATH/domain/test/class (train, crossval and val hold the others), or else a fifth of
    every class of a domain, drawn once. What cannot be read is left out and counted.

    Args:
        path: the folder of domains, in the data folder if it is relative.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        domains: folders to read, in order; left out: all, by name.
        classes: classes to read, in the order of their labels; left out: all, by name.
        size: height and width that all images are brought to (their sides each on its own).
        channels: 3 (RGB) or 1 (grey).
    """
    root = Path(path).expanduser()
    root = root if root.is_absolute() else data_folder(folder) / root
    if not root.is_dir():
        raise Missing(f"the folder {root} does not exist")
    chosen = names(domains or [own.name for own in _inside(root)])
    if not chosen:
        raise Missing(f"{root} has no folders: one for each domain is expected")
    titles = names(classes or [])
    return _read(root.name, root, {name: name for name in chosen}, titles, size, channels)


def pacs(
    folder: str | Path | None = None, *, size: PositiveInt = 32, channels: Channels = 3
) -> Data:
    """PACS: 9,991 images of 7 classes as sketches, cartoons, photos and art paintings.

    Folders, or arrays of at least that size, as in pacs_32px.npz: x, y, domain and domains.

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to.
        channels: 3 (RGB) or 1 (grey).
    """
    return _known("pacs", PACS, folder, size, channels)


def vlcs(
    folder: str | Path | None = None, *, size: PositiveInt = 32, channels: Channels = 3
) -> Data:
    """VLCS: photos of 5 classes from Caltech101, LabelMe, SUN09 and VOC2007.

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to.
        channels: 3 (RGB) or 1 (grey).
    """
    return _known("vlcs", VLCS, folder, size, channels)


def dn4il(
    folder: str | Path | None = None, *, size: PositiveInt = 32, channels: Channels = 3
) -> Data:
    """DN4IL: DomainNet's six domains with the 100 classes of DN4IL's lists.

    The lists, DOMAIN_train.txt and DOMAIN_test.txt, lie beside the domains' folders.

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to.
        channels: 3 (RGB) or 1 (grey).
    """
    return _known("dn4il", DN4IL, folder, size, channels)


def tiny_imagenet(
    folder: str | Path | None = None, *, size: PositiveInt = 64, channels: Channels = 3
) -> Data:
    """Tiny-ImageNet: 200 classes of 500 images to train on and 50 (the val folder) to test on.

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to; they have 64.
        channels: 3 (RGB) or 1 (grey).
    """
    places = ("tiny-imagenet-200", "tiny_imagenet", "TinyImageNet")
    roots = [data_folder(folder) / place for place in places]
    root = next((root for root in roots if (root / "val" / "val_annotations.txt").is_file()), None)
    if root is None:
        raise Missing(
            f"tiny-imagenet is not there: {roots[0]} should hold train/CLASS/images, val/images "
            "and val/val_annotations.txt. Get it from cs231n.stanford.edu/tiny-imagenet-200.zip"
        )
    train = [
        (file, own.name) for own in _inside(root / "train") for file in _images(own / "images")
    ]
    test = []
    lines = (root / "val" / "val_annotations.txt").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        test.append((root / "val" / "images" / name, rest.partition("\t")[0]))
        if not rest:
            raise EverfedError(
                f"val_annotations.txt, line {number}: not 'FILE CLASS ...': {line!r}"
            )
    code = {title: k for k, title in enumerate(sorted({title for _, title in train}))}
    strange = next((title for _, title in test if title not in code), None)
    if strange is not None:
        raise EverfedError(f"{root}: val has images of {strange}, of which train has none")
    files, titles = zip(*train, *test, strict=True)
    held = [False] * len(train) + [True] * len(test)
    labels = [code[title] for title in titles]
    return from_files("tiny-imagenet", root, files, labels, held, size=size, channels=channels)


def _known(
    name: str, known: Known, folder: str | Path | None, size: int, channels: Channels
) -> Data:
    root = data_folder(folder)
    for place in known.places:
        found = {
            domain: own
            for domain, names in known.domains.items()
            for own in names
            if (root / place / own).is_dir()
        }
        if len(found) == len(known.domains):
            data = _read(name, root / place, found, None, size, channels)
            if data.classes != known.classes:
                raise EverfedError(
                    f"{root / place} has {data.classes} classes, not the {known.classes} of "
                    f'{name}; get it from {known.source}, or read it with name = "folders"'
                )
            return data
    kept = [re.fullmatch(rf"{name}_(\d+)px.npz", file.name) for file in root.glob("*px.npz")]
    sizes = {int(own[1]): own[0] for own in kept if own}
    if large := [pixels for pixels in sizes if pixels >= size]:
        data = npz(sizes[min(large)], root, task="domain")
        return replace(data, x=fit(data.x, size, channels))
    raise Missing(
        f"{name} is not there: {root / known.places[0]} should hold the folders "
        f"{', '.join(known.domains)}, each with one folder a class. Get it from {known.source}"
    )


def _read(
    name: str,
    root: Path,
    domains: Mapping[str, str],
    classes: Sequence[str] | None,
    size: int,
    channels: Channels,
) -> Data:
    files: list[Path] = []
    held: list[bool] = []
    task: list[int] = []
    for k, own in enumerate(domains.values()):
        if not (root / own).is_dir():
            have = ", ".join(path.name for path in _inside(root))
            raise EverfedError(f"{root} has no folder {own!r}; it has {have}")
        found = [(f, t) for f, t in _files(root, own) if not classes or f.parent.name in classes]
        if not found:
            raise EverfedError(f"{root / own} has no images: one folder a class is expected")
        files += [file for file, _ in found]
        held += [test for _, test in found]
        task += [k] * len(found)
    titles = list(classes or sorted({file.parent.name for file in files}))
    code = {title: k for k, title in enumerate(titles)}
    labels = [code[file.parent.name] for file in files]
    data = from_files(
        name, root, files, labels, held, task, tuple(domains), size=size, channels=channels
    )
    there = set(zip(task, labels, strict=True))
    lacks = [
        f"{domain} has no images of {title}"
        for k, domain in enumerate(domains)
        for title in titles
        if (k, code[title]) not in there
    ]
    return replace(data, notes=(*data.notes, *lacks))


def _files(root: Path, domain: str) -> Iterator[tuple[Path, bool]]:
    """A domain's image files, and whether each is for tests."""
    lists = {
        test: root / f"{domain}_{part}.txt" for part, test in (("train", False), ("test", True))
    }
    if all(path.is_file() for path in lists.values()):
        for test, path in lists.items():
            for number, line in enumerate(path.read_text().splitlines(), 1):
                file, _, label = line.strip().rpartition(" ")
                if not file or not label.isdigit():
                    raise EverfedError(f"{path}, line {number}: not 'FILE LABEL' but {line!r}")
                yield root / file, test
        return
    base = root / domain
    if (base / "train").is_dir() and (base / "test").is_dir():
        for part in (*TRAIN, *TEST):
            for own in _inside(base / part):
                yield from ((file, part in TEST) for file in _images(own))
        return
    for own in _inside(base):
        images = _images(own)
        drawn = rng(0, "held out").permutation(len(images))
        yield from ((file, k < len(images) // 5) for file, k in zip(images, drawn, strict=True))


def from_files(
    name: str,
    root: Path,
    files: Sequence[Path],
    labels: Sequence[int],
    held: Sequence[bool],
    task: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    *,
    size: int,
    channels: Channels = 3,
) -> Data:
    """A table of image files, with a note on those that cannot be read."""
    gone = [file for file in files if not file.is_file()]
    if gone:
        raise EverfedError(
            f"{name}: {len(gone)} of {len(files)} files do not exist, the first is {gone[0]}"
        )
    x, unread = decoded(files, size, channels)
    table = arrays(x, labels, task=task, tasks=tasks, name=name)
    test = np.array(held, dtype=bool)
    good = np.setdiff1d(np.arange(len(files)), list(unread))
    if len(good) <= len(files) // 2:
        some = next(iter(unread))
        raise EverfedError(
            f"{name}: {len(unread)} of {len(files)} images cannot be read, {files[some]}: "
            f"{unread[some]}"
        )
    notes = []
    if unread:
        shown = [f"{files[k].relative_to(root)} ({why})" for k, why in list(unread.items())[:3]]
        more = ", ..." if len(unread) > 3 else ""
        notes.append(
            f"{len(unread)} of {len(files)} images cannot be read and are left out: "
            f"{', '.join(shown)}{more}"
        )
    return replace(table, train=good[~test[good]], test=good[test[good]], notes=tuple(notes))


def _inside(path: Path) -> list[Path]:
    """The folders in a folder, by name."""
    if not path.is_dir():
        return []
    return sorted(own for own in path.iterdir() if own.is_dir() and own.name[0] not in "._")


def _images(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(
        file
        for file in path.iterdir()
        if file.suffix.lower() in SUFFIXES and file.name[0] not in "._"
    )
