"""The tokenizer that a recipe trains: lossless, deterministic, as large as asked for, and readable by Transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from compress.reading.load import load_data
from foundation.core.target import Target
from foundation.data.config import DataConfig
from foundation.models.checkpoint import load
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from foundation.models.inputs.tokenizer import END_OF_TEXT, PADDING, TrainTokenizer, pieces, resolve_tokenizer, train_bpe
from tests.foundation import tiny_gpt
from tests.problems import raises_problem

SCRIPT = """
import sys
from foundation.models.inputs.tokenizer import train_bpe
print(train_bpe([sys.stdin.read()], 300, pads=False).digest)
"""


@given(st.text(max_size=60))
def test_no_text_is_unknown(text: str) -> None:
    trained = tiny_gpt.data().tokenizer
    assert trained is not None
    ids = trained.tokenizer.encode(text, add_special_tokens=False).ids
    assert trained.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.whole
def test_equal_texts_give_equal_files_in_every_process(tmp_path: Path) -> None:
    trained = train_bpe([tiny_gpt.text(400)], 300, pads=False)
    again = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=tiny_gpt.text(400), capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert again.stdout.strip() == trained.digest
    assert train_bpe([tiny_gpt.text(400, seed=1)], 300, pads=False).digest != trained.digest
    assert train_bpe([tiny_gpt.text(400)], 300, pads=True).digest != trained.digest


def test_the_most_frequent_pair_is_merged_first() -> None:
    trained = train_bpe(["abab\nabab\nabab\nab", "xy"], 259, pads=False)
    assert trained.size == 259
    assert [trained.tokenizer.id_to_token(token) for token in (0, 257, 258)] == [END_OF_TEXT, "ab", "abab"]
    assert trained.ids == {"bos_token_id": 0, "eos_token_id": 0}


def test_more_tokens_than_the_text_has_are_refused() -> None:
    with raises_problem("tokenizer.vocab_size", "5000", "train split", "at most that"):
        train_bpe(["a few words"], 5000, pads=False)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    trained = tiny_gpt.data().tokenizer
    assert trained is not None
    for folder in (tmp_path, tiny_gpt.checkpoint()):
        trained.write(tmp_path)
        loaded = AutoTokenizer.from_pretrained(folder)
        assert (len(loaded), loaded.eos_token, loaded.eos_token_id) == (300, END_OF_TEXT, 0)
        assert loaded("The old king").input_ids == trained.tokenizer.encode("The old king").ids


def test_labelled_texts_get_marks_and_padding(tmp_path: Path) -> None:
    lines = tiny_gpt.text(200).splitlines()
    for split, part in (("train", lines[:160]), ("test", lines[160:])):
        rows = "".join(f"{line}\t{line[::-1]}\t{index % 2}\n" for index, line in enumerate(part))
        (tmp_path / f"{split}.tsv").write_text("text\tother\tlabel\n" + rows)
    columns = {"text": "text", "text_pair": "other"}
    config = DataConfig.model_validate({"path": str(tmp_path), "columns": columns})
    data = load_data(config, "text-classification", None, lambda line: None, TrainTokenizer(train="bpe", vocab_size=280))
    assert data.tokenizer is not None
    assert data.tokenizer.ids == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    sizes = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    out = tmp_path / "checkpoint"
    out.mkdir()
    model = ModelConfig(config=sizes, init="random", task="text-classification")
    import_model(model, data.labels, 0, out, tokenizer=resolve_tokenizer(TrainTokenizer(train="bpe"), data.tokenizer))
    found: object = load(out).config
    assert (found.vocab_size, found.pad_token_id) == (280, 1)  # type: ignore[attr-defined]
    prepared = Checkpoint(out).preprocessor("text-classification", 64, Target(sequence_lengths=(16,)))
    features = prepared.encode([("ab", "c"), ("a", "b")], length=16)
    marks = [prepared.tokenizer.id_to_token(token) for token in features["input_ids"][1]]  # type: ignore[union-attr]
    assert marks[:6] == [END_OF_TEXT, "a", END_OF_TEXT, "b", END_OF_TEXT, PADDING]
    assert features["token_type_ids"][1, :6].tolist() == [0, 0, 0, 1, 1, 0]
    assert features["attention_mask"].sum(axis=1).tolist() == [5 + (features["input_ids"][0] > 1).sum() - 2, 5]


def test_a_tokenizer_that_is_given_is_not_trained() -> None:
    assert resolve_tokenizer("owner/name", None) == "owner/name"
    assert resolve_tokenizer(None, None) is None


@given(st.text(alphabet="ab\n", max_size=200), st.integers(1, 20))
def test_pieces_are_the_text_cut_behind_line_feeds(text: str, size: int) -> None:
    found = list(pieces(text, size))
    assert "".join(found) == text
    assert all(piece.endswith("\n") for piece in found[:-1])
    assert all(len(piece) <= size or "\n" not in piece[: size - 1] for piece in found)
