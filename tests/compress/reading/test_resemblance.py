"""Selection rows that are unlike the evaluation rows are told, whatever rows models are judged on."""

import numpy as np
import pytest

from compress.reading.resemblance import FEWEST, warn_if_lengths_differ
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.standalone.preprocess import Row


def data_of(selection: list[Row], evaluation: list[Row]) -> Data:
    near, far = (Split(rows, ClassIds(np.zeros(len(rows), np.int64))) for rows in (selection, evaluation))
    return Data(near, near, far, ("no", "yes"))


def texts(*lengths: int) -> list[Row]:
    return ["x" * length for length in lengths for _ in range(FEWEST)]


@pytest.mark.parametrize("judge", ["evaluation", "selection"])
def test_phrases_against_sentences_are_told_with_both_medians(judge: str) -> None:
    found = warn_if_lengths_differ(data_of(texts(9, 30, 40), texts(80, 104, 300)).judged_on(judge))  # type: ignore[arg-type]
    assert found is not None
    assert "median selection row has 30 characters, the median evaluation row 104" in found
    assert "data.files.validation" in found


def test_longer_selection_rows_are_told_too() -> None:
    assert warn_if_lengths_differ(data_of(texts(104), texts(30))) is not None


@pytest.mark.parametrize(
    ("selection", "evaluation"),
    [
        (texts(100), texts(149)),  # near
        (texts(100), texts(150)),  # at the limit
        (texts(10)[1:], texts(100)),  # too few rows
        ([b"x"] * FEWEST, [b"x" * 100] * FEWEST),  # encoded images: bytes say nothing
        ([np.zeros(8, np.int32)] * FEWEST, [np.zeros(80, np.int32)] * FEWEST),  # blocks of tokens
        (texts(0), texts(1)),  # empty texts divide nothing
    ],
)
def test_others_are_not(selection: list[Row], evaluation: list[Row]) -> None:
    assert warn_if_lengths_differ(data_of(selection, evaluation)) is None


def test_pairs_count_with_both_texts() -> None:
    assert warn_if_lengths_differ(data_of([("x" * 50, "x" * 50)] * FEWEST, [("x" * 20, "x" * 90)] * FEWEST)) is None
    assert warn_if_lengths_differ(data_of([("x" * 50, "x" * 50)] * FEWEST, [("x" * 50, "x" * 101)] * FEWEST)) is not None
