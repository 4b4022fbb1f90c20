"""Answers of a JSON schema or a regular expression: masks against brute force, whole answers against `json` and `jsonschema`."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foundation.standalone.decoding_rules import Rules, Text
from foundation.standalone.language_text import LanguageText, TextSettings
from triton_repo.front.apis.answer_format import one_of
from triton_repo.generation.served import structures
from triton_repo.generation.served.request import JSON_SCHEMA, REGEX, WRONG, Refused, Wanted
from triton_repo.generation.served.structures import MOST_CACHED, Structures

WORDS = ("tr", "true", "fal", "false", "nu", "null", '{"', '": ', '", "', "ab", "abc", "12", "}}", "]}", " a", "name")
EOS, TURN = 0, 1
ENDS = (EOS, TURN)
SIZE = 300
"""Number of logits: more than there are tokens."""
CLOSING = '"}], '
"""Letters that are likely, so that answers come to an end."""


def alphabet() -> list[str]:
    """The letter that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def words(*more: str, decoder: Any = None, **text: Any) -> LanguageText:
    """The text of a model: a token for each byte, and `WORDS`."""
    letters = alphabet()
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in (*WORDS, *more)]
    vocabulary = {word: index for index, word in enumerate(["<end>", "<turn>", *letters, *spelled])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoder or decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<turn>"])
    return LanguageText(made, TextSettings(**text))


@cache
def model() -> Structures:
    return Structures(words(), SIZE, ENDS)


@cache
def texts() -> list[bytes]:
    """The bytes of each token."""
    return [b"", b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]


@cache
def biased() -> np.ndarray:
    return np.array([3.0 * (text.decode("latin-1") in CLOSING and bool(text)) for text in texts()] + [0.0] * (SIZE - len(texts())))


def written(wanted: Wanted, seed: int, most: int = 600, temperature: float = 1.0) -> tuple[str, str | None]:
    """Returns an answer of a model whose logits are random, and why it ended."""
    logits = np.random.default_rng(seed)
    text = Text(Rules(most, frozenset(ENDS), temperature=temperature, seed=seed), EOS, structure=model().begin(wanted))
    while text.ended is None:
        text.take((logits.normal(size=SIZE) + biased()).astype(np.float32))
    return b"".join(texts()[token] for token in text.tokens).decode(), text.ended


EXPRESSIONS = (
    "yes|no|maybe",
    "[a-c]{2,5}",
    "(ab)*c?",
    "[0-9]{1,3}(\\.[0-9]+)?",
    "(true|false|null)( and (true|false|null)){0,2}",
    "^a.c$",
    "a+b+",
    '"[^"]{0,4}"',
    one_of(["a+b", "12", "{name}", "a b"]),
)


def compiled_in_python(expression: str) -> Any:
    """The same expression in the syntax of Python, which has no `\\x{2b}`."""
    return regex.compile(regex.sub(r"\\x\{([0-9a-f]+)\}", lambda one: regex.escape(chr(int(one[1], 16))), expression))


@settings(max_examples=60)
@given(st.sampled_from(EXPRESSIONS), st.integers(0, 2**20))
def test_masks_are_what_brute_force_finds(expression: str, seed: int) -> None:
    compiled, choose = compiled_in_python(expression), random.Random(seed)
    structure, text = model().begin(Wanted(REGEX, expression)), ""
    for _ in range(8):
        allowed = structure.allowed(SIZE)
        plain = [token for token, one in enumerate(texts()) if one and one.isascii()]
        expected = {token for token in plain if compiled.fullmatch(text + texts()[token].decode(), partial=True)}
        found = {token for token in plain if allowed[token]}
        longest = max((texts()[token] for token in expected), key=len, default=b"")
        if expected and all(
            longest.startswith(texts()[token]) for token in expected
        ):  # letters without a choice: as the tokenizer spells them
            assert found
            assert found <= expected
        else:
            assert found == expected
        assert {bool(allowed[token]) for token in ENDS} == {compiled.fullmatch(text) is not None}
        if not expected:
            break
        token = choose.choice(sorted(expected))
        structure.take(token)
        text += texts()[token].decode()
        follows = [one for one in texts() if one and one.isascii() and compiled.fullmatch(text + one.decode(), partial=True)]
        assert structure.complete == (not follows)
        if structure.complete:
            break


@settings(max_examples=50)
@given(st.sampled_from(EXPRESSIONS), st.integers(0, 2**20))
def test_answers_match_their_expression(expression: str, seed: int) -> None:
    text, reason = written(Wanted(REGEX, expression), seed)
    assert reason == "stop"
    assert compiled_in_python(expression).fullmatch(text)


NAMES = st.text('abcé"\\ \n', min_size=1, max_size=3)
LIMITED = st.one_of(
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, st.integers(0, 3), st.integers(0, 5)),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-200, 200), st.integers(0, 300)),
    st.builds(lambda low: {"type": "number", "minimum": low / 4, "exclusiveMaximum": low / 4 + 1.5}, st.integers(-200, 200)),
    st.builds(lambda one: {"enum": one}, st.lists(st.one_of(NAMES, st.integers(-9, 9), st.booleans(), st.none()), min_size=1, max_size=3)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.sampled_from([{"type": "integer", "multipleOf": 3}, {"type": "string", "pattern": "^a[bc]{1,3}$"}]),
)


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects and lists of schemas, and a choice between two."""
    objects = st.builds(
        lambda known, more, at: {
            "type": "object",
            "properties": known,
            "required": sorted(known)[:at],
            "additionalProperties": more,
            "maxProperties": len(known) + 1,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.one_of(st.just(False), inner),
        st.integers(0, 3),
    )
    lists = st.builds(lambda one, low: {"type": "array", "items": one, "minItems": low, "maxItems": low + 2}, inner, st.integers(0, 2))
    return st.one_of(objects, lists, st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner))


def refusal(wanted: Wanted) -> Refused | None:
    try:
        model().begin(wanted)
    except Refused as error:
        return error
    return None


@settings(max_examples=50)
@given(st.recursive(LIMITED, nested, max_leaves=5), st.integers(0, 2**20))
def test_answers_fit_their_schema(schema: dict[str, Any], seed: int) -> None:
    wanted = Wanted(JSON_SCHEMA, json.dumps(schema))
    if (refused := refusal(wanted)) is not None:  # what llguidance does not take is the fault of the request
        assert refused.code == WRONG
        assert str(refused).startswith(JSON_SCHEMA)
        return
    text, reason = written(wanted, seed)
    if reason == "stop":
        Draft202012Validator(schema).validate(json.loads(text))
        assert "\n" not in text
    else:
        assert reason == "length"


def test_most_schemas_are_taken_and_their_answers_come_to_an_end() -> None:
    """Else the test above would hold for structures that refuse everything."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    found = [written(Wanted(JSON_SCHEMA, json.dumps(schema)), seed) for seed in range(10)]
    assert {reason for _, reason in found} == {"stop"}
    assert all(json.loads(text).keys() == {"name", "age"} for text, _ in found)
    assert len({text for text, _ in found}) == 10


