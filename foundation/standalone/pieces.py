"""Token ids to text, piece by piece, with stop texts: one rule for all engines, `compress generate` and servers, to which it is copied.

    ids ---> Decoded: text that later tokens cannot change ---> StopTexts: text outside stop texts ---> the client

The joined pieces are the text of all ids, up to the character before the stop text. The tokens of an answer are all that the model wrote,
up to the token that completes its stop text: they may hold letters of the stop text, and letters after it.

A letter of several bytes may come in several tokens: until it is whole, decoding ends with U+FFFD, and nothing of it is sent. Some
tokenizers clean their text up, " ." becomes "."; their last `held` letters wait. Others drop a space at the start once a letter follows, so
spaces at the start wait for it.

Only the last tokens are decoded again for each new one. The window starts anew where the tokens that it keeps decode to the same text as
before, so it never starts within a letter; and not within the text of half a letter, to which some tokenizers turn all bytes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
LETTER_TOKENS = 4
"""Most tokens of a letter."""
WINDOW, CONTEXT = 48, 16
"""Tokens at which the window starts anew, and those that it then keeps."""


class Decoded:
    """Text of a growing list of token ids.

    Args:
        decode: Returns the text of ids.
        held: Number of letters at the end that later tokens may change.
    """

    def __init__(self, decode: Callable[[list[int]], str], held: int = 0) -> None:
        self._decode, self._held = decode, held
        self._ids: list[int] = []
        self._text, self._sent, self._begun = "", 0, False
        self._given = 0

    @property
    def letters(self) -> int:
        """Number of letters of the text so far, with those that later tokens may change and without one that is not whole."""
        return self._given + max(0, len(self._text.rstrip(UNFINISHED)) - self._sent)

    def add(self, ids: Sequence[int]) -> str:
        """Takes ids; returns the text that is now certain."""
        self._ids += ids
        self._text = self._decode(self._ids)
        ready = max(len(self._text.rstrip(UNFINISHED)) - self._held, self._sent)
        if not self._begun:
            self._begun = bool(self._text[:ready].strip())
            ready = ready if self._begun else 0
        piece, self._sent = self._text[self._sent : ready], ready
        self._given += len(piece)
        if len(self._ids) >= WINDOW:
            self._slide()
        return piece

    def end(self) -> str:
        """Returns the rest of the text."""
        text = self._cut_off() if self._text.endswith(UNFINISHED) else self._text
        piece, self._sent = text[self._sent :], len(text)
        return piece

    def _cut_off(self) -> str:
        """Returns the text with one U+FFFD for half a letter at its end: with byte fallback it spoils the whole letters before it."""
        for back in range(1, min(LETTER_TOKENS, len(self._ids) + 1)):
            whole = self._decode(self._ids[:-back])
            if not whole.endswith(UNFINISHED):
                return self._text if self._text.startswith(whole) else whole + UNFINISHED
        return self._text

    def _slide(self) -> None:
        kept = self._ids[-CONTEXT:]
        text, waiting = self._decode(kept), len(self._text) - self._sent
        if self._text.endswith(text) and len(text) > waiting and not text.endswith(UNFINISHED):
            self._ids, self._text, self._sent = kept, text, len(text) - waiting


class StopTexts:
    """Ends a text before the stop text that is complete first; of those that end at the same place, before the longest.

    Args:
        texts: Stop texts, none empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._waiting = ""
        self.complete = False

    def add(self, text: str) -> str:
        """Takes text; returns the text that cannot belong to a stop text. After a complete stop text it returns nothing."""
        if self.complete:
            return ""
        self._waiting += text
        places = [(place + len(stop), place) for stop in self._texts if (place := self._waiting.find(stop)) >= 0]
        if places:
            self.complete = True
            return self._waiting[: min(places)[1]]
        keep = self._start_of_stop()
        ready, self._waiting = self._waiting[: len(self._waiting) - keep], self._waiting[len(self._waiting) - keep :]
        return ready

    def end(self) -> str:
        """Returns the text that was held back for a stop text that did not come."""
        ready, self._waiting = "" if self.complete else self._waiting, ""
        return ready

    def _start_of_stop(self) -> int:
        """Returns the length of the longest end of the text that a stop text starts with."""
        longest = max((len(stop) - 1 for stop in self._texts), default=0)
        for size in range(min(longest, len(self._waiting)), 0, -1):
            if any(stop.startswith(self._waiting[-size:]) for stop in self._texts):
                return size
        return 0


class Pieces:
    """The text of one answer in pieces; see above."""

    def __init__(self, decode: Callable[[list[int]], str], held: int = 0, stop: Sequence[str] = ()) -> None:
        self._decoded, self._stop = Decoded(decode, held), StopTexts(stop)

    def add(self, ids: Sequence[int]) -> str:
        """Takes ids one by one, up to the end of a stop text; returns the new piece."""
        return self._stop.add(self._decoded.add(ids))

    def end(self) -> str:
        """Returns the last piece."""
        return self._stop.add(self._decoded.end()) + self._stop.end()

    @property
    def letters(self) -> int:
        """See `Decoded.letters`; the letters of stop texts count too."""
        return self._decoded.letters

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._stop.complete
