"""Text of a language model: ids and text are those of Transformers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from foundation.artifacts.artifact import write_json
from foundation.measure.probes import PROBES
from foundation.models.inputs.language import of_transformers
from foundation.standalone.language_text import CLEANED_LETTERS, SETTINGS, LanguageText, TextSettings

TEXTS = ["in 1999 the    12 men   and 5     5 x  10 women ran", "    return  1\n        if x ==  2:\n", "Gr\u00fc\u00dfe , isn't it ?"]
BYTES, PIECES = "bytes", "pieces"


def digits_apart() -> Tokenizer:
    """A byte-level tokenizer that takes digits one by one."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(name, special=True) for name in ("<s>", "</s>")]
    made.train_from_iterator(
        TEXTS * 20, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made


def word_pieces() -> Tokenizer:
    """A tokenizer of lower-case words, which decodes with spaces between them."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    special = [AddedToken(name, special=True) for name in ("[UNK]", "</s>")]
    made.train_from_iterator(TEXTS * 20, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))])
    return made


KINDS = {BYTES: digits_apart(), PIECES: word_pieces()}


def known(kind: str, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[kind], eos_token="</s>", pad_token="</s>", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_calls_are_text_only_where_calls_are_read(kind: str) -> None:
    made = Tokenizer.from_str(KINDS[kind].to_str())
    made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<other>"])
    text = LanguageText(made, TextSettings())
    ids = [*text.encode("men ran", add_special_tokens=False), *map(made.token_to_id, ("<other>", "[TOOL_CALLS]", "[ARGS]", "</s>"))]
    assert "[" not in text.decode(ids)
    assert text.decode_calls(ids).replace(" ", "") == text.decode(ids).replace(" ", "") + "[TOOL_CALLS][ARGS]"
    plain = text.encode("in 1999 the men", add_special_tokens=False)
    assert text.decode_calls(plain) == text.decode(plain)


def written(folder: Path, tokenizer: PreTrainedTokenizerFast) -> LanguageText:
    """The reader of a folder that Transformers wrote; padding and truncation are switched on in it."""
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(folder)
    write_json(folder / SETTINGS, asdict(of_transformers(tokenizer).settings))
    return LanguageText.load(folder)


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_transformers(kind: str, clean_up: bool, tmp_path: Path) -> None:
    tokenizer = known(kind, clean_up_tokenization_spaces=clean_up)
    text = written(tmp_path, tokenizer)
    tokenizer = known(kind, clean_up_tokenization_spaces=clean_up)
    for probe in (*PROBES, *TEXTS, "", "</s> <s>", "Hello , world ! He 's well ."):
        for special in (False, True):
            ids = tokenizer(probe, add_special_tokens=special)["input_ids"]
            assert text.encode(probe, add_special_tokens=special) == ids
            assert text.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_ids_of_a_conversation_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = known(BYTES, chat_template="<s>{% for m in messages %}{{ m.role }}:  {{ m.content }}{{ eos_token }}{% endfor %}A:")
    text = written(tmp_path, tokenizer)
    messages = [{"role": "user", "content": "the    12 men"}]
    assert (
        text.chat(messages)
        == known(BYTES, chat_template=tokenizer.chat_template).apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )


def test_a_folder_without_settings_has_no_chat_template(tmp_path: Path) -> None:
    KINDS[BYTES].save(str(tmp_path / "tokenizer.json"))
    assert not LanguageText.load(tmp_path).has_template


@pytest.mark.parametrize(
    ("kind", "clean_up", "decoder", "letters"),
    [
        (BYTES, False, None, 0),
        (BYTES, True, None, 0),  # Transformers does not clean up what such a tokenizer writes
        (PIECES, False, None, CLEANED_LETTERS),
        (PIECES, True, None, CLEANED_LETTERS),
        (BYTES, False, decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()]), 0),
        (BYTES, False, decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]), CLEANED_LETTERS),
        (BYTES, False, decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)]), 0),
        (BYTES, False, decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), CLEANED_LETTERS),
    ],
)
def test_letters_are_held_back_that_later_tokens_may_change(kind: str, clean_up: bool, decoder: Any, letters: int) -> None:
    text = of_transformers(known(kind, clean_up_tokenization_spaces=clean_up))
    text.tokenizer.decoder = decoder or text.tokenizer.decoder
    assert text.held_letters == letters


@given(st.text(max_size=40))
def test_every_text_gets_the_ids_of_transformers(text: str) -> None:
    assert of_transformers(known(BYTES)).encode(text) == known(BYTES)(text)["input_ids"]
