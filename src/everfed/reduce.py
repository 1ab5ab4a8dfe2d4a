"""Uploads are reduced as they come in: an engine never holds a cohort of models.

`mean` is weighted by the clients' weights, `sum` is plain, `stack` keeps clients apart (in the
order of their ids). A client that sends NaN, infinity or a wrong shape is dropped and counted;
means are over those that remain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everfed.method import Method, Reduction
from everfed.vector import Layout, squares

Uploads = dict[str, Tensor]


def kinds(method: Method, exchange: str) -> dict[str, Reduction]:
    """How each key of an exchange's uploads is reduced; a part's own keys are 'index.key'."""
    own: dict[str, Reduction] = {
        f"{i}.{key}": kind
        for i, part in enumerate(method.parts)
        for key, kind in part.reduces.items()
    }
    return own | ({"update": "mean", "buffers": "mean"} if exchange == "train" else {})


def pieces(method: Method, layout: Layout) -> tuple[int, ...]:
    """Lengths of the pieces of an update whose squares are summed: each layer's where a part reads
    its spread, else the whole; none where sums are told with noise, as one more would have to be.
    """
    reading = [part for part in method.parts if part.spread]
    if method.using("receive") and not reading:
        return ()
    return layout.pieces() if any(part.layered for part in reading) else (layout.d,)


def reducer(
    method: Method, exchange: str, shapes: dict[str, tuple[int, ...]], layout: Layout
) -> Reducer:
    """What reduces an exchange's uploads; all are kept where a part aggregates them itself."""
    train = exchange == "train"
    spread = train and any(part.spread for part in method.parts)
    cut = pieces(method, layout) if train else ()
    return Reducer(kinds(method, exchange), shapes, spread, bool(method.using("aggregate")), cut)


def _finite_rows(uploads: Uploads, weights: Tensor) -> list[int]:
    """The rows that are finite, times their weights as well."""
    good = torch.isfinite(weights).cpu()
    for value in uploads.values():
        total = value.reshape(len(weights), -1).sum(1)
        most = value.abs().reshape(len(weights), -1).amax(1) if value.numel() else total
        good &= (torch.isfinite(total) & torch.isfinite(most * weights.to(total))).cpu()
    found: list[int] = good.nonzero()[:, 0].tolist()
    return found


