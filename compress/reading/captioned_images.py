"""Images with captions of their own, for models that find images by words and words by images (`foundation.labels.captions`).

    selection, evaluation   x_1 ... x_n, t_11, t_12, ...              every image, and every caption
    train                   x_1, t_11, x_1, t_12, ..., x_2, t_21 ...  pairs: every caption with its image before it

A row of a table is an image with one caption, or a list of captions (Flickr30k, COCO). Rows with the same image are one image with the
captions of them all, and a caption that an image has twice counts once. An image of several files repeats as often as the file that
repeats most. Images are divided into splits with all of their captions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compress.reading.prompted_images import MOST_PAIRS
from compress.reading.sources import Source, numbers_of, read_sources
from foundation.core.errors import InputError, Problem
from foundation.core.shown import is_unicode, shown
from foundation.data.config import DataConfig
from foundation.data.splits import Data, Split, divide, with_test
from foundation.labels import captions, zero_shot
from foundation.labels.tasks import Task
from foundation.labels.value import Numbers
from foundation.standalone.preprocess import Row

SHOWN_PROBLEMS = 3
Log = Callable[[str], None]
Captions = Sequence[str]


def load_captioned(config: DataConfig, task: Task, log: Log) -> Data:
    """Reads the data of a recipe whose images have captions.

    Args:
        config: The data section.
        task: A task whose images have captions.
        log: Receives messages about what was found and decided.

    Raises:
        InputError: The files cannot be read, an image has no caption, or a split has more pairs than can be numbered.
    """
    known: list[Captions] = []
    splits: dict[str, Split] = {}
    problems: list[Problem] = []
    for name, sources in read_sources(config, task, log).items():
        try:
            splits[name] = _images(sources, known)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError.of(problems)
    with_test(splits, config.path, log, "images")
    where = f"data.path {config.path}"
    data = divide(splits["train"], splits.get("test"), splits.get("validation"), (), where, log, config.keep_evaluation_rows)
    parts = {name: _captions_of(getattr(data, name), known) for name in ("train", "selection", "evaluation")}
    for name, part in parts.items():
        if sum(map(len, part)) > MOST_PAIRS:
            raise InputError(where, f"{sum(map(len, part))} captions in {name}", f"at most {MOST_PAIRS} are allowed")
    log(f"data: captions: {', '.join(f'{sum(map(len, part))} in {name}' for name, part in parts.items())}")
    selection, evaluation = (_judged(getattr(data, name), parts[name]) for name in ("selection", "evaluation"))
    return replace(data, train=_pairs(data.train, parts["train"]), selection=selection, evaluation=evaluation)


def _images(sources: Sequence[Source], known: list[Captions]) -> Split:
    """Returns the different images of a split, each with its place in `known` as its label, where its captions are added."""
    found: dict[Any, dict[str, None]] = {}
    repeats: dict[Any, int] = {}
    problems = []
    for source in sources:
        for index, (row, cell) in enumerate(zip(source.rows, source.labels, strict=True)):
            texts, problem = _texts(cell)
            if problem:
                problems.append(Problem(source.place(index), problem))
            found.setdefault(row, {}).update(dict.fromkeys(texts))
            repeats[row] = max(source.repeat, repeats.get(row, 1))
    if problems:
        hidden = len(problems) - SHOWN_PROBLEMS
        more = [Problem(sources[0].name, f"{hidden} more rows like these")] if hidden > 0 else []
        raise InputError.of(problems[:SHOWN_PROBLEMS] + more)
    numbers = np.arange(len(known), len(known) + len(found))
    known += [tuple(texts) for texts in found.values()]
    return Split(list(found), Numbers(numbers), repeats=numbers_of([*repeats.values()]))


def _texts(cell: Any) -> tuple[list[str], str | None]:
    """Returns the captions of a cell, or what is wrong with it."""
    texts = [*cell] if isinstance(cell, list | tuple) else [cell]
    if not texts:
        return [], "no caption given; an image needs at least one"
    for text in texts:
        if not isinstance(text, str) or not text.strip() or not is_unicode(text):
            return [], f"{shown(text)} given as caption; a text, or a list of texts, is allowed"
    return texts, None


def _captions_of(split: Split, known: Sequence[Captions]) -> list[Captions]:
    return [known[number] for number in split.labels.array.tolist()]


def _judged(split: Split, texts: Sequence[Captions]) -> Split:
    """Returns all images, and then all captions."""
    rows: list[Row] = [*split.rows, *(text for of_image in texts for text in of_image)]
    images = np.arange(len(split))
    numbers = np.concatenate([images, np.repeat(images, [len(of_image) for of_image in texts])])
    sides = np.where(np.arange(len(rows)) < len(split), zero_shot.IMAGE, zero_shot.TEXT)
    return Split(rows, captions.labels_of(sides, numbers))


def _pairs(split: Split, texts: Sequence[Captions]) -> Split:
    """Returns every caption with its image before it; an image that repeats is one image, so that no loss takes a copy for another."""
    known = split.labels.array.tolist()
    pairs = [(row, number, text) for row, number, of_image in zip(split.rows, known, texts, strict=True) for text in of_image]
    rows: list[Row] = [row for image, _, text in pairs for row in (image, text)]
    sides = np.tile([zero_shot.IMAGE, zero_shot.TEXT], len(pairs))
    numbers = np.repeat(np.unique([number for _, number, _ in pairs], return_inverse=True)[1], 2)
    return Split(rows, zero_shot.labels_of(sides, numbers, np.repeat(np.arange(len(pairs)), 2)))
