"""A decoder on the fused kernels, with continuous batching on the GPU of its process.

The folder also holds `kernel_decoder.py`, which is `export/fused/decoder/served.py`, and below `packages/` the modules of ours that it
imports. Prompts are read whole. An answer begins once there are pages for its prompt and MAX_TOKENS. Nothing searches with beams.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from .answer import Answer
from .batched import Batched, Decoder
from .language_text import LanguageText
from .logprobs import Spelling
from .opened import Opened, ends_of
from .request import Limits
from .structures import Structures

KERNELS, PACKAGES = "kernels", "packages"


class PagedDecoder(Decoder, Protocol):
    """A model whose texts share the memory of one cache."""

    def fits(self, lengths: Sequence[int]) -> bool:
        """Returns whether texts of these lengths have room at once."""


class Reserving(Batched):
    """Continuous batching where an answer begins once there is memory for all tokens that it may get.

    Args:
        decoder: The model; after an error it goes on with an empty cache.
        ends: Tokens that end an answer.
        room: Answers that run at once.
        max_waiting: Answers that wait.
    """

    def __init__(self, decoder: PagedDecoder, ends: Collection[int], room: int, max_waiting: int) -> None:
        self._pages = decoder
        super().__init__(lambda: decoder, ends, room, max_waiting)

    def _fits(self, answer: Answer) -> bool:
        return self._pages.fits([_longest(one) for one in (*self._running(), answer)])


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model, and compiles the kernels.

    Args:
        folder: Holds `kernels/` and `packages/`.
        parameters: The parameters in config.pbtxt, and `ordinal`, the number of the GPU; empty: the current one.
    """
    sys.path.insert(0, str(folder / PACKAGES))
    module = importlib.import_module(".kernel_decoder", __package__)  # it is there next to a served model alone
    folder, ordinal = folder / KERNELS, parameters["ordinal"]
    text = LanguageText.load(folder)
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=text.has_template,
        tools=text.takes_tools,
        beams=False,
        structured=True,
        scored=True,
    )
    room, ends = int(parameters["max_running"]), ends_of(folder)
    decoder = module.KernelDecoder(
        folder,
        json.loads(parameters["properties"]),
        int(ordinal) if ordinal else None,
        rows=room,
        context=limits.context,
        cache_tokens=int(parameters["cache_tokens"]),
    )
    decoder.prepare()
    engine = Reserving(decoder, ends, room, int(parameters["max_waiting"]))
    return Opened(text, limits, engine, text.held_letters, Structures(text, limits.vocabulary, ends), Spelling(text))


def _longest(answer: Answer) -> int:
    """Returns the most tokens of a text with its answer."""
    return len(answer.request.prompt) + int(answer.request.values["MAX_TOKENS"])
