"""Where an answer ends: behind the first end token, or before the first stop text, whichever comes first."""

from __future__ import annotations

import pytest

from export.engines.own_ends import Ends

LETTERS = "abcdefgh"


@pytest.mark.parametrize(
    ("answer", "tokens", "texts", "cut"),
    [
        ([0, 1, 2], (), (), None),
        ([0, 1, 2, 1], (1,), (), (0, 1)),
        ([0, 1, 2], (), ("bc",), (0,)),
        ([0, 1, 2], (2,), ("b",), (0,)),
        ([0, 1, 2], (0,), ("b",), (0,)),  # the text stands behind the end
        ([0, 1], (5,), ("bc",), None),
    ],
)
def test_what_comes_first_ends_it(answer: list[int], tokens: tuple[int, ...], texts: tuple[str, ...], cut: tuple[int, ...] | None) -> None:
    assert Ends(frozenset(tokens), texts, lambda ids: "".join(LETTERS[one] for one in ids)).cut(answer) == cut
