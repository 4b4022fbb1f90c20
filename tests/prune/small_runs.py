"""What tests of pruning run: the stage by itself on a checkpoint, and recipes of the tiny sentiment classifier with data of their own."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.recipe import Recipe, check
from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.prune import Prune
from tests.export import sentiment


def pruned(stage: Prune, folder: Path, context: Context, out: Path) -> tuple[Any, dict[str, Any]]:
    """Prunes a checkpoint; returns the model and the figures."""
    out.mkdir()
    config = Checkpoint(folder).config
    stage.check(config, config, context)
    figures = stage.run(Artifact(folder, {"id": "baseline", "digest": "0" * 64}), context, out)
    return load(out), figures


def recipe(folder: Path, name: str, texts: Sequence[str], engines: list[str], stages: list[dict[str, Any]]) -> Recipe:
    """Writes sentences with labels, a tenth of them for validation and a tenth for the test; returns the recipe that reads them."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    tenth = len(texts) // 10
    for split, rows in {"train": texts[: -2 * tenth], "validation": texts[-2 * tenth : -tenth], "test": texts[-tenth:]}.items():
        with (data / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows([text + " good" * (row % 2), ("negative", "positive")[row % 2]] for row, text in enumerate(rows))
    return check(
        {
            "name": name,
            "model": {"path": str(sentiment.checkpoint()), "task": "text-classification"},
            "data": {"path": str(data), "max_length": 16},
            "target": {"engines": engines, "batch_sizes": [1], "sequence_lengths": [8], "threads": 1},
            "stages": stages,
        }
    )
