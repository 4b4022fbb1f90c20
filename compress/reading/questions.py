"""Data for question-answering: windows of contexts, with the tokens that the answer begins and ends at (`foundation.labels.spans`).

Questions are divided into splits first, then their contexts into windows (`foundation.standalone.windows`), so that all windows of a
question are in one split. A single file gives a fifth of its contexts, chosen by content hash, with all their questions to the test split.

As in the example for SQuAD of Transformers, training takes every window, points at the first token of all where a window does not hold the
whole answer, and reads the first of several true answers. Figures use all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.reading.sources import read_sources, repeats_of
from compress.reading.squad import Gold
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, hold_out
from foundation.labels.spans import NO_ANSWER, labels_of
from foundation.labels.tasks import Task
from foundation.labels.value import Numbers
from foundation.models.config import NO_TOKENIZER
from foundation.models.inputs.tokenizer import TrainTokenizer, load_tokenizer, train_bpe
from foundation.standalone.windows import Paired, Window, paired, windows

NAMES = ("start", "end")
"""The two logits of a token."""
HOLD_OUT_SHARE = 0.2
CHUNK = 1024
Log = Callable[[str], None]


@dataclass(frozen=True)
class Reader:
    """How contexts are read."""

    tokenizer: Any
    """One of the library `tokenizers` that does not truncate."""
    max_length: int
    stride: int


def load_questions(config: DataConfig, task: Task, tokenizer: str | TrainTokenizer | None, log: Log) -> Data:
    """Reads the data of a recipe whose questions are answered from their contexts.

    Args:
        config: The data section.
        task: A task that finds spans.
        tokenizer: Hub id or folder of a tokenizer (or of a model), or the settings to train one.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: The files cannot be read, or a question leaves too few tokens for its context.
    """
    if tokenizer is None:
        raise InputError.of([NO_TOKENIZER])
    sources = read_sources(config, task, log)
    texts = [text for source in sources["train"] for row in source.rows if isinstance(row, tuple) for text in row]
    trained = train_bpe(texts, tokenizer.vocab_size, pads=True) if isinstance(tokenizer, TrainTokenizer) else None
    engine = trained.tokenizer if trained is not None else load_tokenizer(str(tokenizer)).backend_tokenizer
    engine.no_padding()
    engine.no_truncation()
    reader = Reader(engine, config.max_length, config.shared_tokens)
    places = [source.place(number) for found in sources.values() for source in found for number in range(len(source.rows))]
    golds: list[tuple[Gold, ...]] = [label for found in sources.values() for source in found for label in source.labels]
    splits, first = {}, 0
    for name, found in sources.items():
        rows = [row for source in found for row in source.rows]
        contexts: dict[Any, int] = {}
        numbers = [contexts.setdefault(row[1], len(contexts)) for row in rows if isinstance(row, tuple)]
        splits[name] = Split(rows, Numbers(np.arange(first, first + len(rows))), np.array(numbers, np.int64), repeats_of(found))
        first += len(rows)
    if list(splits) == ["train"] and local(config.path, "data.path").is_file():
        splits["train"], splits["test"] = _by_context(splits["train"])
        count = len(splits["test"])
        log(f"data: {config.path} is a single file; {count} of its questions, of contexts chosen by content hash, become the test split")
    told = f"data.path {config.path}"

    def log_questions(line: str) -> None:
        log(line.replace("_rows", "_ROWS").replace("rows", "questions").replace("_ROWS", "_rows"))

    data = divide(splits["train"], splits.get("test"), splits.get("validation"), (), told, log_questions, config.keep_evaluation_rows)
    names = (*NAMES, NO_ANSWER) if not all(golds) else NAMES
    made = {name: _windows(name, getattr(data, name), golds, places, reader, log) for name in ("train", "selection", "evaluation")}
    return replace(data, labels=names, tokenizer=trained, train=made["train"], selection=made["selection"], evaluation=made["evaluation"])


def _by_context(split: Split) -> tuple[Split, Split]:
    """Returns the questions of some contexts, and the questions of the others."""
    contexts = [row[1] for row in split.rows if isinstance(row, tuple)]
    once: list[Any] = list(dict.fromkeys(contexts))
    chosen = set(map(str, hold_out(Split(once, Numbers(np.zeros(len(once)))), HOLD_OUT_SHARE)[1].rows))
    numbers = range(len(contexts))
    rest, test = ([number for number in numbers if (contexts[number] in chosen) is held] for held in (False, True))
    return split.take(rest), split.take(test)


def _windows(name: str, split: Split, golds: Sequence[tuple[Gold, ...]], places: Sequence[str], reader: Reader, log: Log) -> Split:
    """Returns the windows of the contexts of a split of questions, whose labels are their numbers in `golds`; train has no true texts."""
    rows: list[Any] = []
    numbers: list[int] = []
    spans: list[tuple[int, int]] = []
    known = split.labels.array.tolist()
    for number, (pair, tokens) in enumerate(_tokenized(split, reader)):
        try:
            made = windows(pair, tokens, reader.max_length, reader.stride)
        except ValueError as error:
            raise InputError(f"{places[known[number]]}", f"{error}") from error
        rows += made
        numbers += [number] * len(made)
        spans += [span_in(window, tokens, golds[known[number]]) for window in made]
    true = [golds[number] for number in known]
    none = sum(not answers for answers in true)
    log(f"data: {name}: {len(true)} questions, {len(rows)} windows" + f", {none} questions without an answer" * bool(none))
    texts = [[] if name == "train" else [gold.text for gold in answers] for answers in true]
    return Split(rows, labels_of(np.array(spans).reshape(-1, 2), numbers, [bool(answers) for answers in true], texts))


def _tokenized(split: Split, reader: Reader) -> Iterator[tuple[tuple[str, str], Paired]]:
    """Yields each question with its context, and their tokens."""
    pairs = [row for row in split.rows if isinstance(row, tuple)]
    for start in range(0, len(pairs), CHUNK):
        some = pairs[start : start + CHUNK]
        yield from zip(some, paired(reader.tokenizer, some), strict=True)


def span_in(window: Window, tokens: Paired, golds: Sequence[Gold]) -> tuple[int, int]:
    """Returns the first and the last token of the first true answer in a window; (0, 0) where it does not hold the whole answer."""
    characters = tokens.characters[window.start : window.stop]
    if not golds:
        return 0, 0
    begin, behind = golds[0].start, golds[0].start + len(golds[0].text)
    if characters[0, 0] > begin or characters[-1, 1] < behind:
        return 0, 0
    first = int(np.searchsorted(characters[:, 0], begin, side="right")) - 1
    last = int(np.searchsorted(characters[:, 1], behind, side="left"))
    return tokens.first + first, tokens.first + last
