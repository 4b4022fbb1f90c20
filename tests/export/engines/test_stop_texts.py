"""Texts that end an answer: what stays is all that stands before them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from export.engines.stop_texts import before_stop, stops

LETTERS = {1: "a", 2: "b", 3: "ab", 4: "c", 5: "bc"}


def decode(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "stop", "kept"),
    [
        ([1, 2, 4], ["c"], [1, 2]),
        ([1, 1, 1, 2], ["ab"], [1, 1]),  # letters like the first of the stop text, but before it, stay
        ([1, 3, 4], ["bc"], [1]),  # a token that is partly of it goes
        ([4, 1, 2, 4], ["b", "ca"], []),  # the one that is complete first
        ([4, 1, 2], ["b", "ab"], [4]),  # two that end together: the longer one
        ([1, 2], ["c"], [1, 2]),
        ([1, 2], ["ab"], []),
        ([1, 2], [], [1, 2]),
        ([], ["a"], []),
    ],
)
def test_tokens_before_the_text_stay(tokens: list[int], stop: list[str], kept: list[int]) -> None:
    assert before_stop(decode, tokens, stop) == tuple(kept)
    assert stops(decode, tokens, stop) == (len(kept) < len(tokens))
