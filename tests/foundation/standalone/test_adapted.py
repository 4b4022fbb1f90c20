"""Rows that name their adapter: texts to everything else, never chosen by their content, and whole in files and messages."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.data.splits import content_key, input_key
from foundation.measure.engine_process import read_rows, write_rows
from foundation.standalone.adapted import AdaptedPair, AdaptedText, adapter_of, index_of, plain, with_adapter
from foundation.standalone.preprocess import ADAPTER_IDS, BadRow, Preprocessor
from tests.triton_repo import tiny_exports as tiny

TEXTS = st.text(max_size=12)
ROWS = st.one_of(TEXTS, st.tuples(TEXTS, TEXTS))
NAMES = ("legal", "medical", "plain")


def prepared() -> Preprocessor:
    made = tiny.text_preprocessor()
    return replace(made, adapters=NAMES, input_names=(*made.input_names, ADAPTER_IDS))


@pytest.mark.slow
@given(row=ROWS, name=st.sampled_from(NAMES))
def test_a_row_is_its_text_and_its_adapter(row: Any, name: str) -> None:
    named = with_adapter(row, name)
    assert named == row
    assert isinstance(named, type(row))
    assert (adapter_of(named), adapter_of(row), plain(named)) == (name, None, row)
    assert type(plain(named)) is type(row)
    again = pickle.loads(pickle.dumps(named))
    assert (again, adapter_of(again), type(again)) == (row, name, type(named))
    assert index_of(named, NAMES) == NAMES.index(name)


@given(row=ROWS, other=st.sampled_from(NAMES[1:]))
def test_keys_tell_adapters_apart_and_leaks_not(row: Any, other: str) -> None:
    named = with_adapter(row, NAMES[0])
    assert len({content_key(row), content_key(named), content_key(with_adapter(row, other))}) == 3
    assert input_key(named) == input_key(with_adapter(row, other)) == input_key(row)  # the model below has read this text


@given(rows=st.lists(st.tuples(TEXTS, st.sampled_from(NAMES)), min_size=1, max_size=5), pairs=st.booleans())
def test_files_of_rows_hold_the_names(rows: list[tuple[str, str]], pairs: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    named = [with_adapter((text, name) if pairs else text, name) for text, name in rows]
    write_rows(file, named)
    found = read_rows(file)
    assert found == named
    assert [adapter_of(row) for row in found] == [name for _, name in rows]
    assert all(isinstance(row, AdaptedPair if pairs else AdaptedText) for row in found)


def test_the_numbers_of_adapters_are_an_input(tmp_path: Path) -> None:
    rows = [with_adapter(text, NAMES[index % 3]) for index, text in enumerate(tiny.TEXTS)]
    prepared().save(tmp_path)
    for made in (prepared(), Preprocessor.load(tmp_path)):
        assert made.adapters == NAMES
        seen = {}
        for indices, features in made.batches(rows, 4):
            plainly = tiny.text_preprocessor().encode([plain(rows[index]) for index in indices], features["input_ids"].shape[1])
            for name, values in plainly.items():
                np.testing.assert_array_equal(features[name], values)
            seen |= dict(zip(indices, features[ADAPTER_IDS][:, 0].tolist(), strict=True))
        assert seen == {index: index % 3 for index in range(len(rows))}


@pytest.mark.parametrize(
    "row", ["a fine film", "legal", with_adapter("a fine film", "Legal"), with_adapter("a", "legal "), with_adapter("a", "")]
)
def test_a_row_without_one_of_the_names_is_refused(row: Any) -> None:
    with pytest.raises(BadRow) as caught:
        prepared().encode([with_adapter("a", "legal"), row])
    assert all(part in str(caught.value) for part in ("row 1", *NAMES))


def test_a_model_without_adapters_reads_the_text_alone() -> None:
    made = tiny.text_preprocessor()
    assert made.encode([with_adapter("a fine film", "legal")])["input_ids"].tolist() == made.encode(["a fine film"])["input_ids"].tolist()