def test_an_answer_that_is_cut_off_has_its_length() -> None:
    text, reason = written(Wanted(JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 50}'), 1, most=20)
    assert reason == "length"
    assert text.startswith("[")


def test_a_structure_that_is_complete_ends_the_answer_without_an_end_token() -> None:
    text = Text(Rules(9, frozenset(ENDS)), EOS, structure=model().begin(Wanted(REGEX, "ab|cd")))
    while text.ended is None:
        text.take(np.zeros(SIZE, np.float32))
    assert not set(text.tokens) & set(ENDS)
    assert text.ended == "stop"


BIG = 2**53
WRONG_STRUCTURES = (
    (JSON_SCHEMA, "{", "not JSON"),
    (JSON_SCHEMA, '{"const": NaN}', "NaN"),
    (JSON_SCHEMA, "[1]", "a JSON object"),
    (JSON_SCHEMA, '{"type": "objct"}', "objct"),
    (JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    (JSON_SCHEMA, '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueItems"),
    (JSON_SCHEMA, json.dumps({"const": BIG}), str(BIG)),
    (JSON_SCHEMA, json.dumps({"properties": {"a": {"enum": ["x", [-BIG]]}}}), str(BIG)),
    (JSON_SCHEMA, '{"type": "number", "minimum": 1e400}', "inf"),
    (JSON_SCHEMA, '{"type": "object", "minProperties": 2, "additionalProperties": true}', "minProperties"),
    (JSON_SCHEMA, '{"items": ' * 70 + "{}" + "}" * 70, "nested"),
    (JSON_SCHEMA, '{"type": "string", "pattern": "("}', "unclosed group"),
    (REGEX, "a(", "unclosed group"),
    (REGEX, "a(?=b)", "look-around"),
)


@pytest.mark.parametrize(("name", "text", "named"), WRONG_STRUCTURES)
def test_a_wrong_structure_is_refused_in_one_line(name: str, text: str, named: str) -> None:
    with pytest.raises(Refused) as caught:
        model().begin(Wanted(name, text))
    assert str(caught.value).startswith(f"{name}: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.code == WRONG


def test_largest_integers_and_required_keys_are_taken() -> None:
    for schema in ({"const": BIG - 1}, {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2}):
        model().begin(Wanted(JSON_SCHEMA, json.dumps(schema)))


def test_a_key_cannot_be_spelled_otherwise() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    structure = model().begin(Wanted(JSON_SCHEMA, json.dumps(schema)))
    for letter in b'{"\\':
        structure.take(letter + len(ENDS))
    allowed = structure.allowed(SIZE)
    assert not allowed[ord("u") + len(ENDS)]
    assert allowed[ord("n") + len(ENDS)]


def test_each_structure_is_compiled_once_and_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Wanted] = []
    compile_one = structures._compile

    def counted(wanted: Wanted, tokens: Any) -> Any:
        compiled.append(wanted)
        return compile_one(wanted, tokens)

    monkeypatch.setattr(structures, "_compile", counted)
    one = Structures(words(), SIZE, ENDS)
    many = [Wanted(REGEX, "a" * count) for count in range(1, MOST_CACHED + 2)]
    for wanted in (many[0], many[0], *many[1:-1], many[0], many[-1]):
        one.begin(wanted)
    assert compiled == many
    assert len(one._compiled) == MOST_CACHED
    one.begin(many[0])  # used last, so another one has left
    assert compiled == many
    one.begin(many[1])
    assert len(compiled) == len(many) + 1


def test_answers_of_one_structure_do_not_share_their_state() -> None:
    wanted = Wanted(REGEX, "ab|cd")
    first, second = model().begin(wanted), model().begin(wanted)
    first.take(ord("a") + len(ENDS))
    assert second.allowed(SIZE)[ord("c") + len(ENDS)]
    assert not first.allowed(SIZE)[ord("c") + len(ENDS)]


@pytest.mark.parametrize(
    ("text", "ends", "named"),
    [
        (lambda: words(clean_up=True), ENDS, "spaces"),
        (words, (), "end token"),
        (lambda: words(decoder=decoders.WordPiece()), ENDS, "tokenizer"),
    ],
)
def test_a_model_whose_text_is_no_sequence_of_bytes_takes_no_structure(text: Any, ends: tuple[int, ...], named: str) -> None:
    with pytest.raises(Refused, match=named):
        Structures(text(), SIZE, ends).begin(Wanted(REGEX, "a"))


def test_a_space_that_the_tokenizer_drops_is_not_written_first() -> None:
    vocabulary = {word: at for at, word in enumerate(["<end>", "a", "\u2581a", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))])}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<end>"])
    text = LanguageText(made, TextSettings())
    structure = Structures(text, len(vocabulary), (0,)).begin(Wanted(REGEX, "( ?a){2}"))
    assert text.decode([2]) == "a"
    assert structure.allowed(len(vocabulary))[1:4].tolist() == [True, False, False]
    structure.take(1)
    assert structure.allowed(len(vocabulary))[1:4].tolist() == [True, True, True]


def test_what_no_token_can_write_is_refused() -> None:
    tiny = Tokenizer(models.BPE({"<end>": 0, "a": 1}, []))
    tiny.pre_tokenizer, tiny.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tiny.add_special_tokens(["<end>"])
    structure = Structures(LanguageText(tiny, TextSettings()), 2, (0,)).begin(Wanted(REGEX, "b"))
    with pytest.raises(Refused, match="no token"):
        structure.allowed(2)
