"""A shortened text has exactly the ids of the whole one: held against the tokenizer itself, for the tokenizers of the encoders we know."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from foundation.standalone import long_text
from foundation.standalone.long_text import EXPRESSIONS, IDEOGRAPHS, WORD, LongTexts
from foundation.standalone.preprocess import Preprocessor
from tests.seldom import seldom

CORPUS = [
    "The film is a fine one, and nobody's doubts aren't heard: it isn't the 3,141st.",
    "Der Film war schön; naïve façades, Ελλάδα ΣΊΣΥΦΟΣ και όσο, фильм был очень хорош, שלום עולם, 한국어 문장.",
    "中文电影很好看 and mixed 日本語テキスト with x86_64 and e-mail@example.org!",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
QWEN, LLAMA = sorted(EXPRESSIONS, key=len)


def wordpiece() -> Tokenizer:
    """BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))


def cased() -> Tokenizer:
    """Cased BERT."""
    tokenizer = wordpiece()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    return tokenizer


def bytes_bpe() -> Tokenizer:
    """RoBERTa and GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet))


def modern() -> Tokenizer:
    """ModernBERT: added tokens that are runs of spaces are looked for in the text, so nothing is cut."""
    tokenizer = bytes_bpe()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("  ", normalized=True), AddedToken("    ", normalized=True)])
    return tokenizer


def split_bpe(expression: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet))


def qwen() -> Tokenizer:
    """Qwen 2 and 3."""
    return split_bpe(QWEN)


def llama() -> Tokenizer:
    """Llama 3."""
    return split_bpe(LLAMA)


def unigram() -> Tokenizer:
    """XLM-R: SentencePiece's words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return trained(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="[UNK]"))


def albert() -> Tokenizer:
    """ALBERT and DeBERTa: more normalizers, and spaces that are merged."""
    tokenizer = Tokenizer(models.Unigram())
    steps = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip()]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return trained(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="[UNK]"))


def sentencepiece_bpe() -> Tokenizer:
    """SentencePiece's BPE, with a token that takes the space before it and one that takes the space behind."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))
    tokenizer.add_tokens([AddedToken("film", lstrip=True, rstrip=True, single_word=True)])
    return tokenizer


def whole_piece() -> Tokenizer:
    """BPE over the whole text, as Llama 2: not known to keep to words."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL))


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


CUT = {make.__name__: make for make in (wordpiece, cased, bytes_bpe, qwen, llama, unigram, albert, sentencepiece_bpe)}
WHOLE = {make.__name__: make for make in (modern, whole_piece)}
MADE: dict[str, Tokenizer] = {}


def prepared(name: str, max_length: int, prompt: str = "") -> tuple[Preprocessor, LongTexts]:
    """Returns a preprocessor, and what shortens texts for it."""
    if name not in MADE:
        MADE[name] = {**CUT, **WHOLE}[name]()
    tokenizer = Tokenizer.from_str(MADE[name].to_str())
    names = ("input_ids", "attention_mask", "token_type_ids")
    made = Preprocessor("text", names, ("x",), "text-classification", max_length, (max_length,), prompt=prompt, tokenizer=tokenizer)
    return made, LongTexts(tokenizer, max_length, prompt)


def same(preprocessor: Preprocessor, row: Any, shortened: Any) -> None:
    [whole], [short] = preprocessor.tokenized([row]), preprocessor.tokenized([shortened])
    assert whole.tolist() == short.tolist()


def letters(characters: str) -> st.SearchStrategy[str]:
    return st.text(characters, min_size=1, max_size=12)


WORDS = st.one_of(
    letters("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789"),
    letters("äöüßéèñçŉİıſ"),
    letters("ΣσςΆϊΰάλφ"),
    letters("фильмйёЙ"),
    letters("한국어문장"),
    letters("中文电影好看"),
    letters("שלוםعربيफ़िल्मक"),
    letters("\u0301\u0308\u200d\u0d4e\u0e33\uff9e\u3164\u00a0\u2003\u00a8\u1160\u0345"),
    letters("'\".,;:!?-()[]@#`"),
    st.sampled_from(["film", "[MASK]", "[SEP]", "don't", "we'll", "``", "x" * 120, "\u2581", "\u2581a"]),
)
GAPS = st.sampled_from([" ", " ", " ", " ", "", "  ", "\n", "\t ", " \r\n", "\u00a0", "\u3000", "\u200b", ". ", " -"])


def texts(most_words: int) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(WORDS, GAPS), min_size=1, max_size=most_words).map(lambda parts: "".join(word + gap for word, gap in parts))


LONG, SHORTER = texts(60), texts(15)
"""The tokenizer keeps every pair of parts that it cuts off, so whole pairs take long."""


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@given(text=LONG, repeated=st.integers(1, 8), max_length=st.integers(4, 12), prompt=st.sampled_from(["", "query: ", "x"]))
def test_a_text_has_the_ids_of_the_whole(name: str, text: str, repeated: int, max_length: int, prompt: str) -> None:
    preprocessor, long_texts = prepared(name, max_length, prompt)
    same(preprocessor, text * repeated, long_texts.shortened(text * repeated))


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", seldom(CUT, {"qwen", "llama", "cased"}))
@given(pair=st.tuples(SHORTER, SHORTER), repeated=st.tuples(st.integers(1, 2), st.integers(1, 2)), max_length=st.integers(4, 9))
def test_a_pair_has_the_ids_of_the_whole(name: str, pair: tuple[str, str], repeated: tuple[int, int], max_length: int) -> None:
    preprocessor, long_texts = prepared(name, max_length)
    row = (pair[0] * repeated[0], pair[1] * repeated[1])
    assume(max(map(len, row)) < 512)  # longer ones may be refused
    same(preprocessor, row, long_texts.shortened(row))


