"""Tokens that are proposed: what the text proposes, and how much that is."""

from __future__ import annotations

import pytest

from foundation.core.decoding import Decoding
from foundation.core.errors import InputError
from foundation.core.speculation import Speculation, look_up, per_step


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 4], [9, 2, 3, 4]),  # three tokens that occurred before
        ([5, 1, 2, 7, 8, 6, 1, 2], [7, 8, 6, 1, 2]),  # two
        ([2, 7, 2, 8, 2], [7, 2, 8, 2]),  # one: its first place, not its last
        ([1, 2, 3, 4], []),
        ([1, 1], [1]),
        ([1, 2], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_the_last_tokens_is_proposed(text: list[int], expected: list[int]) -> None:
    assert look_up(text, 10) == expected
    for count in range(4):
        assert look_up(text, count) == expected[:count]


def test_a_draft_proposes_as_many_as_the_model_may_still_add_but_one() -> None:
    draft = Speculation(4, "draft.xml")
    assert draft.proposed([1], list(range(10)), [1, 5, 4], 10) == 4 + 3  # six are done: three, and one of the model itself
    assert draft.proposed([1], list(range(3)), [1, 1, 1], 3) == 1 + 0
    assert draft.proposed([1], [1], [1], 1) == 0


def test_a_text_proposes_what_it_holds() -> None:
    # 7 8 | 7 -> "8", then 7 8 | 7 8 7 -> "8 7"
    assert Speculation(2).proposed([7, 8], [7, 8, 7, 8, 7, 8, 7], [1, 2, 3, 1], 7) == 2 + 2 + 0
    assert Speculation(5).proposed([1, 2, 3], [4, 5], [1, 1], 9) == 0


def test_tokens_per_step() -> None:
    assert per_step(10, 0) == 1
    assert per_step(10, 5) == 2
    assert per_step(0, 0) is None


@pytest.mark.parametrize("tokens", [0, 33, -1])
def test_how_many_at_once_is_limited(tokens: int) -> None:
    with pytest.raises(InputError, match=f"{tokens} tokens at once given; 1 to 32 is allowed"):
        Speculation(tokens)


def test_sampling_is_for_texts_alone() -> None:
    Speculation(3).check(Decoding(temperature=1))
    with pytest.raises(InputError, match="held against the most likely ones"):
        Speculation(3, "draft.xml").check(Decoding(temperature=1))
    for one in (Speculation(3), Speculation(3, "draft.xml")):
        with pytest.raises(InputError, match="a search takes no proposals"):
            one.check(Decoding(beams=2))
