"""Functions that a model may call, by the client of OpenAI: what reaches the model, and what of its answer is a call."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator

from foundation.standalone.decoding_rules import Rules, Text
from tests.triton_repo.apis.stand_in_triton import Triton, inputs_of
from tests.triton_repo.apis.test_openai import client
from tests.triton_repo.generation.test_structures import ENDS, EOS, SIZE, biased, model, texts
from triton_repo.front.apis.tools import Tool, placed, schema_of_calls
from triton_repo.generation.served.request import JSON_SCHEMA, Wanted

PLACES = {
    "type": "object",
    "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]}},
    "required": ["from", "to"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "route", "description": "Finds a way.", "parameters": PLACES}},
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "add", "arguments": {"a": 1}}'


def asked(served: Any, answer: str, stream: bool = False, **given: Any) -> tuple[Any, dict[str, Any]]:
    """Returns message and reason of an answer (of a stream, its pieces put together), and the inputs of the model, which writes it."""
    triton = Triton()
    request: dict[str, Any] = {
        "model": "story",
        "messages": [{"role": "user", "content": answer}],
        "tools": TOOLS,
        "stream": stream,
        **given,
    }

    async def ask(address: str) -> Any:
        found = await client(address).chat.completions.create(**request)
        if not stream:
            return found.choices[0].message.content, found.choices[0].message.tool_calls, found.choices[0].finish_reason
        choices = [piece.choices[0] async for piece in found]
        assert choices[0].delta.role == "assistant"
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == list(range(len(calls)))
        return "".join(choice.delta.content or "" for choice in choices), calls or None, choices[-1].finish_reason

    return served(ask, "story", triton=triton), inputs_of(triton.requests[0])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", ""),
        (f"I add them. <tool_call>{CALL}</tool_call>", "I add them."),
        (f"[TOOL_CALLS][{CALL}]", ""),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}', ""),
        ('{"name": "add", "parameters": {"a": 1}}', ""),
    ],
)
def test_a_call_is_read_from_the_answer(answer: str, text: str, stream: bool, served: Any) -> None:
    (found, calls, reason), inputs = asked(served, answer, stream)
    assert (found or "", reason) == (text, "tool_calls")
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [("function", "add", {"a": 1})]
    sent = json.loads(inputs["TOOLS"])
    assert sent == [{"type": "function", "function": {k: v for k, v in one["function"].items() if k != "strict"}} for one in TOOLS]
    assert [list(one["function"]) for one in sent] == [["name", "description", "parameters"], ["name", "parameters"], ["name"]]
    assert JSON_SCHEMA not in inputs


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_a_call_is_text(stream: bool, served: Any) -> None:
    assert asked(served, "Nothing to do.", stream, tool_choice="auto")[0] == ("Nothing to do.", None, "stop")


def test_without_a_choice_of_functions_the_model_sees_none(served: Any) -> None:
    answer = f"<tool_call>{CALL}</tool_call>"
    for given in ({"tool_choice": "none"}, {"tools": []}, {"tools": openai.omit, "tool_choice": "auto"}):
        found, inputs = asked(served, answer, **given)
        assert found == (answer, None, "stop")
        assert "TOOLS" not in inputs


@pytest.mark.parametrize("stream", [True, False])
def test_a_named_function_gets_the_whole_answer_as_arguments(stream: bool, served: Any) -> None:
    choice = {"type": "function", "function": {"name": "route"}}
    (text, calls, reason), inputs = asked(served, '{"from": 1}', stream, tool_choice=choice)
    assert (text or "", reason) == ("", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in calls] == [("route", '{"from": 1}')]
    assert json.loads(inputs[JSON_SCHEMA]) == PLACES
    assert "TOOLS" in inputs


@pytest.mark.parametrize("stream", [True, False])
def test_required_calls_are_the_whole_answer(stream: bool, served: Any) -> None:
    answer = '[{"name": "now", "parameters": {}}, {"name": "add", "parameters": {"a": 1}}]'
    (text, calls, reason), inputs = asked(served, answer, stream, tool_choice="required")
    assert (text or "", reason) == ("", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in calls] == [("now", "{}"), ("add", '{"a": 1}')]
    assert json.loads(inputs[JSON_SCHEMA])["minItems"] == 1
    (_, calls, _), inputs = asked(served, answer, stream, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(inputs[JSON_SCHEMA])["maxItems"] == 1
    assert len(calls) == 1


def test_several_answers_have_calls_of_their_own(served: Any) -> None:
    async def ask(address: str) -> Any:
        messages: Any = [{"role": "user", "content": '<tool_call>{"name": "add", "arguments": {"a": SEED}}</tool_call>'}]
        return await client(address).chat.completions.create(model="story", messages=messages, tools=TOOLS, n=3, temperature=1, seed=4)

    choices = served(ask, "story").choices
    assert [json.loads(one.message.tool_calls[0].function.arguments)["a"] for one in choices] == [4, 5, 6]
    assert len({one.message.tool_calls[0].id for one in choices}) == 3


def test_a_conversation_holds_calls_and_their_results(served: Any) -> None:
    triton = Triton()

    async def ask(address: str) -> None:
        calls = client(address).chat.completions
        messages: list[Any] = [{"role": "user", "content": f"<tool_call>{CALL}</tool_call>"}]
        first = (await calls.create(model="story", messages=messages, tools=TOOLS)).choices[0].message
        messages += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}]
        messages += [{"role": "assistant", "content": "Two.", "tool_calls": None, "refusal": None}, {"role": "user", "content": "Thanks"}]
        await calls.create(model="story", messages=messages, tools=TOOLS)

    served(ask, "story", triton=triton)
    sent = json.loads(inputs_of(triton.requests[1])["MESSAGES"])
    call = sent[1]["tool_calls"][0]
    assert sent[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert call == {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert sent[2] == {"role": "tool", "content": "2", "tool_call_id": call["id"], "name": "add"}
    assert sent[3] == {"role": "assistant", "content": "Two."}


def called(arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}], **more}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools: add given twice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice: other given; route, add, now are in tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: given without tools"),
        ({"logprobs": True}, "tools: given with logprobs"),
        ({"response_format": {"type": "json_object"}}, "tools: given with response_format"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content: none given"),
        ({"messages": [called("[1]")]}, "messages.0.tool_calls.0.function.arguments: a JSON object"),
        ({"messages": [called("{")]}, "messages.0.tool_calls.0.function.arguments: not JSON"),
        ({"messages": [{**called(content="a"), "role": "user"}]}, "messages.0.tool_calls: given with role user"),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages.0: tool_call_id or name given with role user"),
    ],
)
def test_wrong_tools_are_refused_by_name(given: dict[str, Any], named: str, served: Any) -> None:
    async def ask(address: str) -> Any:
        request: dict[str, Any] = {"model": "story", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **given}
        with pytest.raises(openai.BadRequestError) as caught:
            await client(address).chat.completions.create(**request)
        return caught.value.body

    assert served(ask, "story")["message"].startswith(named)


def test_references_of_a_schema_lead_to_its_place() -> None:
    schema = {"properties": {"$ref": {"type": "string"}, "a": {"items": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}}, "$ref": "other.json"}
    assert placed(schema, "#/p") == {
        "properties": {"$ref": {"type": "string"}, "a": {"items": [{"$ref": "#/p/$defs/x"}, {"$ref": "#/p"}]}},
        "$ref": "other.json",
    }


@pytest.mark.parametrize("several", [True, False])
def test_required_calls_fit_the_schemas_of_their_functions(several: bool) -> None:
    tools = [Tool.model_validate(one) for one in TOOLS]
    by_name = {tool.function.name: tool.schema_of_arguments for tool in tools}
    schema, names = schema_of_calls(tools, several=several), set()
    for seed in range(12):
        logits = np.random.default_rng(seed)
        structure = model().begin(Wanted(JSON_SCHEMA, json.dumps(schema)))
        text = Text(Rules(600, frozenset(ENDS), temperature=1.0, seed=seed), EOS, structure=structure)
        while text.ended is None:
            text.take((logits.normal(size=SIZE) + biased()).astype("float32"))
        if text.ended != "stop":
            continue
        calls = json.loads(b"".join(texts()[token] for token in text.tokens))
        assert len(calls) >= 1 if several else len(calls) == 1
        for call in calls:
            assert set(call) == {"name", "parameters"}
            Draft202012Validator(by_name[call["name"]]).validate(call["parameters"])
            names.add(call["name"])
    assert names == {"route", "add", "now"}
