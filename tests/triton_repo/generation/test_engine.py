"""The queue before an engine: who waits, who runs, who is told what when something fails. With an engine that counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from triton_repo.generation.served import engine as module
from triton_repo.generation.served.answer import LENGTH, Answer
from triton_repo.generation.served.engine import Engine
from triton_repo.generation.served.request import BUSY, FAILED, FIELDS, WRONG, Broken, Busy, Refused, Request

ROOM, WAITING = 2, 1


class Client:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.gone, self.pieces = False, []
        self.refused: tuple[str, str] | None = None
        self.over = threading.Event()

    def send(self, outputs: dict[str, Any], *, last: bool) -> None:
        self.pieces.append(outputs)
        if last:
            self.over.set()

    def refuse(self, line: str, code: str) -> None:
        self.refused = (line, code)
        self.over.set()


class Counter(Engine):
    """Gives each answer the tokens 0, 1, ... one a step; steps only while it is let."""

    def __init__(self) -> None:
        super().__init__(ROOM, WAITING)
        self.let, self.renewed = threading.Event(), 0
        self.let.set()
        self.error: Callable[[], None] = lambda: None
        self.error_of_begin: Callable[[], None] = lambda: None
        self.error_of_renewal: Callable[[], None] = lambda: None
        self._answers: dict[Answer, int] = {}
        self.most = 0
        """Most places that were taken at once."""

    @property
    def running(self) -> int:
        return len(self._answers)

    def _running(self) -> list[Answer]:
        return list(self._answers)

    def _begin(self, answer: Answer) -> None:
        self.error_of_begin()
        self._answers[answer] = 0
        self.most = max(self.most, sum(one.places for one in self._answers))

    def _step(self) -> None:
        self.let.wait(0.01)
        if self.let.is_set():
            self.error()
            for answer, count in list(self._answers.items()):
                self._answers[answer] = count + 1
                answer.take([count], LENGTH if count + 1 == answer.request.values["MAX_TOKENS"] else None)
                if answer.ended:
                    del self._answers[answer]

    def _drop_due(self) -> None:
        self._end_due()
        self._answers = {answer: count for answer, count in self._answers.items() if not answer.ended}

    def _renew(self) -> None:
        self._answers = {}
        self.renewed += 1
        self.error_of_renewal()


@contextmanager
def counting() -> Iterator[Counter]:
    engine = Counter()
    engine.start()
    yield engine
    engine.let.set()
    engine.close()
    assert not engine._thread.is_alive()


def submit(engine: Engine, tokens: int = 3, seconds: float = 60.0, beams: int = 1) -> Client:
    values = {field.name: field.default for field in FIELDS} | {"MAX_TOKENS": tokens, "TIMEOUT_SECONDS": seconds, "BEAMS": beams}
    client = Client()
    engine.submit(Answer(Request(np.array([5]), values, (), ()), client, lambda ids: "".join(chr(97 + one) for one in ids), 0))
    return client


def told(client: Client) -> tuple[str, str]:
    """What an answer was, and why it ended."""
    assert client.over.wait(10)
    return "".join(piece["TEXT"] for piece in client.pieces), client.pieces[-1]["FINISH_REASON"]


def once(error: Exception) -> Callable[[], None]:
    left = [error]

    def fail() -> None:
        if left:
            raise left.pop()

    return fail


def test_answers_run_side_by_side_and_the_queue_has_an_end() -> None:
    with counting() as engine:
        engine.let.clear()
        clients = [submit(engine) for _ in range(ROOM + WAITING)]
        with pytest.raises(Busy, match="1 wait, the most allowed; try again later"):
            submit(engine)
        engine.let.set()
        assert [told(client) for client in clients] == [("abc", "length")] * 3


def test_a_search_takes_a_place_for_each_beam_and_waits_for_them() -> None:
    with counting() as engine:
        engine.let.clear()
        running, search = submit(engine), submit(engine, beams=ROOM)
        until(lambda: engine.running == 1)
        behind = submit(engine)
        with pytest.raises(Busy):
            submit(engine)
        assert engine.most == 1
        engine.let.set()
        assert [told(client) for client in (running, search, behind)] == [("abc", "length")] * 3
        assert engine.most == ROOM


def test_a_search_that_never_fits_is_wrong_and_waits_for_nobody() -> None:
    with counting() as engine, pytest.raises(Refused, match=rf"BEAMS: {ROOM + 1} given; .* room for {ROOM} ") as refused:
        submit(engine, beams=ROOM + 1)
    assert refused.value.code == WRONG


def test_who_has_gone_and_whose_time_is_over_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    with counting() as engine:
        engine.let.clear()
        running, late = submit(engine), submit(engine, seconds=0.05)
        waiting = submit(engine)
        assert told(late) == ("", "timeout")
        running.gone = True
        assert told(running) == ("", "cancelled")
        engine.let.set()
        assert told(waiting) == ("abc", "length")


def test_an_error_of_the_engine_is_told_and_the_engine_is_made_anew() -> None:
    with counting() as engine:
        engine.let.clear()
        clients = [submit(engine) for _ in range(ROOM + WAITING)]
        until(lambda: engine.running == ROOM)
        engine.error = once(RuntimeError("no\n memory"))
        engine.let.set()
        assert told(clients[2]) == ("abc", "length")
        assert [client.refused for client in clients[:2]] == [("the engine failed: no memory", FAILED)] * 2
        assert engine.renewed == 1


def test_an_answer_that_cannot_begin_is_told() -> None:
    with counting() as engine:
        engine.error_of_begin = once(KeyError("x"))
        first = submit(engine)
        assert first.over.wait(10)
        assert first.refused == ("'x'", FAILED)
        assert told(submit(engine)) == ("abc", "length")


def test_an_answer_that_cannot_be_ended_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    with counting() as engine:
        engine.let.clear()
        broken, beside = submit(engine), submit(engine)
        until(lambda: engine.running == 2)
        monkeypatch.setattr(Answer, "due", property(lambda self: once(OSError("pipe"))() if self.client is broken else None))
        assert broken.over.wait(10)
        monkeypatch.undo()
        engine.let.set()
        assert told(beside) == ("abc", "length")
        assert engine.renewed == 0


def test_an_engine_that_cannot_be_made_anew_refuses_everybody() -> None:
    with counting() as engine:
        engine.let.clear()
        clients = [submit(engine) for _ in range(ROOM + WAITING)]
        until(lambda: engine.running == ROOM)
        engine.error, engine.error_of_renewal = once(RuntimeError("a")), once(RuntimeError("b"))
        engine.let.set()
        assert all(client.over.wait(10) for client in clients)
        assert [client.refused for client in clients] == [("the engine failed: a", FAILED)] * 2 + [
            ("the model cannot answer any more: b", FAILED)
        ]
        with pytest.raises(Broken, match="cannot answer any more: b"):
            submit(engine)


def test_the_thread_outlives_a_client_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0)
    with counting() as engine:
        engine.let.clear()
        client = submit(engine)
        until(lambda: engine.running == 1)
        monkeypatch.setattr(Client, "gone", property(lambda self: once(OSError("pipe"))()), raising=False)
        assert client.over.wait(10)
        monkeypatch.undo()
        engine.let.set()
        assert told(submit(engine)) == ("abc", "length")


def test_whoever_is_there_when_the_model_is_unloaded_is_told() -> None:
    with counting() as engine:
        engine.let.clear()
        clients = [submit(engine) for _ in range(ROOM + WAITING)]
        engine.close()
        assert [told(client) for client in clients] == [("", "cancelled")] * 3
        with pytest.raises(Busy, match="is being unloaded; try again later"):
            submit(engine)


def test_each_refusal_has_its_code() -> None:
    assert [kind.code for kind in (Refused, Busy, Broken)] == [WRONG, BUSY, FAILED]


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
