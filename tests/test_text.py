"""Sentences: GLUE's files read into token ids, and a Transformers classifier in a federation."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import everfed as ef
from everfed import config as configs
from everfed.errors import EverfedError

pytest.importorskip("transformers", reason="everfed[text] is not installed")
pytest.importorskip("pyarrow", reason="everfed[datasets] is not installed")


@pytest.fixture(scope="session")
def sentences(data_dir):
    """Real sentences of SST-2 (training, test) and question-sentence pairs of QNLI."""
    from pyarrow import compute, parquet

    sst2 = parquet.read_table(data_dir / "sst2.parquet")
    pick = {s: sst2.filter(compute.equal(sst2["split"], s)) for s in ("train", "test")}
    return {
        "train": pick["train"].slice(0, 1500).to_pylist(),
        "test": pick["test"].slice(0, 300).to_pylist(),
        "qnli": parquet.read_table(data_dir / "qnli_dev.parquet").slice(0, 240).to_pylist(),
    }


@pytest.fixture(scope="session")
def glue_tsv(sentences, tmp_path_factory):
    """The three tasks as in GLUE's archives; QQP's columns hold QNLI's texts."""
    root = tmp_path_factory.mktemp("glue")
    tables = {
        "SST-2": (["sentence\tlabel"], "{sentence}\t{label}", sentences["train"], sentences["test"]),
        "QNLI": (["index\tquestion\tsentence\tlabel"], "{k}\t{question}\t{sentence}\t{label}",
                 sentences["qnli"][:180], sentences["qnli"][180:]),
        "QQP": (["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"],
                "{k}\t1\t2\t{question}\t{sentence}\t{same}",
                sentences["qnli"][:180], sentences["qnli"][180:]),
    }  # fmt: skip
    for name, (head, form, train, dev) in tables.items():
        (root / name).mkdir()
        for part, rows in (("train", train), ("dev", dev)):
            lines = [
                form.format(k=k, same=int(row["label"] == "entailment"), **row)
                for k, row in enumerate(rows)
            ]
            (root / name / f"{part}.tsv").write_text("\n".join(head + lines) + "\n")
    return root


def words(data, sample, folder):
    """The letters of a sample again, from the tokenizer that reads it."""
    from everfed.data.glue import _learn

    texts = [row.split("\t")[0] for row in (folder / "SST-2/train.tsv").read_text().splitlines()]
    made = _learn(texts[1:], 8000)
    pieces = [made.id_to_token(k).removeprefix("##") for k in data.x[sample].tolist() if k > 4]
    return "".join(pieces)


def test_glue_tsv_files(glue_tsv, sentences):
    data = ef.data.glue(["sst2", "qqp", "qnli"], glue_tsv, length=48)
    assert data.tasks == ("sst2", "qqp", "qnli")
    assert np.bincount(data.task[data.train]).tolist() == [1500, 180, 180]
    assert np.bincount(data.task[data.test]).tolist() == [300, 60, 60]
    assert data.y[data.train][:1500].tolist() == [row["label"] for row in sentences["train"]]
    not_entailed = [int(row["label"] == "not_entailment") for row in sentences["qnli"][:180]]
    assert data.y[data.train][-180:].tolist() == not_entailed
    assert data.y[data.train][1500:1680].tolist() == [1 - label for label in not_entailed]
    assert data.x[data.train][:, 0].unique().tolist() == [2]  # [CLS]
    ends = (data.x == 3).sum(1)  # [SEP]: one in SST-2, two in pairs that were not cut
    assert ends[data.task == 0].unique().tolist() == [1]
    assert ends[data.task == 1].max() == 2


def test_words_survive(glue_tsv, sentences):
    data = ef.data.glue(["sst2"], glue_tsv, length=64)
    for k in (0, 7, 99):
        said = sentences["train"][k]["sentence"]
        assert words(data, k, glue_tsv) == said.replace(" ", "")


def test_parquet_files_give_the_same_as_tsv_files(glue_tsv, sentences, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = {"train": sentences["train"], "validation": sentences["test"]}
    (tmp_path / "glue/sst2").mkdir(parents=True)
    for part, own in rows.items():
        table = pa.table({key: [row[key] for row in own] for key in ("sentence", "label")})
        parquet.write_table(table, tmp_path / f"glue/sst2/{part}-00000-of-00001.parquet")
    a, b = (ef.data.glue(["sst2"], folder) for folder in (glue_tsv, tmp_path))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)


def test_ids_are_the_same_in_every_process(glue_tsv):
    """Else no run could be resumed."""
    say = f"import everfed as ef; print(ef.data.glue(['sst2'], {str(glue_tsv)!r}).fingerprint)"
    told = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == ef.data.glue(["sst2"], glue_tsv).fingerprint


