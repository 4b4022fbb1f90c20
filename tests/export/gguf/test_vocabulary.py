"""Tokenizers as GGUF holds them: names of rules, tokens and their types, special tokens, and what llama.cpp has no rules for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from export.gguf.vocabulary import CONTROL, NORMAL, RULES, UNUSED, USER_DEFINED, vocabulary
from foundation.core.errors import InputError
from tests.export.gguf import gguf_checkpoints as given


def saved(folder: Path, tokenizer: Tokenizer, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    given.save_tokenizer(folder, tokenizer, **settings)
    return folder


@pytest.mark.parametrize("rules", sorted(set(RULES.values())))
def test_rules_have_the_name_of_llama_cpp(rules: str, tmp_path: Path) -> None:
    tokenizer = given.byte_level(rules)
    found = vocabulary(saved(tmp_path, tokenizer, bos_token="<s>", eos_token=given.END), 300, embeds=False)
    assert (found.model, found.rules) == ("gpt2", rules)
    known = tokenizer.get_vocab()
    assert all(found.tokens[place] == token for token, place in known.items())
    assert found.types[:3] == (CONTROL, CONTROL, NORMAL)
    assert found.tokens[len(known) :] == tuple(f"[PAD{place}]" for place in range(len(known), 300))
    assert set(found.types[len(known) :]) == {UNUSED}
    assert found.ids["bos"] == 0
    assert found.ids["eos"] == 1
    assert found.begins is (rules == "llama-bpe")
    assert not found.ends
    assert found.merges[0].count(" ") == 1
    assert found.remarks == ()


def test_nfc_is_written_with_a_remark_and_added_tokens_have_types(tmp_path: Path) -> None:
    tokenizer = given.byte_level("qwen2")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    found = vocabulary(saved(tmp_path, tokenizer, eos_token=given.END), 300, embeds=False)
    size = tokenizer.get_vocab_size()
    assert found.types[size - 2 : size] == (USER_DEFINED, CONTROL)
    assert "NFC" in found.remarks[0]
    assert "<|im_end|>" in found.remarks[1]  # at which llama.cpp ends an answer because of its name


def test_word_pieces_that_go_on_lose_their_mark_and_words_get_one() -> None:
    folder = given.embedder()
    found, tokenizer = vocabulary(folder, 100, embeds=True), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (found.model, found.ids["bos"], found.ids["sep"], found.ids["unk"]) == ("bert", 2, 3, 1)
    for token, place in tokenizer.get_vocab().items():
        expected = token if place < 5 else token[2:] if token.startswith("##") else f"\u2581{token}"
        assert found.tokens[place] == expected
    assert any(token.startswith("##") for token in tokenizer.get_vocab())
    assert len(set(found.tokens)) == 100


def _cased() -> Tokenizer:
    made = given.word_piece()
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    return made


def _accents() -> Tokenizer:
    made = given.word_piece()
    made.normalizer = normalizers.BertNormalizer(strip_accents=False)
    return made


def _bare() -> Tokenizer:
    made = given.word_piece()
    made.post_processor = processors.ByteLevel()
    return made


def _prefix_space() -> Tokenizer:
    made = given.byte_level("gpt-2")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def _lowercase() -> Tokenizer:
    made = given.byte_level("gpt-2")
    made.normalizer = normalizers.Lowercase()
    return made


def _ignored_merges() -> Tokenizer:
    made = given.byte_level("smollm")
    made.model.ignore_merges = True
    return made


def _two_before() -> Tokenizer:
    made = given.byte_level("smollm")
    made.post_processor = processors.TemplateProcessing(single="<s> <s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    return made


def _byte_fallback() -> Tokenizer:
    return Tokenizer(models.BPE(vocab={"a": 0, "<0x0A>": 1}, merges=[], byte_fallback=True))


def _unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("a", -1.0)], unk_id=0))


@pytest.mark.parametrize(
    ("made", "part"),
    [
        (_cased, "normalizer"),
        (_accents, "normalizer"),
        (_bare, "[CLS]"),
        (_prefix_space, "pre-tokenizer"),
        (_lowercase, "Lowercase"),
        (_ignored_merges, "pre-tokenizer"),
        (_two_before, "2 tokens before"),
        (_byte_fallback, "SentencePiece"),
        (_unigram, "Unigram"),
    ],
)
def test_other_rules_are_refused_in_one_line(made: Callable[[], Tokenizer], part: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, made())
    with pytest.raises(InputError) as caught:
        vocabulary(folder, 300, embeds=False)
    (problem,) = caught.value.problems
    assert part in problem.given
    assert "\n" not in str(problem)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows"):
        vocabulary(saved(tmp_path, given.byte_level("smollm")), 100, embeds=False)
