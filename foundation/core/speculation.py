"""Speculative decoding: tokens are proposed, and the model checks all of them in one pass (Leviathan et al. 2022, 2211.17192).

    step      the model reads its last token and k proposed ones, and keeps those that it would have chosen itself, up to the first other
              one; that one it replaces with its own choice: 1 to k + 1 tokens
    draft     a smaller model with the same tokenizer proposes its k most likely next tokens
    look-up   the text proposes (Saxena 2023, prompt look-up decoding): where its last tokens occurred before, what followed them there

Greedy answers equal the answers of the model alone, token for token, as far as sums over k + 1 tokens at once round as those over one.

Left out: sampling with a draft, since OpenVINO GenAI accepts draft tokens by a rule that changes the distribution, and beams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foundation.core.decoding import Decoding
from foundation.core.errors import InputError

DRAFT_TOKENS = 4
"""Tokens that a draft proposes at once."""
MAX_TOKENS = 32
PROPOSED_MODE = "paged"
"""Mode of an engine in which tokens can be proposed."""
MATCHED_TOKENS = 3
"""Most tokens at the end of a text that are looked up in it."""


@dataclass(frozen=True)
class Speculation:
    """The source of proposed tokens."""

    tokens: int
    """Most tokens that are proposed at once."""
    draft: str | None = None
    """Model file of the draft; None: the text is looked up."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Settings that the draft is compiled with."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise InputError("speculation", f"{self.tokens} tokens at once given", f"1 to {MAX_TOKENS} is allowed")

    def check(self, decoding: Decoding) -> None:
        """Raises InputError if tokens are chosen in a way that nothing can be proposed for."""
        what = "a draft" if self.draft else "prompt look-up"
        if decoding.beams > 1:
            raise InputError("beams", f"{decoding.beams} given with {what}", "a search takes no proposals", "leave one of them out")
        if decoding.samples and self.draft:
            raise InputError(
                "temperature",
                f"{decoding.temperature:g} given with a draft",
                "its tokens are held against the most likely ones",
                "give 0, or look the prompt up instead",
            )

    def proposed(self, prompt: Sequence[int], answer: Sequence[int], steps: Sequence[int], most: int) -> int:
        """Returns how many tokens were proposed for an answer.

        Args:
            prompt: Token ids.
            answer: Token ids.
            steps: How many of them came with each step of the model; nothing is proposed for the first.
            most: Most tokens of the answer.
        """
        count = 0
        for at in range(1, len(steps)):
            done = sum(steps[:at])
            room = min(self.tokens, most - done - 1)  # the model adds one itself
            count += room if self.draft else len(look_up([*prompt, *answer[:done]], room))
        return count

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Speculation:
        """The inverse of `dataclasses.asdict`."""
        return cls(**message)


def look_up(text: Sequence[int], count: int) -> list[int]:
    """Returns the tokens that followed the first occurrence of a text's last tokens, at most `count`.

    The last `MATCHED_TOKENS` are looked for, else one less, and so on; of a short text half.
    """
    longest = MATCHED_TOKENS if len(text) > MATCHED_TOKENS else len(text) // 2
    for size in range(longest, 0, -1):
        last = list(text[-size:])
        for at in range(len(text) - size):
            if list(text[at : at + size]) == last:
                return list(text[at + size : at + size + count])
    return []


def per_step(tokens: int, accepted: int) -> float | None:
    """Returns how many tokens came with a step of the model; None without any."""
    return round(tokens / (tokens - accepted), 4) if tokens else None
