"""A decoder in OpenVINO GenAI, with continuous batching where its attention allows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import openvino

from .engine import Engine
from .language_text import LanguageText
from .opened import Opened
from .openvino_request import for_this_cpu
from .paged import Paged, Proposals
from .request import Limits
from .stateful import Stateful

GENAI, DRAFT = "genai", "draft"


def open_model(folder: Path, parameters: Mapping[str, str]) -> Opened:
    """Loads tokenizer and model.

    Args:
        folder: Holds `genai/`, and `draft/` where a draft proposes tokens.
        parameters: The parameters in config.pbtxt.
    """
    told, draft, folder = json.loads(parameters.get("proposals", "{}")), folder / DRAFT, folder / GENAI
    text, paged = LanguageText.load(folder), parameters["mode"] == "paged"
    own = partial(for_this_cpu, openvino.Core())
    proposals = Proposals(told["tokens"], draft if told["draft"] else None, own(told["properties"])) if told else None
    limits = Limits(
        context=int(parameters["context"]),
        vocabulary=int(parameters["vocabulary"]),
        seconds=float(parameters["request_seconds"]),
        chat=text.has_template,
        tools=text.takes_tools,
        beams=paged and proposals is None,
        subtracts=False,
        proposes="" if proposals is None else "text" if proposals.draft is None else "draft",
    )
    properties, waiting = own(json.loads(parameters["properties"])), int(parameters["max_waiting"])
    room = int(parameters["max_running"])
    engine: Engine = Paged(folder, properties, room, waiting, proposals) if paged else Stateful(folder, properties, waiting)
    return Opened(text, limits, engine, text.held_letters)
