"""Models by name. Each function gives a recipe; the run's seed decides the initial weights.

>>> mlp(64, 128, 10)().__class__.__name__
'Sequential'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everfed.errors import EverfedError


@dataclass(frozen=True)
class Recipe:
    """A model that is built when a run starts."""

    name: str  #: in records
    build: Callable[[], nn.Module] = field(repr=False, compare=False)  #: makes the module
    sizes: tuple[Any, ...] = ()  #: what the recipe was called with

    def __call__(self) -> nn.Module:
        return self.build()


def mlp(*widths: int) -> Recipe:
    """Dense layers with ReLU between them.

    Args:
        *widths: inputs, hidden layers, outputs; inputs of any shape are flattened.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise EverfedError(f"mlp needs the widths of inputs, hidden layers and outputs: {widths}")

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for k, (a, b) in enumerate(pairwise(widths)):
            layers += [nn.ReLU()] * (k > 0) + [nn.Linear(a, b)]
        return nn.Sequential(*layers)

    return Recipe("mlp", build, widths)


def lenet(channels: int = 1, size: int = 28, classes: int = 10) -> Recipe:
    """LeNet5: two 5x5 convolutions with pooling, three dense layers.

    Args:
        channels: of the images.
        size: their height and width, at least 16.
        classes: outputs.
    """
    side = (size - 4) // 2
    side = (side - 4) // 2
    if side < 1:
        raise EverfedError(f"lenet needs images of at least 16 pixels, not {size}")

    def build() -> nn.Module:
        # pooling before ReLU gives the same numbers and is cheaper
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * side * side, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
        )  # fmt: skip

    return Recipe("lenet", build, (channels, size, classes))


#: what follows a convolution: nothing, BatchNorm, or GroupNorm, which keeps no statistics
Norm = Literal["none", "batch", "group"]


def _norm(norm: Norm, channels: int) -> list[nn.Module]:
    if norm == "none":
        return []
    return [nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(2, channels)]


def cnn(
    channels: int = 3, size: int = 32, classes: int = 10, width: int = 16, norm: Norm = "none"
) -> Recipe:
    """A small convolutional network: two 3x3 blocks with pooling, one hidden dense layer.

    Args:
        channels: of the images.
        size: their height and width, at least 4.
        classes: outputs.
        width: channels of the first convolution; the second has twice as many.
        norm: after each convolution: "none", "batch" (whose statistics clients share, and data-free
            generators go by) or "group" (which has none).
    """
    side = size // 4
    if side < 1:
        raise EverfedError(f"cnn needs images of at least 4 pixels, not {size}")
    if norm == "group" and width % 2:
        raise EverfedError(f"cnn: GroupNorm has two groups of channels, so no width of {width}")

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), *_norm(norm, width),
            nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), *_norm(norm, 2 * width),
            nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
            nn.Linear(2 * width * side * side, 4 * width), nn.ReLU(),
            nn.Linear(4 * width, classes),
        )  # fmt: skip

    return Recipe("cnn", build, (channels, size, classes, width, norm))


class Residual(nn.Module):
    """ResNet's basic block with GroupNorm."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outer)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            project = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.short = nn.Sequential(project, nn.GroupNorm(2, outer))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.short(x))


def resnet18(channels: int = 3, classes: int = 10) -> Recipe:
    """ResNet-18 for 32x32 images, with GroupNorm (statistics of clients are not mixed).

    Args:
        channels: of the images.
        classes: outputs.
    """

    def build() -> nn.Module:
        stages: list[nn.Module] = []
        inner = 64
        for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            stages += [Residual(inner, outer, stride), Residual(outer, outer, 1)]
            inner = outer
        return nn.Sequential(
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU(),
            *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes),
        )  # fmt: skip

    return Recipe("resnet18", build, (channels, classes))


class Dice(nn.Module):
    """DIN's activation: a PReLU whose bend lies at the mean of its inputs and is smooth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.slope = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.norm(x))
        return p * x + (1 - p) * self.slope * x


