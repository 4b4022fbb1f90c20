"""The thread that answers: a queue of answers before an engine that runs some of them at once.

    submit() ---> waiting, at most `max_waiting` ---> running, in as many places as the engine has ---> ended

An answer takes one place, a search one for each of its beams. Answers begin in the order in which they came: a search waits until its beams
fit, an answer until its memory is free where an engine reserves it, and so do those after it. A request that finds the queue full is
refused at once, and so is a search that never fits. An answer whose client is gone or whose time is over ends within `PERIOD_SECONDS` and
a step of the engine.

The thread outlives every error. An error of one answer ends only that answer. After an error of the engine, all running answers get it, and
the engine is recreated.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from .answer import CANCELLED, Answer, in_a_line
from .guests import Guests
from .request import Broken, Busy, Refused

if TYPE_CHECKING:
    import openvino
    import openvino_genai

PERIOD_SECONDS = 0.25
"""Time between two checks of the clients; each costs a message to the server."""
STOP_SECONDS = 30.0
TRY_LATER = "try again later"
"""Suffix of the error message of an overloaded model; the front of the server looks for it."""
NO_TOKEN = 2**31 - 1
"""An id that no token has."""


class Engine(ABC):
    """An engine and its thread.

    Args:
        room: Number of places.
        max_waiting: Number of answers that wait.
    """

    def __init__(self, room: int, max_waiting: int) -> None:
        self.guests = Guests()
        """Other threads that need Python's lock."""
        self._room, self._max_waiting, self._taken = room, max_waiting, 0
        self._waiting: list[Answer] = []
        self._changed = threading.Condition()
        self._closing = False
        self._broken: str | None = None
        self._looked = 0.0
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Puts an answer into the queue.

        Raises:
            Refused: The answer needs more places than there are.
            Busy: The queue is full, or the engine is being closed.
            Broken: The engine has failed for good.
        """
        if answer.places > self._room:
            raise Refused(f"BEAMS: {answer.places} given; this model has room for {self._room} beams: give at most so many")
        with self._changed:
            if self._broken is not None:
                raise Broken(f"the model cannot answer any more: {self._broken}")
            if self._closing:
                raise Busy(f"the model is being unloaded; {TRY_LATER}")
            if len(self._waiting) >= self._max_waiting + max(0, self._room - self._taken):
                raise Busy(f"{self.running} requests are being answered and {self._max_waiting} wait, the most allowed; {TRY_LATER}")
            self._waiting.append(answer)
            self._changed.notify()

    def close(self) -> None:
        """Ends all answers and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(STOP_SECONDS)

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of answers that run."""

    @abstractmethod
    def _begin(self, answer: Answer) -> None:
        """Begins an answer, or completes it at once."""

    @abstractmethod
    def _step(self) -> None:
        """Generates the next tokens of all running answers."""

    @abstractmethod
    def _drop_due(self) -> None:
        """Ends the running answers that have to end."""

    @abstractmethod
    def _running(self) -> list[Answer]:
        """Returns the answers that run."""

    @abstractmethod
    def _renew(self) -> None:
        """Recreates the engine after an error; no answer runs then."""

    def _look(self) -> None:
        """Ends the answers that have to end; does nothing if it did so a moment ago."""
        now = time.monotonic()
        if now - self._looked < PERIOD_SECONDS and not self._closing:
            return
        self._looked = now
        with self._changed:
            waiting = list(self._waiting)
        for answer in waiting:
            reason = CANCELLED if self._closing else answer.due
            if reason is not None:
                with self._changed:
                    self._waiting.remove(answer)
                with alone(answer):
                    answer.end(reason)
        self._drop_due()

    def _end_due(self) -> None:
        """Ends the answers that run and have to end; the engine still holds them."""
        for answer in self._running():
            with alone(answer):
                reason = CANCELLED if self._closing else answer.due
                if reason is not None and not answer.ended:
                    answer.end(reason)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._taken = self._count()
                while not (self._waiting or self.running or self._closing):
                    self._changed.wait()
            try:
                self._look()
                if self._closing and not self.running:
                    return
                self._round()
            except Exception as error:
                self._recover(error)

    def _round(self) -> None:
        while (answer := self._next()) is not None:
            with alone(answer):
                self._begin(answer)
        if self.running:
            self._step()

    def _next(self) -> Answer | None:
        """Returns the first waiting answer, if there is room for it."""
        with self._changed:
            self._taken = self._count()
            if self._closing or not self._waiting or self._taken + self._waiting[0].places > self._room or not self._fits(self._waiting[0]):
                return None
            self._taken += self._waiting[0].places
            return self._waiting.pop(0)

    def _fits(self, answer: Answer) -> bool:
        """Returns whether there is memory for one more answer besides those that run; answers that come after it wait for it."""
        return True

    def _count(self) -> int:
        return sum(answer.places for answer in self._running())

    def _recover(self, error: Exception) -> None:
        """Fails the requests that ran, and opens the engine anew; if that fails too, fails all others as well."""
        for answer in self._running():
            if not answer.ended:
                answer.fail(f"the engine failed: {in_a_line(error)}")
        try:
            self._renew()
        except Exception as again:
            with self._changed:
                self._broken = in_a_line(again)
                waiting, self._waiting = self._waiting, []
            for answer in waiting:
                answer.fail(f"the model cannot answer any more: {self._broken}")


@contextmanager
def alone(answer: Answer) -> Iterator[None]:
    """Ends an answer with the error that is raised inside: a failed answer must not stop the others."""
    try:
        yield
    except Refused as error:
        answer.fail(str(error), error.code)
    except Exception as error:
        answer.fail(in_a_line(error))


def generation_config(answer: Answer, of_model: openvino_genai.GenerationConfig) -> openvino_genai.GenerationConfig:
    """Returns the settings of an answer as GenAI's config.

    Args:
        answer: The answer.
        of_model: GenAI's config of the model, for its end tokens.

    Raises:
        Refused: GenAI does not take them.
    """
    import openvino_genai

    request, config = answer.request, openvino_genai.GenerationConfig()
    values = request.values
    config.max_new_tokens, config.ignore_eos = values["MAX_TOKENS"], values["IGNORE_EOS"]
    # stop tokens of the request are looked for in `Answer`: GenAI passes them over where it ignores the end token
    config.stop_token_ids = {token for token in of_model.stop_token_ids if token >= 0}
    # without an end token GenAI takes the tokenizer's, and fails where it has none
    config.set_eos_token_id(NO_TOKEN if of_model.eos_token_id < 0 else of_model.eos_token_id)
    config.repetition_penalty = values["REPETITION_PENALTY"]
    config.do_sample = request.samples
    if request.samples:
        config.temperature, config.rng_seed = values["TEMPERATURE"], values["SEED"]
        config.top_p, config.min_p = values["TOP_P"], values["MIN_P"]
        if values["TOP_K"]:
            config.top_k = values["TOP_K"]
    if values["BEAMS"] > 1:
        config.num_beams, config.num_return_sequences = values["BEAMS"], values["ANSWERS"]
        config.length_penalty = values["LENGTH_PENALTY"]
    try:
        config.validate()
    except RuntimeError as error:
        raise Refused(f"OpenVINO GenAI does not take this request: {in_a_line(error)}") from error
    return config


def token_tensor(prompt: np.ndarray) -> openvino.Tensor:
    """Returns a prompt, int64 [P], as GenAI takes it, int64 [1, P]."""
    import openvino

    return openvino.Tensor(np.ascontiguousarray(prompt, np.int64)[None])
