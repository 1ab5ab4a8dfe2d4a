"""GLUE's sentence tasks with two classes (SST-2, QQP, QNLI) as domains, in words' numbers.

A sample is one row of token ids, (length,): [CLS] first [SEP] second [SEP], then 0 as padding.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import PositiveInt

from everfed.chance import rng
from everfed.data.files import Missing, data_folder
from everfed.data.table import Data, arrays
from everfed.errors import EverfedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Name = Literal["sst2", "qqp", "qnli"]
#: the first is padding, number 0
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Source:
    """Where a task's files may lie, and their columns."""

    places: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ("label",)


SOURCES: dict[Name, Source] = {
    "sst2": Source(("SST-2", "sst2", "glue/sst2", "."), ("sentence",)),
    "qqp": Source(
        ("QQP", "qqp", "glue/qqp", "."), ("question1", "question2"), ("is_duplicate", "label")
    ),
    "qnli": Source(("QNLI", "qnli", "glue/qnli", "."), ("question", "sentence")),
}
#: labels that are words
WORDS = {"0": 0, "1": 1, "entailment": 0, "not_entailment": 1}

#: texts (one or two a sample) and labels
Rows = tuple[list[tuple[str, ...]], list[int]]


def glue(
    tasks: Sequence[Name] = ("sst2", "qqp", "qnli"),
    folder: str | Path | None = None,
    *,
    length: PositiveInt = 64,
    tokenizer: str | None = None,
    vocabulary: PositiveInt = 8000,
    limit: PositiveInt | None = None,
    test_limit: PositiveInt | None = None,
) -> Data:
    """GLUE's SST-2, QQP and QNLI as domains with two classes, in token ids.

    TSV files (SST-2/train.tsv, dev.tsv), Parquet files as on Hugging Face (sst2/train-*.parquet,
    validation-*.parquet), or sst2.parquet. Without dev or validation samples a fifth is held out.

    Args:
        tasks: some of sst2, qqp and qnli, in order.
        folder: the data folder; left out: the environment's EVERFED_DATA.
        length: tokens of a sample; longer ones are cut.
        tokenizer: a tokenizer.json or vocab.txt, or a folder with one, in the data folder if it is
            relative; left out: characters and the most frequent words of the training samples.
        vocabulary: how many of these.
        limit: training samples of a task, drawn once; left out: all.
        test_limit: test samples of a task, likewise.
    """
    if find_spec("tokenizers") is None:
        raise EverfedError("texts need: pip install 'everfed[text]'")
    root = data_folder(folder)
    notes: list[str] = []
    parts = [_both(task, root, notes) for task in tasks]
    parts = [(_some(train, limit), _some(test, test_limit)) for train, test in parts]
    if tokenizer is None:
        made = _learn(
            (text for (texts, _), _ in parts for pair in texts for text in pair), vocabulary
        )
    else:
        made = _load(root, tokenizer)
    made.enable_truncation(length)
    made.enable_padding(pad_id=0, length=length)

    def stack(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        texts = [pair for part in parts for pair in part[k][0]]
        labels = [label for part in parts for label in part[k][1]]
        codes = made.encode_batch([pair if len(pair) > 1 else pair[0] for pair in texts])
        ids = np.array([code.ids for code in codes], np.int32).reshape(-1, length)
        sizes = [len(part[k][1]) for part in parts]
        return ids, np.array(labels), np.repeat(np.arange(len(parts)), sizes)

    (x, y, task), (xt, yt, test_task) = stack(0), stack(1)
    table = arrays(x, y, test=(xt, yt), task=task, test_task=test_task, tasks=tasks, name="glue")
    return replace(table, notes=tuple(notes))


# reading -------------------------------------------------------------------------------------
def _both(task: Name, root: Path, notes: list[str]) -> tuple[Rows, Rows]:
    """Training and test samples."""
    source = SOURCES[task]
    for place in source.places:
        for train, test in (
            ("train.tsv", "dev.tsv"),
            ("train-*.parquet", "validation-*.parquet"),
            (f"{task}.parquet", ""),
            (f"{task}_*.parquet", ""),
        ):
            found = sorted((root / place).glob(train))
            if place == "." and not train.startswith(task):
                continue  # whose it is would be a guess
            if found:
                held = sorted((root / place).glob(test)) if test else []
                return _split(_rows(found, source, notes), _rows(held, source, notes))
    raise Missing(
        f"{task} is not there: put GLUE's train.tsv and dev.tsv into {root / source.places[0]}, or "
        f"its Parquet files into {root / task}, or {task}.parquet into {root}"
    )


def _rows(files: Sequence[Path], source: Source, notes: list[str]) -> list[dict[str, Any]]:
    """Rows with texts, label and split; incomplete ones are left out and counted."""
    out: list[dict[str, Any]] = []
    for path in files:
        rows = _tsv(path) if path.suffix == ".tsv" else _parquet(path)
        if not rows:
            raise EverfedError(f"{path} has no rows")
        label = next((name for name in source.labels if name in rows[0]), None)
        lacks = [name for name in source.texts if name not in rows[0]]
        if label is None or lacks:
            wanted = ", ".join([*source.texts, " or ".join(source.labels)])
            raise EverfedError(
                f"{path} should have the columns {wanted}; it has {', '.join(rows[0])}"
            )
        before = len(out)
        for row in rows:
            texts = tuple(row[name] for name in source.texts)
            code = WORDS.get(str(row[label]))
            if all(isinstance(text, str) and text.strip() for text in texts) and code is not None:
                out.append({"texts": texts, "label": code, "split": row.get("split")})
        left = len(rows) - (len(out) - before)
        if left:
            notes.append(f"{left} of {len(rows)} rows of {path.name} are incomplete and left out")
    return out


def _tsv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EverfedError(f"{path} cannot be read: {error}") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise EverfedError(f"{path} needs: pip install 'everfed[datasets]'") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise EverfedError(f"{path} is not a whole Parquet file: {error}") from None
    return rows


def _split(rows: list[dict[str, Any]], held: list[dict[str, Any]]) -> tuple[Rows, Rows]:
    """Training and test samples: as the files say, else a fifth is held out."""
    if not held:
        held = [row for row in rows if row["split"] in ("test", "dev", "validation")]
        rest = [row for row in rows if row["split"] not in ("test", "dev", "validation")]
        if any(row["split"] == "test" for row in held):  # dev is then for choosing settings
            held = [row for row in held if row["split"] == "test"]
        if not held or not rest:
            order = rng(0, "held out").permutation(len(rows))
            cut = len(rows) // 5
            held, rest = [rows[k] for k in order[:cut]], [rows[k] for k in order[cut:]]
        rows = rest
    return _columns(rows), _columns(held)


def _columns(rows: list[dict[str, Any]]) -> Rows:
    return [row["texts"] for row in rows], [row["label"] for row in rows]


def _some(rows: Rows, limit: int | None) -> Rows:
    texts, labels = rows
    if limit is None or limit >= len(labels):
        return rows
    chosen = np.sort(rng(0, "limit").permutation(len(labels))[:limit])
    return [texts[k] for k in chosen], [labels[k] for k in chosen]


# tokens --------------------------------------------------------------------------------------
def _learn(texts: Iterable[str], size: int) -> Tokenizer:
    """Word pieces: all characters, and the most frequent words; the pairs' form is BERT's.

    The library's own trainers give another vocabulary in every process, and a run could not be
    resumed.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    clean, cut = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(
        word for text in texts for word, _ in cut.pre_tokenize_str(clean.normalize_str(text))
    )
    letters = sorted({letter for word in words for letter in word})
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    frequent = sorted(words, key=lambda word: (-words[word], word))
    known = dict.fromkeys([*pieces, *frequent[: max(0, size - len(pieces))]])
    vocabulary = {piece: k for k, piece in enumerate(known)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = clean, cut
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return made


def _load(root: Path, name: str) -> Tokenizer:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    path = Path(name).expanduser()
    path = path if path.is_absolute() else root / path
    if path.is_dir():
        inside = [path / "tokenizer.json", path / "vocab.txt"]
        path = next((file for file in inside if file.is_file()), inside[0])
    if not path.is_file():
        raise EverfedError(f"there is no tokenizer {path}")
    try:
        if path.suffix == ".txt":
            made: Tokenizer = BertWordPieceTokenizer(str(path))._tokenizer
        else:
            made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise EverfedError(f"{path} is not a tokenizer: {error}") from None
    if made.token_to_id("[PAD]") != 0:
        raise EverfedError(f"{path}: token 0 should be [PAD]; here 0 means padding")
    return made