class DIN(nn.Module):
    """Deep Interest Network (Zhou et al. 2018) on rows of item numbers, 0 being none: the
    candidate, then the user's history.

    The history counts by its attention to the candidate, h = sum_k a(e_k, e) e_k, whose weights are
    not brought to the sum 1.
    """

    #: the parameter whose rows the inputs' numbers are: a client needs those of its own items only
    table = "items.weight"

    def __init__(self, items: int, width: int, hidden: tuple[int, int], activation: str) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, width, padding_idx=0)
        nn.init.normal_(self.items.weight[1:], std=0.1)
        self.attention = nn.Sequential(nn.Linear(4 * width, 36), nn.PReLU(), nn.Linear(36, 1))
        layers: list[nn.Module] = []
        for inner, outer in pairwise((3 * width, *hidden)):
            bend = Dice(outer) if activation == "dice" else nn.PReLU()
            layers += [nn.Linear(inner, outer), bend]
        self.top = nn.Sequential(*layers, nn.Linear(hidden[-1], 2))

    def forward(self, x: Tensor) -> Tensor:
        e = self.items(x)  # (batch, 1 + history, width)
        candidate, past = e[:, :1], e[:, 1:]
        beside = candidate.expand_as(past)
        a = self.attention(torch.cat([past, beside, past - beside, past * beside], -1))
        a = a * x[:, 1:, None].ne(0)
        h, e = (a * past).sum(1), candidate[:, 0]
        z: Tensor = self.top(torch.cat([h, e, h * e], -1))
        return z


def din(
    items: int,
    *,
    width: int = 16,
    hidden: tuple[int, int] = (80, 40),
    activation: Literal["dice", "prelu"] = "dice",
) -> Recipe:
    """DIN, for clicks: attention over the user's history, item by item.

    Args:
        items: how many there are; their numbers begin at 1.
        width: of an item's vector.
        hidden: widths of the dense layers.
        activation: "dice" (DIN's own, with running statistics) or "prelu".
    """
    if items < 1:
        raise EverfedError(f"din needs items, not {items}")

    def build() -> nn.Module:
        return DIN(items, width, hidden, activation)

    return Recipe("din", build, (items, width, *hidden, activation))


class Characters(nn.Module):
    """The next character after rows of characters' numbers: LSTM, the last state decides."""

    def __init__(self, characters: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(characters, 8)
        self.past = nn.LSTM(8, width, layers, batch_first=True)
        self.next = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.next(self.past(self.letters(x.long()))[0][:, -1])
        return z


def lstm(characters: int, classes: int, *, width: int = 128, layers: int = 2) -> Recipe:
    """The next character of a text, by an LSTM on vectors of 8 numbers (LEAF's network, which has
    256 units in two layers).

    Args:
        characters: how many there are.
        classes: outputs.
        width: units of a layer.
        layers: how many.
    """

    def build() -> nn.Module:
        return Characters(characters, classes, width, layers)

    return Recipe("lstm", build, (characters, classes, width, layers))


class Classifier(nn.Module):
    """A Transformers sequence classifier on rows of token ids, 0 being padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=ids, attention_mask=ids.ne(0)).logits
        return logits


def transformer(
    vocabulary: int,
    classes: int = 2,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 2,
    length: int = 64,
    path: str | Path | None = None,
) -> Recipe:
    """A text classifier of Hugging Face's Transformers: a small DistilBERT with first weights drawn
    from the seed, or one's own with its weights.

    Args:
        vocabulary: how many token ids there are.
        classes: outputs.
        width: of a token's vector.
        layers: how many.
        heads: of attention; they divide the width.
        length: the longest sample.
        path: a folder with config.json and weights, as DistilBERT's; the sizes are then its own.
    """
    if find_spec("transformers") is None:
        raise EverfedError("transformer needs: pip install 'everfed[text]'")
    if width % heads:
        raise EverfedError(f"a width of {width} cannot be divided among {heads} heads")
    if path is not None and not Path(path, "config.json").is_file():
        raise EverfedError(f"{path} holds no model: config.json and the weights are expected there")

    def build() -> nn.Module:
        import transformers

        if path is not None:
            kind = transformers.AutoModelForSequenceClassification
            inner = kind.from_pretrained(path, num_labels=classes, local_files_only=True)
            if inner.get_input_embeddings().num_embeddings < vocabulary:
                raise EverfedError(f"the data have token ids that {path} has no vector for")
            return Classifier(inner)
        config = transformers.DistilBertConfig(
            vocab_size=vocabulary, dim=width, n_layers=layers, n_heads=heads,
            hidden_dim=4 * width, max_position_embeddings=length, num_labels=classes,
        )  # fmt: skip
        return Classifier(transformers.DistilBertForSequenceClassification(config))

    sizes = (vocabulary, classes, width, layers, heads, length)
    return Recipe("transformer", build, sizes if path is None else (str(path), classes))
