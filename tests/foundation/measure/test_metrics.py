from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from foundation.core import correlation
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.labels import captions, spans, tags, text_groups, transcripts, zero_shot
from foundation.labels.candidates import labels_of as candidate_labels
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets
from foundation.labels.next_token import Tokens
from foundation.labels.relevance import labels_of as judged_labels
from foundation.labels.tasks import TASKS, Task
from foundation.labels.value import Numbers
from foundation.labels.vectors import Pairs, labels_of
from foundation.measure import answers, metrics, predictions
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward


def rows_of_classes(num_classes: int) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    ids = st.lists(st.tuples(*[st.integers(0, num_classes - 1)] * 2), min_size=1, max_size=60)
    return ids.map(lambda pairs: (np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])))


@given(rows_of_classes(2))
def test_two_classes_agree_with_sklearn(pair: tuple[np.ndarray, np.ndarray]) -> None:
    answers, labels = pair
    figures = metrics.metrics("text-classification", np.eye(2, dtype=np.float32)[answers], ClassIds(labels))
    assert figures["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, answers))
    assert figures["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, answers, zero_division=0))
    assert figures["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, answers), abs=1e-12)


@given(rows_of_classes(4))
def test_many_classes_agree_with_sklearn(pair: tuple[np.ndarray, np.ndarray]) -> None:
    answers, labels = pair
    figures = metrics.metrics("text-classification", np.eye(4, dtype=np.float32)[answers], ClassIds(labels))
    assert figures["f1"] == pytest.approx(sklearn.metrics.f1_score(labels, answers, average="macro", zero_division=0))
    assert figures["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(labels, answers), abs=1e-12)


@given(hnp.arrays(np.float32, (12, 2), elements=st.integers(-8, 8).map(lambda i: i / 4)))
def test_correlations_agree_with_scipy(values: np.ndarray) -> None:
    figures = metrics.metrics("text-regression", values[:, :1], Numbers(values[:, 1]))
    if np.ptp(values[:, 0]) == 0 or np.ptp(values[:, 1]) == 0:
        assert figures == {"pearson": 0.0, "spearman": 0.0}
    else:
        assert figures["pearson"] == pytest.approx(scipy.stats.pearsonr(*values.T).statistic, abs=1e-6)
        assert figures["spearman"] == pytest.approx(scipy.stats.spearmanr(*values.T).statistic, abs=1e-9)


def test_tied_ranks_share_their_average() -> None:
    assert correlation.ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_equal_logits_take_the_lowest_class() -> None:
    assert metrics.metrics("image-classification", np.zeros((3, 4), np.float32), ClassIds(np.array([0, 0, 1]))) == {
        "accuracy": pytest.approx(2 / 3)
    }


def test_the_primary_metric_of_each_task_is_there() -> None:
    for task in TASKS:
        cases: dict[type[Labels], tuple[np.ndarray, Labels]] = {
            ClassIds: (np.zeros((2, 2), np.float32), ClassIds(np.zeros(2, np.int64))),
            Numbers: (np.zeros((2, 1), np.float32), Numbers(np.zeros(2, np.float32))),
            Tokens: (np.zeros((2, 3, 2), np.float32), Tokens(np.zeros((2, 3), np.int32))),
        }
        cases[Pairs] = np.zeros((4, 3), np.float32), labels_of(np.zeros(2))
        cases[LabelSets] = np.zeros((2, 3), np.float32), LabelSets(np.zeros((2, 3), bool))
        cases[tags.Tags] = np.ones((2, 4, 3), np.float32), tags.labels_of([["O"]] * 2, [np.array([1])] * 2, ("O", "B-A", "I-A"))
        span = np.zeros((2, spans.Part.WORDS.stop), np.float32)
        cases[spans.Spans] = span, spans.labels_of(np.zeros((2, 2), int), [0, 1], [True, False], [["a b"], []])
        read = np.zeros((2, 5, transcripts.Part.WIDTH), np.float32)
        cases[transcripts.Transcripts] = read, transcripts.labels_of(["a b", "a"], ("<pad>", "|", "a", "b"))
        if TASKS[task].searches:
            cases[Pairs] = np.zeros((4, 3), np.float32), judged_labels(1, 3, [(0, 0, 1)])
            cases[Numbers] = np.zeros((2, 1), np.float32), candidate_labels([0, 0], [1, 0], [[1]])
        if TASKS[task].two_towers:  # an image and seven classes
            form = captions if TASKS[task].captioned else zero_shot
            cases[Pairs] = np.eye(8, dtype=np.float32), form.labels_of(np.array([0] + [1] * 7), np.array([0, *range(7)]))
        if TASKS[task].needs_negatives:
            cases[Pairs] = np.zeros((3, 3), np.float32), text_groups.labels_of([("a", "b", "c")])
        figures = metrics.metrics(task, *cases[TASKS[task].answer.FORM])
        assert next(iter(figures)) == TASKS[task].metric
        assert tuple(figures) == TASKS[task].metrics


def test_no_rows_are_an_error() -> None:
    with pytest.raises(InputError, match="no row to evaluate"):
        metrics.metrics("image-classification", np.zeros((0, 2), np.float32), ClassIds(np.zeros(0, np.int64)))


def test_predictions_are_in_row_order_and_padded_to_buckets(tiny_bert: Path, told: Any) -> None:
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 32, Target(sequence_lengths=(4, 8)))
    rows = ["good film", "the film was not very good i hate this film", "love it", "bad"]
    model = load(tiny_bert)
    logits = predictions.predict(model, prepared, rows, 2, told)
    assert logits.dtype == np.float32
    assert told.advanced == len(rows)
    for row, answer in zip(rows, logits, strict=True):
        with torch.inference_mode():
            alone = forward(model, {name: torch.from_numpy(value) for name, value in prepared.encode([row]).items()})
        np.testing.assert_allclose(alone[0].numpy(), answer, atol=1e-5)


def test_predicting_keeps_the_mode_of_the_model(tiny_bert: Path) -> None:
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 32, Target())
    model = load(tiny_bert).train()
    first, second = (predictions.predict(model, prepared, ["good film"], 1) for _ in range(2))
    assert model.training
    np.testing.assert_array_equal(first, second)  # no dropout


def test_a_model_that_answers_nan_is_an_error(tiny_bert: Path) -> None:
    prepared = Checkpoint(tiny_bert).preprocessor("text-classification", 32, Target())
    model = load(tiny_bert)
    model.classifier.bias.data.fill_(float("nan"))  # type: ignore[union-attr,operator]
    with pytest.raises(InputError, match=r"2 of 2 rows are NaN or infinite, the first in row 0"):
        predictions.predict(model, prepared, ["good", "bad"], 2)


@pytest.mark.parametrize(
    ("task", "labels"),
    [
        ("text-classification", ClassIds(np.array([1, 0]))),
        ("text-regression", Numbers(np.array([0.5, 4.0], np.float32))),
        ("multi-label-classification", LabelSets(np.array([[True, False], [False, False]]))),
    ],
)
def test_predictions_survive_the_file(tmp_path: Path, task: Task, labels: Labels) -> None:
    logits = np.array([[1.0, 2.0], [3.0, 4.0]])
    answers.save_predictions(tmp_path / "p.safetensors", logits, labels)
    read, again = answers.load_predictions(tmp_path / "p.safetensors", task)
    assert read.dtype == np.float32
    assert again.array.dtype == labels.array.dtype
    np.testing.assert_array_equal(read, logits)
    np.testing.assert_array_equal(again.array, labels.array)
