"""Answers over one cache of a tiny decoder: each is what it is alone, whoever comes, leaves, reads a long prompt or searches beside it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.engines.onnxruntime_decoder import MODEL, properties
from foundation.core.decoding import Decoding
from foundation.standalone import onnx_decoder
from foundation.standalone.decoding_rules import Structure
from foundation.standalone.language_text import LanguageText
from foundation.standalone.onnx_decoder import OnnxDecoder
from tests.export.engines.test_onnxruntime_decoder import engine as alone_engine
from tests.export.engines.test_onnxruntime_decoder import folder
from tests.export.generation.genai_checkpoints import prompts, tokenizer
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.triton_repo.generation.paused import Paused, running
from tests.triton_repo.generation.test_engine import Client
from triton_repo.generation.served import engine as module
from triton_repo.generation.served.answer import Answer
from triton_repo.generation.served.batched import Batched
from triton_repo.generation.served.request import FIELDS, REGEX, WRONG, Request, Wanted
from triton_repo.generation.served.structures import Structures

pytestmark = pytest.mark.whole

ENDS = tuple(range(30, 60))
ROOM, TOKENS, PENALTY = 6, 20, 3.0
PART = 16


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_decoder, "PART", PART)


class PausedBatched(Paused, Batched):
    def __init__(self) -> None:
        self.opened: list[OnnxDecoder] = []
        super().__init__(self._made, ENDS, ROOM, 8)

    def _made(self) -> OnnxDecoder:
        self.opened.append(OnnxDecoder(Path(folder("llama"), MODEL), properties(1)))
        return self.opened[-1]


def submit(
    engine: Batched,
    prompt: np.ndarray,
    decode: Callable[[list[int]], str] | None = None,
    structure: Structure | None = None,
    stop: tuple[str, ...] = (),
    **given: Any,
) -> Client:
    values = {field.name: field.default for field in FIELDS} | {
        "MAX_TOKENS": TOKENS,
        "TIMEOUT_SECONDS": 60.0,
        "REPETITION_PENALTY": PENALTY,
    }
    client = Client()
    decode = decode or (lambda ids: str(tokenizer().decode(ids, skip_special_tokens=True)))
    engine.submit(Answer(Request(prompt.astype(np.int64), {**values, **given}, stop, ()), client, decode, 0, structure))
    return client


def tokens(client: Client) -> list[int]:
    assert client.over.wait(30)
    assert client.refused is None
    return [token for piece in client.pieces for token in piece["TOKENS"]]


def alone(prompt: np.ndarray, **given: Any) -> list[int]:
    settings = {"max_tokens": TOKENS, "repetition_penalty": PENALTY, "stop_tokens": ENDS, "ignore_end": True, **given}
    (answer,) = alone_engine("llama").generate([prompt], Decoding(**settings))
    return list(answer.tokens[0])


def test_answers_that_come_and_go_are_what_they_are_alone() -> None:
    asked = prompts((3, 40, 14, 1, 33, 5), seed=11)
    expected = [alone(prompt) for prompt in asked]
    assert len({len(one) for one in expected}) > 2  # they end at different steps
    with running(PausedBatched()) as engine:
        first = [submit(engine, prompt) for prompt in asked[:2]]
        for _ in range(3):
            engine.steps.release()
        later = [submit(engine, prompt) for prompt in asked[2:]]
        engine.free = True
        assert [tokens(client) for client in (*first, *later)] == expected
        reasons = [client.pieces[-1]["FINISH_REASON"] for client in (*first, *later)]
        assert reasons == ["stop" if one[-1] in ENDS else "length" for one in expected]
        assert engine.running == 0
        assert engine._texts.lengths == []


def test_a_long_prompt_is_read_between_the_steps_of_others() -> None:
    short, long = prompts((4, 5 * PART + 3), seed=16)
    with running(PausedBatched()) as engine:
        writing = submit(engine, short, IGNORE_EOS=True, PIECE_SECONDS=0.0)
        engine.steps.release()
        reading = submit(engine, long, IGNORE_EOS=True)
        for _ in range(5):
            engine.steps.release()
        while engine.steps._value:  # until the five steps have been taken
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        assert len([token for piece in writing.pieces for token in piece["TOKENS"]]) >= 5
        assert reading.pieces == []  # the sixth part is still to be read
        engine.free = True
        assert tokens(writing) == alone(short, stop_tokens=())
        assert tokens(reading) == alone(long, stop_tokens=())


def test_a_search_and_a_sample_run_beside_the_others() -> None:
    one, two, three = prompts((4, 8, 6), seed=12)
    (best,) = alone_engine("llama").generate(
        [two],
        Decoding(TOKENS, beams=3, answers=2, length_penalty=0.5, repetition_penalty=PENALTY, stop_tokens=ENDS, ignore_end=True),
    )
    with running(PausedBatched()) as engine:
        greedy = submit(engine, one)
        searched = submit(engine, two, BEAMS=3, ANSWERS=2, STREAM=False, LENGTH_PENALTY=0.5)
        sampled = submit(engine, three, TEMPERATURE=1.0, SEED=7)
        engine.free = True
        assert tokens(greedy) == alone(one)
        assert tokens(sampled) == alone(three, temperature=1.0, seed=7)
        tokens(searched)
        assert [piece["TOKENS"] for piece in searched.pieces] == [list(answer) for answer in best.tokens]


@pytest.mark.parametrize("leaving", [(0,), (1, 2), (3,), (0, 1, 2)])
def test_who_leaves_makes_room_and_changes_nobody(leaving: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    asked = prompts((3, 9, 14, 3 * PART), seed=13)
    expected = [alone(prompt, stop_tokens=()) for prompt in asked]
    with running(PausedBatched()) as engine:
        clients = [submit(engine, prompt, IGNORE_EOS=True) for prompt in asked]
        for _ in range(3):
            engine.steps.release()
        while engine.steps._value:
            threading.Event().wait(0.01)
        for number in leaving:
            clients[number].gone = True
        for number in leaving:
            found = tokens(clients[number])
            assert found == expected[number][: len(found)]
            assert clients[number].pieces[-1]["FINISH_REASON"] == "cancelled"
        engine.free = True
        for number in set(range(4)) - set(leaving):
            assert tokens(clients[number]) == expected[number]
        assert tokens(submit(engine, asked[0], IGNORE_EOS=True)) == expected[0]


def test_the_prompt_of_a_search_is_read_between_the_steps_of_others() -> None:
    short, long, last = prompts((4, 5 * PART + 3, 6), seed=18)
    (best,) = alone_engine("llama").generate(
        [long], Decoding(TOKENS, beams=3, repetition_penalty=PENALTY, stop_tokens=ENDS, ignore_end=True)
    )
    with running(PausedBatched()) as engine:
        writing = submit(engine, short, IGNORE_EOS=True, PIECE_SECONDS=0.0)
        engine.steps.release()
        searching = submit(engine, long, BEAMS=3, STREAM=False)
        behind = submit(engine, last)
        for _ in range(5):
            engine.steps.release()
        while engine.steps._value:
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
        assert len([token for piece in writing.pieces for token in piece["TOKENS"]]) >= 5
        assert engine._preparing  # the sixth part is still to be read
        engine.free = True
        assert tokens(writing) == alone(short, stop_tokens=())
        assert tokens(searching) == list(best.tokens[0])
        assert tokens(behind) == alone(last)


def test_searches_hold_no_more_rows_than_there_is_room_for() -> None:
    (prompt,) = prompts((5,), seed=19)
    with running(PausedBatched()) as engine:
        searches = [submit(engine, prompt, BEAMS=ROOM, STREAM=False, MAX_TOKENS=4) for _ in range(3)]
        beside = submit(engine, prompt)
        for _ in range(2):
            engine.steps.release()
        while engine.steps._value:
            threading.Event().wait(0.01)
        assert len(engine._searches) == 1
        engine.free = True
        assert len({tuple(tokens(client)) for client in searches}) == 1
        assert tokens(beside) == alone(prompt)


def _undecodable(ids: list[int]) -> str:
    raise OverflowError("too large")


@pytest.mark.parametrize("given", [{}, {"BEAMS": 3, "STREAM": False}, {"PIECE_SECONDS": 0.0}])
def test_an_error_of_one_answer_ends_that_answer_alone(given: dict[str, Any]) -> None:
    one, two = prompts((4, 7), seed=20)
    with running(PausedBatched()) as engine:
        beside = submit(engine, one)
        broken = submit(engine, two, _undecodable, **given)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "too large" in broken.refused[0]
        assert tokens(beside) == alone(one)
        assert len(engine.opened) == 1


def test_logits_that_are_no_numbers_end_a_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = prompts((4, 7), seed=21)
    monkeypatch.setattr(onnx_decoder.Beams, "step", lambda self, tokens, order: np.full((len(tokens), VOCABULARY), np.nan, np.float32))
    with running(PausedBatched()) as engine:
        beside, broken = submit(engine, one), submit(engine, two, BEAMS=2, STREAM=False, MAX_TOKENS=3)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "came to no answer" in broken.refused[0]
        assert tokens(beside) == alone(one)


def test_after_an_error_the_engine_starts_anew() -> None:
    (prompt,) = prompts((5,), seed=14)
    with running(PausedBatched()) as engine:
        engine.errors.append(RuntimeError("no memory"))
        broken = submit(engine, prompt)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "the engine failed: no memory" in broken.refused[0]
        assert tokens(submit(engine, prompt)) == alone(prompt)
        assert len(engine.opened) == 2


def test_who_leaves_while_a_long_prompt_is_read_does_not_take_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    short, long = prompts((4, 4 * PART), seed=17)
    with running(PausedBatched()) as engine:
        writing = submit(engine, short, IGNORE_EOS=True, PIECE_SECONDS=0.0)
        engine.steps.release()
        while not writing.pieces:
            threading.Event().wait(0.01)
        reading = submit(engine, long, IGNORE_EOS=True)
        for _ in range(2):
            engine.steps.release()
        while engine.steps._value:
            threading.Event().wait(0.01)
        writing.gone = True
        tokens(writing)
        engine.free = True
        assert tokens(reading) == alone(long, stop_tokens=())


def text(client: Client) -> str:
    tokens(client)
    return "".join(piece["TEXT"] for piece in client.pieces)


@cache
def structures() -> Structures:
    return Structures(LanguageText.load(folder("llama")), VOCABULARY, ENDS)


@pytest.mark.parametrize("sampled", [{}, {"TEMPERATURE": 1.5, "SEED": 3}])
def test_an_answer_with_a_structure_matches_it_and_changes_no_other(sampled: dict[str, Any]) -> None:
    asked = prompts((3, 40, 14), seed=21)
    expected = [alone(prompt) for prompt in asked]
    free = alone(asked[0], ignore_end=True)
    with running(PausedBatched()) as engine:
        before = [submit(engine, prompt) for prompt in asked[:2]]
        for _ in range(2):
            engine.steps.release()
        beside = [submit(engine, asked[0], structure=structures().begin(Wanted(REGEX, "[a-f]{3,9}(x|yz)")), **sampled) for _ in range(2)]
        later = submit(engine, asked[2])
        engine.free = True
        assert [tokens(client) for client in (*before, later)] == expected
        for client in beside:
            assert re.fullmatch("[a-f]{3,9}(x|yz)", text(client))
            assert client.pieces[-1]["FINISH_REASON"] == "stop"
            assert tokens(client) != free[: len(tokens(client))]
        assert engine.running == 0


def test_an_answer_with_a_structure_ends_at_its_length_and_at_a_stop_text() -> None:
    (prompt,) = prompts((5,), seed=22)
    with running(PausedBatched()) as engine:
        engine.free = True
        cut = submit(engine, prompt, structure=structures().begin(Wanted(REGEX, "(cd){40}")), MAX_TOKENS=7)
        assert (text(cut), cut.pieces[-1]["FINISH_REASON"]) == ("cdcdcdc", "length")
        stopped = submit(engine, prompt, structure=structures().begin(Wanted(REGEX, "(cd){40}")), stop=("dc",))
        assert (text(stopped), stopped.pieces[-1]["FINISH_REASON"]) == ("c", "stop")


def test_a_structure_that_cannot_be_continued_ends_its_answer_alone() -> None:
    one, two = prompts((5, 6), seed=23)
    with running(PausedBatched()) as engine:
        engine.free = True
        wrong = submit(engine, one, structure=structures().begin(Wanted(REGEX, "cd[0-9]")))
        right = submit(engine, two)
        assert wrong.over.wait(30)
        assert wrong.refused is not None
        assert wrong.refused[1] == WRONG
        assert "no token" in wrong.refused[0]
        assert tokens(right) == alone(two)
        assert len(engine.opened) == 1
