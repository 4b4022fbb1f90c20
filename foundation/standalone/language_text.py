"""Text of a language model: to token ids and back, and conversations to text. Needs tokenizers and Jinja2; it is copied to servers.

    tokenizer.json   ids of a text, and text of ids
    chat.json        what Transformers reads next to it, settled when the folder was written (`export.generation.text_files`):
                       chat_template    the Jinja program, or null
                       special_tokens   those that a template may name: bos_token, eos_token, ...
                       clean_up         whether spaces before punctuation are removed from decoded text

Every engine and the server read text here, and Transformers reads the same files: the ids are those that a model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .chat_template import Message, Render, TemplateRefused, Tool, compiled, names_tools

CALL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[CALL_ID]", "[ARGS]")
"""What marks calls of functions in an answer; special tokens in some tokenizers."""
TOKENIZER, SETTINGS = "tokenizer.json", "chat.json"
CLEANED_LETTERS = 8
"""Letters at the end of a text that later tokens may change where spaces before punctuation are removed."""
STEADY = ("ByteLevel", "Metaspace", "Fuse", "ByteFallback", "Replace")
"""Decoders whose text later tokens do not change, but for letters that are not whole."""
CLEANED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""Replacements of the clean-up, in this order, as in Transformers."""


@dataclass(frozen=True)
class TextSettings:
    """Contents of chat.json."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    clean_up: bool = False


class LanguageText:
    """Reads and writes the text of a model.

    Args:
        tokenizer: The tokenizer; padding and truncation are switched off.
        settings: What Transformers reads next to it.
    """

    def __init__(self, tokenizer: Tokenizer, settings: TextSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    @classmethod
    def load(cls, folder: Path) -> LanguageText:
        """Reads the two files of a folder; without chat.json there is no chat template."""
        file = folder / SETTINGS
        settings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return cls(Tokenizer.from_file(str(folder / TOKENIZER)), TextSettings(**settings))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return self._cleaned(text)

    def _cleaned(self, text: str) -> str:
        if self.settings.clean_up:
            for old, new in CLEANED:
                text = text.replace(old, new)
        return text

    def decode_calls(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens but `CALL_MARKS`."""
        text: str = self.tokenizer.decode([one for one in ids if one not in self._unwritten], skip_special_tokens=False)
        return self._cleaned(text)

    @cached_property
    def _unwritten(self) -> frozenset[int]:
        """Special tokens that mark no call."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, one in added.items() if one.special and one.content not in CALL_MARKS)

    @property
    def held_letters(self) -> int:
        """Number of letters at the end of a text that later tokens may change."""
        return CLEANED_LETTERS if self.settings.clean_up or not _is_steady(self.tokenizer.decoder) else 0

    @property
    def has_template(self) -> bool:
        """Whether conversations can be written as text."""
        return self.settings.chat_template is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether functions that the model may call can be written as text."""
        return self.settings.chat_template is not None and names_tools(self.settings.chat_template)

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Tool] = ()) -> str:
        """Returns a conversation as text.

        Raises:
            TemplateRefused: There is no template, or it does not take these messages.
        """
        return self._render(messages, add_generation_prompt, tools)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a conversation that the model continues.

        Raises:
            TemplateRefused: See `apply_chat_template`.
        """
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    @cached_property
    def _render(self) -> Render:
        if self.settings.chat_template is None:
            raise TemplateRefused("there is no chat template")
        return compiled(self.settings.chat_template, self.settings.special_tokens)


def _is_steady(decoder: Any) -> bool:
    """Whether later tokens leave a decoder's text as it is, but for letters that are not whole."""
    if decoder is None:
        return False
    told = json.loads(decoder.__getstate__())
    steps = told["decoders"] if told["type"] == "Sequence" else [told]
    kinds = [step["type"] for step in steps]
    if "Replace" in kinds[kinds.index("Fuse") :] if "Fuse" in kinds else False:
        return False  # it replaces what several tokens write together
    return all(step["type"] in STEADY or (step["type"] == "Strip" and not step["stop"]) for step in steps)
