"""One rule for all engines for where an answer ends: after the first end token, or with the token that completes a stop text.

The tokens of an answer include the one that ends it. Its text ends at the character before the stop text (`foundation.standalone.pieces`);
the code that turns tokens into text cuts it there. Stop texts are looked for in the text, since one text has many spellings in tokens. No
library is asked for them: Transformers drops a token that also holds letters before the stop text, and OpenVINO GenAI 2026.4 keeps the stop
text, passes over those within proposed tokens, and fails at some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from foundation.standalone.language_text import LanguageText
from foundation.standalone.pieces import Pieces


class Ending:
    """Looks for the end of one answer.

    Args:
        tokens: Token ids that end it; none where the engine knows them.
        texts: Texts that end it.
        reader: Returns the decoder from tokens to text; called only if there are stop texts.
    """

    def __init__(self, tokens: Collection[int], texts: Sequence[str], reader: Callable[[], LanguageText]) -> None:
        self._tokens = frozenset(tokens)
        text = reader() if texts else None
        self._pieces = None if text is None else Pieces(text.decode, text.held_letters, texts)
        self.ended = False

    def take(self, ids: Sequence[int]) -> list[int]:
        """Takes the next tokens; returns those that belong to the answer."""
        taken: list[int] = []
        for token in ids:
            if self.ended:
                break
            taken.append(token)
            if self._pieces is not None:
                self._pieces.add([token])
            self.ended = token in self._tokens or (self._pieces is not None and self._pieces.stopped)
        return taken
