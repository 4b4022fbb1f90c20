"""Groups of answers of a tiny encoder-decoder: each answer is what it is alone, whoever comes, leaves or searches beside it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from foundation.standalone.decoding_rules import Rules, Structure, Text, search, write
from foundation.standalone.encoder_decoder import EncoderDecoder
from foundation.standalone.language_text import LanguageText
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.export.generation.tiny_encoder_decoders import PAD, START, folder, sources
from tests.triton_repo.generation.paused import Paused, running
from tests.triton_repo.generation.test_engine import Client
from triton_repo.generation.served import engine as module
from triton_repo.generation.served.answer import Answer
from triton_repo.generation.served.grouped import Grouped, Special
from triton_repo.generation.served.request import FIELDS, REGEX, Request, Wanted
from triton_repo.generation.served.structures import Structures

pytestmark = pytest.mark.whole

PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": "1"}
ENDS = list(range(30, 60))
ROOM = 4


class PausedGrouped(Paused, Grouped):
    def __init__(self) -> None:
        self.opened: list[EncoderDecoder] = []
        super().__init__(self._made, Special(START, PAD, ENDS), ROOM, 8)

    def _made(self) -> EncoderDecoder:
        self.opened.append(EncoderDecoder(folder("t5"), PROPERTIES, PAD))
        return self.opened[-1]


def submit(
    engine: Grouped, source: np.ndarray, decode: Callable[[list[int]], str] | None = None, structure: Structure | None = None, **given: Any
) -> Client:
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": 20, "TIMEOUT_SECONDS": 60.0, "REPETITION_PENALTY": 3.0}
    client = Client()
    decode = decode or (lambda ids: str(tokenizer().decode(ids, skip_special_tokens=True)))
    engine.submit(Answer(Request(source.astype(np.int64), {**values, **given}, (), ()), client, decode, 0, structure))
    return client


def tokens(client: Client) -> list[int]:
    assert client.over.wait(30)
    assert client.refused is None
    return [token for piece in client.pieces for token in piece["TOKENS"]]


@cache
def opened() -> EncoderDecoder:
    """The model that answers alone, compiled once; each engine compiles one of its own."""
    return EncoderDecoder(folder("t5"), PROPERTIES, PAD)


def alone(source: np.ndarray, **rules: Any) -> list[int]:
    text = Text(Rules(**{"max_tokens": 20, "repetition_penalty": 3.0, "ends": frozenset(ENDS), **rules}), START)
    with opened().begin([source]) as group:
        write(group.step, [text])
    return text.tokens


@pytest.mark.slow
def test_answers_that_come_and_go_are_what_they_are_alone() -> None:
    asked = sources((3, 9, 14, 1, 7, 5), seed=11)
    expected = [alone(source) for source in asked]
    assert len({len(one) for one in expected}) > 2  # they end at different steps
    with running(PausedGrouped()) as engine:
        first = [submit(engine, source) for source in asked[:2]]
        for _ in range(3):
            engine.steps.release()
        later = [submit(engine, source) for source in asked[2:]]
        engine.free = True
        assert [tokens(client) for client in (*first, *later)] == expected
        reasons = [client.pieces[-1]["FINISH_REASON"] for client in (*first, *later)]
        assert reasons == ["stop" if one[-1] in ENDS else "length" for one in expected]


def test_an_answer_with_a_structure_matches_it_and_changes_no_other() -> None:
    asked = sources((3, 9, 14), seed=21)
    structures = Structures(LanguageText.load(folder("t5")), VOCABULARY, ENDS)
    with running(PausedGrouped()) as engine:
        beside = [submit(engine, source) for source in asked]
        structured = submit(engine, asked[0], structure=structures.begin(Wanted(REGEX, "[a-f]{3,9}(x|yz)")))
        engine.free = True
        assert [tokens(client) for client in beside] == [alone(source) for source in asked]
        tokens(structured)
        assert re.fullmatch("[a-f]{3,9}(x|yz)", "".join(piece["TEXT"] for piece in structured.pieces))
        assert structured.pieces[-1]["FINISH_REASON"] == "stop"


def test_a_search_and_a_sample_run_beside_the_others() -> None:
    one, two, three = sources((4, 8, 6), seed=12)
    with opened().begin([two] * 3) as group:
        best = search(group.step, Rules(20, ends=frozenset(ENDS), repetition_penalty=3.0), START, 3, 0.5)
    with running(PausedGrouped()) as engine:
        greedy = submit(engine, one)
        searched = submit(engine, two, BEAMS=3, ANSWERS=2, STREAM=False, LENGTH_PENALTY=0.5)
        sampled = submit(engine, three, TEMPERATURE=1.0, SEED=7)
        engine.free = True
        assert tokens(greedy) == alone(one)
        assert tokens(sampled) == alone(three, temperature=1.0, seed=7)
        tokens(searched)
        assert [piece["TOKENS"] for piece in searched.pieces] == best[:2]


def test_who_leaves_makes_room_and_changes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    asked = sources((3, 9, 14, 6), seed=13)
    with running(PausedGrouped()) as engine:
        clients = [submit(engine, source, IGNORE_EOS=True) for source in asked]
        engine.steps.release()
        engine.steps.release()
        clients[1].gone = clients[2].gone = True
        assert tokens(clients[1])[:2] == alone(asked[1], ends=frozenset())[: len(tokens(clients[1]))][:2]
        engine.free = True
        for number in (0, 3):
            assert tokens(clients[number]) == alone(asked[number], ends=frozenset())
        assert clients[1].pieces[-1]["FINISH_REASON"] == "cancelled"
        for _ in range(3):  # requests of the model are used again
            assert tokens(submit(engine, asked[0])) == alone(asked[0])
        assert len(engine.opened[0]._free) <= 2


def test_searches_hold_no_more_rows_than_there_is_room_for() -> None:
    (source,) = sources((5,), seed=16)
    with running(PausedGrouped()) as engine:
        searches = [submit(engine, source, BEAMS=3, STREAM=False, MAX_TOKENS=4) for _ in range(3)]
        for _ in range(2):
            engine.steps.release()
        while engine.steps._value:
            threading.Event().wait(0.01)
        assert len(engine._groups) == 1
        engine.free = True
        assert len({tuple(tokens(client)) for client in searches}) == 1


def _undecodable(ids: list[int]) -> str:
    raise OverflowError("too large")


@pytest.mark.parametrize("given", [{}, {"BEAMS": 3, "STREAM": False}])
def test_an_error_of_one_answer_ends_that_answer_alone(given: dict[str, Any]) -> None:
    one, two = sources((4, 7), seed=15)
    with running(PausedGrouped()) as engine:
        beside = submit(engine, one)
        broken = submit(engine, two, _undecodable, **given)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "too large" in broken.refused[0]
        assert tokens(beside) == alone(one)
        assert len(engine.opened) == 1


def test_after_an_error_the_engine_starts_anew() -> None:
    (source,) = sources((5,), seed=14)
    with running(PausedGrouped()) as engine:
        engine.errors.append(RuntimeError("no memory"))
        broken = submit(engine, source)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "the engine failed: no memory" in broken.refused[0]
        assert tokens(submit(engine, source)) == alone(source)
        assert len(engine.opened) == 2
