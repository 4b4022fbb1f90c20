"""A decoder in ONNX Runtime, with continuous batching."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .batched import Batched
from .language_text import LanguageText
from .logprobs import Spelling
from .onnx_decoder import OnnxDecoder
from .opened import Opened, ends_of
from .request import Limits
from .structures import Structures

ONNX, MODEL = "onnx", "model.onnx"


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model.

    Args:
        folder: Holds `onnx/`.
        parameters: The parameters in config.pbtxt.
    """
    folder = folder / ONNX
    text, properties = LanguageText.load(folder), json.loads(parameters["properties"])
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=text.has_template,
        tools=text.takes_tools,
        beams=True,
        penalizes=True,
        structured=True,
        scored=True,
    )
    ends = ends_of(folder)
    engine = Batched(
        lambda: OnnxDecoder(folder / MODEL, properties),
        ends,
        int(parameters["max_running"]),
        int(parameters["max_waiting"]),
    )
    return Opened(text, limits, engine, text.held_letters, Structures(text, limits.vocabulary, ends), Spelling(text))
