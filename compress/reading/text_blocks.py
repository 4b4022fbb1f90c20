"""Data for text-generation: documents, tokenized and packed into blocks of equal length.

    documents of a split -> ids, joined by the end-of-text token -> cut every `data.max_length` tokens

A text file (.txt, .txt.gz) is one document. In other files and Hub data sets each row is a document, unless all rows end with a line feed:
then they are the lines of a single document (WikiText on the Hub). Documents of more than a million characters are tokenized in pieces that
end at a line break. The shorter last block is dropped for training, where all blocks have equal length, and kept for evaluation.

If there is neither a test nor a validation split, the last tenth of the text, from the start of a line, becomes the test split. Adjacent
lines are related, so random test lines would be too close to the training text. A trained tokenizer sees only the train split. Decisions
are made on the validation split, or on 5 % of the train blocks, chosen by a hash of their tokens (`foundation.data.splits`). Where files
repeat, their blocks do; a block of several files repeats as often as the file that repeats most.

Not supported: a start-of-text token at the start of every block; attention masks at document boundaries within a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compress.reading.sources import Sources, numbers_of, read_sources
from foundation.core.errors import InputError, Problem
from foundation.data.config import Columns, DataConfig
from foundation.data.splits import Data, Split, divide
from foundation.labels.next_token import Block, labels_of
from foundation.labels.tasks import TASKS, Task
from foundation.models.inputs.tokenizer import TrainedTokenizer, TrainTokenizer, load_tokenizer, pieces, train_bpe

TEST_SHARE = 0.1
Log = Callable[[str], None]


def load_blocks(config: DataConfig, task: Task, tokenizer: str | TrainTokenizer, log: Log) -> Data:
    """Reads the data of a recipe for text-generation.

    Args:
        config: The data section.
        task: A task that predicts tokens.
        tokenizer: Hub id or folder of a tokenizer (or of a model), or the settings to train one.
        log: Receives messages about what was found and decided.

    Returns:
        Blocks of at most `config.max_length` token ids, labelled with the next tokens; there are no class names.

    Raises:
        InputError: The files cannot be read, there is too little text, or the tokenizer cannot be used.
    """
    where = f"data.path {config.path}"
    files = read_texts(config, task, log)
    texts = {split: documents(found) for split, found in files.items()}
    empty = [split for split, found in texts.items() if not any(text.strip() for text in found)]
    if empty:
        raise InputError.of(Problem(where, f"the {split} split has no text", "at least one block of text is needed") for split in empty)
    times = [source.repeat for source in files["train"] for _ in documents([source])]
    if list(texts) == ["train"]:
        times = [count for count, text in zip(times, texts["train"], strict=True) if text]
        texts["train"], texts["test"] = tail(texts["train"], TEST_SHARE)
        log(f"data: no test or validation split; the last {TEST_SHARE:.0%} of the text ({_characters(texts['test'])}) is the test split")
    trained = train_bpe(texts["train"], tokenizer.vocab_size, pads=False) if isinstance(tokenizer, TrainTokenizer) else None
    encode = _encoder(tokenizer if isinstance(tokenizer, str) else trained)
    splits: dict[str, Split] = {}
    for split, found in texts.items():
        tokens, starts = encode(found)
        blocks = cut(tokens, config.max_length, whole=split == "train")
        if not blocks:
            least = f"one block of data.max_length ({config.max_length})" if split == "train" else "2"
            raise InputError(where, f"the {split} split has {len(tokens)} tokens", f"at least {least} are needed")
        edges = np.arange(len(blocks)) * config.max_length
        first, last = (np.searchsorted(starts, places, side="right") - 1 for places in (edges, edges + config.max_length - 1))
        spans = zip(first.tolist(), last.tolist(), strict=True)
        repeats = numbers_of([max(times[start : end + 1]) for start, end in spans]) if split == "train" else None
        splits[split] = Split(list(blocks), labels_of(blocks, config.max_length - 1), first, repeats)
        log(f"data: {split}: {len(found)} documents, {_characters(found)}, {len(tokens)} tokens, {len(blocks)} blocks")
    data = divide(splits["train"], splits.get("test"), splits.get("validation"), (), where, log, config.keep_evaluation_rows)
    return replace(data, tokenizer=trained)


def documents(sources: Sequence[Any]) -> list[str]:
    """Returns the documents of sources: one per row, or one per source if all of its non-empty rows end with a line feed."""
    texts: list[str] = []
    for source in sources:
        rows = [row for row in source.rows if row]
        texts += ["".join(rows)] if all(row.endswith("\n") for row in rows) else rows
    return texts


def tail(texts: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Splits texts into (start, about the last `share` of the characters), at the start of a line or between documents."""
    left = round(sum(map(len, texts)) * (1 - share))
    for index, text in enumerate(texts):
        if len(text) > left:
            at = text.rfind("\n", 0, left) + 1 or left
            before, after = [*texts[:index], text[:at]], [text[at:], *texts[index + 1 :]]
            return [kept for kept in before if kept], [kept for kept in after if kept]
        left -= len(text)
    return list(texts), []


def cut(tokens: Block, length: int, whole: bool) -> list[Block]:
    """Cuts tokens into blocks, int32 `[length]`. The last one may have 2 to `length` tokens; `whole` drops it if shorter."""
    blocks = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    least = length if whole else 2
    return [block for block in blocks if len(block) >= least]


def read_texts(config: DataConfig, task: Task, log: Log) -> Sources:
    """Reads the texts of a task whose rows have no labels.

    Raises:
        InputError: The files cannot be read, or columns are given that the task does not read.
    """
    facts = TASKS[task]
    files = [] if config.files is None else [*config.files.train, *config.files.test, *config.files.validation]
    columns = {"data.columns": config.columns, **{f"data.files: {entry.file}: columns": entry.columns for entry in files}}
    problems = [
        Problem(f"{key}.{name}", f"{getattr(given, name)!r} given", f"{task} reads only {' and '.join(facts.columns)}", "leave it out")
        for key, given in columns.items()
        for name in Columns.model_fields
        if name not in facts.columns and getattr(given, name) is not None
    ]
    if problems:
        raise InputError.of(problems)
    return read_sources(config, task, log)


def _encoder(tokenizer: str | TrainedTokenizer | None) -> Callable[[Sequence[str]], tuple[Block, list[int]]]:
    """Returns a function from the documents of a split to ids, int32, joined by the end-of-text token if the tokenizer has one, and the
    place of the first token of each document."""
    assert tokenizer is not None, "a tokenizer is given or trained"
    if isinstance(tokenizer, TrainedTokenizer):
        engine, end = tokenizer.tokenizer, tokenizer.ids["eos_token_id"]
    else:
        loaded = load_tokenizer(tokenizer)
        engine, end = loaded.backend_tokenizer, loaded.eos_token_id
    engine.no_truncation()
    engine.no_padding()

    def encode(texts: Sequence[str]) -> tuple[Block, list[int]]:
        between = [] if end is None else [np.array([end], np.int32)]
        ids: list[Block] = []
        starts, count = [], 0
        for index, text in enumerate(texts):
            joint = between if index else []
            own = [np.array(piece.ids, np.int32) for piece in engine.encode_batch_fast(list(pieces(text)), add_special_tokens=False)]
            starts.append(count + len(joint))
            count += len(joint) + sum(map(len, own))
            ids += [*joint, *own]
        return np.concatenate([np.zeros(0, np.int32), *ids]), starts

    return encode


def _characters(texts: Sequence[str]) -> str:
    return f"{sum(map(len, texts)):,} characters"
