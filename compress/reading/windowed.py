"""Training rows of classifiers that read long texts in windows: the text of every window is a row, with the label of its text.

Texts are divided into splits first, so that all windows of a text are in one split. Evaluation and selection rows stay whole: they have one
answer each, pooled from the answers of their windows (`foundation.standalone.windows.merged`). Rows that are sent to a
server stay whole too.

    text of a window   the characters of its tokens; tokenized on its own it may differ by a token where it begins within a word
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split
from foundation.models.config import NO_TOKENIZER
from foundation.models.inputs.tokenizer import load_tokenizer

CHUNK = 1024
Log = Callable[[str], None]


def in_windows(data: Data, config: DataConfig, tokenizer: str | None, log: Log) -> Data:
    """Returns the data with each training row replaced by its windows.

    Args:
        data: Single texts with class ids, or sets of them.
        config: The data section.
        tokenizer: Hub id or folder of a tokenizer (or of a model); None: the data's.
        log: Receives the number of windows.

    Raises:
        InputError: Rows are pairs, there is no tokenizer, or windows share as many tokens as they have.
    """
    if isinstance(data.train.rows[0], tuple):
        raise InputError("data.windows", "given for pairs of texts", "single texts are divided", "leave it, or data.columns.text_pair, out")
    if tokenizer is None and data.tokenizer is None:
        raise InputError.of([NO_TOKENIZER])
    engine = data.tokenizer.tokenizer if tokenizer is None and data.tokenizer else load_tokenizer(str(tokenizer)).backend_tokenizer
    engine.no_padding()
    engine.no_truncation()
    others = len(engine.encode("").ids)
    if config.shared_tokens >= config.max_length - others:
        room = f"a window of data.max_length {config.max_length} has room for {config.max_length - others} tokens of the text"
        raise InputError("data.windows.stride", f"{config.shared_tokens} given", f"{room}, and shares fewer", "give less")
    engine.enable_truncation(config.max_length, stride=config.shared_tokens)
    for name in ("selection", "evaluation"):
        owners, _ = _divided(getattr(data, name), engine)
        log(f"data: {name}: {len(getattr(data, name))} texts are read in {len(owners)} windows")
    owners, texts = _divided(data.train, engine)
    log(f"data: train: {len(data.train)} texts become {len(owners)} rows, one for each window of at most {config.max_length} tokens")
    return replace(data, train=Split(texts, data.train.labels[np.array(owners, np.int64)]))


def _divided(split: Split, engine: Any) -> tuple[list[int], list[Any]]:
    """Returns the index of the text of each window, and the window's text."""
    owners: list[int] = []
    texts: list[Any] = []
    for start in range(0, len(split), CHUNK):
        some = [str(row) for row in split.rows[start : start + CHUNK]]
        for number, (text, whole) in enumerate(zip(some, engine.encode_batch(some), strict=True), start):
            for part in (whole, *whole.overflowing):
                places = [place for place, special in zip(part.offsets, part.special_tokens_mask, strict=True) if not special]
                owners.append(number)
                texts.append(text[places[0][0] : places[-1][1]] if whole.overflowing and places else text)
    return owners, texts
