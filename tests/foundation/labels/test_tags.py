"""Entities of tags against a reader written out from the rules of conlleval, and F1 counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.labels import tags

IOB = ("O", "B-A", "I-A", "B-B", "I-B")
IOBES = ("O", *(f"{prefix}-{kind}" for kind in "AB" for prefix in "BIES"))
Rows = st.lists(st.lists(st.sampled_from(IOBES), min_size=1, max_size=8), min_size=1, max_size=4)


def ends(before: str, now: str) -> bool:
    """end_of_chunk of conlleval, for tags such as B-PER."""
    (one, kind), (other, other_kind) = (tag.split("-") if tag != "O" else ("O", "") for tag in (before, now))
    return one != "O" and (one in "ES" or other in "BSO" or kind != other_kind)


def begins(before: str, now: str) -> bool:
    """start_of_chunk of conlleval."""
    (one, kind), (other, other_kind) = (tag.split("-") if tag != "O" else ("O", "") for tag in (before, now))
    return other != "O" and (other in "BS" or one in "ESO" or kind != other_kind)


def naive(row: list[str]) -> list[tags.Span]:
    found, start = [], 0
    for place, (before, now) in enumerate(zip(["O", *row], [*row, "O"], strict=True)):
        if ends(before, now):
            found.append((start, place, before.split("-")[1]))
        if begins(before, now):
            start = place
    return found


@given(st.lists(st.sampled_from(IOBES), max_size=10))
def test_entities_are_those_of_conlleval(row: list[str]) -> None:
    assert tags.spans_of(row) == naive(row)


@pytest.mark.parametrize(
    "row",
    [
        ["I-A", "I-A", "B-A", "O", "I-B"],  # IOB1
        ["B-A", "I-A", "B-A", "O", "B-B"],  # IOB2
        ["B-A", "E-A", "S-A", "O", "S-B"],  # IOBES
        ["B-A", "L-A", "U-A", "O", "U-B"],  # BILOU
    ],
)
def test_every_scheme_says_the_same(row: list[str]) -> None:
    assert tags.spans_of(row) == [(0, 2, "A"), (2, 3, "A"), (4, 5, "B")]
    assert tags.tags_of(tags.spans_of(row), 5, IOB) == ["B-A", "I-A", "B-A", "O", "B-B"]
    assert tags.tags_of(tags.spans_of(row), 5, IOBES) == ["B-A", "E-A", "S-A", "O", "S-B"]


def test_a_model_without_b_gets_i_and_an_unknown_kind_is_an_error() -> None:
    assert tags.tags_of([(0, 2, "A")], 3, ("O", "I-A")) == ["I-A", "I-A", "O"]
    assert tags.tags_of([(0, 1, "A")], 2, ("A", "O")) == ["A", "O"]
    with pytest.raises(KeyError, match="B"):
        tags.tags_of([(0, 1, "B")], 1, ("O", "I-A"))


def labels_of(rows: list[list[str]]) -> np.ndarray:
    return tags.labels_of(rows, [np.arange(1, len(row) + 1) for row in rows], IOBES)


def answers_of(rows: list[list[str]], length: int) -> np.ndarray:
    answers = np.zeros((len(rows), length, len(IOBES)), np.float32)
    for row, names in enumerate(rows):
        for word, name in enumerate(names[:length]):
            answers[row, word] = -1.0
            answers[row, word, IOBES.index(name)] = 2.0
    return answers


@given(Rows, st.randoms(use_true_random=False))
def test_f1_is_that_of_the_entities_written_out(true: list[list[str]], random: object) -> None:
    found = [[random.choice(IOBES) for _ in row] for row in true]  # type: ignore[attr-defined]
    cut = [row[:6] + ["O"] * (len(row) - 6) for row in found]  # words that are cut off count as O
    counts = labels_of(true).values(answers_of(found, 6))[0]
    pairs = [(set(naive(ours)), set(naive(theirs))) for ours, theirs in zip(cut, true, strict=True)]
    assert counts.tolist() == [[len(ours & theirs), len(ours), len(theirs)] for ours, theirs in pairs]
    right, ours, theirs = counts.sum(axis=0)
    precision, recall = right / ours if ours else 0.0, right / theirs if theirs else 0.0
    assert tags.precision(counts) == precision
    assert tags.recall(counts) == recall
    assert tags.f1(counts) == pytest.approx(2 * precision * recall / (precision + recall) if right else 0.0)


def test_labels_with_the_choices_of_answers_agree_with_them() -> None:
    true, found = [["B-A", "I-A", "O"], ["O"]], [["O", "S-B", "B-A"], ["S-A"]]
    made = labels_of(true).pseudo_labels(answers_of(found, 2))
    assert made.array.tolist() == labels_of([["O", "S-B", "O"], ["S-A"]]).array.tolist()  # the third word has no logits


def test_answers_are_the_logits_of_first_tokens_by_word() -> None:
    logits = np.arange(1, 25, dtype=np.float32).reshape(2, 4, 3)
    answers = tags.of_words(logits, [np.array([1, -1, 3]), np.array([2])], 3)
    assert answers[0].tolist() == [logits[0, 1].tolist(), [0, 0, 0], logits[0, 3].tolist()]
    assert answers[1].tolist() == [logits[1, 2].tolist(), [0, 0, 0], [0, 0, 0]]
    assert tags.choices(answers).tolist() == [[2, -1, 2], [2, -1, -1]]
