"""Documents, tokenized and packed: nothing lost, nothing twice, and one clear line for what cannot be packed."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.reading.load import load_data
from compress.reading.sources import Source
from compress.reading.text_blocks import cut, documents, tail
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, content_key
from foundation.labels.next_token import IGNORED
from foundation.measure.engine_process import read_rows, write_rows
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.standalone.preprocess import BadRow
from tests.foundation import tiny_gpt

TRAIN = TrainTokenizer(train="bpe", vocab_size=300)


def load(path: object, length: int = 16, tokenizer: Any = TRAIN, **config: Any) -> tuple[Data, list[str]]:
    log: list[str] = []
    settings = DataConfig.model_validate({"path": str(path), "max_length": length, **config})
    return load_data(settings, "text-generation", None, log.append, tokenizer), log


def ids(split: Split) -> list[int]:
    return [int(token) for row in split.rows for token in row]


@given(st.integers(0, 60), st.integers(2, 9))
def test_blocks_are_the_tokens_in_their_order(count: int, length: int) -> None:
    tokens = np.arange(count, dtype=np.int32)
    kept, whole = cut(tokens, length, whole=False), cut(tokens, length, whole=True)
    lost = 1 if count % length == 1 else 0  # a single token predicts nothing
    assert [int(token) for block in kept for token in block] == list(range(count - lost))
    assert all(len(block) == length for block in kept[:-1])
    assert [len(block) for block in whole] == [length] * (count // length)


@given(st.lists(st.text(alphabet="ab\n", max_size=30), max_size=5), st.floats(0.05, 0.9))
def test_the_tail_is_cut_at_a_line_and_loses_nothing(texts: list[str], share: float) -> None:
    before, after = tail(texts, share)
    assert "".join([*before, *after]) == "".join(texts)
    total = len("".join(texts))
    longest = max([len(line) + 1 for text in texts for line in text.split("\n")], default=0)
    assert abs(len("".join(after)) - share * total) <= longest + 1


def test_rows_that_end_with_a_line_feed_are_lines_of_one_document() -> None:
    assert documents([Source("a", ["one\n", "", "two\n"]), Source("b", ["x", "y\n"])]) == ["one\ntwo\n", "x", "y\n"]


def test_one_file_gives_its_last_tenth_as_the_test_split() -> None:
    for path in (tiny_gpt.data_folder(), tiny_gpt.data_folder() / "input.txt"):
        data, log = load(path)
        text = (tiny_gpt.data_folder() / "input.txt").read_text()
        assert data.tokenizer is not None
        written = data.tokenizer.tokenizer.decode(ids(data.evaluation), skip_special_tokens=False)
        assert text.endswith((written, written[:-1]))
        assert text[: -len(written)].endswith("\n")
        assert len(written) == pytest.approx(0.1 * len(text), rel=0.05)
        assert any("the last 10% of the text" in line for line in log)
        assert data.labels == ()


def test_the_splits_are_apart_and_whole(tmp_path: Path) -> None:
    data, _ = load(tiny_gpt.data_folder())
    assert all(len(row) == 16 for split in (data.train, data.selection) for row in split.rows)
    assert {len(row) for row in data.evaluation.rows[:-1]} == {16}
    assert not set(data.train.keys) & set(data.selection.keys)
    for split in (data.train, data.evaluation):
        for row, labels in zip(split.rows, split.labels.array, strict=True):
            assert labels[: len(row) - 1].tolist() == row[1:].tolist()
            assert (labels[len(row) - 1 :] == IGNORED).all()


def test_named_splits_are_read_and_the_tokenizer_sees_train_alone(tmp_path: Path) -> None:
    for name, seed in (("train", 0), ("valid", 1), ("test", 2)):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt") as file:
            file.write(tiny_gpt.text(200, seed) + ("" if name == "train" else "\N{SNOWMAN}" * 5000))
    (tmp_path / "SOURCE.md").write_text("not read")
    data, log = load(tmp_path)
    assert len(data.selection) > 5
    assert not any("set aside" in line for line in log)
    assert data.tokenizer is not None
    merged = [data.tokenizer.tokenizer.id_to_token(token) for token in range(257, 300)]
    assert not any(token.startswith("\u00e2") for token in merged)  # the first byte of the snowman, as the vocabulary writes it


def test_documents_are_joined_by_the_end_of_text(tmp_path: Path) -> None:
    for seed, split in enumerate(("train", "test")):
        rows = tiny_gpt.text(150, seed).splitlines()
        (tmp_path / f"{split}.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    data, _ = load(tmp_path)
    tokens = ids(data.evaluation)
    assert data.tokenizer is not None
    assert abs(tokens.count(0) - (len(rows) - 1)) <= 1
    assert data.tokenizer.tokenizer.decode(tokens[: tokens.index(0)]) == rows[0]


def test_the_tokenizer_of_a_checkpoint_gives_the_same_blocks() -> None:
    trained, _ = load(tiny_gpt.data_folder())
    given_, _ = load(tiny_gpt.data_folder(), tokenizer=str(tiny_gpt.checkpoint()))
    assert given_.digest == trained.digest
    assert given_.tokenizer is None


def test_hub_rows_that_are_lines_make_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        name: datasets.Dataset.from_dict({"text": ["", *tiny_gpt.text(200, seed).splitlines(keepends=True)]})
        for seed, name in enumerate(("train", "test", "validation"))
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: splits)
    data, log = load("Salesforce/wikitext", subset="wikitext-2-raw-v1")
    assert 0 not in ids(data.evaluation)
    assert any("test: 1 documents" in line for line in log)


def test_blocks_travel_to_engines_and_back(tmp_path: Path) -> None:
    rows = tiny_gpt.data().evaluation.rows
    write_rows(tmp_path / "rows", rows)
    for row, again in zip(rows, read_rows(tmp_path / "rows"), strict=True):
        np.testing.assert_array_equal(row, again)
        assert content_key(row) == content_key(again)
    assert len({content_key(row) for row in rows}) == len(rows)


def test_a_batch_has_no_more_blocks_than_its_logits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, rows = tiny_gpt.prepared(lengths=(8,)), [np.arange(16, dtype=np.int32)] * 7
    assert [len(indices) for indices, _ in prepared.batches(rows, 4)] == [4, 3]
    monkeypatch.setattr("foundation.standalone.preprocess.LOGIT_BYTES", 2 * 4 * 16 * tiny_gpt.VOCABULARY)
    assert [len(indices) for indices, _ in prepared.batches(rows, 4)] == [2, 2, 2, 1]
    monkeypatch.setattr("foundation.standalone.preprocess.LOGIT_BYTES", 1)
    assert [len(indices) for indices, _ in prepared.batches(rows, 4)] == [1] * 7


def test_blocks_are_padded_to_their_bucket_and_nothing_else_is_a_block() -> None:
    prepared = tiny_gpt.prepared(lengths=(8,))
    blocks = [np.arange(1, 6, dtype=np.int32), np.arange(1, 17, dtype=np.int32)]
    assert {tuple(features["input_ids"].shape) for _, features in prepared.batches(blocks, 4)} == {(1, 8), (1, 16)}
    assert list(prepared.encode(blocks[:1])) == ["input_ids"]
    for wrong in ("text", np.arange(17, dtype=np.int32), np.arange(4), np.array([3], np.int32)):
        with pytest.raises(BadRow, match=r"row 0: .* a block of 2 to 16 token ids"):
            prepared.encode([wrong])


GOOD = tiny_gpt.text(60).encode()
# (what is wrong, file, contents, settings, words the one line must hold)
MALFORMED: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("train.txt", b"", {}, "train.txt: empty file"),
    ("train.txt", b" \n\n  \n", {}, "the train split has no text"),
    ("train.txt", b"Too short.\n", {"tokenizer": "given"}, "tokens; at least one block of data.max_length (16) are needed"),
    ("test.txt", b"a", {}, "the test split has 1 tokens; at least 2 are needed"),
    ("test.txt", b"\n", {}, "the test split has no text"),
    ("train.txt", b"fine\nna\xefve\n", {}, "train.txt line 2: byte 0xef at position 3 is not UTF-8"),
    ("train.txt", "text".encode("utf-16"), {}, "train.txt line 1: byte 0xff"),
    ("train.txt.gz", gzip.compress(GOOD)[:-9], {}, "train.txt.gz: cannot be read"),
    ("train.txt.gz", GOOD, {}, "train.txt.gz: cannot be read (Not a gzipped file"),
    ("train.jsonl", b'{"content": "a"}\n', {}, "no column 'text'; available: 'content'"),
    ("train.jsonl", b'{"text": ["a"]}\n', {}, "['a'] given as text"),
    ("train.jsonl", b'{"text": ""}\n', {}, "the train split has no text"),
    ("train.txt", GOOD, {"columns": {"label": "label"}}, "data.columns.label: 'label' given; text-generation reads only text"),
    ("train.txt", GOOD, {"columns": {"text_pair": "b"}}, "data.columns.text_pair: 'b' given; text-generation reads only text"),
    ("train.txt", GOOD, {"files": {"train": {"file": "train.txt", "columns": {"label": 1}}}}, "train.txt: columns.label: 1 given"),
    ("train.txt", GOOD, {"tokenizer": TrainTokenizer(train="bpe", vocab_size=100_000)}, "tokenizer.vocab_size: 100000 given; the train"),
    ("train.txt", GOOD, {"tokenizer": None}, "tokenizer: missing; text models with random weights need one"),
    ("train.txt", GOOD, {"tokenizer": "./nowhere"}, "tokenizer: there is no folder ./nowhere"),
    ("notes.md", GOOD, {"alone": True}, "no train split, only notes.md"),
    ("a.txt", GOOD, {"alone": True, "second": "b.txt"}, "no train split, only a.txt, b.txt"),
]


@pytest.mark.parametrize(("name", "contents", "settings", "message"), MALFORMED, ids=[case[-1][:60] for case in MALFORMED])
def test_malformed_text_is_one_clear_line(tmp_path: Path, name: str, contents: bytes, settings: dict[str, Any], message: str) -> None:
    settings = dict(settings)
    if not settings.pop("alone", False):
        for split in ("train", "test"):
            if not name.startswith(split):
                (tmp_path / f"{split}.txt").write_bytes(GOOD)
    if "second" in settings:
        (tmp_path / settings.pop("second")).write_bytes(GOOD)
    (tmp_path / name).write_bytes(contents)
    if settings.get("tokenizer") == "given":
        settings["tokenizer"] = str(tiny_gpt.checkpoint())
    with pytest.raises(InputError) as caught:
        load(tmp_path, **settings)
    assert len(caught.value.lines) == 1
    assert message in caught.value.lines[0]
    assert "\n" not in caught.value.lines[0]
    assert len(caught.value.lines[0]) < 600
