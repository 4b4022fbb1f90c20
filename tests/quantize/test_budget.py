import numpy as np
import pytest

from foundation.labels.classes import ClassIds
from foundation.labels.next_token import Tokens
from foundation.labels.value import Numbers
from foundation.measure.judged import judged_of
from quantize.budget import loss


def test_by_labels_it_is_what_the_metric_loses() -> None:
    labels = np.array([0, 1, 1, 0])
    reference = np.float32([[2, 1], [0, 1], [0, 1], [0, 1]])  # 3 of 4 right
    logits = np.float32([[2, 1], [1, 0], [0, 1], [1, 0]])  # 3 of 4 right, two answers changed
    assert loss("text-classification", reference, logits, ClassIds(labels)) == 0.0
    assert loss("text-classification", reference, logits, None) == 0.5
    assert loss("text-classification", reference, -reference, ClassIds(labels)) == pytest.approx(0.5)


def test_regression_is_held_by_correlation() -> None:
    reference = np.float32([[0], [1], [2], [3]])
    assert loss("text-regression", reference, 5 * reference - 3, None) == pytest.approx(0.0, abs=1e-12)
    assert loss("text-regression", reference, -reference, None) == pytest.approx(2.0)
    labels = np.float32([0, 1, 2, 4])
    expected = np.corrcoef(reference[:, 0], labels)[0, 1] - np.corrcoef(np.float32([1, 0, 2, 3]), labels)[0, 1]
    assert loss("text-regression", reference, np.float32([[1], [0], [2], [3]]), Numbers(labels)) == pytest.approx(expected)


def test_perplexity_is_lost_relatively() -> None:
    labels = np.int32([[1, 2], [3, -100]])
    reference, worse = (np.float32([[[a, 1], [a, 2]], [[a, 3], [0, -1]]]) for a in (1.0, 1.1))
    assert loss("text-generation", reference, worse, Tokens(labels)) == pytest.approx(np.exp(0.1) - 1, rel=1e-5)
    assert loss("text-generation", worse, reference, Tokens(labels)) < 0


def test_the_loss_is_counted_in_the_judged_metric() -> None:
    labels = np.array([0] * 10 + [1] * 90)
    reference = np.eye(2, dtype=np.float32)[labels]
    logits = np.eye(2, dtype=np.float32)[np.where(np.arange(100) < 5, 1, labels)]
    task = "text-classification"
    assert loss(task, reference, logits, ClassIds(labels)) == pytest.approx(0.05)
    assert loss(task, reference, logits, ClassIds(labels), judged_of(task, "recall:a", ("a", "b")).metric) == pytest.approx(0.5)