def test_incomplete_lines_are_left_out_and_counted(glue_tsv, tmp_path):
    (tmp_path / "QNLI").mkdir()
    for part in ("train", "dev"):
        text = (glue_tsv / f"QNLI/{part}.tsv").read_text()
        (tmp_path / f"QNLI/{part}.tsv").write_text(text + "999\tonly a question\n")
    data = ef.data.glue(["qnli"], tmp_path)
    assert len(data.train) == 180
    assert data.notes[0] == "1 of 181 rows of train.tsv are incomplete and left out"


def test_what_is_wrong_with_texts_is_told(glue_tsv, tmp_path):
    with pytest.raises(EverfedError, match=r"qqp is not there: put GLUE's train\.tsv"):
        ef.data.glue(["qqp"], tmp_path)
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/train.tsv").write_text("text\tlabel\nfine\t1\n")
    with pytest.raises(EverfedError, match="should have the columns sentence, label; it has text"):
        ef.data.glue(["sst2"], tmp_path)
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2/train-0.parquet").write_bytes(b"PAR1")
    (tmp_path / "SST-2/train.tsv").unlink()
    with pytest.raises(EverfedError, match="not a whole Parquet file"):
        ef.data.glue(["sst2"], tmp_path)
    with pytest.raises(EverfedError, match="there is no tokenizer"):
        ef.data.glue(["sst2"], glue_tsv, tokenizer="none")


# the model ----------------------------------------------------------------------------------------
def small(data, **more):
    sizes = {"width": 32, "layers": 1, "length": data.x.shape[1]} | more
    return ef.models.transformer(int(data.x.max()) + 1, 2, **sizes)


def test_padding_does_not_count(glue_tsv):
    short, long = (ef.data.glue(["sst2"], glue_tsv, length=n) for n in (40, 60))
    rows = (short.x[:, -1] == 0).nonzero()[:5, 0]  # sentences that are whole in both
    torch.manual_seed(0)
    model = small(long)().eval()
    with torch.no_grad():
        torch.testing.assert_close(model(short.x[rows]), model(long.x[rows]))


def test_a_federation_learns_sentiment_then_inference_and_resumes_to_the_last_bit(
    glue_tsv, tmp_path
):
    data = ef.data.glue(["sst2", "qnli"], glue_tsv, length=24, vocabulary=2000)
    stream = ef.streams.domains(data, clients=3, alpha=1.0, rounds=3)
    local = ef.Local(lr=3e-3, optimizer="adamw", epochs=2, weight_decay=0.01)
    options = {"local": local, "sample": 2, "workers": 1, "checkpoint_seconds": 0}
    method = ef.methods.special(0.05)
    whole = ef.run(method, stream, small(data), **options)
    sst2 = data.y[data.test][data.task[data.test] == 0].float().mean()
    assert whole.matrix[0, 0] > max(sst2, 1 - sst2) + 0.05  # more than the frequent class

    class Crash(Exception):
        pass

    def crash(progress):
        if progress.round == 4:
            raise Crash

    with pytest.raises(Crash):
        ef.run(method, stream, small(data), folder=tmp_path / "run", on_round=crash, **options)
    again = ef.run(method, stream, small(data), folder=tmp_path / "run", resume=True, **options)
    assert torch.equal(again.vector, whole.vector)


def test_weights_and_vocabulary_from_the_users_folder(glue_tsv, tmp_path, monkeypatch):
    """As DistilBERT's: a folder with config.json, weights and vocab.txt."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "film", "good", "##s"]
    sizes = DistilBertConfig(vocab_size=len(pieces), dim=8, n_layers=1, n_heads=2, hidden_dim=16)
    home = tmp_path / "mine"
    DistilBertForSequenceClassification(sizes).save_pretrained(home)
    (home / "vocab.txt").write_text("\n".join(pieces))
    for name in ("train", "dev"):
        (tmp_path / "SST-2").mkdir(exist_ok=True)
        text = "sentence\tlabel\n" + "a good film\t1\nthe films\t0\n" * 8
        (tmp_path / f"SST-2/{name}.tsv").write_text(text)
    config = configs.parse({
        "data_dir": str(tmp_path),
        "data": {"name": "glue", "tasks": ["sst2"], "tokenizer": "mine", "length": 8},
        "model": {"name": "transformer", "path": "mine"},
        "stream": {"name": "static", "clients": 2, "rounds": 1},
    })  # fmt: skip
    made = configs.experiment(config)
    assert made.stream.data.x[:2].tolist() == [[2, 5, 8, 7, 3, 0, 0, 0], [2, 6, 7, 9, 3, 0, 0, 0]]
    kept = DistilBertForSequenceClassification.from_pretrained(home)
    ours = made.model()
    torch.testing.assert_close(ours.inner.distilbert.state_dict(), kept.distilbert.state_dict())
    assert made.go(workers=1).acc >= 0
    with pytest.raises(EverfedError, match="holds no model"):
        ef.models.transformer(10, path=tmp_path / "none")
    with pytest.raises(EverfedError, match="needs rows of token ids"):
        configs.experiment(configs.parse({"model": {"name": "transformer"}}))
