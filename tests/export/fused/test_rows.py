"""Packed rows: the tokens of each row and nothing else, by a loop; wrong rows are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.fused.rows import Limits, filled, pack
from foundation.core.errors import InputError

LIMITS = Limits(words=50, kinds=2, longest=9, first_position=2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
def test_it_is_the_tokens_one_after_another(lengths: list[int], kinds: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids, types = random.integers(0, 50, (len(lengths), 9)), random.integers(0, 2, (len(lengths), 9))
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.int64)
    features = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if kinds else {})
    rows = pack(features, LIMITS)
    wanted = [(ids[n, at], types[n, at] if kinds else 0, at + 2) for n, length in enumerate(lengths) for at in range(length)]
    assert list(zip(rows.word.tolist(), rows.kind.tolist(), rows.position.tolist(), strict=True)) == wanted
    assert rows.start.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert rows.first.tolist() == rows.start.tolist()[:-1]
    assert (rows.word.dtype, rows.start.dtype, rows.first.dtype) == (torch.int64, torch.int32, torch.int64)
    assert rows.sequences == len(lengths)
    more = filled(rows, len(wanted) + 3, len(lengths) + 2)
    assert more.word.tolist() == [*rows.word.tolist(), 0, 0, 0]
    assert more.start.tolist() == [*rows.start.tolist(), sum(lengths), sum(lengths)]
    assert more.first.tolist() == [*rows.first.tolist(), 0, 0]
    assert more.is_filled
    assert more.to(torch.device("cpu")).is_filled
    assert not rows.is_filled


def test_without_a_mask_nothing_is_padding() -> None:
    assert pack({"input_ids": np.ones((2, 3), np.int64)}, LIMITS).start.tolist() == [0, 3, 6]


@pytest.mark.parametrize("mask", [[0, 0, 0], [0, 1, 1], [1, 0, 1]])
def test_padding_stands_behind_the_tokens(mask: list[int]) -> None:
    features = {"input_ids": np.ones((2, 3), np.int64), "attention_mask": np.array([[1, 1, 0], mask])}
    with pytest.raises(InputError, match=r"attention_mask: .*1 for the tokens of a row, at least one"):
        pack(features, LIMITS)


def test_what_would_read_beyond_a_table_is_refused() -> None:
    ids = np.ones((1, 3), np.int64)
    with pytest.raises(InputError, match="input_ids: 1 to 50 given; 0 to 49"):
        pack({"input_ids": ids * np.array([1, 50, 1])}, LIMITS)
    with pytest.raises(InputError, match="input_ids: -1 to 1 given; 0 to 49"):
        pack({"input_ids": ids * np.array([1, -1, 1])}, LIMITS)
    with pytest.raises(InputError, match="token_type_ids: 2 to 2 given; 0 to 1"):
        pack({"input_ids": ids, "token_type_ids": 2 * ids}, LIMITS)
    with pytest.raises(InputError, match="a row has 10 tokens; this model takes 9"):
        pack({"input_ids": np.ones((1, 10), np.int64)}, LIMITS)
    padded = {"input_ids": np.array([[1, 99]]), "attention_mask": np.array([[1, 0]])}
    assert pack(padded, LIMITS).word.tolist() == [1]  # the id of padding is not looked up
