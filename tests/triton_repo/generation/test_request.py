"""What a client asks of a language model: every wrong input is one line that names it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.standalone.chat_template import TemplateRefused
from triton_repo.generation.served.request import DEFAULT_TOKENS, FIELDS, Limits, Refused, Wanted, read

LIMITS = Limits(context=64, vocabulary=100, seconds=30.0, chat=True, beams=True, structured=True)


class Letters:
    """A tokenizer of bytes, with a chat template."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [one % 100 for one in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def decode_calls(self, ids: list[int]) -> str:
        return self.decode(ids)

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tools: Any) -> str:
        if messages[0]["role"] == "nobody":
            raise TemplateRefused("nobody speaks")
        written = "".join(f"<{one['role']}>{one['content']}{json.dumps(one.get('tool_calls', ''))}" for one in messages)
        return (json.dumps(tools) if tools else "") + written.replace('""', "") + "<a>" * add_generation_prompt


def texts(*values: str | bytes) -> np.ndarray:
    return np.array([value if isinstance(value, bytes) else value.encode() for value in values], np.object_)


def asked(limits: Limits = LIMITS, **inputs: Any) -> Any:
    return read({name: np.asarray(value) for name, value in inputs.items()}, limits, Letters())


def test_a_text_gets_the_most_likely_tokens_by_default() -> None:
    found = asked(TEXT=texts("abc"))
    assert found.prompt.tolist() == [1, 97, 98, 99]
    assert found.values["MAX_TOKENS"] == min(DEFAULT_TOKENS, 60)
    assert not found.samples
    assert found.values["TIMEOUT_SECONDS"] == 30


