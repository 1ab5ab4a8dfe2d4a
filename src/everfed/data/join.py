"""Several data sets as the domains of one, brought to one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.cifar import cifar10, cifar100
from everfed.data.digit10 import emnist_digits, mnist_m, svhn, usps
from everfed.data.files import Missing, fashion_mnist, mnist, npz
from everfed.data.folders import tiny_imagenet
from everfed.data.images import Channels, fill
from everfed.data.table import Data
from everfed.errors import EverfedError

#: data sets that a source may name
NAMED: dict[str, Callable[[str | Path | None], Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "emnist_digits": emnist_digits,
    "fashion_mnist": fashion_mnist,
    "mnist": mnist,
    "mnist_m": mnist_m,
    "svhn": svhn,
    "tiny_imagenet": tiny_imagenet,
    "usps": usps,
}


def join(
    domains: Mapping[str, Data],
    *,
    size: PositiveInt = 32,
    channels: Channels = 3,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
    name: str = "join",
) -> Data:
    """Data sets of byte images with the same labels as the domains of one.

    >>> from everfed.data import arrays
    >>> zeros = np.zeros((6, 8, 8), np.uint8)
    >>> join({"a": arrays(zeros, [0, 1] * 3), "b": arrays(zeros, [1, 0] * 3)})
    Data(join: 12 train, 12 test, 3x32x32, 2 classes, tasks a, b)

    Args:
        domains: data sets by the names that their domains shall have, in order.
        size: height and width that all images are brought to.
        channels: 3 (grey is repeated) or 1 (colours become grey).
        limit: training samples of a domain, drawn once; left out: all.
        test_limit: test samples of a domain, likewise.
        name: what messages and records call the data.
    """
    if not domains:
        raise EverfedError(f"{name}: name at least one domain")
    some = {
        domain: (drawn(data.train, limit), drawn(data.test, test_limit))
        for domain, data in domains.items()
    }
    counts = [(len(train), len(test)) for train, test in some.values()]
    x = torch.empty(sum(map(sum, counts)), size, size, channels, dtype=torch.uint8)
    labels, train, test, begin = [], [], [], 0
    for (domain, data), (own, held) in zip(domains.items(), some.values(), strict=True):
        if data.x.dtype != torch.uint8 or data.x.dim() != 4:
            raise EverfedError(f"{name}: {domain} has no byte images")
        ids = np.concatenate([own, held])
        fill(x[begin : begin + len(ids)], data.x, ids)
        labels.append(data.y[torch.from_numpy(ids)])
        middle, end = begin + len(own), begin + len(ids)
        train.append(np.arange(begin, middle))
        test.append(np.arange(middle, end))
        begin = end
    task = np.repeat(np.arange(len(counts)), [a + b for a, b in counts])
    notes = tuple(f"{k}: {note}" for k, data in domains.items() for note in data.notes)
    return Data(
        name, x.permute(0, 3, 1, 2), torch.cat(labels), np.concatenate(train),
        np.concatenate(test), task, tasks=tuple(domains), notes=notes,
    )  # fmt: skip


def join_files(
    sources: dict[str, str | list[str]],
    folder: str | Path | None = None,
    *,
    size: PositiveInt = 32,
    channels: Channels = 3,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Data:
    """Data sets of the data folder as the domains of one, brought to one size.

    Args:
        sources: what to read for each domain, in order: the name of a data set (cifar10, cifar100,
            emnist_digits, fashion_mnist, mnist, mnist_m, svhn, tiny_imagenet, usps) or an .npz
            file; of a list, the first that is there.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to.
        channels: 3 (grey is repeated) or 1 (colours become grey).
        limit: training samples of a domain, drawn once; left out: all.
        test_limit: test samples of a domain, likewise.
    """
    read = {domain: open_first(source, folder) for domain, source in sources.items()}
    name = "+".join(data.name for data in read.values())
    return join(read, size=size, channels=channels, limit=limit, test_limit=test_limit, name=name)


def digit10(
    folder: str | Path | None = None,
    *,
    size: PositiveInt = 32,
    channels: Channels = 3,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Data:
    """Digit-10: USPS, SVHN, EMNIST-digits and MNIST as four domains of ten digits.

    Args:
        folder: the data folder; left out: the environment's EVERFED_DATA.
        size: height and width that all images are brought to.
        channels: 3 (grey is repeated) or 1 (colours become grey).
        limit: training samples of a domain, drawn once; left out: all, 380,548 in all.
        test_limit: test samples of a domain, likewise.
    """
    names = {"USPS": "usps", "SVHN": "svhn", "EMNIST": "emnist_digits", "MNIST": "mnist"}
    read = {domain: NAMED[source](folder) for domain, source in names.items()}
    return join(
        read, size=size, channels=channels, limit=limit, test_limit=test_limit, name="digit10"
    )


def open_first(source: str | list[str], folder: str | Path | None) -> Data:
    """The first source that is there."""
    tried = [source] if isinstance(source, str) else source
    missing: list[str] = []
    for one in tried:
        try:
            if one.endswith(".npz"):
                return npz(one, folder)
            if one not in NAMED:
                raise EverfedError(
                    f"no data set {one!r}: give an .npz file or one of {', '.join(NAMED)}"
                )
            return NAMED[one](folder)
        except Missing as error:
            missing.append(str(error))
    raise Missing("; or ".join(missing) or "a domain has no source")


def drawn(ids: np.ndarray, limit: int | None) -> np.ndarray:
    """At most `limit` of them, always the same."""
    if limit is None or limit >= len(ids):
        return ids
    some: np.ndarray = ids[np.sort(rng(0, "limit").permutation(len(ids))[:limit])]
    return some
