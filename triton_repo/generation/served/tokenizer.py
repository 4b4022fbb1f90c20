"""The tokenizer of a decoder, as OpenVINO GenAI reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino_genai

CLEANED_LETTERS = 8
"""Letters at the end of a text that a tokenizer which cleans up may still change."""
CLEANING = b"('[ms])"
"""Part of the regular expression that cleans up, a constant of the detokenizer."""


class GenaiTokenizer:
    """The tokenizer of OpenVINO GenAI.

    Args:
        folder: Holds openvino_tokenizer.xml and openvino_detokenizer.xml.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = openvino_genai.Tokenizer(str(folder))
        self.has_template = bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Returns the ids of a text, int64 [1, P]."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).input_ids.data

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(ids)
        return text

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Returns a conversation as text; raises RuntimeError where the template does not take it."""
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return text


def held_letters(folder: Path) -> int:
    """Returns how many letters at the end of a text later tokens may change: none unless the detokenizer removes spaces before
    punctuation, so that a token changes text before it."""
    return CLEANED_LETTERS if CLEANING in (folder / "openvino_detokenizer.bin").read_bytes() else 0
