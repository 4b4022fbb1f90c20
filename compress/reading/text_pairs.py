"""Data for text-to-text: pairs of a source and a target text, tokenized.

    source -> ids with the special tokens of the tokenizer          target -> ids with those that it gives a target, the end token last

Tables and Hub data sets have a column for each; a parallel corpus has two line-aligned files (`compress.reading.aligned`). Both texts are
truncated: the source to `data.max_length` tokens, the target to one less, since the decoder reads a start token before it. A trained
tokenizer sees the sources and targets of the train split and is shared by both sides.

Empty targets are left out of training; in evaluation rows they count as an end token that is to be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.reading.sources import numbers_of
from compress.reading.text_blocks import read_texts
from foundation.core.errors import InputError
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, hold_out
from foundation.labels.next_token import Block, labels_of
from foundation.labels.tasks import Task
from foundation.models.inputs.tokenizer import TrainedTokenizer, TrainTokenizer, load_tokenizer, target_engine, train_bpe
from foundation.standalone.preprocess import TokenPair

HOLD_OUT_SHARE = 0.1
Log = Callable[[str], None]
Encode = Callable[[Sequence[str]], list[Block]]


def load_pairs(config: DataConfig, task: Task, tokenizer: str | TrainTokenizer, log: Log) -> Data:
    """Reads the data of a recipe for text-to-text.

    Args:
        config: The data section.
        task: A task of encoder-decoders.
        tokenizer: Hub id or folder of a tokenizer (or of a model), or the settings to train one.
        log: Receives messages about what was found and decided.

    Returns:
        Pairs of token ids, labelled with the ids of their targets; there are no class names.

    Raises:
        InputError: The files cannot be read, there is no pair, or the tokenizer cannot be used.
    """
    files = read_texts(config, task, log)
    found = {split: [row for source in sources for row in source.rows] for split, sources in files.items()}
    pairs = {split: [_filled(split, index, row) for index, row in enumerate(rows)] for split, rows in found.items()}
    trained = _train(pairs["train"], tokenizer) if isinstance(tokenizer, TrainTokenizer) else None
    encode_source, encode_target = _encoders(tokenizer if isinstance(tokenizer, str) else trained, config.max_length)
    splits: dict[str, Split] = {}
    for split, texts in pairs.items():
        times = [file.repeat for file in files[split] for _ in file.rows]
        kept = [(*pair, number) for pair, number in zip(texts, times, strict=True) if pair[1].strip() or split != "train"]
        if len(kept) < len(texts):
            log(f"data: {split}: {len(texts) - len(kept)} pairs with an empty target are left out")
        sources, targets = encode_source([source for source, _, _ in kept]), encode_target([target for _, target, _ in kept])
        rows = [TokenPair(source, target) for source, target in zip(sources, targets, strict=True)]
        repeats = numbers_of([number for _, _, number in kept])
        splits[split] = Split(list(rows), labels_of(rows, config.max_length - 1), repeats=repeats)
        cut = sum(len(row) == config.max_length for row in rows)
        tokens = sum(len(row.target) for row in rows)
        log(f"data: {split}: {len(rows)} pairs, {tokens} tokens to predict; {cut} pairs reach data.max_length ({config.max_length})")
    if list(splits) == ["train"]:
        splits["train"], splits["test"] = hold_out(splits["train"], HOLD_OUT_SHARE)
        log(f"data: no test or validation split; {len(splits['test'])} pairs, chosen by content hash, become the test split")
    data = divide(
        splits["train"], splits.get("test"), splits.get("validation"), (), f"data.path {config.path}", log, config.keep_evaluation_rows
    )
    return replace(data, tokenizer=trained)


def _filled(split: str, index: int, row: Any) -> tuple[str, str]:
    source, target = row
    if not source.strip():
        raise InputError("data", f"{split} pair {index + 1} has an empty source", "a text is needed", "remove the pair")
    return source, target


def _train(pairs: Sequence[tuple[str, str]], settings: TrainTokenizer) -> TrainedTokenizer:
    return train_bpe([text for pair in pairs for text in pair], settings.vocab_size, pads=True, starts=False)


def _encoders(tokenizer: str | TrainedTokenizer | None, max_length: int) -> tuple[Encode, Encode]:
    """Returns the functions from sources and from targets to their ids, int32 [length]."""
    assert tokenizer is not None, "a tokenizer is given or trained"
    if isinstance(tokenizer, TrainedTokenizer):
        engine, end = tokenizer.tokenizer, tokenizer.ids["eos_token_id"]
        return _encoder(engine, max_length, end), _encoder(engine, max_length - 1, end)
    loaded = load_tokenizer(tokenizer)
    if loaded.eos_token_id is None:
        raise InputError("tokenizer", f"{tokenizer} has no end token", "an encoder-decoder needs one", "set eos_token in its config")

    def encode_source(texts: Sequence[str]) -> list[Block]:
        return (
            [np.array(row, np.int32) for row in loaded(list(texts), truncation=True, max_length=max_length)["input_ids"]] if texts else []
        )

    return encode_source, _encoder(target_engine(tokenizer), max_length - 1, loaded.eos_token_id)


def _encoder(engine: Tokenizer, length: int, end: int) -> Encode:
    def encode(texts: Sequence[str]) -> list[Block]:
        engine.no_padding()
        engine.enable_truncation(length)
        return [_ended(row.ids, end, length) for row in engine.encode_batch_fast(list(texts))]

    return encode


def _ended(ids: Sequence[int], end: int, length: int) -> Block:
    """Returns ids that close with the end token, int32, at most `length`."""
    return np.array(ids if ids and ids[-1] == end else [*ids[: length - 1], end], np.int32)
