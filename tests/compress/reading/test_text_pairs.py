"""Pairs of texts, tokenized: sources and targets stay together, ends are marked, and what cannot be a pair is one clear line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compress.reading.load import load_data
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, content_key
from foundation.labels.next_token import IGNORED, answers_of
from foundation.measure.engine_process import read_rows, write_rows
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.standalone.preprocess import BadRow, Preprocessor, TokenPair
from foundation.training.rows import Rows
from tests.export.generation.tiny_encoder_decoders import checkpoint, preprocessor

TRAIN = TrainTokenizer(train="bpe", vocab_size=280)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
END = 0


def pairs(count: int, start: int = 0) -> list[tuple[str, str]]:
    return [(f"{WORDS[row % 10]} {row}", f"{row} {WORDS[row % 7]} {WORDS[row % 3]}") for row in range(start, start + count)]


def write(folder: Path, name: str, rows: list[tuple[str, str]]) -> None:
    lines = (json.dumps({"en": source, "de": target}) for source, target in rows)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(path: Path, length: int = 24, tokenizer: Any = TRAIN, **config: Any) -> tuple[Data, list[str]]:
    log: list[str] = []
    settings = DataConfig.model_validate({"path": str(path), "max_length": length, "columns": {"source": "en", "target": "de"}, **config})
    return load_data(settings, "text-to-text", None, log.append, tokenizer), log


def texts(data: Data, rows: list[Any]) -> list[tuple[str, str]]:
    assert data.tokenizer is not None
    tokenizer = data.tokenizer.tokenizer
    return [(tokenizer.decode(row.source.tolist()), tokenizer.decode(row.target.tolist())) for row in rows]


def test_every_pair_keeps_its_texts_and_ends(tmp_path: Path) -> None:
    write(tmp_path, "train", pairs(300))
    write(tmp_path, "test", pairs(20, 300))
    data, log = load(tmp_path)
    assert sorted(texts(data, [*data.train.rows, *data.selection.rows])) == sorted(pairs(300))
    assert texts(data, data.evaluation.rows) == pairs(20, 300)
    for row, labels in zip(data.evaluation.rows, data.evaluation.labels.array, strict=True):
        assert isinstance(row, TokenPair)
        assert row.source[-1] == row.target[-1] == END
        assert END not in row.target[:-1]
        assert labels.tolist() == [*row.target.tolist(), *[IGNORED] * (23 - len(row.target))]
    assert any("20 pairs" in line for line in log)


def test_line_aligned_files_give_the_same_as_a_table(tmp_path: Path) -> None:
    table, aligned = tmp_path / "table", tmp_path / "aligned"
    table.mkdir(), aligned.mkdir()
    for name, rows in (("train", pairs(120)), ("val", pairs(20, 120)), ("test", pairs(10, 140))):
        write(table, name, rows)
        (aligned / f"{name}.en").write_text("".join(f"{source}\n" for source, _ in rows), encoding="utf-8")
        with gzip.open(aligned / f"{name}.de.gz", "wt", encoding="utf-8", newline="") as file:
            file.write("".join(f"{target}\r\n" for _, target in rows))
    (first, _), (second, _) = load(table), load(aligned)
    assert first.digest == second.digest
    named, _ = load(aligned, files={"train": "train", "test": "test"})
    assert named.evaluation.digest == first.evaluation.digest


def test_long_texts_are_cut_and_still_end(tmp_path: Path) -> None:
    write(tmp_path, "train", [(" ".join(WORDS * 9), " ".join(WORDS * 9)), *pairs(100)])
    write(tmp_path, "test", [(" ".join(WORDS * 9), " ".join(WORDS * 9))])
    data, _ = load(tmp_path, length=10)
    (row,) = data.evaluation.rows
    assert isinstance(row, TokenPair)
    assert (len(row.source), len(row.target), len(row)) == (10, 9, 10)
    assert row.source[-1] == row.target[-1] == END


def test_the_tokenizer_of_a_checkpoint_gives_what_transformers_gives(tmp_path: Path) -> None:
    write(tmp_path, "train", [("abc", "cab"), ("ab", "ba"), ("aa", "bb"), ("ac", "ca"), ("bc", "cb"), ("cc", "aabb")])
    write(tmp_path, "test", [("abcabc", "c")])
    with pytest.raises(InputError, match="has no end token"):
        load(tmp_path, tokenizer=str(checkpoint("t5")))
    settings = json.loads((checkpoint("t5") / "tokenizer_config.json").read_text())
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "c"}))
    (folder / "tokenizer.json").write_bytes((checkpoint("t5") / "tokenizer.json").read_bytes())
    data, _ = load(tmp_path, tokenizer=str(folder))
    (row,) = data.evaluation.rows
    assert isinstance(row, TokenPair)
    assert row.source.tolist() == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("abcabc").ids == [0, 1, 2, 0, 1, 2]
    assert row.target.tolist() == [2]


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({"train.jsonl": '{"en": "a"}\n'}, {}, "no column 'de'"),
        ({"train.jsonl": '{"en": " ", "de": "a"}\n'}, {}, "train pair 1 has an empty source"),
        ({"train.en": "a\nb\n", "train.de": "a\n"}, {}, "train.de: 1 lines, fewer than train.en; align them"),
        ({"train.en": "a\n"}, {}, "no train split"),
        ({"train.jsonl": '{"en": "a", "de": "a"}\n'}, {"columns": {"text": "en"}}, "reads only source and target"),
    ],
)
def test_what_cannot_be_pairs_is_one_clear_line(tmp_path: Path, files: dict[str, str], config: dict[str, Any], message: str) -> None:
    for name, contents in files.items():
        (tmp_path / name).write_text(contents, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load(tmp_path, **config)
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1


ROWS = [
    TokenPair(np.array(source, np.int32), np.array(target, np.int32)) for source, target in (([5, 6, 7, 2], [9, 2]), ([8], [3, 4, 5, 2]))
]


def test_a_batch_has_the_source_with_its_mask_and_the_target_behind_the_start() -> None:
    found = preprocessor().encode(ROWS, length=0)
    assert found["input_ids"].tolist() == [[5, 6, 7, 2, 0], [8, 0, 0, 0, 0]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    assert found["decoder_input_ids"].tolist() == [[0, 9, 2, 0, 0], [0, 3, 4, 5, 2]]
    trained = Rows.prepare(ROWS, preprocessor()).batch(np.array([1, 0]))
    assert trained["decoder_input_ids"][:, :5].tolist() == [[0, 3, 4, 5, 2], [0, 9, 2, 0, 0]]
    assert trained["attention_mask"].sum(dim=1).tolist() == [1, 4]
    assert trained["input_ids"][1, :5].tolist() == [5, 6, 7, 2, 0]


def test_the_answers_are_those_to_the_tokens_of_the_target() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 16, 20)).astype(np.float32)
    found = answers_of(ROWS, logits, 31)
    for row, pair, logits_LV in zip(found, ROWS, logits, strict=True):
        for at, token in enumerate(pair.target):
            chances = np.exp(logits_LV[at].astype(np.float64))
            assert row[at, 0] == pytest.approx(-np.log(chances[token] / chances.sum()), rel=1e-5)
            assert row[at, 1] == logits_LV[at].argmax()
        assert (row[len(pair.target) :] == [0, -1]).all()


def test_pairs_travel_and_differ_by_where_the_target_starts(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows", ROWS)
    for row, back in zip(ROWS, read_rows(tmp_path / "rows"), strict=True):
        assert isinstance(back, TokenPair)
        assert (back.source.tolist(), back.target.tolist()) == (row.source.tolist(), row.target.tolist())
    ids = np.arange(6, dtype=np.int32)
    assert len({content_key(TokenPair(ids[:cut], ids[cut:])) for cut in range(1, 6)} | {content_key(ids)}) == 6


@pytest.mark.parametrize(
    "row", ["text", np.arange(3, dtype=np.int32), TokenPair(np.arange(3, dtype=np.int32), np.arange(32, dtype=np.int32))]
)
def test_nothing_else_is_a_pair(row: Any) -> None:
    with pytest.raises(BadRow, match=r"row 1: .* 1 to 32 and 1 to 31 token ids, int32"):
        preprocessor().encode([ROWS[0], row])


def test_the_start_token_is_kept_with_the_model(tmp_path: Path) -> None:
    preprocessor().save(tmp_path)
    assert (
        Preprocessor.load(tmp_path).encode(ROWS)["decoder_input_ids"].tolist() == preprocessor().encode(ROWS)["decoder_input_ids"].tolist()
    )
