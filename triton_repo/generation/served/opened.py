"""Parts of a served model, whatever its engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .answer import Answer, Client
from .engine import Engine
from .request import Limits, Request, Tokenizer

if TYPE_CHECKING:
    from .logprobs import Spelling
    from .structures import Structures


@dataclass(frozen=True)
class Opened:
    """A model that is ready to answer."""

    tokenizer: Tokenizer
    limits: Limits
    engine: Engine
    """Not started yet."""
    held: int
    """Letters at the end of a text that later tokens may change; see `pieces.Decoded`."""
    structures: Structures | None = None
    """Structures of its answers, where the logits are ours."""
    spelling: Spelling | None = None
    """How its tokens are written, where the logits are ours."""

    def answer(self, request: Request, client: Client) -> Answer:
        """Returns the answer to a request; the engine does not have it yet.

        Raises:
            Refused: Its structure is wrong.
        """
        structure = None if request.wanted is None or self.structures is None else self.structures.begin(request.wanted)
        most = request.values["LOGPROBS"]
        listed = None if most is None or self.spelling is None else self.spelling.begin(most)
        decode = self.tokenizer.decode_calls if request.calls else self.tokenizer.decode
        return Answer(request, client, decode, self.held, structure, listed)


def ends_of(folder: Path) -> list[int]:
    """Returns the tokens that end an answer, of generation_config.json in a folder; empty where it names none."""
    end = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    return [] if end is None else [end] if isinstance(end, int) else list(end)
