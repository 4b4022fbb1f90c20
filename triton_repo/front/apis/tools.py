"""Functions that a model may call: the keys `tools` and `tool_choice` of a conversation, to inputs of the model.

    none       the model does not see the functions
    auto       the chat template writes the functions; a call is read from the answer (`tool_calls`)
    required   the answer is a JSON list of calls: [{"name": ..., "parameters": {...}}], one of the functions each
    a name     the answer is the arguments of this function, as JSON of its parameters

The last two limit the tokens of the answer as `response_format` does, so that every call fits the schema of its function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from foundation.core.json_value import Json
from triton_repo.front.apis.body import JsonObject
from triton_repo.front.limits import Rejected
from triton_repo.generation.served.messages import TOOLS
from triton_repo.generation.served.request import JSON_SCHEMA

MOST_TOOLS = 128
"""As OpenAI allows."""
NAME, PARAMETERS = "name", "parameters"
PLACE = f"#/items/anyOf/{{index}}/properties/{PARAMETERS}"
"""Place of the parameters of a function in the schema of a list of calls."""


class Function(JsonObject):
    """A function. `strict` makes no difference: calls that are required fit their schema, others are as the model writes them."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(JsonObject):
    """A tool; other kinds than functions are not offered."""

    type: Literal["function"]
    function: Function

    def written(self) -> dict[str, Json]:
        """Returns the tool as chat templates read it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of its arguments; a function without parameters has none."""
        return self.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionName(JsonObject):
    """Names a function."""

    name: str


class NamedChoice(JsonObject):
    """The function that is called."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]
Choice = Literal["none", "auto", "required"] | NamedChoice


def tool_inputs(tools: Sequence[Tool], choice: Choice | None, *, several: bool) -> dict[str, Json]:
    """Returns the inputs of the model for the functions that it may call; empty where it may call none.

    Args:
        tools: The functions.
        choice: Key of the request.
        several: Whether an answer may hold several calls.

    Raises:
        Rejected: Functions and choice do not fit.
    """
    names = [tool.function.name for tool in tools]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise Rejected(f"tools: {twice} given twice; each function needs a name of its own")
    if not tools and choice not in (None, "none", "auto"):
        raise Rejected("tool_choice: given without tools; give tools, or leave it out")
    if not tools or choice == "none":
        return {}
    inputs: dict[str, Json] = {TOOLS: json.dumps([tool.written() for tool in tools], ensure_ascii=False)}
    if isinstance(choice, NamedChoice):
        named = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if named is None:
            raise Rejected(f"tool_choice: {choice.function.name[:64]} given; {', '.join(names)} are in tools")
        return {**inputs, JSON_SCHEMA: json.dumps(named.schema_of_arguments, ensure_ascii=False)}
    if choice == "required":
        return {**inputs, JSON_SCHEMA: json.dumps(schema_of_calls(tools, several=several), ensure_ascii=False)}
    return inputs


def schema_of_calls(tools: Sequence[Tool], *, several: bool) -> dict[str, Any]:
    """Returns the JSON schema of a list of calls; several: of more than one."""
    calls = [
        {
            "type": "object",
            "properties": {
                NAME: {"const": tool.function.name},
                PARAMETERS: placed(tool.schema_of_arguments, PLACE.format(index=index)),
            },
            "required": [NAME, PARAMETERS],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"type": "array", "minItems": 1, **({} if several else {"maxItems": 1}), "items": {"anyOf": calls}}


def placed(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a schema for a place in another one: its references to itself lead to where it is then."""
    return {key: _placed(value, key, place) for key, value in schema.items()}


def _placed(value: Any, key: str, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    if isinstance(value, dict):
        return placed(value, place)
    return [_placed(one, "", place) for one in value] if isinstance(value, list) else value