@dataclass
class Reducer:
    """A streaming reduction of (clients, ...) uploads."""

    kinds: Mapping[str, Reduction]
    shapes: dict[str, tuple[int, ...]]  #: where a shape is known beforehand
    spread: bool = False
    whole: bool = False  #: keep every client's uploads apart
    pieces: tuple[int, ...] = ()  #: of an update, whose squares are summed
    sums: Uploads = field(default_factory=dict)
    stacks: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    n: int = 0
    weight: float = 0.0
    weight_sq: float = 0.0  #: the sum of squared weights
    lengths: float = 0.0  #: the weighted sum of the updates' squared norms, with `pieces`
    dropped: dict[int, str] = field(default_factory=dict)  #: client -> why
    weights: dict[int, float] = field(default_factory=dict)  #: of each client, with `whole`

    def add(self, clients: Sequence[int], uploads: Uploads, weights: Tensor) -> list[int]:
        """Take in the uploads of some clients, (clients, ...) each; the rows that count."""
        for key, value in uploads.items():
            shape = self.shapes.setdefault(key, tuple(value.shape[1:]))
            if tuple(value.shape) != (len(clients), *shape):
                why = f"{key} has shape {tuple(value.shape[1:])}, not {shape}"
                self.dropped |= dict.fromkeys(clients, why)
                return []
        sums = self._reduced(uploads, weights)
        rows = list(range(len(clients)))
        if not all(bool(torch.isfinite(value.sum())) for value in sums.values()):
            rows = _finite_rows(uploads, weights)
            bad = set(range(len(clients))) - set(rows)
            self.dropped |= {clients[row]: "NaN or infinity" for row in bad}
            if not rows:
                return []
            uploads = {key: value[rows] for key, value in uploads.items()}
            weights = weights[rows]
            sums = self._reduced(uploads, weights)
        self.n += len(rows)
        self.weight += float(weights.sum())
        self.weight_sq += float(weights.cpu().double().square().sum())
        self.lengths += float(sums.pop("lengths", 0.0))
        if self.whole:
            self.weights |= dict(zip([clients[i] for i in rows], weights.tolist(), strict=True))
        for key, value in sums.items():
            if self.kinds.get(key) == "stack" or (self.whole and key in self.kinds):
                own = self.stacks.setdefault(key, {})
                own.update({clients[i]: v.clone() for i, v in zip(rows, uploads[key], strict=True)})
            else:
                self.add_to_sum(key, value)
        return rows

    def _reduced(self, uploads: Uploads, weights: Tensor) -> Uploads:
        """Sums over these clients; one that is not finite betrays a row that is not."""
        out: Uploads = {}
        for key, value in uploads.items():
            kind, flat = self.kinds[key], value.reshape(len(value), -1)
            ones = torch.ones(len(flat)).to(flat)
            factors = weights.to(flat) if kind == "mean" else ones
            out[key] = (factors @ flat).reshape(value.shape[1:])
            if key == "update" and self.pieces:
                cut = torch.split(flat, list(self.pieces), 1)
                own = torch.stack([squares(part) for part in cut], 1)
                out["lengths"] = weights.cpu().double() @ own.sum(1)
            if key == "update" and self.spread:
                same = bool((weights == weights[0]).all())
                out["plain"] = out[key] / factors[0] if same else ones @ flat
                out["squares"] = own.sum(0)
        return out

    def add_to_sum(self, key: str, value: Tensor) -> None:
        """A further term of a sum, of a client that does not count otherwise."""
        if key in self.sums:
            self.sums[key] += value
        else:
            self.sums[key] = value

    def merge(self, other: Reducer) -> None:
        """Take in (and copy: it may lie in shared memory) what another worker has reduced."""
        self.n += other.n
        self.weight += other.weight
        self.weight_sq += other.weight_sq
        self.lengths += other.lengths
        self.dropped |= other.dropped
        self.weights |= other.weights
        for key, value in other.sums.items():
            self.add_to_sum(key, value.clone())
        for key, rows in other.stacks.items():
            own = self.stacks.setdefault(key, {})
            own.update({client: row.clone() for client, row in rows.items()})

    def mean_of(self, key: str) -> Tensor:
        """The weighted mean of uploads that were kept apart."""
        rows = self.stacks[key]
        share = torch.tensor([self.weights[client] for client in rows]) / self.weight
        mean: Tensor = share @ torch.stack(list(rows.values())).to(share)
        return mean

    def values(self) -> Uploads:
        """The reduced uploads; those that were kept, in the order of the clients' ids. With
        `spread` also `plain` and `squares`, the sums of u_k and of |u_k|^2."""
        out = {
            key: value / self.weight if self.kinds.get(key) == "mean" else value
            for key, value in self.sums.items()
        }
        for key, rows in self.stacks.items():
            out[key] = torch.stack([rows[client] for client in sorted(rows)])
        return out


def cohort_spread(values: Mapping[str, Tensor], n: int, pieces: tuple[int, ...]) -> Tensor | None:
    """sum_k |u_k - u|^2 / (n d) of each piece, u the (weighted) mean update, from sums only.

    With s = sum u_k it is sum |u_k|^2 - |s|^2 / n + n |u - s / n|^2, so no single update is kept.
    """
    if "squares" not in values:
        return None

    def lengths(v: Tensor) -> Tensor:
        return torch.stack([squares(part) for part in torch.split(v, list(pieces))])

    center = values["plain"] / n
    total = values["squares"] - n * lengths(center) + n * lengths(values["update"] - center)
    return (total / (n * torch.tensor(pieces).to(total))).clamp(min=0)
