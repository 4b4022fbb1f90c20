"""Labels of several prompts: the mean of their calibrated probabilities, and how many agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.labeller.answers import Answers
from distill.labeller.labels import Labels
from distill.labeller.prompts import read_prompts
from distill.labeller.scorer import Asked
from distill.labeller.settings import Labeller
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from tests.distill.labeller.tiny_labellers import EXAMPLES, SILENT, prompts

WORDS = {"negative": ["bad"], "positive": ["good"]}
TEMPLATES = ["A: {text} {label}", "B: {text} {label}", "C: {text} {label}"]
LOGITS = {"A": 1.0, "B": 2.0, "C": -4.0}
"""What a prompt adds to the log-odds of the second class, whatever the text is."""


class Biased:
    """Log-odds are the number of letters g minus the number of letters b, plus the bias of the prompt."""

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], np.ndarray]]:
        for index, one in enumerate(asked):
            prompt = str(one.query.prompt)
            text = prompt.split(": ")[-1]
            odds = text.count("g") - text.count("b") + LOGITS[prompt.split("\n\n")[-1][0]]
            log_p = [-np.log1p(np.exp(odds)), -np.log1p(np.exp(-odds))]
            yield [index], np.array([[log_p, [1, 1]]], np.float32)

    def texts(self, *args: Any) -> list[str | None]:
        raise AssertionError


def labels(folder: Path, contents: dict[str, Any], **settings: Any) -> Labels:
    path = prompts(folder, **contents)
    labeller = Labeller.model_validate({"path": "a", "prompt": path, "labels": WORDS, **settings})
    return Labels(labeller, read_prompts(path, WORDS, False, "prompt"), tuple(WORDS), Answers(folder, {}, Biased, SILENT), 0, "x")


def split(*rows: str) -> Split:
    return Split(list(rows), ClassIds(np.array(["g" in row for row in rows], np.int64)))


def test_the_mean_of_the_probabilities_is_the_label(tmp_path: Path) -> None:
    found = labels(tmp_path, {"templates": TEMPLATES}, calibration="none")
    found.calibrate([], split())
    one = found.of(["gg", "b"])
    positive = np.array([[1 / (1 + np.exp(-(odds + bias))) for bias in LOGITS.values()] for odds in (2, -1)])
    np.testing.assert_allclose(np.exp(one.log_p_nC[:, 1]), positive.mean(axis=1), rtol=1e-5)
    agrees = (positive > 0.5) == (positive.mean(axis=1) > 0.5)[:, None]
    np.testing.assert_allclose(one.agreement_n, agrees.mean(axis=1), rtol=1e-6)
    assert one.asked == 6


def test_contextual_calibration_removes_the_bias_of_each_prompt(tmp_path: Path) -> None:
    found = labels(tmp_path, {"templates": TEMPLATES}, calibration="contextual")
    found.calibrate(["gg"], split())
    one = found.of(["gg", "b"])
    np.testing.assert_allclose(one.log_p_nC[:, 1] - one.log_p_nC[:, 0], [2, -1], atol=1e-4)
    np.testing.assert_allclose(one.agreement_n, 1)


def test_batch_calibration_gives_the_training_rows_equal_shares(tmp_path: Path) -> None:
    found = labels(tmp_path, {"templates": TEMPLATES[:1]}, calibration="batch")
    rows = ["gg", "b", "", "bg"]
    found.calibrate(rows, split())
    raw = np.array([1 / (1 + np.exp(-(text.count("g") - text.count("b") + 1.0))) for text in rows])
    shift = np.log(raw.mean() / (1 - raw.mean()))
    one = found.of(["gg"])
    assert one.log_p_nC[0, 1] - one.log_p_nC[0, 0] == pytest.approx(3 - shift, abs=1e-4)


def test_orders_of_examples_are_prompts_of_their_own(tmp_path: Path) -> None:
    found = labels(tmp_path, {"templates": TEMPLATES[:1], "examples": EXAMPLES}, orders=3, calibration="none")
    found.calibrate([], split())
    assert len(found.variants) == 3
    assert found.of(["gg"]).asked == 3


def test_a_fit_reads_the_labels_of_selection_rows_alone(tmp_path: Path) -> None:
    rows = ["g", "b"] * 20
    selection = Split(list(rows), ClassIds(np.array([1, 0] * 15 + [0, 1] * 5, np.int64)))  # a quarter is wrong
    plain, fit = (labels(tmp_path, {"templates": TEMPLATES[:1]}, fit=name, calibration="contextual") for name in ("none", "temperature"))
    for one in (plain, fit):
        one.calibrate(rows, selection)
    assert plain.scaling is None
    assert np.exp(plain.of(["g"]).log_p_nC[0, 1]) == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-4)
    assert np.exp(fit.of(["g"]).log_p_nC[0, 1]) == pytest.approx(0.75, abs=1e-3)


def test_no_row_has_no_label(tmp_path: Path) -> None:
    found = labels(tmp_path, {"templates": TEMPLATES}, calibration="contextual")
    found.calibrate([], split())
    assert found.of([]).log_p_nC.shape == (0, 2)
