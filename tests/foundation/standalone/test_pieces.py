"""Text of tokens as they come: the joined pieces are the whole text, letters are never cut, stop texts never sent."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from foundation.standalone.pieces import CONTEXT, WINDOW, Decoded, Pieces, StopTexts


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


TOKENS = (b"", b" ", b"a", b"bc", b" .", b".", b"\xc3", b"\xa9", b" d")
"""Of a special token, of spaces that are cleaned up, of half letters, and of words."""


def cleaned(ids: list[int]) -> str:
    """Decodes tokens, cleans up, and drops a space at the start: a text depends on its first tokens, and a token changes text before it."""
    text = b"".join(TOKENS[one] for one in ids).decode("utf-8", errors="replace").replace(" .", ".")
    return text.removeprefix(" ")


@given(st.lists(st.sampled_from(range(len(TOKENS))), min_size=WINDOW, max_size=4 * WINDOW), st.integers(1, 3))
@example([2] * 5 + [0] * 2 * WINDOW + [2, 3], 1)  # a window without text
@example([8] * (WINDOW - 4) + [0] * (CONTEXT - 3) + [1, 1, 1] + [5, 3], 1)  # one with less text than waits
@example([2] * (WINDOW - CONTEXT) + [7] + [2] * 2 * CONTEXT, 1)  # one that would begin within a letter
def test_a_window_starts_anew_only_where_that_changes_no_text(ids: list[int], size: int) -> None:
    decoded, parts = Decoded(cleaned, held=3), list[str]()
    for at in range(0, len(ids), size):
        parts.append(decoded.add(ids[at : at + size]))
    assert "".join([*parts, decoded.end()]) == cleaned(ids)


@pytest.mark.whole
@given(st.lists(st.sampled_from("aé€ "), min_size=WINDOW, max_size=3 * WINDOW).map("".join))
@example("€" * 2 * WINDOW)
def test_a_window_never_starts_within_a_letter_of_bytes(text: str) -> None:
    """A tokenizer with byte fallback, as Llama's, gives up all letters of a run of bytes that begins within one."""
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [*text.encode()]
    decoded = Decoded(lambda some: str(decoder.decode([f"<0x{one:02X}>" if one >= 128 else chr(one) for one in some])))
    assert "".join([*(decoded.add([one]) for one in ids), decoded.end()]) == text
    for last in range(len(ids) - 4, len(ids)):  # an answer that is cut within a letter
        decoded = Decoded(lambda some: str(decoder.decode([f"<0x{one:02X}>" if one >= 128 else chr(one) for one in some])))
        found = "".join([*(decoded.add([one]) for one in ids[:last]), decoded.end()])
        assert found.rstrip("\ufffd") == bytes(ids[:last]).decode(errors="ignore")
        assert len(found) <= len(found.rstrip("\ufffd")) + 3


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
    assert stop.add("more") == ("" if stop.complete else "more")


def test_a_window_starts_anew_only_where_its_letters_read_the_same() -> None:
    """Two bytes are a letter, and bytes do not say whether they are its first or its second; a token without text comes before them."""

    def in_pairs(ids: list[int]) -> str:
        return bytes(one for one in ids if one < 256).decode("utf-16-be", errors="replace")

    text = "aé€" * WINDOW
    decoded = Decoded(in_pairs)
    parts = [decoded.add([256])] + [decoded.add([one]) for one in text.encode("utf-16-be")]
    assert "".join([*parts, decoded.end()]) == text
    assert len(decoded._ids) <= WINDOW + CONTEXT
