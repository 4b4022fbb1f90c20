"""Log-probabilities of a served model (`triton_repo.generation.served.logprobs`), in the schemas of the two routes of OpenAI.

    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}]}
    completions   {"tokens", "token_logprobs", "top_logprobs": [{token: logprob}], "text_offset"}, lists of one element a token

Completions have a map of the most likely tokens, to which the chosen one is added where it is none of them. A token that is no whole letter
is written bytes:\\xe2 there. `text_offset` counts from the start of the answer, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, TypeAdapter

from foundation.core.json_value import Json


class Listed(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None

    @property
    def document(self) -> dict[str, Json]:
        """The token in a conversation."""
        return {"token": self.token, "logprob": self.logprob, "bytes": None if self.bytes is None else [*self.bytes]}

    @property
    def name(self) -> str:
        """The token in a completion: half a letter is marked, so that it is no other token's text."""
        try:
            bytes(self.bytes or []).decode("utf-8")
        except UnicodeDecodeError:
            return f"bytes:{self.token}"
        return self.token


class Chosen(Listed):
    """A token of an answer."""

    text_offset: int
    top_logprobs: list[Listed]


TOKENS = TypeAdapter(list[Chosen])
"""Reads the output LOGPROBS."""


def chat_logprobs(tokens: Sequence[Chosen]) -> dict[str, Json]:
    """Returns the key `logprobs` of a choice of a conversation."""
    content: list[Json] = [{**one.document, "top_logprobs": [best.document for best in one.top_logprobs]} for one in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Chosen]) -> dict[str, Json]:
    """Returns the key `logprobs` of a choice of a completion."""
    best: list[Json] = []
    for one in tokens:
        named: dict[str, Json] = {}
        for other in (*one.top_logprobs, one):  # of two with the same text the more likely one comes first
            named.setdefault(other.name, other.logprob)
        best.append(named)
    return {
        "tokens": [one.name for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": best,
        "text_offset": [one.text_offset for one in tokens],
    }