@pytest.mark.parametrize("name", list(CUT))
def test_a_long_text_is_shortened(name: str) -> None:
    preprocessor, long_texts = prepared(name, 16)
    text = " ".join(CORPUS * 50)
    short = long_texts.shortened(text)
    assert len(short) <= 8 * 16
    assert text.startswith(str(short))
    same(preprocessor, text, short)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", list(CUT))
@pytest.mark.parametrize("max_length", [16, 17])
@pytest.mark.parametrize(("first", "second"), [(3000, 10), (10, 3000), (800, 700), (700, 800), (3000, 0)])
def test_the_longer_text_of_a_pair_is_shortened(name: str, max_length: int, first: int, second: int) -> None:
    preprocessor, long_texts = prepared(name, max_length)
    words = " ".join(CORPUS * 50)
    row = (words[:first], words[:second])
    short = long_texts.shortened(row)
    same(preprocessor, row, short)
    if min(first, second) <= 10:
        assert sum(map(len, short)) <= 8 * max_length + 10
    assert max(map(len, short)) <= 64 * max_length  # 8 characters for each token of the other text, if those are single characters


@pytest.mark.first(1)
@pytest.mark.parametrize("first", ["x ", "abc "])
@pytest.mark.parametrize("second", ["x ", "abc "])
@pytest.mark.parametrize("times", [(60, 60), (60, 61), (61, 60), (150, 100), (100, 150)])
@pytest.mark.parametrize("max_length", [9, 10])
def test_the_text_with_more_tokens_gets_the_odd_one(first: str, second: str, times: tuple[int, int], max_length: int) -> None:
    """Though it may be the one with fewer characters."""
    preprocessor, long_texts = prepared("wordpiece", max_length)
    row = (first * times[0] + "abc", second * times[1] + "abc")
    short = long_texts.shortened(row)
    same(preprocessor, row, short)
    assert max(map(len, short)) <= 64 * max_length


def test_the_text_with_more_tokens_keeps_more_where_both_are_cut_alike() -> None:
    """Words of 121 characters are one token each: both heads would end at the same one."""
    preprocessor, long_texts = prepared("wordpiece", 10)
    row = (f"{'x' * 120} " * 60, f"{'x' * 120} " * 40)
    short = long_texts.shortened(row)
    same(preprocessor, row, short)
    assert short[1].count(" ") < short[0].count(" ") < 60
    same(preprocessor, row[::-1], long_texts.shortened(row[::-1]))


def test_ideographs_are_cut_apart_where_the_tokenizer_does() -> None:
    preprocessor, long_texts = prepared("wordpiece", 16)
    text = "中文电影好看" * 500
    assert len(long_texts.shortened(text)) <= 8 * 16
    same(preprocessor, text, long_texts.shortened(text))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "text"), [("whole_piece", "a fine film "), ("modern", "a fine film "), ("wordpiece", "x."), ("unigram", "中文")]
)
def test_what_cannot_be_shortened_is_refused_above_a_length(name: str, text: str) -> None:
    _, long_texts = prepared(name, 16)
    fits = (text * long_texts.most)[: long_texts.most]
    assert long_texts.shortened(fits) == fits
    with pytest.raises(ValueError, match=r"65537 characters, .* between two words: .*; 65536 are allowed"):
        long_texts.shortened(fits + text[:1])
    with pytest.raises(ValueError, match=r"65537 and 65538 characters; .* more than 65536"):
        long_texts.shortened((fits + text[:1], fits + text[:2] if len(text) > 1 else fits + text * 2))
    with pytest.raises(ValueError, match=r"60000 and 60000 characters, .* between two words"):
        long_texts.shortened((fits[:60_000], fits[:60_000]))
    pair = (fits[:500], fits[:500])
    assert long_texts.shortened(pair) == pair


def test_a_model_that_reads_more_takes_longer_texts_whole() -> None:
    _, long_texts = prepared("whole_piece", 8192)
    assert long_texts.most == 8192 * 32


def test_ten_megabytes_cost_no_more_than_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the characters that are tokenized."""
    _, long_texts = prepared("wordpiece", 128)
    counted = []
    count: Callable[[str], int] = long_texts._count
    monkeypatch.setattr(long_texts, "_count", lambda text: counted.append(len(text)) or count(text))
    assert len(long_texts.shortened("a fine film " * 833_333)) <= 128 * 8
    assert len(long_texts.shortened(("a fine film " * 833_333, "a fine film"))[0]) <= 128 * 8
    assert sum(counted) < 5 * 128 * 8


@pytest.mark.whole
def test_no_normalizer_turns_the_letters_into_spaces_or_marks() -> None:
    wanted = long_text.re.compile(f"[{WORD}{IDEOGRAPHS}]")
    found = [character for character in map(chr, range(0x110000)) if wanted.match(character)]
    assert len(found) > 30_000
    for character in found:
        if unicodedata.category(character) == "Cn":
            continue
        assert unicodedata.category(character)[0] in "LN", hex(ord(character))
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            changed = unicodedata.normalize(form, character)
            assert not any(part.isspace() or part == "\u2581" for part in changed), hex(ord(character))
            assert unicodedata.normalize(form, f"{character} a") == f"{changed} a"
