"""One answer under way: takes tokens from an engine and sends them to the client in pieces.

The first token is sent at once, later ones with those that came within PIECE_SECONDS of the piece before: a response costs the server and
the client as much for one token as for several, and takes that from the engine where they share processors.

Outputs of each response: TEXT string [1], the new piece; TOKENS int64 [k], its ids; INDEX int32 [1], the number of the answer where a
search gives several; LOGPROBS string [1], where the request asks for it, of the tokens of the text (`logprobs`). The last one also has
FINISH_REASON string [1], PROMPT_TOKENS and COMPLETION_TOKENS int32 [1].

    stop        an end token, a stop token or a stop text; tokens of the stop text are in TOKENS, its letters are not in TEXT
    length      MAX_TOKENS were generated
    timeout     TIMEOUT_SECONDS are over
    cancelled   the client has gone, or the model is unloaded
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .pieces import Pieces
from .request import FAILED, Request

if TYPE_CHECKING:
    from .decoding_rules import Logits, Structure
    from .logprobs import Listed

STOP, LENGTH, TIMEOUT, CANCELLED = "stop", "length", "timeout", "cancelled"
Outputs = Mapping[str, str | int | list[int]]
"""The outputs of a response, by name."""


class Client(Protocol):
    """The receiver of an answer."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits for the answer any more."""

    def send(self, outputs: Outputs, *, last: bool) -> None:
        """Sends a response. Whatever fails, the client has then gone: one answer must not hold up the others."""

    def refuse(self, line: str, code: str) -> None:
        """Ends the answer with an error."""


class Answer:
    """An answer.

    Args:
        asked: What was asked.
        client: Where it goes.
        decode: Returns the text of ids.
        held: See `pieces.Decoded`.
        structure: What its tokens may be; None: all.
        listed: Its log-probabilities; None: nobody asks for them.
    """

    def __init__(
        self,
        request: Request,
        client: Client,
        decode: Callable[[list[int]], str],
        held: int,
        structure: Structure | None = None,
        listed: Listed | None = None,
    ) -> None:
        self.request, self.client, self.structure = request, client, structure
        self._decode, self._listed = decode, listed
        self._pieces = Pieces(decode, held, request.stop)
        self._deadline = time.monotonic() + request.values["TIMEOUT_SECONDS"]
        self._sent = -math.inf
        """When the last piece was sent."""
        self._count = 0
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._unread: list[int] = []
        """Tokens without a text yet: the tokens of a piece are decoded together where nobody needs the text of each."""
        self._letters = 0
        """Letters that were sent."""
        self.ended = False

    @property
    def places(self) -> int:
        """Rows of the cache of the model that the answer takes."""
        return int(self.request.values["BEAMS"])

    @property
    def due(self) -> str | None:
        """Returns why the answer has to end now, whatever the engine does; None if it need not."""
        if self.client.gone:
            return CANCELLED
        return TIMEOUT if time.monotonic() > self._deadline else None

    def waits(self, now: float) -> bool:
        """Returns whether nothing can be done with further tokens yet: no piece is due, and none of them can end the answer.

        Args:
            now: The time of `time.monotonic`.
        """
        if self.request.stop or self.request.stop_tokens or self._listed is not None:
            return False
        return not self.request.values["STREAM"] or now - self._sent < self.request.values["PIECE_SECONDS"]

    def take(self, ids: Sequence[int], reason: str | None = None, logits_V: Logits | None = None) -> None:
        """Takes the next tokens, and sends the new piece.

        Args:
            ids: Token ids.
            reason: Why the engine generates no more; None if it does. The answer then ends only if a stop text was found.
            logits_V: The logits from which the one token was chosen, where the engine has them.
        """
        for token in ids:  # one by one: tokens after a stop text are not part of the answer
            if self._listed is not None:
                assert logits_V is not None, "log-probabilities are refused where the engine has no logits"
                self._listed.take(token, logits_V, self._pieces.letters)
            self._tokens.append(token)
            self._unread.append(token)
            self._count += 1
            if self.request.stop or self._listed is not None:
                self._read()
            if self._pieces.stopped or token in self.request.stop_tokens:
                reason = STOP
                break
        if reason is not None:
            self.end(reason)
        elif self.request.values["STREAM"] and self._tokens and time.monotonic() - self._sent >= self.request.values["PIECE_SECONDS"]:
            self._send({})

    def end(self, reason: str) -> None:
        """Sends what is left and the reason; the answer has then ended."""
        self._read()
        self._text.append(self._pieces.end())
        self.ended = True
        self._send(self._last(STOP if self._pieces.stopped and reason == LENGTH else reason, self._count), last=True)

    def fail(self, line: str, code: str = FAILED) -> None:
        """Ends the answer with an error; `FAILED` is not the client's fault."""
        self.ended = True
        self.client.refuse(line, code)

    def give(self, results: Sequence[tuple[Sequence[int], str]]) -> None:
        """Sends the answers of a search, best first: token ids and reason of each.

        Raises:
            ValueError: There is none.
        """
        if not results:
            raise ValueError("the search came to no answer; the logits of the model may be no numbers")
        self.ended = True
        for index, (ids, reason) in enumerate(results):
            outputs: Outputs = {"TEXT": self._decode(list(ids)), "TOKENS": list(ids), "INDEX": index, **self._last(reason, len(ids))}
            self.client.send(outputs, last=index == len(results) - 1)

    def _read(self) -> None:
        """Turns tokens into text."""
        if self._unread:
            self._text.append(self._pieces.add(self._unread))
            self._unread = []

    def _last(self, reason: str, count: int) -> Outputs:
        return {"FINISH_REASON": reason, "PROMPT_TOKENS": len(self.request.prompt), "COMPLETION_TOKENS": count}

    def _send(self, more: Outputs, *, last: bool = False) -> None:
        self._read()
        text, tokens = "".join(self._text), self._tokens
        self._text, self._tokens, self._sent = [], [], time.monotonic()
        self._letters += len(text)
        if self._listed is not None:
            whole = more.get("FINISH_REASON", STOP) != STOP
            more = {"LOGPROBS": self._listed.until(None if whole else self._letters), **more}
        self.client.send({"TEXT": text, "TOKENS": tokens, "INDEX": 0, **more}, last=last)


def in_a_line(error: Exception) -> str:
    """Returns the message of an error; of a long one the end, where GenAI puts the reason after the place in its code."""
    return " ".join(str(error).split())[-300:] or type(error).__name__


def tensors(outputs: Outputs) -> dict[str, np.ndarray]:
    """Returns the outputs of a response as arrays."""
    made = {}
    for name, value in outputs.items():
        if isinstance(value, str):
            made[name] = np.array([value.encode("utf-8")], np.object_)
        else:
            made[name] = np.array(value, np.int64) if isinstance(value, list) else np.array([value], np.int32)
    return made
