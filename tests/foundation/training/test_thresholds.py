"""The threshold of no answer that a training sets: it is chosen from scores that hold the old one already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foundation.core.progress import ConsoleProgress
from foundation.labels import spans
from foundation.models.heads.reader import THRESHOLD_KEY
from foundation.standalone.windows import Read
from foundation.training import thresholds

CONTEXT = "red blue"
READ = Read(0, 1, np.array([(0, 3), (4, 8)]), 3)
LEADS = ((5.0, True), (6.0, True), (7.0, False), (8.0, False), (6.5, True))
"""How far the score of no answer is above that of the best span, and whether the question has an answer."""


def answers_of(threshold: float | None) -> np.ndarray[Any, Any]:
    """What is kept of the logits of each question by a model with a threshold: the best span is the first word, of score 0."""
    logits = [np.array([(lead / 2, lead / 2), (0, 0), (-9, -9)], np.float32) for lead, _ in LEADS]
    return np.stack([spans.compress_logits(one, READ, CONTEXT, threshold) for one in logits])


@pytest.mark.parametrize("old", [0.0, 2.5, 6.75, 40.0, -3.0])
def test_a_threshold_is_added_to_the_one_that_the_model_has(old: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the leads 6.5 and 7 every question is decided well; a threshold that lies there stays."""
    has = [answerable for _, answerable in LEADS]
    labels = spans.labels_of(np.zeros((len(has), 2), int), range(len(has)), has, [["red"] if one else [] for one in has])
    monkeypatch.setattr(thresholds, "compared", lambda model, prepared, rows, size: answers_of(prepared.null_threshold))
    split = SimpleNamespace(rows=LEADS, labels=labels)
    selection = type("Selection", (SimpleNamespace,), {"__len__": lambda self: len(self.rows)})(**vars(split))
    context: Any = SimpleNamespace(data=SimpleNamespace(selection=selection), progress=ConsoleProgress("silent"))
    model: Any = SimpleNamespace(config=SimpleNamespace())
    prepared: Any = SimpleNamespace(null_threshold=old)
    found = thresholds.fit_null_threshold(model, prepared, context)[THRESHOLD_KEY]
    assert getattr(model.config, THRESHOLD_KEY) == found
    assert found == pytest.approx(old if old == 6.75 else 6.75)
    assert labels.values(answers_of(found))[0][:, 1].tolist() == [1.0] * len(has)
    prepared = SimpleNamespace(null_threshold=found)
    assert thresholds.fit_null_threshold(model, prepared, context)[THRESHOLD_KEY] == found  # of the model as it is now, nothing moves
