"""What a label means: a class name, or an id only where something outside the labels numbers the classes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.reading.labels import LONGEST_LABEL, class_ids, class_names, values
from foundation.core.errors import InputError
from tests.problems import raises_problem


@dataclass(frozen=True)
class File:
    labels: list[Any] = field(default_factory=list)
    label_names: tuple[str, ...] = ()

    def place(self, index: int) -> str:
        return f"train.csv line {index + 2}"


def ids(labels: list[Any], names: tuple[str, ...], *, numbered: bool = False, own: tuple[str, ...] = ()) -> list[int]:
    found: list[int] = class_ids([File(labels, own)], names, "the train split", numbered=numbered).tolist()
    return found


STARS = ("1", "2", "3", "4", "5")


@pytest.mark.parametrize("numbered", [False, True])
def test_names_that_are_numbers_are_matched_as_names(numbered: bool) -> None:
    assert ids([1, "5", 3.0], STARS, numbered=numbered) == [0, 4, 2]
    with raises_problem("line 2", "'0'", "train split: 1, 2, 3, 4, 5"):
        ids([0], STARS, numbered=numbered)


def test_integers_are_ids_of_a_model_with_other_names_only() -> None:
    assert ids([0, "1", "good"], ("bad", "good"), numbered=True) == [0, 1, 1]
    with pytest.raises(InputError, match="label '2'"):
        ids([2], ("bad", "good"), numbered=True)
    with pytest.raises(InputError, match="label '0'"):
        ids([0], ("bad", "good"), numbered=False)
    with pytest.raises(InputError, match="label '0'"):
        ids([0], ("1", "good"), numbered=True)


def test_class_ids_0_to_c_keep_their_order() -> None:
    names = class_names([File([2, 0, 1, 10] * 5)])
    assert names == ("0", "1", "2", "10")
    assert ids([10, 0], names) == [3, 0]


def test_a_class_label_column_holds_ids_of_its_own_names() -> None:
    assert ids([0, 4], STARS, own=STARS) == [0, 4]
    assert ids([0, 1], ("good", "bad"), numbered=True, own=("Bad", "Good")) == [1, 0]
    assert ids([0, 1], ("bad", "neutral", "good"), numbered=True, own=("bad", "good")) == [0, 2]
    assert ids([0, 1], ("LABEL_0", "LABEL_1"), numbered=True, own=("bad", "good")) == [0, 1]
    with pytest.raises(InputError, match=r"numbers 2 classes \(bad, good\), .* has 3"):
        ids([0, 1], ("negative", "neutral", "positive"), numbered=True, own=("bad", "good"))


def test_generic_names_are_sorted_by_their_number() -> None:
    names = class_names([File([f"LABEL_{index}" for index in (10, 2, 0)] * 5)])
    assert names == ("LABEL_0", "LABEL_2", "LABEL_10")


def test_equal_numbers_in_different_spelling_have_a_fixed_order() -> None:
    assert class_names([File(["1", "01", "001"] * 5)]) == ("001", "01", "1")


UNFIT = [
    None,
    "",
    " ",
    float("nan"),
    float("inf"),
    float("-inf"),
    "nan",
    "NaN",
    "-nan",
    "inf",
    "Infinity",
    "-Infinity",
    [1],
    {"a": 1},
    b"x",
    10**5000,
    "9" * 5000,
    "x" * (LONGEST_LABEL + 1),
    "a\nb",
    "a\x00b",
    "\ud800",
]


@pytest.mark.parametrize("label", UNFIT, ids=[f"{type(label).__name__}-{number}" for number, label in enumerate(UNFIT)])
def test_what_cannot_name_a_class_is_no_label(label: Any) -> None:
    with pytest.raises(InputError, match=r"train.csv line 4: no label") as caught:
        class_names([File(["a", "b", label, "a"])])
    assert len(caught.value.lines[0]) < 300
    with pytest.raises(InputError, match=r"train.csv line 3: no label"):
        ids(["a", label], ("a", "b"))


def test_a_class_called_nan_by_the_model_is_one() -> None:
    assert ids(["nan", "rice"], ("nan", "rice"), numbered=True) == [0, 1]


@pytest.mark.parametrize("label", [None, "nan", float("inf"), "x", True, "1_0", 10**400, "9" * 5000, [], 1e39, "\ud800"])
def test_a_value_has_to_be_a_finite_number(label: Any) -> None:
    assert values([File([1, "2.5"])]).tolist() == [1.0, 2.5]
    with pytest.raises(InputError, match=r"line 3: label .*; a finite number is allowed"):
        values([File([1, label])])


def test_wrong_labels_are_searched_for_suggestions_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr("compress.reading.labels.nearest", lambda given, allowed: searched.append(given) or "")
    names = tuple(f"class {index}" for index in range(1000))
    with pytest.raises(InputError, match=r"\(and 19997 more rows like these\)") as caught:
        ids([f"other {index}" for index in range(20_000)], names)
    assert searched == ["other 0", "other 1", "other 2"]
    assert len(caught.value.lines) == 3


def test_the_row_is_named_in_the_second_file_too() -> None:
    files = [File(["a"] * 3), File(["a", "b", "c"])]
    with pytest.raises(InputError, match=r"train.csv line 4: label 'c'"):
        class_ids(files, ("a", "b"), "the train split", numbered=False)
    assert class_ids(files[:1], ("a", "b"), "x", numbered=False).dtype == np.int64


SPACED = (" negative", "Positive ", "so  so")


@pytest.mark.parametrize("label", ["negative", " negative", "negative ", "Negative", "\tNEGATIVE"])
@pytest.mark.parametrize("own", [(), ("positive", "SO SO", "negative")])
def test_names_that_differ_in_spaces_or_case_are_the_same(label: str, own: tuple[str, ...]) -> None:
    assert ids([label, "positive", "so so"], SPACED, numbered=True, own=own) == [0, 1, 2]
    assert ids([0, 1, 2], SPACED, numbered=True, own=own) == ([1, 2, 0] if own else [0, 1, 2])


def test_names_are_the_same_however_unicode_composes_them() -> None:
    assert ids(["cafe\u0301", "tea"], ("caf\u00e9", "tea")) == [0, 1]


def test_names_that_are_alike_are_matched_by_their_letters_alone() -> None:
    names = ("a", "A", " b", "c")
    assert ids(["a", "A", "b", "C"], names) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"label 'd'; allowed by the train split: a, A, ' b', c"):
        ids(["d"], names)
    assert ids(["x ", " x"], ("x ", " x")) == [0, 1]
    with pytest.raises(InputError, match=r"label 'x'; allowed by the train split: 'x ', ' x'"):
        ids(["x"], ("x ", " x"))


@pytest.mark.whole
@given(st.lists(st.text("aAbB \u00e9e\u0301", min_size=1, max_size=3).filter(str.strip), min_size=1, max_size=5, unique=True), st.data())
def test_every_name_finds_itself_and_no_two_names_are_mixed_up(names: list[str], data: st.DataObject) -> None:
    given = data.draw(st.permutations(names))
    assert ids(given, tuple(names)) == [names.index(name) for name in given]
