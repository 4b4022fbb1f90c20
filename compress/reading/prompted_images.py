"""Images with classes, for zero-shot classification: each class is described by texts made of its name.

    selection, evaluation   x_1 ... x_n, t_11, t_12, ...    every image, and every class in every template
    train                   x_1, t_1, x_2, t_2, ...         pairs: every image with its class in one of the templates, which take turns

Templates hold `{}` where the name goes; underscores of a name become spaces. Rows are split before this: the texts come
from the recipe and leak nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from foundation.core.errors import InputError
from foundation.data.splits import Data, Split
from foundation.labels import zero_shot
from foundation.standalone.preprocess import Row

TEMPLATES = ("a photo of a {}",)
"""Default prompt template of a class."""
MOST_PAIRS = 2**24


def with_prompts(data: Data, templates: Sequence[str], where: str, log: Callable[[str], None]) -> Data:
    """Returns the data with texts about the classes; see `foundation.labels.zero_shot` for its labels.

    Args:
        data: Splits of images with class ids.
        templates: Texts with `{}` where the name of a class goes.
        where: Name of the data in messages.
        log: Receives a message about the texts.

    Raises:
        InputError: Two classes have the same texts, or a split has more images than can be numbered.
    """
    texts = [[template.format(name.replace("_", " ")) for template in templates] for name in data.labels]
    told: dict[str, str] = {}
    for name, of_class in zip(data.labels, texts, strict=True):
        if told.setdefault(of_class[0], name) != name:
            raise InputError(
                where, f"the classes {told[of_class[0]]} and {name} have the same text, {of_class[0]!r}", remedy="rename one of them"
            )
    for split in (data.train, data.selection, data.evaluation):
        if len(split) > MOST_PAIRS:
            raise InputError(where, f"{len(split)} images in a split", f"at most {MOST_PAIRS} are allowed")
    log(f"data: {len(texts)} classes are told by {len(templates)} text(s) each, such as {texts[0][0]!r}")
    selection, evaluation = (_judged(split, texts) for split in (data.selection, data.evaluation))
    return replace(data, train=_pairs(data.train, texts), selection=selection, evaluation=evaluation)


def _judged(split: Split, texts: Sequence[Sequence[str]]) -> Split:
    """Returns all images, and then all texts."""
    rows: list[Row] = [*split.rows, *(text for of_class in texts for text in of_class)]
    classes = np.concatenate([split.labels.array, np.repeat(np.arange(len(texts)), len(texts[0]))])
    sides = np.full(len(rows), zero_shot.TEXT)
    sides[: len(split)] = zero_shot.IMAGE
    return Split(rows, zero_shot.labels_of(sides, classes))


def _pairs(split: Split, texts: Sequence[Sequence[str]]) -> Split:
    """Returns every image with a text about its class after it."""
    rows: list[Row] = []
    seen = [0] * len(texts)
    for image, label in zip(split.rows, split.labels.array.tolist(), strict=True):
        rows += [image, texts[label][seen[label] % len(texts[label])]]
        seen[label] += 1
    sides = np.tile([zero_shot.IMAGE, zero_shot.TEXT], len(split))
    return Split(rows, zero_shot.labels_of(sides, np.repeat(split.labels.array, 2), np.repeat(np.arange(len(split)), 2)))
