"""Continuous batching where memory is reserved, with a decoder that counts pages: nothing is stopped for want of them, and nobody waits in
vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.triton_repo.generation.paused import Paused, running
from tests.triton_repo.generation.test_engine import Client, until
from triton_repo.generation.served import engine as module
from triton_repo.generation.served.answer import Answer
from triton_repo.generation.served.kernels import Reserving
from triton_repo.generation.served.request import FIELDS, Request

VOCABULARY, SLOTS, PAGES, ROOM, WAITING, END = 31, 4, 12, 4, 64, 3


class Pages:
    """A decoder whose next token follows from the whole text, and whose memory is pages of `SLOTS` tokens."""

    part = None

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.opened, self.most, self.read_at_once = 0, 0, list[int]()
        self.errors: list[Exception] = []

    def texts(self) -> Pages:
        self.written = []
        self.opened += 1
        return self

    def groups(self, prompts: Sequence[np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
        yield prompts[:2]

    def fits(self, lengths: Sequence[int]) -> bool:
        return sum(-(-length // SLOTS) for length in lengths) <= PAGES

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.written]

    def read(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        self.written += [prompt.tolist() for prompt in prompts]
        self.read_at_once.append(len(prompts))
        if self.errors:
            raise self.errors.pop()
        return self._logits(self.written[-len(prompts) :])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        assert len(tokens) == len(self.written)
        for text, token in zip(self.written, tokens.tolist(), strict=True):
            text.append(token)
        return self._logits(self.written)

    def keep(self, order: Sequence[int]) -> None:
        self.written = [self.written[number] for number in order]

    def _logits(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        taken = sum(-(-len(text) // SLOTS) for text in self.written)
        assert taken <= PAGES, "no page is free"
        self.most = max(self.most, taken)
        return np.array([np.eye(VOCABULARY)[following(text)] for text in texts], np.float32)


def following(text: Sequence[int]) -> int:
    return (sum(place * token for place, token in enumerate(text, 1)) + len(text)) % VOCABULARY


def alone(prompt: Sequence[int], tokens: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + tokens and (len(text) == len(prompt) or text[-1] != END):
        text.append(following(text))
    return text[len(prompt) :]


class PausedReserving(Paused, Reserving):
    def __init__(self) -> None:
        self.pages = Pages()
        super().__init__(self.pages, [END], ROOM, WAITING)


def submit(engine: Reserving, prompt: Sequence[int], tokens: int, **given: Any) -> Client:
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": tokens, "TIMEOUT_SECONDS": 60.0, "PIECE_SECONDS": 0.0}
    client = Client()
    engine.submit(Answer(Request(np.array(prompt, np.int64), {**values, **given}, (), ()), client, str, 0))
    return client


def tokens(client: Client) -> list[int]:
    assert client.over.wait(30)
    assert client.refused is None, client.refused
    return [token for piece in client.pieces for token in piece["TOKENS"]]


@pytest.mark.parametrize("seed", range(6))
def test_answers_that_come_at_any_time_are_what_they_are_alone_within_the_memory(seed: int) -> None:
    random = np.random.default_rng(seed)
    asked = [(random.integers(4, VOCABULARY, random.integers(1, 20)).tolist(), int(random.integers(1, 20))) for _ in range(14)]
    with running(PausedReserving()) as engine:
        clients = []
        for prompt, most in asked:
            clients.append(submit(engine, prompt, most))
            for _ in range(int(random.integers(0, 3))):
                engine.steps.release()
        engine.free = True
        assert [tokens(client) for client in clients] == [alone(prompt, most) for prompt, most in asked]
        until(lambda: engine.running == 0 and not engine.pages.written)
    assert engine.pages.opened == 1  # never recreated
    assert engine.pages.most > PAGES // 2  # memory was short


def test_an_answer_joins_at_the_next_step_where_there_is_room() -> None:
    with running(PausedReserving()) as engine:
        first = submit(engine, [5, 6], 8)
        engine.steps.release()
        until(lambda: len(first.pieces) == 1)
        second = submit(engine, [7], 2)
        until(lambda: engine.running == 2)
        engine.steps.release()
        until(lambda: len(second.pieces) == 1)
        assert len(first.pieces) == 2
        engine.free = True
        assert (tokens(first), tokens(second)) == (alone([5, 6], 8), alone([7], 2))


def test_who_needs_more_memory_than_is_free_waits_and_is_not_overtaken() -> None:
    with running(PausedReserving()) as engine:
        first = submit(engine, [5] * 20, 12)  # eight of twelve pages
        large, small = submit(engine, [6] * 10, 10), submit(engine, [8], 1)
        for _ in range(3):
            engine.steps.release()
        until(lambda: len(first.pieces) >= 3)
        assert (engine.running, large.pieces, small.pieces) == (1, [], [])
        engine.free = True
        assert tokens(large) == alone([6] * 10, 10)
        assert tokens(small) == alone([8], 1)


def test_who_leaves_gives_its_memory_to_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    with running(PausedReserving()) as engine:
        first = submit(engine, [5] * 20, 20)
        waiting = submit(engine, [6] * 10, 10)
        engine.steps.release()
        until(lambda: len(first.pieces) == 1)
        first.gone = True
        until(lambda: engine.running == 1 and first.over.is_set())
        engine.free = True
        assert tokens(waiting) == alone([6] * 10, 10)


def test_prompts_of_any_length_are_read_whole_and_together_as_the_decoder_says() -> None:
    with running(PausedReserving()) as engine:
        clients = [submit(engine, prompt, 1) for prompt in ([5] * 30, [6], [7])]
        until(lambda: engine.running == 3)
        engine.free = True
        assert [tokens(client) for client in clients] == [alone(prompt, 1) for prompt in ([5] * 30, [6], [7])]
    assert engine.pages.read_at_once == [2, 1]


def test_after_an_error_the_cache_is_empty_and_the_same_decoder_answers() -> None:
    with running(PausedReserving()) as engine:
        engine.pages.errors.append(RuntimeError("no memory"))
        broken = submit(engine, [5] * 30, 18)
        engine.free = True
        assert broken.over.wait(30)
        assert broken.refused is not None
        assert "the engine failed: no memory" in broken.refused[0]
        assert tokens(submit(engine, [6] * 30, 18)) == alone([6] * 30, 18)
        assert engine.pages.opened == 2
