"""What an answer has to be, as clients of OpenAI and of vLLM say it, to the inputs JSON_SCHEMA and REGEX of the model.

    OpenAI   "response_format": {"type": "json_schema", "json_schema": {"name", "schema"}}, {"type": "json_object"} or {"type": "text"}
    vLLM     "structured_outputs": {"json": ..., "regex": ..., "choice": [...], "json_object": true}, one of them
             "guided_json", "guided_regex", "guided_choice": their names before release 0.12

`strict` makes no difference: every answer fits its schema. Sources: https://platform.openai.com/docs/guides/structured-outputs and
https://docs.vllm.ai/en/latest/features/structured_outputs.html, as of 2026.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from foundation.core.json_value import Json
from triton_repo.front.apis.body import JsonObject
from triton_repo.front.limits import Rejected
from triton_repo.generation.served.request import JSON_SCHEMA, REGEX

ANY_OBJECT = {"type": "object"}
MOST_CHOICES = 1024
Choices = Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
Schema = dict[str, Any]


class TextFormat(JsonObject):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(JsonObject):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(JsonObject):
    """A schema of OpenAI; name and description do not reach the model."""

    name: str
    description: str | None = None
    json_schema: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(JsonObject):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Structured(JsonObject):
    """A structure as vLLM names it."""

    json_schema: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None


def structure_inputs(
    response_format: TextFormat | ObjectFormat | SchemaFormat | None,
    structured_outputs: Structured | None,
    guided: Structured,
) -> dict[str, Json]:
    """Returns the input of the model that says what the answer has to be; empty for free text.

    Args:
        response_format: Key of the request.
        structured_outputs: Key of the request.
        guided: The keys `guided_...` of the request, together.

    Raises:
        Rejected: Several are given.
    """
    found: list[tuple[str, dict[str, Json]]] = []
    if isinstance(response_format, ObjectFormat):
        found.append(("response_format", _schema(ANY_OBJECT)))
    elif isinstance(response_format, SchemaFormat):
        found.append(("response_format", _schema(response_format.json_schema.json_schema)))
    for prefix, one in (("structured_outputs.", structured_outputs), ("guided_", guided)):
        if one is not None:
            found += [(f"{prefix}{name}", value) for name, value in _structures(one).items()]
    if len(found) > 1:
        raise Rejected(f"{found[0][0]} and {found[1][0]} given; one is allowed")
    return found[0][1] if found else {}


def _structures(one: Structured) -> Mapping[str, dict[str, Json]]:
    """Returns the inputs of each key that is given."""
    found: dict[str, dict[str, Json]] = {}
    if one.json_schema is not None:
        found["json"] = {JSON_SCHEMA: one.json_schema} if isinstance(one.json_schema, str) else _schema(one.json_schema)
    if one.regex is not None:
        found["regex"] = {REGEX: one.regex}
    if one.choice is not None:
        found["choice"] = {REGEX: one_of(one.choice)}
    if one.json_object:
        found["json_object"] = _schema(ANY_OBJECT)
    return found


def one_of(texts: Sequence[str]) -> str:
    """Returns the regular expression that exactly these texts match; letters that could mean something are written as numbers."""
    return "|".join("".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text) for text in texts)


def _schema(schema: Mapping[str, Any]) -> dict[str, Json]:
    return {JSON_SCHEMA: json.dumps(schema, ensure_ascii=False)}
