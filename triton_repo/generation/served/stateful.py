"""One answer after the other: for models whose attention paged attention would get wrong (sliding windows, ALiBi, soft caps)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino_genai

from .answer import LENGTH, STOP, Answer, in_a_line
from .engine import Engine, generation_config, token_tensor
from .stretches import read_again_at, stretches

_REASON = openvino_genai.GenerationFinishReason


class Stateful(Engine):
    """An engine that answers one request at a time.

    Args:
        folder: What OpenVINO GenAI reads.
        properties: Compile properties, with the attention that is right.
        max_waiting: Number of answers that wait.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str], max_waiting: int) -> None:
        super().__init__(1, max_waiting)
        self._folder, self._properties = folder, dict(properties)
        self._current: Answer | None = None
        self._again = read_again_at(folder)
        self._renew()

    @property
    def running(self) -> int:
        """Number of answers that run."""
        return int(self._current is not None)

    def look(self) -> None:
        """Ends the answers that have to end."""
        self._look()

    def _renew(self) -> None:
        self._current = None
        self._pipeline = openvino_genai.LLMPipeline(str(self._folder), "CPU", **self._properties)
        self._config = self._pipeline.get_generation_config()

    def _running(self) -> list[Answer]:
        return [] if self._current is None else [self._current]

    def _begin(self, answer: Answer) -> None:
        self._settings = generation_config(answer, self._config)
        self._current = answer

    def _step(self) -> None:
        """Gives the whole answer."""
        answer = self._current
        assert answer is not None, "begun"
        streamer, prompt = _Streamer(answer, self), answer.request.prompt
        for most in stretches(len(prompt), answer.request.values["MAX_TOKENS"], self._again):
            self._settings.max_new_tokens = most
            found = self._pipeline.generate(token_tensor(prompt), self._settings, streamer)
            if streamer.error is not None or answer.ended or found.finish_reasons[0] == _REASON.STOP:
                break
            prompt = np.concatenate([prompt, np.array(found.tokens[0], np.int64)])
        if streamer.error is not None:  # whatever happens with one answer, the engine is as good as before
            answer.fail(in_a_line(streamer.error))
        elif not answer.ended:
            (reason,) = found.finish_reasons
            answer.end(STOP if reason == _REASON.STOP else LENGTH)
        self._current = None

    def _drop_due(self) -> None:
        self._end_due()


class _Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Passes tokens on. Why there are no more is known only after the last one, so the reason goes out in a response of its own."""

    def __init__(self, answer: Answer, engine: Stateful) -> None:
        super().__init__()
        self._answer, self._engine = answer, engine
        self.error: Exception | None = None

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        """Takes a token; returns whether to continue."""
        try:
            self._answer.take([token] if isinstance(token, int) else list(token))
            self._engine.look()
        except Exception as error:  # an exception cannot pass through the pipeline
            self.error = error
        going = self.error is None and not self._answer.ended
        return openvino_genai.StreamingStatus.RUNNING if going else openvino_genai.StreamingStatus.CANCEL

    def end(self) -> None:
        """Called after the last token."""
