"""Draws requests from all that the limits of a language model allow, and a little beyond."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from triton_repo.generation.served.messages import MESSAGES
from triton_repo.generation.served.request import (
    CHAT,
    FIELDS,
    INPUT_IDS,
    MAX_STOP_LETTERS,
    MAX_STOPS,
    PENALTIES,
    SAMPLING,
    STOP,
    STOP_TOKENS,
    TEXT,
    Field,
    Limits,
)

Inputs = dict[str, np.ndarray]
TYPES: Mapping[str, Any] = {"TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32}
BY_NAME = {field.name: field for field in FIELDS}
PLAIN = (
    "REPETITION_PENALTY",
    "PRESENCE_PENALTY",
    "FREQUENCY_PENALTY",
    "LOGPROBS",
    "IGNORE_EOS",
    "PIECE_SECONDS",
    "TIMEOUT_SECONDS",
    "STREAM",
)
SEARCHED = ("REPETITION_PENALTY", "PRESENCE_PENALTY", "FREQUENCY_PENALTY", "IGNORE_EOS", "LENGTH_PENALTY", "TIMEOUT_SECONDS")
FORMS = {"plain": PLAIN, "sampled": (*PLAIN, *SAMPLING), "searched": SEARCHED}
LETTERS = st.characters(codec="utf-8", exclude_characters="\0")


def values(field: Field, low: float | None = None, high: float | None = None) -> st.SearchStrategy[np.ndarray]:
    """Returns what a field may be: its limits, and whatever lies between them."""
    kind, least, most = TYPES[field.datatype], field.low if low is None else low, field.high if high is None else min(high, field.high)
    if field.datatype == "TYPE_BOOL":
        drawn: st.SearchStrategy[Any] = st.booleans()
    elif field.datatype == "TYPE_FP32":
        smallest, largest = (float(np.float32(limit)) for limit in (least, most))
        drawn = st.one_of(st.sampled_from([smallest, largest]), st.floats(smallest, largest, width=32))
    else:
        drawn = st.one_of(st.sampled_from([int(least), int(most)]), st.integers(int(least), int(most)))
    return drawn.map(lambda value: np.array([value], kind))


@st.composite
def requests(draw: st.DrawFn, limits: Limits, beams: int) -> Inputs:
    """Draws the inputs of a request.

    Args:
        draw: Of Hypothesis.
        limits: What the model takes.
        beams: Most beams that it has room for; one more is drawn, too.
    """
    inputs = draw(_prompts(limits))
    room = max(1, limits.context - len(inputs.get(INPUT_IDS, ())))
    if draw(st.booleans()):
        inputs["MAX_TOKENS"] = draw(values(BY_NAME["MAX_TOKENS"], high=room))
    form = draw(st.sampled_from([*FORMS, *FORMS, "searched", "anything"]))
    refused = () if limits.subtracts else PENALTIES
    if form == "searched" and not (limits.penalizes or limits.apart):
        refused = (*refused, "REPETITION_PENALTY")
    if not limits.scored:
        refused = (*refused, "LOGPROBS")
    for name in FORMS.get(form, tuple(BY_NAME)):
        if draw(st.booleans()) and (form == "anything" or name not in refused):
            inputs[name] = draw(values(BY_NAME[name]))
    if form == "sampled":
        inputs["TEMPERATURE"] = draw(values(BY_NAME["TEMPERATURE"], low=BY_NAME["TEMPERATURE"].least))
    if form == "searched":
        inputs["BEAMS"] = draw(st.integers(2, beams + 1).map(lambda count: np.array([count], np.int32)))
        inputs["ANSWERS"] = draw(values(BY_NAME["ANSWERS"], high=int(inputs["BEAMS"][0])))
        inputs["STREAM"] = np.array([False])
    elif draw(st.booleans()):
        inputs[STOP] = texts(*draw(st.lists(st.text(LETTERS, min_size=1, max_size=MAX_STOP_LETTERS), max_size=MAX_STOPS)))
        inputs[STOP_TOKENS] = np.array(draw(st.lists(st.integers(0, limits.vocabulary - 1), max_size=8)), np.int64)
    return inputs


@st.composite
def _prompts(draw: st.DrawFn, limits: Limits) -> Inputs:
    kind = draw(st.sampled_from([INPUT_IDS] * 4 + [TEXT] * 2 + [MESSAGES]))
    if kind == INPUT_IDS:
        length = draw(st.one_of(st.integers(1, limits.context - 1), st.sampled_from([1, limits.context - 1, limits.context])))
        seed = draw(st.integers(0, 2**20))
        return {kind: np.random.default_rng(seed).integers(0, limits.vocabulary, length)}
    text = draw(st.text(LETTERS, max_size=limits.context))
    if kind == TEXT:
        return {kind: texts(text), CHAT: np.array([limits.chat and draw(st.booleans())])}
    return {kind: texts(json.dumps([{"role": draw(st.sampled_from(["user", "system", "x"])), "content": text}]))}


def texts(*found: str) -> np.ndarray:
    """Texts as a request holds them, object [n]."""
    array = np.empty(len(found), np.object_)
    array[:] = [text.encode() for text in found]
    return array
