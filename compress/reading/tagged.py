"""Data for token-classification: sentences with a tag for each word, and the place of its first token (`foundation.labels.tags`).

Tags keep the names and ids of a model, or of a data set that numbers them; else they are O, and B and I of each kind of entity of the train
split, by name. A model without B, or with E and S, gets its own tags.

Words after `data.max_length` tokens are cut off: nothing is learned from them, and they count as O. The log says how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compress.reading.labels import own_names
from compress.reading.same_name import NONE, SameName, listed
from compress.reading.sources import Source, read_sources, repeats_of
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, with_test
from foundation.labels.tags import NO_PIECE, OUTSIDE, first_pieces, kinds_of, labels_of, tags_of
from foundation.labels.tasks import Task
from foundation.models.config import NO_TOKENIZER
from foundation.models.inputs.tokenizer import TrainTokenizer, load_tokenizer, train_bpe

CHUNK = 1024
Log = Callable[[str], None]


def load_tagged(
    config: DataConfig, task: Task, label_names: tuple[str, ...] | None, tokenizer: str | TrainTokenizer | None, log: Log
) -> Data:
    """Reads the data of a recipe whose words have tags.

    Args:
        config: The data section.
        task: A task that tags words.
        label_names: Names of the tags by id if the model determines them; None takes them from the data.
        tokenizer: Hub id or folder of a tokenizer (or of a model), or the settings to train one.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: The files cannot be read, or there is a kind of entity that the model does not know.
    """
    if tokenizer is None:
        raise InputError.of([NO_TOKENIZER])
    sources = {name: [_filled(source, log) for source in found] for name, found in read_sources(config, task, log).items()}
    names = label_names or _names(sources["train"])
    if [name.strip() for name in names].count(OUTSIDE) != 1:
        raise InputError("model" if label_names else "data", f"the tags are {listed(names)}", f"one of them has to be {OUTSIDE}")
    texts = [row for source in sources["train"] for row in source.rows if isinstance(row, str)]
    trained = train_bpe(texts, tokenizer.vocab_size, pads=True) if isinstance(tokenizer, TrainTokenizer) else None
    engine = trained.tokenizer if trained is not None else load_tokenizer(str(tokenizer)).backend_tokenizer
    engine.no_padding()
    engine.enable_truncation(config.max_length)
    splits = {name: _split(name, found, names, engine, config.max_length, log) for name, found in sources.items()}
    with_test(splits, config.path, log, "sentences")
    data = divide(
        splits["train"], splits.get("test"), splits.get("validation"), names, f"data.path {config.path}", log, config.keep_evaluation_rows
    )
    return replace(data, tokenizer=trained)


def _filled(source: Source, log: Log) -> Source:
    """Returns a source without its empty sentences."""
    kept = [number for number, row in enumerate(source.rows) if row]
    if len(kept) < len(source.rows):
        log(f"data: {source.name}: {len(source.rows) - len(kept)} sentences without a word are left out")
    rows, labels, places = ([column[number] for number in kept] for column in (source.rows, source.labels, source.places))
    documents = [source.documents[number] for number in kept] if source.documents else []
    return replace(source, rows=rows, labels=labels, places=places, documents=documents)


def _names(sources: Sequence[Source]) -> tuple[str, ...]:
    own = own_names(sources)
    if own:
        return own
    kinds = sorted({kind for source in sources for label in source.labels for _, _, kind in label.spans})
    if not kinds:
        raise InputError(sources[0].name, "no entity in the train split", "tags such as B-PER and I-PER are needed")
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


def _split(name: str, sources: Sequence[Source], names: tuple[str, ...], engine: Tokenizer, max_length: int, log: Log) -> Split:
    tags: list[list[str]] = []
    kinds = kinds_of(names)
    same = SameName(kinds)
    for source in sources:
        for number, (words, spans) in enumerate(source.labels):
            try:
                alike = [(start, end, kind if same(kind) == NONE else kinds[same(kind)]) for start, end, kind in spans]
                tags.append(tags_of(alike, words, names))
            except KeyError as error:
                allowed = f"the tags are for {', '.join(kinds)}"
                raise InputError(source.place(number), f"an entity of the kind {shown(error.args[0])}", allowed) from error
    rows: list[Any] = [row for source in sources for row in source.rows]
    pieces = [row for start in range(0, len(rows), CHUNK) for row in first_pieces(engine, rows[start : start + CHUNK])]
    words, lost = sum(map(len, pieces)), sum(int(np.sum(row == NO_PIECE)) for row in pieces)
    found = sum(len(label.spans) for source in sources for label in source.labels)
    cut = f"; {lost} words have no token within data.max_length ({max_length}): not learned, counted as {OUTSIDE}" if lost else ""
    log(f"data: {name}: {len(rows)} sentences, {words} words, {found} entities{cut}")
    return Split(rows, labels_of(tags, pieces, names), _documents(sources), repeats_of(sources))


def _documents(sources: Sequence[Source]) -> np.ndarray | None:
    """Returns the number of the document of each sentence, int64 `[n]`; None where a file does not divide itself into documents."""
    if not all(len(set(source.documents)) > 1 for source in sources):
        return None
    return np.unique([(place, number) for place, source in enumerate(sources) for number in source.documents], axis=0, return_inverse=True)[
        1
    ]
