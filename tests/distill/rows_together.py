"""Rows that belong together, and models of vectors, for trainings that one process and several come to the same in (`processes`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foundation.data.splits import Data, Split
from foundation.labels import text_groups, vectors, zero_shot
from foundation.labels.tasks import Task
from foundation.models.config import ModelConfig
from foundation.models.importing import import_model
from tests import tiny_embedding, tiny_towers
from tests.export import sentiment

GROUPS = 28
"""Ten batches of three an epoch; the last of them has a single group, fewer than processes."""
BATCH: Mapping[str, int] = {"pairs": 6, "scored": 6, "mined": 12, "mined dropping": 12, "towers": 6}
"""Rows of three groups, by what the rows are."""
KINDS = tuple(BATCH)


def task_of(kind: str) -> Task:
    """The task of some rows."""
    return "image-text" if kind == "towers" else "sentence-embedding"


def write(folder: Path, kind: str) -> None:
    """Writes the checkpoint that is trained on some rows, as a run imports it."""
    source, out = folder.with_name(f"{folder.name}-source"), folder
    if kind == "towers":
        tiny_towers.checkpoint(source)
    else:
        tiny_embedding.folder(source, layers=2, dropout=0.1 if kind.endswith("dropping") else 0.0)
    out.mkdir()
    import_model(ModelConfig(path=str(source), task=task_of(kind)), ("score",) if kind != "towers" else tuple(tiny_towers.COLOURS), 0, out)


def data_of(kind: str) -> Data:
    """Rows to train on, and others to select by."""
    if kind == "towers":
        seen = of_images(paired=False)
        return Data(of_images(paired=True), seen, seen, tuple(tiny_towers.COLOURS))
    texts = sentiment.rows(5 * GROUPS)
    scores = np.random.default_rng(0).random(GROUPS)
    scored = Split(list(texts[: 2 * GROUPS]), vectors.labels_of(scores))
    if kind == "scored":
        return Data(scored, scored, scored, ("score",))
    negatives = [number % 3 if kind.startswith("mined") else 0 for number in range(GROUPS)]
    groups = [tuple(texts[5 * number : 5 * number + 2 + count]) for number, count in enumerate(negatives)]
    rows = [text for group in text_groups.filled(groups) for text in group]
    return Data(Split(list(rows), text_groups.labels_of(groups)), scored, scored, ("score",))


def of_images(paired: bool) -> Split:
    """An image and a text about it after each other, or images and then a text of each class."""
    random, names = np.random.default_rng(0), list(tiny_towers.COLOURS)
    images = [tiny_towers.image(names[number % 3], random) for number in range(GROUPS)]
    classes = np.arange(GROUPS) % 3
    if not paired:
        rows = [*images, *(f"a photo of a {name}" for name in names)]
        return Split(rows, zero_shot.labels_of(np.repeat([0, 1], [GROUPS, 3]), np.concatenate([classes, np.arange(3)])))
    both = [row for number, image in enumerate(images) for row in (image, f"a photo of a {names[number % 3]}")]
    return Split(both, zero_shot.labels_of(np.tile([0, 1], GROUPS), classes.repeat(2), np.arange(GROUPS).repeat(2)))
