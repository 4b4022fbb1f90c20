"""Trainings of one recipe that differ in single settings, and their answers on the same rows side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compress.pipeline import run
from compress.recipe import read
from compress.report.intervals import paired
from foundation.artifacts.run_folder import open_run
from foundation.artifacts.store import share
from foundation.core.progress import ConsoleProgress
from foundation.labels.form import Labels
from foundation.measure.answers import load_predictions
from foundation.measure.metrics import METRICS

SST2 = """
name: {name}
seed: {seed}
model: {{path: {model}, task: text-classification, head: new}}
data:
  path: {data}
  columns: {{text: sentence, label: label}}
  files:
    train: train.tsv.gz
    test: [dev.tsv, {{file: sentence_level_test.tsv, header: false, columns: {{text: 0, label: 1}}}}]
  max_length: 64
stages:
  - finetune: {{epochs: {epochs:g}, fraction: {fraction:.6f}, evaluate_every: 1000000, keep: last}}
"""
"""Fine-tuning on SST-2 with a new head; evaluation rows are both labelled test files, 2,693."""
SST2_ROWS = 67_000


@dataclass(frozen=True)
class Trained:
    """A training and its answers."""

    name: str
    loss: float
    """Mean loss of the last epoch."""
    steps: int
    logits: NDArray[np.float32]
    labels: Labels

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return float(np.mean(self.logits.argmax(axis=1) == self.labels.array))


def trained(name: str, text: str, settings: list[str], out: Path) -> Trained:
    """Trains a variant, or finds it finished.

    Args:
        name: Name of its run folder.
        text: The recipe.
        settings: What is different, as of `compress run --set`.
        out: Where all variants are.
    """
    folder = out / name
    share(folder, out)
    file = out / f"{name}.yaml"
    file.write_text(text, encoding="utf-8")
    finished = open_run(run(read(file, settings), folder, progress=ConsoleProgress()).folder)
    logits, labels = load_predictions(finished.predictions("finetune"), "text-classification")
    metrics = finished.artifacts["finetune"].metrics
    return Trained(name, metrics["losses"][-1]["loss"], metrics["steps"], logits, labels)


def table(variants: list[Trained], *references: str) -> str:
    """Returns a Markdown table of variants with the difference to some of them in points, each with its paired 95 % interval."""
    heads = ["variant", "steps", "loss", "accuracy", *(f"difference to {name}, points" for name in references), "n"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    known = {one.name: one for one in variants}
    for one in variants:
        cells = [one.name, str(one.steps), f"{one.loss:.4f}", f"{one.accuracy:.4f}"]
        for name in references:
            drop = paired(METRICS["accuracy"], known[name].logits, one.logits, one.labels)
            cells.append("" if name == one.name else f"{-100 * drop.difference:+.2f} ({-100 * drop.high:+.2f} to {-100 * drop.low:+.2f})")
        lines.append(f"| {' | '.join(cells)} | {len(one.labels):,} |")
    return "\n".join(lines)
