"""What a server returns for logits: labels and scores written out, and outputs of the announced shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.labels.tasks import TASKS
from foundation.standalone.response import BLANK, DELIMITER, RESPONSES, STRING
from foundation.standalone.windows import Question, Read

NAMES = ("no", "yes", "perhaps")
ROWS = st.lists(st.lists(st.floats(-90, 90, width=32), min_size=3, max_size=3), min_size=1, max_size=6)


def words(array: np.ndarray) -> list[list[str]]:
    return [[text.decode() for text in row] for row in array]


def test_a_label_is_argmax_with_softmax_score() -> None:
    logits = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, -1.0], [1e4, -1e4, 0.0]], np.float32)
    found = RESPONSES["label"].of(logits, NAMES)
    assert words(found["LABEL"]) == [["yes"], ["no"], ["no"]]
    naive = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert found["SCORE"][0, 0] == pytest.approx(naive[1], rel=1e-6)
    assert found["SCORE"][2, 0] == 1.0
    with pytest.raises(ValueError, match=r"\[n, 3\] expected"):
        RESPONSES["label"].of(logits[:, :2], NAMES)


def test_the_label_of_a_regression_is_its_name_and_the_score_its_value() -> None:
    found = RESPONSES["label"].of(np.array([[2.5], [-1.0]], np.float32), ("score",))
    assert words(found["LABEL"]) == [["score"], ["score"]]
    assert found["SCORE"].tolist() == [[2.5], [-1.0]]


@given(ROWS)
def test_all_labels_come_with_their_sigmoids_the_likeliest_first(rows: list[list[float]]) -> None:
    found = RESPONSES["labels"].of(np.array(rows, np.float32), NAMES)
    for row, names, scores in zip(rows, words(found["LABEL"]), found["SCORE"], strict=True):
        order = sorted(range(3), key=lambda index: (-row[index], index))
        assert names == [NAMES[index] for index in order]
        for index, score in zip(order, scores.tolist(), strict=True):
            assert score == pytest.approx(1 / (1 + math.exp(-row[index])), rel=1e-5, abs=1e-30)
            assert (score > 0.5) == (row[index] > 0) or abs(row[index]) < 1e-6  # 0 decides, and so does 0.5


@pytest.mark.parametrize("form", RESPONSES)
def test_outputs_are_as_announced(form: str) -> None:
    told: dict[str, Any] = {"entities": ("a", ((1, 0, 1),)), "span": Question("a", 0.0, (), (Read(0, 2, np.array([(0, 1)]), 5),))}
    told["transcript"] = 4
    names = (BLANK, DELIMITER, "a") if form == "transcript" else NAMES
    placed = [told[form.partition("-")[0]]] * 4 if form.partition("-")[0] in told else []
    logits = np.zeros((4, 5, 3) if placed else (4, 3), np.float32)
    found = RESPONSES[form].of(logits, names, placed)
    announced = RESPONSES[form].outputs(3)
    assert [output.name for output in announced] == list(found)
    for output in announced:
        assert found[output.name].shape == (4, *(5 if axis < 0 else axis for axis in output.dims))
        assert found[output.name].dtype == (np.object_ if output.kind == STRING else np.float32)
    assert found[RESPONSES[form].RAW] is logits


def test_every_answer_has_a_form() -> None:
    assert {facts.answer.RESPONSE for facts in TASKS.values()} <= RESPONSES.keys()
