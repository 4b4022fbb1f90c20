"""Labels of texts: every prompt is asked, its probabilities are calibrated, and their mean is the soft target.

    p_v(c | x)   of each variant v: a template with the few-shot examples in one order, calibrated without labels (`calibration`)
    p(c | x)     mean over v: self-consistency as an ensemble of prompts (Jiang et al. 2020, https://arxiv.org/abs/1911.12543; of orders:
                 Lu et al. 2022, https://arxiv.org/abs/2104.08786)
    agreement(x) share of the variants whose largest p_v is the largest p

With `fit` the mean is fitted to the labels of the selection rows. Its logarithm is what a teacher's logits are to the losses: at the
temperature T of a loss the target is softmax(log p / T).

Tensor names: n rows, C classes, V variants, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distill.labeller.answers import Answers
from distill.labeller.calibration import CONTENT_FREE, Scaling, bias_of, fitted, without_bias
from distill.labeller.prompts import PromptFile, Variant, variants
from distill.labeller.scorer import Asked
from distill.labeller.settings import Labeller
from distill.labeller.verbalizers import class_scores, listed_words
from foundation.core.arrays import Array
from foundation.data.splits import Split
from foundation.standalone.preprocess import Row


@dataclass(frozen=True)
class Labelled:
    """The labels of some rows."""

    log_p_nC: Array
    """Log-probabilities of the classes, float32 [n, C]."""
    agreement_n: Array
    """Share of the prompts that agree with the label, float32 [n]."""
    asked: int
    """Queries that the model was asked; the others were stored."""


class Labels:
    """Labels texts as the settings say.

    Args:
        settings: The labeller.
        file: Its prompt file.
        classes: Class names by id.
        answers: The model with its stored answers.
        seed: Seed of the orders of examples.
        label: Id of the stage, for the progress bar.
    """

    def __init__(self, settings: Labeller, file: PromptFile, classes: Sequence[str], answers: Answers, seed: int, label: str) -> None:
        self.settings, self.file, self.answers, self.label = settings, file, answers, label
        self.classes, self.seed = tuple(classes), seed
        words, self.class_W = listed_words(settings.labels, classes)
        self.words = tuple(word.strip() for word in words)
        self.variants = variants(file, settings.labels, settings.orders, seed)
        self.bias_VC: list[Array] = []
        self.scaling: Scaling | None = None

    def calibrate(self, rows: Sequence[Row], selection: Split) -> int:
        """Finds the bias of each variant, and fits the probabilities to the labels of selection rows, where the settings say so.

        Args:
            rows: The rows to train on, whose mean answer is the bias of `batch`.
            selection: Selection rows; their labels are read for `fit` alone.

        Returns:
            How many queries the model was asked.
        """
        free: list[Row] = [_alike(text, rows) for text in CONTENT_FREE]
        known = {"none": [], "contextual": free, "batch": rows}[self.settings.calibration]
        found = [self._asked(variant, known) for variant in self.variants] if known else []
        self.bias_VC = [bias_of(log_p_nC) for log_p_nC, _ in found]
        asked = sum(count for _, count in found)
        if self.settings.reads_labels:
            fit = self.of(selection.rows)
            self.scaling = fitted(fit.log_p_nC.astype(np.float64), selection.labels.array, self.settings.fit == "platt")
            asked += fit.asked
        return asked

    def of(self, rows: Sequence[Row]) -> Labelled:
        """Returns the labels of texts, or of pairs of texts, calibrated as far as `calibrate` has been called.

        Raises:
            InputError: A text does not fit the model, or the model fails.
        """
        if not rows:
            return Labelled(np.zeros((0, len(self.classes)), np.float32), np.zeros(0, np.float32), 0)
        found = [self._asked(variant, rows) for variant in self.variants]
        log_p_VnC = np.stack([log_p_nC for log_p_nC, _ in found])
        if self.bias_VC:
            log_p_VnC = np.stack([without_bias(log_p_nC, bias_C) for log_p_nC, bias_C in zip(log_p_VnC, self.bias_VC, strict=True)])
        mean_nC = np.exp(log_p_VnC).mean(axis=0)
        agreement_n = (log_p_VnC.argmax(axis=2) == mean_nC.argmax(axis=1)).mean(axis=0)
        log_p_nC = np.log(np.maximum(mean_nC, 1e-12))
        if self.scaling is not None:
            log_p_nC = self.scaling(log_p_nC)
        return Labelled(log_p_nC.astype(np.float32), agreement_n.astype(np.float32), sum(count for _, count in found))

    def _asked(self, variant: Variant, rows: Sequence[Row]) -> tuple[Array, int]:
        """Returns the log-probabilities of one variant before calibration, float64 [n, C], and how many queries were asked."""
        answers_n2W, count = self.answers.scores([Asked(variant.query(row), self.words) for row in rows], self.label)
        return class_scores(answers_n2W[:, 0], answers_n2W[:, 1], self.class_W, self.settings.length_normalized), count


def _alike(text: str, rows: Sequence[Row]) -> Row:
    """Returns a text as a row of the same form as others."""
    return (text, text) if rows and isinstance(rows[0], tuple) else text
