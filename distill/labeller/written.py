"""Training texts that the labeller writes for each label, filtered by its own labels.

    for each label and each template of `write`: draw texts
    keep x if  argmax_c p(c | x) is the label that x was asked for,  p >= min_probability,
               x is new: no evaluation, selection or train row, and no text that is kept already

Writing a text for a label and labelling it are different conditionals of one model; only where both agree the text is used (round-trip
consistency, Alberti et al. 2019, https://arxiv.org/abs/1906.05416; of generated classification data: Ye et al. 2022,
https://arxiv.org/abs/2202.07922). A kept text has the labeller's probabilities as its soft target, as every other row.

The texts are written next to the checkpoint (`FILE`, one JSON object a line: text, label, probability), to be read or used as `data`. Not
supported: pairs of texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distill.labeller.labels import Labels
from distill.labeller.prompts import writing_query
from distill.labeller.scorer import Sampled
from distill.labeller.settings import Writing
from distill.plain_text import new_rows
from foundation.core.arrays import Array
from foundation.core.progress import Progress
from foundation.standalone.preprocess import Row

FILE = "written.jsonl"
DRAW = 16
"""Texts of a draw; a run that was killed goes on after the last one."""


@dataclass(frozen=True)
class Written:
    """The texts that were kept."""

    rows: list[Row]
    log_p_nC: Array
    """Log-probabilities of the classes, float32 [n, C]."""
    counts: dict[str, int]
    """How many texts were written, left out and kept."""
    asked: int
    """Queries for their labels that the model was asked; the others were stored."""

    def save(self, folder: Path, classes: tuple[str, ...]) -> None:
        """Writes the texts with their labels."""
        best = self.log_p_nC.argmax(axis=1)
        lines = [
            {"text": text, "label": classes[label], "probability": round(float(np.exp(log_p_C[label])), 6)}
            for text, label, log_p_C in zip(self.rows, best, self.log_p_nC, strict=True)
        ]
        (folder / FILE).write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")


def write(labels: Labels, never: Iterable[Row], known: Iterable[Row], progress: Progress) -> Written:
    """Returns texts that a labeller writes for each label and labels alike.

    Args:
        labels: Labels the texts; its settings have `write`.
        never: Evaluation and selection rows.
        known: Train rows.
        progress: Shows a bar and the counts.

    Raises:
        InputError: The model cannot write.
    """
    settings, classes = labels.settings.write, labels.classes
    assert settings is not None, "nothing is to be written"
    drawn: list[tuple[str, int]] = []
    unfinished = 0
    with progress.bar(f"{labels.label}: texts", settings.rows * len(classes)) as advance:
        for number, name in enumerate(classes):
            for text in _drawn(labels, settings, name):
                unfinished += not text
                drawn += [(text, number)] if text else []
                advance(1)
    fresh, held_out, duplicates = new_rows([text for text, _ in drawn], never, known)
    found = labels.of(fresh)
    log_p_nC = found.log_p_nC
    wanted = dict(reversed(drawn))  # of equal texts the first counts
    asked_n = np.array([wanted[str(text)] for text in fresh], np.int64)
    agrees_n = (log_p_nC.argmax(axis=1) == asked_n) & (np.exp(log_p_nC[np.arange(len(fresh)), asked_n]) >= settings.min_probability)
    kept = np.flatnonzero(agrees_n)
    counts = {
        "texts": settings.rows * len(classes),
        "unfinished": unfinished,
        "held_out": held_out,
        "duplicates": duplicates,
        "other_label": len(fresh) - len(kept),
        "kept": len(kept),
    }
    progress.log(f"  {labels.label}: {len(kept)} of {counts['texts']} written texts kept; {counts['other_label']} got another label")
    return Written([fresh[index] for index in kept], log_p_nC[kept], counts, found.asked)


def _drawn(labels: Labels, settings: Writing, name: str) -> Iterator[str | None]:
    """Yields the texts of a label, in turn of all templates."""
    templates, word = labels.file.write, labels.settings.labels[name][0]
    for number in range(-(-settings.rows // DRAW)):
        query = writing_query(templates[number % len(templates)], word, labels.file)
        count = min(DRAW, settings.rows - DRAW * number)
        sampled = Sampled(settings.temperature, settings.top_p, settings.max_tokens, labels.seed)
        yield from labels.answers.texts(query, count, sampled, number)