def test_conversations_go_through_the_chat_template_alone() -> None:
    messages = [{"role": "s", "content": "x"}, {"role": "u", "content": "y"}]
    expected = [one % 100 for one in b"<s>x<u>y<a>"]
    assert asked(MESSAGES=texts(json.dumps(messages))).prompt.tolist() == expected
    assert asked(TEXT=texts(json.dumps(messages))).prompt.tolist() != expected  # JSON of a user is text
    assert asked(TEXT=texts("y"), CHAT=[True]).prompt.tolist() == [one % 100 for one in b"<user>y<a>"]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "no prompt given"),
        ({"TEXT": texts("a"), "INPUT_IDS": [1]}, "TEXT and INPUT_IDS given; give one of"),
        ({"TEXT": texts("a", "b")}, "TEXT: 2 texts given"),
        ({"TEXT": texts("")}, None),
        ({"INPUT_IDS": np.zeros(0, np.int64)}, "INPUT_IDS: 0 ids given; 1 to 64 are allowed"),
        ({"INPUT_IDS": [100]}, "INPUT_IDS"),
        ({"INPUT_IDS": [-1]}, "INPUT_IDS"),
        ({"INPUT_IDS": [1], "CHAT": [True]}, "token ids take no chat template"),
        ({"TEXT": texts(b"\xff")}, "TEXT: not UTF-8 text (byte 0)"),
        ({"TEXT": texts("a\0b")}, "TEXT: holds a zero character"),
        ({"TEXT": texts("a" * 64)}, "63 are allowed, one less than the context"),
        ({"TEXT": texts("a" * 10_000)}, "TEXT: 10000 bytes given"),
        ({"TEXT": texts("a"), "MAX_TOKENS": [63]}, "MAX_TOKENS up to 62 is allowed"),
        ({"TEXT": texts("a"), "MAX_TOKENS": [0]}, "MAX_TOKENS: 0 given"),
        ({"TEXT": texts("a"), "MAX_TOKENS": [1, 2]}, "MAX_TOKENS: 2 values given; one is allowed"),
        ({"TEXT": texts("a"), "TEMPERATURE": [float("nan")]}, "TEMPERATURE: nan given; 0 or 1e-06 to 100 is allowed"),
        ({"TEXT": texts("a"), "TOP_K": [3]}, "TOP_K given without TEMPERATURE"),
        ({"TEXT": texts("a"), "STOP": texts("")}, "STOP: at most 16 texts of 1 to 256 letters"),
        ({"TEXT": texts("a"), "STOP": texts(*["a"] * 17)}, "STOP: at most 16 texts"),
        ({"TEXT": texts("a"), "BEAMS": [2]}, "a search needs STREAM false"),
        ({"TEXT": texts("a"), "BEAMS": [2], "STREAM": [False], "ANSWERS": [3]}, "ANSWERS: 3 given with 2 beams"),
        ({"TEXT": texts("a"), "BEAMS": [2], "STREAM": [False], "REPETITION_PENALTY": [2.0]}, "REPETITION_PENALTY: 2 given with 2 beams"),
        ({"MESSAGES": texts("{")}, "this is not JSON"),
        ({"MESSAGES": texts('[{"role": "nobody", "content": "a"}]')}, "the chat template does not take these messages: nobody speaks"),
        ({"MESSAGES": texts("[]")}, "with at least one message"),
        ({"MESSAGES": texts('[{"role": "u"}]')}, "message 0 is not like that"),
        ({"MESSAGES": texts('[{"role": "u", "content": "\\ud800"}]')}, "half a surrogate pair"),
        ({"TEXT": texts("a"), "REGEX": texts("a"), "JSON_SCHEMA": texts("{}")}, "JSON_SCHEMA and REGEX given; one is allowed"),
        ({"TEXT": texts("a"), "REGEX": texts("")}, "REGEX: 0 bytes given"),
        ({"TEXT": texts("a"), "REGEX": texts("a" * 2**14)}, "REGEX: 16384 bytes given"),
        ({"TEXT": texts("a"), "JSON_SCHEMA": texts("{}", "{}")}, "JSON_SCHEMA: 2 texts given"),
        ({"TEXT": texts("a"), "JSON_SCHEMA": texts(b"\xff")}, "JSON_SCHEMA: not UTF-8"),
        ({"TEXT": texts("a"), "REGEX": texts("a"), "IGNORE_EOS": [True]}, "REGEX given with IGNORE_EOS"),
        ({"TEXT": texts("a"), "REGEX": texts("a"), "BEAMS": [2], "STREAM": [False]}, "REGEX given with 2 beams"),
    ],
)
def test_wrong_inputs_are_refused_by_name(inputs: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert asked(**inputs).prompt.tolist() == [1]  # the tokenizer starts every text with a token of its own
        return
    with pytest.raises(Refused) as refused:
        asked(**inputs)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


FUNCTIONS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
MADE = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CALLED = [
    {"role": "u", "content": "x"},
    {"role": "a", "content": "", "tool_calls": [MADE]},
    {"role": "tool", "content": "y", "tool_call_id": "1", "name": "f"},
]
CALLS = Limits(context=640, vocabulary=100, seconds=30.0, chat=True, beams=True, tools=True)


def test_functions_and_calls_go_through_the_chat_template() -> None:
    found = asked(CALLS, MESSAGES=texts(json.dumps(CALLED)), TOOLS=texts(json.dumps(FUNCTIONS)))
    expected = f"{json.dumps(FUNCTIONS)}<u>x<a>{json.dumps([MADE])}<tool>y<a>"
    assert found.prompt.tolist() == [one % 100 for one in expected.encode()]
    assert found.calls
    assert not asked(CALLS, MESSAGES=texts(json.dumps(CALLED))).calls
    assert asked(CALLS, TEXT=texts("x"), CHAT=[True], TOOLS=texts(json.dumps(FUNCTIONS))).calls


@pytest.mark.parametrize(
    ("limits", "inputs", "words"),
    [
        (LIMITS, {"MESSAGES": CALLED[:1], "TOOLS": FUNCTIONS}, "TOOLS: the chat template of this model does not mention tools"),
        (LIMITS, {"MESSAGES": CALLED}, "MESSAGES: message 1 is about a call; the chat template of this model does not mention tools"),
        (CALLS, {"TEXT": "x", "TOOLS": FUNCTIONS}, "TOOLS given with TEXT"),
        (CALLS, {"INPUT_IDS": [1], "TOOLS": FUNCTIONS}, "TOOLS given with INPUT_IDS"),
        (CALLS, {"MESSAGES": CALLED, "TOOLS": {}}, "TOOLS: a JSON list"),
        (CALLS, {"MESSAGES": CALLED, "TOOLS": [{"type": "function", "function": {}}]}, "tool 0 is not like that"),
        (CALLS, {"MESSAGES": CALLED, "TOOLS": ["\ud800"]}, "TOOLS: holds half a surrogate pair"),
        (CALLS, {"MESSAGES": [{**CALLED[1], "tool_calls": []}]}, "message 0 is not like that"),
        (CALLS, {"MESSAGES": [{**CALLED[1], "tool_calls": [{**MADE, "function": {"name": "f", "arguments": "{}"}}]}]}, "message 0"),
        (CALLS, {"MESSAGES": [{**CALLED[2], "name": 1}]}, "message 0 is not like that"),
    ],
)
def test_wrong_functions_and_calls_are_refused_by_name(limits: Limits, inputs: dict[str, Any], words: str) -> None:
    given = {
        name: value if name == "INPUT_IDS" else texts(value if name == "TEXT" else json.dumps(value)) for name, value in inputs.items()
    }
    with pytest.raises(Refused) as refused:
        asked(limits, **given)
    assert words in str(refused.value)


def test_models_without_template_or_search_say_so() -> None:
    plain = Limits(context=64, vocabulary=100, seconds=30.0, chat=False, beams=False)
    with pytest.raises(Refused, match="no chat template; give the whole prompt as TEXT"):
        asked(plain, TEXT=texts("a"), CHAT=[True])
    with pytest.raises(Refused, match="BEAMS: 2 given; this model does not search with beams"):
        asked(plain, TEXT=texts("a"), BEAMS=[2], STREAM=[False])
    with pytest.raises(Refused, match="REGEX: not offered"):
        asked(plain, TEXT=texts("a"), REGEX=texts("a"))


def test_a_structure_is_part_of_the_request() -> None:
    assert asked(TEXT=texts("a"), JSON_SCHEMA=texts('{"type": "object"}')).wanted == Wanted("JSON_SCHEMA", '{"type": "object"}')
    assert asked(TEXT=texts("a")).wanted is None


@given(
    st.sampled_from([field for field in FIELDS if field.datatype != "TYPE_BOOL"]),
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.sampled_from([None, "low", "high", "least"]),
)
def test_numbers_out_of_bounds_never_pass_and_the_bounds_do(field: Any, value: float, bound: str | None) -> None:
    value = value if bound is None else getattr(field, bound)
    exact = field.datatype == "TYPE_FP32"
    if not exact and not (np.isfinite(value) and abs(value) < 2**63):
        return
    number = np.array([value if exact else int(value)], np.float32 if exact else np.int64)
    low, high, least = (number.dtype.type(one) for one in (field.low, field.high, field.least))
    if low <= number[0] <= high and not 0 < abs(number[0]) < least:
        assert field.read(number) == number[0]
    else:
        assert bound is None or (bound == "least" and not least)  # fields without one have 0 for it
        with pytest.raises(Refused, match=field.name):
            field.read(number)
