"""Pairs of sentences become texts with labels that say which belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.core.errors import InputError
from compress.data.config import Columns, DataConfig
from compress.data.load import load_data
from compress.data.splits import Data

TASK = "sentence-embedding"


def loaded(folder: Path, train: str, test: str, **columns: Any) -> tuple[Data, list[str]]:
    (folder / "train.csv").write_text("text,text_pair,label\n" + train)
    (folder / "test.csv").write_text("text,text_pair,label\n" + test)
    lines: list[str] = []
    return load_data(DataConfig(path=str(folder), columns=Columns(**columns)), TASK, None, lines.append), lines


def test_a_row_is_a_text_and_scores_are_scaled_by_those_of_train(tmp_path: Path) -> None:
    train = "".join(f"a{number},b{number},{1 + number % 5}\n" for number in range(50))
    data, lines = loaded(tmp_path, train, "c,d,2\ne,f,7\n")
    assert data.evaluation.rows == ["c", "d", "e", "f"]
    assert data.evaluation.labels.tolist() == [[0, 0.25], [0, 0.25], [1, 1.5], [1, 1.5]]
    assert len(data.train) + len(data.selection) == 100
    assert {f"{one}{other}" for one, other in zip(data.train.rows[::2], data.train.rows[1::2], strict=True)} <= {
        f"a{number}b{number}" for number in range(50)
    }
    assert data.train.together == data.selection.together == 2
    assert any("scores 1 to 5 are scaled to 0 to 1" in line for line in lines)
    assert data.labels == ("score",)


def test_calibration_takes_both_texts_of_a_pair(tmp_path: Path) -> None:
    train = "".join(f"a{number},b{number},{number % 5}\n" for number in range(50))
    data, _ = loaded(tmp_path, train, "c,d,2\n")
    chosen = data.calibration(16)
    assert len(chosen) == 16
    assert chosen.together == 2
    assert all(str(one)[1:] == str(other)[1:] for one, other in zip(chosen.rows[::2], chosen.rows[1::2], strict=True))
    assert np.array_equal(chosen.labels, data.calibration(16).labels)


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ("a,b,3\nc,d,3\n" * 30, "all train pairs have the score 3"),
        ("a,b,much\n", "label 'much'; a finite number is allowed"),
        ("a,b\n", "train.csv.* line 2"),
    ],
)
def test_malformed_rows_are_refused_in_one_line(train: str, line: str, tmp_path: Path) -> None:
    rows = "".join(f"x{number},y{number},3\n" for number in range(30))
    with pytest.raises(InputError, match=line) as caught:
        loaded(tmp_path, train + rows, "c,d,2\n")
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_data_without_a_second_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\na,1\n")
    with pytest.raises(InputError, match="text_pair"):
        load_data(DataConfig(path=str(tmp_path)), TASK, None, print)
