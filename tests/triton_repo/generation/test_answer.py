"""An answer under way: what its client gets, and when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_repo.generation.served import answer as answers
from triton_repo.generation.served.answer import LENGTH, Answer
from triton_repo.generation.served.request import Limits, Refused, read

LIMITS = Limits(context=64, vocabulary=100, seconds=1000.0, chat=False, beams=False)


class Clock:
    """Stands still between two steps."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Client:
    """Keeps what it gets, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.found: list[tuple[float, list[int]]] = []
        self.texts: list[str] = []
        self.reason: str | None = None

    gone = False

    def send(self, outputs: dict[str, Any], *, last: bool) -> None:
        self.found.append((self._clock.now, outputs["TOKENS"]))
        self.texts.append(outputs["TEXT"])
        self.reason = outputs.get("FINISH_REASON")
        assert last == ("FINISH_REASON" in outputs)

    def refuse(self, line: str, code: str) -> None:
        raise AssertionError(line)


def test_a_stop_token_of_the_request_ends_the_answer_wherever_it_comes() -> None:
    given = {"INPUT_IDS": np.array([1]), "STOP_TOKENS": np.array([7, 9]), "IGNORE_EOS": np.array([True])}
    for steps in ([[3], [9], [4]], [[3, 9, 4]], [[3], [9, 4]]):  # tokens that were proposed come together
        client = Client(Clock())
        one = Answer(read(given, LIMITS, mock.Mock()), client, lambda ids: "a" * len(ids), 0)
        for step in steps:
            if not one.ended:
                one.take(step)
        assert one.ended
        assert [token for _, tokens in client.found for token in tokens] == [3, 9]
        assert client.reason == "stop"


def test_a_stop_text_ends_the_answer_at_its_letter() -> None:
    words = {1: "one two", 2: " three", 3: " four"}
    given = {"INPUT_IDS": np.array([1]), "STOP": np.array([b"wo th"], np.object_)}
    client = Client(Clock())
    one = Answer(read(given, LIMITS, mock.Mock()), client, lambda ids: "".join(words[token] for token in ids), 0)
    one.take([1, 2, 3])
    assert "".join(client.texts) == "one t"
    assert [token for _, tokens in client.found for token in tokens] == [1, 2]  # up to the one that completes it
    assert client.reason == "stop"


def told(gaps: list[float], *, kept_back: bool = False, **inputs: Any) -> list[tuple[float, list[int]]]:
    """Returns what a client gets, and when, of an answer with a token after each of these seconds; its last token is the last piece.

    With `kept_back` the engine passes tokens on only where the answer does not wait.
    """
    clock = Clock()
    client = Client(clock)
    arrays = {name: value if isinstance(value, np.ndarray) else np.array([value]) for name, value in inputs.items()}
    given = {"INPUT_IDS": np.array([1]), **arrays}
    with mock.patch.object(answers, "time", clock):
        one, kept = Answer(read(given, LIMITS, mock.Mock()), client, lambda ids: "a" * len(ids), 0), list[int]()
        for number, gap in enumerate(gaps):
            clock.now += gap
            kept.append(number)
            last = number == len(gaps) - 1
            if one.ended or (kept_back and not last and one.waits(clock.now)):
                continue
            one.take(kept, LENGTH if last else None)
            kept = []
    return client.found


GAPS = st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.2, 1.5]), min_size=1, max_size=30)


@given(GAPS, st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=50, deadline=None)
def test_tokens_come_together_that_are_written_close_to_one_another(gaps: list[float], seconds: float) -> None:
    found = told(gaps, PIECE_SECONDS=seconds)
    assert [token for _, tokens in found for token in tokens] == list(range(len(gaps)))
    assert found[0] == (100.0 + gaps[0], [0]), "the first token does not wait"
    times = [when for when, _ in found]
    assert all(later - earlier >= seconds for earlier, later in pairwise(times[:-1]))
    if seconds == 0:
        assert [tokens for _, tokens in found] == [[number] for number in range(len(gaps))]
    # nobody waits for a token that is slow: it comes as soon as it is written
    written, slow = 100.0 + np.cumsum(gaps), [number for number, gap in enumerate(gaps) if gap >= seconds]
    assert all(any(when == pytest.approx(written[number]) and number in tokens for when, tokens in found) for number in slow)


def test_a_fast_answer_comes_in_few_pieces_unless_it_is_asked_otherwise() -> None:
    gaps = [0.006] * 37
    assert [len(tokens) for _, tokens in told(gaps)] == [1, 17, 17, 2]
    assert [len(tokens) for _, tokens in told(gaps, STREAM=False)] == [37]


ENDS: list[dict[str, Any]] = [{}, {"STREAM": False}, {"STOP": np.array([b"aaaa"], np.object_)}, {"STOP_TOKENS": np.array([3, 8])}]


@given(GAPS, st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from(ENDS))
@settings(max_examples=100, deadline=None)
def test_tokens_that_the_engine_keeps_back_change_nothing(gaps: list[float], seconds: float, ends: dict[str, Any]) -> None:
    given = {"PIECE_SECONDS": seconds, **ends}
    assert told(gaps, kept_back=True, **given) == told(gaps, **given)


def test_only_what_may_end_an_answer_is_read_at_once() -> None:
    client = Client(Clock())
    given = {"INPUT_IDS": np.array([1]), "STREAM": np.array([False])}
    assert Answer(read(given, LIMITS, mock.Mock()), client, str, 0).waits(100.0)
    for name in ("STOP", "STOP_TOKENS"):
        more = {**given, name: ENDS[2]["STOP"] if name == "STOP" else ENDS[3]["STOP_TOKENS"]}
        assert not Answer(read(more, LIMITS, mock.Mock()), client, str, 0).waits(100.0)


def test_a_negative_pause_is_refused() -> None:
    with pytest.raises(Refused, match="PIECE_SECONDS: -1 given; 0 to 60 is allowed"):
        told([0.1], PIECE_SECONDS=-1.0)
