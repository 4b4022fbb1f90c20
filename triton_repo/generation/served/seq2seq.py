"""An encoder-decoder in OpenVINO, which answers groups of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from .asked import Limits
from .encoder_decoder import EncoderDecoder
from .grouped import Grouped, Special
from .opened import Opened

SEQ2SEQ = "seq2seq"
CLEANED_LETTERS = 8
"""Letters at the end of a text that a tokenizer which cleans up may still change."""


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model.

    Args:
        folder: Holds `seq2seq/`.
        parameters: Those of config.pbtxt.
    """
    folder = folder / SEQ2SEQ
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=False,
        beams=True,
        apart=True,
    )
    properties, special = json.loads(parameters["properties"]), Special(**json.loads(parameters["special"]))
    engine = Grouped(
        lambda: EncoderDecoder(folder, properties, special.pad), special, int(parameters["max_running"]), int(parameters["max_waiting"])
    )
    return Opened(SourceTokenizer(folder), limits, engine, CLEANED_LETTERS)


class SourceTokenizer:
    """The tokenizer of a checkpoint, for sources and answers."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises RuntimeError: sources are no conversations."""
        raise RuntimeError("an encoder-decoder takes a source text, no conversation")
