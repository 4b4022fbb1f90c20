"""Calls in the text of an answer: the same however the text comes in pieces, and nothing that is no call is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_repo.front.apis.answer import Answer, Call
from triton_repo.front.apis.tool_calls import ForcedCalls, MarkedCalls, Reader, with_calls

KNOWN = ("weather", "add")
WEATHER, ADD = {"name": "weather", "arguments": {"city": "Tromsø"}}, {"name": "add", "arguments": {"a": 1, "b": [2.5, None]}}
ONE, TWO = json.dumps(WEATHER), json.dumps(ADD)
NAMED = [json.dumps(call["arguments"]) for call in (WEATHER, ADD)]
LLAMA = json.dumps({"name": "weather", "parameters": {"city": "Tromsø"}})
FORMS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "none": ("Just text, a < b.", "Just text, a < b.", []),
    "spaces": ("  two\n\nparagraphs \n", "  two\n\nparagraphs \n", []),
    "empty": ("", "", []),
    "hermes": (f"<tool_call>\n{ONE}\n</tool_call>", "", [WEATHER]),
    "hermes twice": (f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "", [WEATHER, ADD]),
    "hermes with text": (f"Let me look.\n\n<tool_call>{ONE}</tool_call> Done.", "Let me look. Done.", [WEATHER]),
    "hermes without its end": (f"Now:\n<tool_call>\n{ONE}", "Now:", [WEATHER]),
    "hermes that is cut off": (f"Now:\n<tool_call>\n{ONE[:-3]}", f"Now:\n<tool_call>\n{ONE[:-3]}", []),
    "hermes that is no call": ("See <tool_call>{broken</tool_call> there", "See <tool_call>{broken</tool_call> there", []),
    "hermes, one of two is none": (f"<tool_call>[]</tool_call><tool_call>{TWO}</tool_call>", "<tool_call>[]</tool_call>", [ADD]),
    "hermes of another function": ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', "", [{"name": "x", "arguments": {}}]),
    "mistral": (f"[TOOL_CALLS][{ONE}, {TWO}]", "", [WEATHER, ADD]),
    "mistral with text": (f"Well. [TOOL_CALLS] [{ONE}]\n", "Well.", [WEATHER]),
    "mistral that is cut off": (f"[TOOL_CALLS][{ONE}, ", f"[TOOL_CALLS][{ONE}, ", []),
    "mistral by name": (f"[TOOL_CALLS]weather[ARGS]{NAMED[0]}", "", [WEATHER]),
    "mistral by name twice": (f"Well. [TOOL_CALLS]weather[ARGS] {NAMED[0]} [TOOL_CALLS] add[ARGS]{NAMED[1]}\n", "Well.", [WEATHER, ADD]),
    "mistral by name with ids": (
        f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{NAMED[0]}[TOOL_CALLS]add[CALL_ID]2[ARGS]{NAMED[1]}",
        "",
        [WEATHER, ADD],
    ),
    "mistral by name, marks in a text": (
        '[TOOL_CALLS]add[ARGS]{"a": "[TOOL_CALLS]x[ARGS]{}"}[TOOL_CALLS]x[ARGS]{}',
        "",
        [{"name": "add", "arguments": {"a": "[TOOL_CALLS]x[ARGS]{}"}}, {"name": "x", "arguments": {}}],
    ),
    "mistral by name that is cut off": (f"[TOOL_CALLS]weather[ARGS]{NAMED[0][:-1]}", f"[TOOL_CALLS]weather[ARGS]{NAMED[0][:-1]}", []),
    "mistral by name, the second is cut off": (
        f"[TOOL_CALLS]weather[ARGS]{NAMED[0]}[TOOL_CALLS]add[ARGS]{{",
        "[TOOL_CALLS]add[ARGS]{",
        [WEATHER],
    ),
    "mistral by name, then text": (f"[TOOL_CALLS]weather[ARGS]{NAMED[0]} it is", "it is", [WEATHER]),
    "mistral by name without arguments": ("[TOOL_CALLS]weather[ARGS][1]", "[TOOL_CALLS]weather[ARGS][1]", []),
    "mistral by no name": ("[TOOL_CALLS]two words[ARGS]{}", "[TOOL_CALLS]two words[ARGS]{}", []),
    "mistral without a call": ("See [TOOL_CALLS]", "See [TOOL_CALLS]", []),
    "llama": (LLAMA, "", [WEATHER]),
    "llama with a mark": (f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    "llama twice": (f" {LLAMA}; {TWO}\n", "", [WEATHER, ADD]),
    "llama of another function": ('{"name": "x", "parameters": {}}', '{"name": "x", "parameters": {}}', []),
    "llama and text": (f"{LLAMA} is it", f"{LLAMA} is it", []),
    "text and llama": (f"It is {LLAMA}", f"It is {LLAMA}", []),
    "other JSON": ('{"name": "weather"}', '{"name": "weather"}', []),
    "arguments as a text": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [{"name": "add", "arguments": {"a": 1}}]),
    "arguments that are a list": ('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": [1]}', []),
    "deep": ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
}


def read(reader: Reader, pieces: Sequence[str]) -> tuple[str, list[Call]]:
    text, calls = "", list[Call]()
    for piece in pieces:
        more, found = reader.add(piece)
        text, calls = text + more, calls + found
    rest, found = reader.end()
    return text + rest, calls + found


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("form", FORMS)
@given(st.lists(st.integers(0, 200), max_size=8))
def test_calls_are_read_however_the_text_is_cut(form: str, places: list[int]) -> None:
    text, expected, calls = FORMS[form]
    found, read_calls = read(MarkedCalls(KNOWN), cut(text, places))
    assert found == expected
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in read_calls] == calls


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_letter_by_letter(form: str) -> None:
    text, expected, calls = FORMS[form]
    if len(text) < 1000:
        found, read_calls = read(MarkedCalls(KNOWN), list(text))
        assert (found, [call.name for call in read_calls]) == (expected, [call["name"] for call in calls])


def test_text_goes_on_as_it_comes() -> None:
    reader = MarkedCalls(KNOWN)
    assert [reader.add(piece)[0] for piece in ("Hello", " wor", "ld", " <to", "ast>", " [TOOL", "]")] == [
        "Hello",
        " wor",
        "ld",
        "",
        " <toast>",
        "",
        " [TOOL]",
    ]


def test_a_call_goes_on_where_it_ends() -> None:
    reader = MarkedCalls(KNOWN)
    assert reader.add(f"<tool_call>{ONE}</tool_cal") == ("", [])
    assert [call.name for call in reader.add("l>")[1]] == ["weather"]


def test_ids_are_nine_letters_and_differ() -> None:
    _, calls = read(MarkedCalls(KNOWN), [f"[TOOL_CALLS][{', '.join([ONE] * 50)}]"])
    assert len({call.id for call in calls}) == 50
    assert all(len(call.id) == 9 and call.id.isalnum() and call.id.isascii() for call in calls)  # as templates of Mistral demand


def test_forced_calls_are_the_whole_answer() -> None:
    assert [(one.name, one.arguments) for one in read(ForcedCalls("add"), ['{"a"', ": 1}"])[1]] == [("add", '{"a": 1}')]
    text, calls = read(ForcedCalls(None), ['[{"name": "add", "parameters": {"a": 1}}, ', LLAMA, "]"])
    assert (text, [one.name for one in calls]) == ("", ["add", "weather"])
    assert read(ForcedCalls(None), ['[{"name": "ad']) == ('[{"name": "ad', [])


def passed_on(answer: Sequence[Answer], reader: Reader, *, several: bool = True) -> list[Answer]:
    async def pieces() -> AsyncGenerator[Answer]:
        for one in answer:
            yield one

    async def all_of_them() -> list[Answer]:
        return [one async for one in with_calls(pieces(), reader, several=several)]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(("reason", "expected"), [("stop", "tool_calls"), ("length", "length"), ("cancelled", "cancelled")])
def test_calls_are_numbered_and_give_the_reason(reason: str, expected: str) -> None:
    answer = [Answer(f"Hm.<tool_call>{ONE}</tool_call>"), Answer(f"<tool_call>{TWO}</tool_call>"), Answer("", reason, 3, 9)]
    found = passed_on(answer, MarkedCalls(KNOWN))
    assert [one.text for one in found] == ["Hm.", "", ""]
    assert [(call.index, call.name) for one in found for call in one.calls] == [(0, "weather"), (1, "add")]
    assert (found[-1].reason, found[-1].prompt_tokens, found[-1].tokens) == (expected, 3, 9)


def test_of_several_calls_the_first_one_is_passed_on_where_one_is_wanted() -> None:
    for pieces in ([f"[TOOL_CALLS][{ONE}, {TWO}]"], [f"<tool_call>{ONE}</tool_call>", f"<tool_call>{TWO}</tool_call>"]):
        found = passed_on([*map(Answer, pieces), Answer("", "stop")], MarkedCalls(KNOWN), several=False)
        assert [(call.index, call.name) for one in found for call in one.calls] == [(0, "weather")]
        assert found[-1].reason == "tool_calls"


def test_an_answer_without_calls_stays_as_it_is() -> None:
    answer = [Answer("a"), Answer(" b"), Answer("", "stop", 1, 2)]
    assert passed_on(answer, MarkedCalls(KNOWN)) == [Answer("a", calls=[]), Answer(" b", calls=[]), Answer("", "stop", 1, 2, calls=[])]
