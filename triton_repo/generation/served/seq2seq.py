"""An encoder-decoder in OpenVINO, which answers groups of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .encoder_decoder import EncoderDecoder
from .grouped import Grouped, Special
from .language_text import LanguageText
from .logprobs import Spelling
from .opened import Opened
from .request import Limits
from .structures import Structures

SEQ2SEQ = "seq2seq"


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model.

    Args:
        folder: Holds `seq2seq/`.
        parameters: The parameters in config.pbtxt.
    """
    folder = folder / SEQ2SEQ
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=False,
        beams=True,
        apart=True,
        structured=True,
        scored=True,
    )
    properties, special = json.loads(parameters["properties"]), Special(**json.loads(parameters["special"]))
    engine = Grouped(
        lambda: EncoderDecoder(folder, properties, special.pad), special, int(parameters["max_running"]), int(parameters["max_waiting"])
    )
    text = LanguageText.load(folder)
    return Opened(text, limits, engine, text.held_letters, Structures(text, limits.vocabulary, special.ends), Spelling(text))
