"""The data of text-generation: documents, tokenized and packed into blocks of one length.

    documents of a split -> ids, joined by the end-of-text token -> cut every `data.max_length` tokens

A text file (.txt, .txt.gz) is one document, a row of any other file or of a data set of the Hub another; rows that all end with a line feed
are the lines of one document (WikiText on the Hub). A document of more than a million characters is tokenized in pieces that end with a
line. The last, shorter block is dropped from training, where all blocks have one length, and kept for evaluation.

Where there is one text and no test or validation split, its last tenth, from the start of a line on, is the test split: neighbouring lines
know each other, so that a random choice would test on what stands beside the training text. A trained tokenizer sees the train split
alone. Choices are made on 5 % of the train blocks, by hash of their tokens, or on validation (`compress.data.splits`).

Left out: a start-of-text token at the head of every block, and attention that stops at the end of a document inside of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compress.core.errors import InputError
from compress.core.next_token import Block, labels_of
from compress.core.tasks import TASKS, Task
from compress.data.config import Columns, DataConfig
from compress.data.sources import Sources, read_sources
from compress.data.splits import Data, Split, divide
from compress.models.tokenizer import TrainedTokenizer, TrainTokenizer, load_tokenizer, pieces, train_bpe

TEST_SHARE = 0.1
Log = Callable[[str], None]


def load_blocks(config: DataConfig, task: Task, tokenizer: str | TrainTokenizer, log: Log) -> Data:
    """Reads the data of a recipe for text-generation.

    Args:
        config: The data section.
        task: What the model predicts: tokens.
        tokenizer: Hub id or folder of a tokenizer (of a model, for example), or how to train one.
        log: Where to tell what was found and decided.

    Returns:
        Blocks of at most `config.max_length` token ids, with the tokens behind each position as labels; no names of classes.

    Raises:
        InputError: The files cannot be read, there is too little text, or the tokenizer cannot be used.
    """
    where = f"data.path {config.path}"
    texts = {split: documents(found) for split, found in _read(config, task, log).items()}
    empty = [split for split, found in texts.items() if not any(text.strip() for text in found)]
    if empty:
        raise InputError(*(f"{where}: the {split} split holds no text; text of at least one block is needed" for split in empty))
    if list(texts) == ["train"]:
        texts["train"], texts["test"] = tail(texts["train"], TEST_SHARE)
        log(f"data: no test or validation split; the last {TEST_SHARE:.0%} of the text ({_characters(texts['test'])}) are the test split")
    trained = train_bpe(texts["train"], tokenizer.vocab_size, pads=False) if isinstance(tokenizer, TrainTokenizer) else None
    encode = _encoder(tokenizer if isinstance(tokenizer, str) else trained)
    splits: dict[str, Split] = {}
    for split, found in texts.items():
        tokens = encode(found)
        blocks = cut(tokens, config.max_length, whole=split == "train")
        if not blocks:
            least = f"one block of data.max_length ({config.max_length})" if split == "train" else "2"
            raise InputError(f"{where}: the {split} split has {len(tokens)} tokens; at least {least} are needed")
        splits[split] = Split(list(blocks), labels_of(blocks, config.max_length - 1))
        log(f"data: {split}: {len(found)} documents, {_characters(found)}, {len(tokens)} tokens, {len(blocks)} blocks")
    data = divide(splits["train"], splits.get("test"), splits.get("validation"), (), where, log)
    return replace(data, tokenizer=trained)


def documents(found: Sequence[Any]) -> list[str]:
    """Returns the documents of some sources: a row each, or all rows of a source where each that is not empty ends with a line feed."""
    texts: list[str] = []
    for source in found:
        rows = [row for row in source.rows if row]
        texts += ["".join(rows)] if all(row.endswith("\n") for row in rows) else rows
    return texts


def tail(texts: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Cuts about the last `share` of the characters off; the cut is at the start of a line, or between documents."""
    left = round(sum(map(len, texts)) * (1 - share))
    for index, text in enumerate(texts):
        if len(text) > left:
            at = text.rfind("\n", 0, left) + 1 or left
            before, after = [*texts[:index], text[:at]], [text[at:], *texts[index + 1 :]]
            return [kept for kept in before if kept], [kept for kept in after if kept]
        left -= len(text)
    return list(texts), []


def cut(tokens: Block, length: int, whole: bool) -> list[Block]:
    """Returns the blocks of a split, int32 `[length]` each; the last may be shorter, of 2 tokens at least, unless they have to be whole."""
    blocks = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    least = length if whole else 2
    return [block for block in blocks if len(block) >= least]


def _read(config: DataConfig, task: Task, log: Log) -> Sources:
    files = [] if config.files is None else [*config.files.train, *config.files.test, *config.files.validation]
    columns = {"data.columns": config.columns, **{f"data.files: {entry.file}: columns": entry.columns for entry in files}}
    problems = [
        f"{key}.{name}: {getattr(given, name)!r} given; {task} reads {' and '.join(TASKS[task].columns)} alone: leave it out"
        for key, given in columns.items()
        for name in Columns.model_fields
        if name not in TASKS[task].columns and getattr(given, name) is not None
    ]
    if problems:
        raise InputError(*problems)
    return read_sources(config, task, log)


def _encoder(tokenizer: str | TrainedTokenizer | None) -> Callable[[Sequence[str]], Block]:
    """Returns what turns the documents of a split into ids, int32, with the end-of-text token between them where there is one."""
    assert tokenizer is not None, "a tokenizer is given or trained"
    if isinstance(tokenizer, TrainedTokenizer):
        engine, end = tokenizer.tokenizer, tokenizer.ids["eos_token_id"]
    else:
        loaded = load_tokenizer(tokenizer)
        engine, end = loaded.backend_tokenizer, loaded.eos_token_id
    engine.no_truncation()
    engine.no_padding()

    def encode(texts: Sequence[str]) -> Block:
        between = [] if end is None else [np.array([end], np.int32)]
        ids: list[Block] = []
        for index, text in enumerate(texts):
            ids += between if index else []
            ids += [np.array(piece.ids, np.int32) for piece in engine.encode_batch_fast(list(pieces(text)), add_special_tokens=False)]
        return np.concatenate([np.zeros(0, np.int32), *ids])

    return encode


def _characters(texts: Sequence[str]) -> str:
    return f"{sum(map(len, texts)):,} characters"
