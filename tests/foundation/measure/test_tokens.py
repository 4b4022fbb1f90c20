"""Answers of two language models: where they part, how often, and when that is too often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.measure.tokens import compare_tokens, token_shortfall


def told(reference: list[list[int]], found: list[list[int]]) -> dict[str, object]:
    return compare_tokens(np.array(reference, np.int32), np.array(found, np.int32))


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    compared = told([[1, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, 5]], [[1, 2, 3, 4], [1, 9, 3, 9], [9, 5, 5, 5]])
    assert compared["identical"] == 1
    assert compared["disagreements"] == 2
    assert compared["decisions"] == 4 + 2 + 1
    assert compared["first_other"] == 0.5
    assert compared["equal_share"] == pytest.approx(1 - 3 / 12)


@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**31))
def test_the_counts_are_those_of_a_loop(prompts: int, tokens: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    reference, found = (random.integers(0, 3, (prompts, tokens)).astype(np.int32) for _ in range(2))
    decisions, disagreements, first = 0, 0, []
    for left, right in zip(reference.tolist(), found.tolist(), strict=True):
        for position, (one, other) in enumerate(zip(left, right, strict=True)):
            decisions += 1
            if one != other:
                disagreements += 1
                first.append(position)
                break
    compared = compare_tokens(reference, found)
    assert (compared["decisions"], compared["disagreements"]) == (decisions, disagreements)
    assert compared["first_other"] == (float(np.median(first)) if first else None)
    assert compared["identical"] == prompts - disagreements


def test_one_other_token_in_a_thousand_passes_and_a_wrong_model_does_not() -> None:
    random = np.random.default_rng(0)
    reference = random.integers(0, 100, (100, 64)).astype(np.int32)
    slipped = reference.copy()
    slipped[:5, 40] += 1
    assert token_shortfall(compare_tokens(reference, slipped), "torch") is None
    wrong = reference.copy()
    wrong[:, 3] += 1
    reason = token_shortfall(compare_tokens(reference, wrong), "torch")
    assert reason is not None
    assert "100 of 400 tokens that follow equal ones differ from torch" in reason


def test_answers_of_other_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shapes"):
        told([[1, 2]], [[1, 2, 3]])
