"""Text of tokens as they come: the joined pieces are the whole text, letters are never cut, stop texts never sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_repo.generation.served.pieces import CONTEXT, WINDOW, Decoded, Pieces, StopTexts


def decode(ids: list[int]) -> str:
    """Decodes bytes, as byte-level tokenizers do."""
    return bytes(ids).decode("utf-8", errors="replace")


def in_pieces(values: bytes, cuts: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Pieces]:
    pieces, at, found = Pieces(decode, stop=stop), 0, []
    for size in [*cuts, len(values)]:
        for one in values[at : at + size]:
            if not pieces.stopped:
                found.append(pieces.add([one]))
        at += size
    found.append(pieces.end())
    return found, pieces


LETTERS = st.text(st.characters(exclude_categories=("Cs",)), max_size=2 * WINDOW)


@given(LETTERS, st.lists(st.integers(1, 9), max_size=20))
def test_joined_pieces_are_the_text_and_no_letter_is_cut(text: str, cuts: list[int]) -> None:
    found, _ = in_pieces(text.encode(), cuts)
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(st.text("ab ", max_size=60), st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_ends_before_the_stop_text_that_is_complete_first(text: str, stop: list[str]) -> None:
    found, pieces = in_pieces(("x" + text).encode(), [], tuple(stop))
    ends = [(place + len(one), place) for one in stop if (place := ("x" + text).find(one)) >= 0]
    assert "".join(found) == ("x" + text)[: min(ends)[1]] if ends else "".join(found) == "x" + text
    assert pieces.stopped == bool(ends)


def test_the_window_slides_over_long_texts() -> None:
    decoded = Decoded(decode)
    text = "é" * (3 * WINDOW)
    parts = [decoded.add([one]) for one in text.encode()] + [decoded.end()]
    assert "".join(parts) == text
    assert len(decoded._ids) <= WINDOW + CONTEXT  # not the whole answer is decoded again


def test_letters_that_a_tokenizer_may_still_clean_up_wait() -> None:
    def cleaning(ids: list[int]) -> str:
        return decode(ids).replace(" .", ".")

    decoded = Decoded(cleaning, held=2)
    parts = [decoded.add([one]) for one in b"one . two"] + [decoded.end()]
    assert "".join(parts) == "one. two"


@pytest.mark.parametrize(("texts", "expected"), [((), "abc"), (("bc",), "a"), (("c", "bc"), "a"), (("cd",), "abc")])
def test_stop_texts_wait_only_for_what_may_still_come(texts: tuple[str, ...], expected: str) -> None:
    stop = StopTexts(texts)
    assert "".join([*(stop.add(letter) for letter in "abc"), stop.end()]) == expected
    assert stop.add("more") == ("" if stop.found else "more")
