"""A decoder in OpenVINO GenAI, with continuous batching where its attention allows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino_genai

from .asked import Limits
from .engine import Engine
from .opened import Opened
from .paged import Paged, Proposals
from .stateful import Stateful

GENAI, DRAFT = "genai", "draft"
CLEANED_LETTERS = 8
"""Letters at the end of a text that a tokenizer which cleans up may still change."""
CLEANING = b"('[ms])"
"""Part of the regular expression that cleans up, a constant of the detokenizer."""


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model.

    Args:
        folder: Holds `genai/`, and `draft/` where a draft proposes tokens.
        parameters: Those of config.pbtxt.
    """
    told, draft, folder = json.loads(parameters.get("proposals", "{}")), folder / DRAFT, folder / GENAI
    tokenizer, paged = GenaiTokenizer(folder), parameters["mode"] == "paged"
    proposals = Proposals(told["tokens"], draft if told["draft"] else None, told["properties"]) if told else None
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=tokenizer.has_template,
        beams=paged and proposals is None,
        proposes="" if proposals is None else "text" if proposals.draft is None else "draft",
    )
    properties, waiting = json.loads(parameters["properties"]), int(parameters["max_waiting"])
    room = int(parameters["max_running"])
    engine: Engine = Paged(folder, properties, room, waiting, proposals) if paged else Stateful(folder, properties, waiting)
    return Opened(tokenizer, limits, engine, CLEANED_LETTERS if cleans_up(folder / "openvino_detokenizer.bin") else 0)


class GenaiTokenizer:
    """The tokenizer of OpenVINO GenAI."""

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


def cleans_up(detokenizer: Path) -> bool:
    """Whether a detokenizer removes spaces before punctuation, so that a token changes text before it."""
    return CLEANING in detokenizer.read_bytes()
