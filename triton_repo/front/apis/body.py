"""Bodies of the routes: JSON that a pydantic model describes. A key that the model does not name is refused, not ignored."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Self

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from foundation.core.json_value import Json
from triton_repo.front.bodies import check_size, parsed
from triton_repo.front.limits import BODY_SECONDS, Rejected

MOST_ROWS = 2048
"""Most texts of one request, as OpenAI allows."""


class JsonObject(BaseModel):
    """A JSON object, which has no other keys, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(JsonObject):
    """The JSON object of a request."""

    @classmethod
    def of(cls, text: bytes) -> Self:
        """Returns the object in a JSON text; a key that is null counts as not given.

        Raises:
            Rejected: A key is unknown, or its value is not allowed.
        """
        check_size(text)
        with suppress(ValidationError):  # nearly every body is parsed here, once
            return cls.model_validate_json(text)
        document: dict[str, Json] = {key: value for key, value in parsed(text).items() if value is not None}
        try:
            return cls.model_validate_json(json.dumps(document))  # of Python's values strict models take no dict for a model
        except ValidationError as error:
            raise Rejected(line(error)) from error


def line(error: ValidationError) -> str:
    """Returns the first error in one line: the key, and what is wrong with it; unknown keys come first, as they may be misspelled ones."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    first = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])[:128]
    if first["type"] == "extra_forbidden":
        return f"{key}: not offered here; leave it out"
    return f"{key}: {first['msg'][:200]}"


async def read(request: web.Request) -> bytes:
    """Returns the body of a request.

    Raises:
        Rejected: It is compressed.
        TimeoutError: It did not arrive in time.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Rejected("compressed bodies are not accepted; send it without Content-Encoding", 415)
    return await asyncio.wait_for(request.read(), BODY_SECONDS)
