"""Continuous batching with paged attention: every step generates the next token of all answers that run; answers come and go between steps.

Prompts are read in parts of at most `max_num_batched_tokens` together with the tokens of the others, so that a long prompt does not hold
them up. Memory for keys and values grows with what runs, at most `room` times the longest context.

A draft model, or the text itself, may propose tokens that the model checks all at once: answers stay the same, and pieces have several
tokens. With a draft every prompt is read whole, since OpenVINO GenAI answers otherwise where it reads one in parts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import openvino_genai

from .answer import LENGTH, STOP, Answer
from .draft_folder import with_stand_in
from .engine import Engine, alone, generation_config, token_tensor

WHOLE_PROMPTS = 2**20
"""Tokens of a step with a draft."""
SWITCH_SECONDS = 1e-4
"""How long another thread waits before it asks for Python's lock. A step of the pipeline holds it, so that a thread that reads a request or
sends a response gets it between two steps, and only if it has asked; by default it asks after 5 ms, longer than steps of a small model,
and a request needs the lock several times (findings/openvino_genai_step_holds_lock.sh)."""
LONG_SECONDS = 2e-3
"""Steps that are longer are followed by time for other threads; after a shorter one they have not long to wait for the next."""
GUESTS_SHARE = 0.1
"""Most of that time, as a share of the step."""
MATCHED_TOKENS = 3
"""Most tokens at the end of a text that are looked up in it."""


@dataclass(frozen=True)
class Proposals:
    """Source of proposed tokens."""

    tokens: int
    """Most tokens at once."""
    draft: Path | None
    """Folder of the draft; None: the text is looked up."""
    properties: Mapping[str, str]
    """Compile properties of the draft."""


class Paged(Engine):
    """An engine with continuous batching.

    Args:
        folder: What OpenVINO GenAI reads.
        properties: Compile properties.
        room: Number of answers that run at once, with all beams of a search.
        max_waiting: Number of answers that wait.
        proposals: What proposes tokens; None: nothing.
    """

    def __init__(
        self, folder: Path, properties: Mapping[str, str], room: int, max_waiting: int, proposals: Proposals | None = None
    ) -> None:
        super().__init__(room, max_waiting)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._folder, self._properties, self._proposals = folder, _compiled(properties), proposals
        self._number = 0
        self._runs: dict[int, tuple[Answer, openvino_genai.GenerationHandle]] = {}
        self._renew()

    @property
    def running(self) -> int:
        """Number of answers that run."""
        return len(self._runs)

    def _renew(self) -> None:
        self._runs = {}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = self._room
        properties: dict[str, object] = {**self._properties}
        with ExitStack() as stack:
            folder = self._folder
            if self._proposals is not None and self._proposals.draft is not None:
                scheduler.max_num_batched_tokens = WHOLE_PROMPTS
                folder, draft = (stack.enter_context(with_stand_in(one)) for one in (folder, self._proposals.draft))
                properties["draft_model"] = openvino_genai.draft_model(str(draft), "CPU", **_compiled(self._proposals.properties))
            elif self._proposals is not None:
                properties["prompt_lookup"] = True
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._config = self._pipeline.get_config()
        if self._proposals is not None:  # such a pipeline does not know the end tokens of its model
            self._config = openvino_genai.GenerationConfig(str(self._folder / "generation_config.json"))
        self._ends = {*self._config.stop_token_ids, self._config.eos_token_id}

    def _running(self) -> list[Answer]:
        return [answer for answer, _ in self._runs.values()]

    def _begin(self, answer: Answer) -> None:
        self._number += 1
        config = generation_config(answer, self._config)
        if self._proposals is not None:
            config.ignore_eos = True  # GenAI passes over ends within proposed tokens, so they are looked for in `_pass_on`
            config.num_assistant_tokens = self._proposals.tokens
            if self._proposals.draft is None:
                config.max_ngram_size = MATCHED_TOKENS
        handle = self._pipeline.add_request(self._number, token_tensor(answer.request.prompt), config)
        self._runs[self._number] = (answer, handle)

    def _step(self) -> None:
        started = time.monotonic()
        self._pipeline.step()
        now = time.monotonic()
        for number, (answer, handle) in list(self._runs.items()):
            finished = handle.get_status() != RUNNING
            if not finished and self._proposals is None and answer.waits(now):
                continue  # a small model takes as long for a step as reading the tokens of all answers would
            with alone(answer):
                self._pass_on(answer, handle, finished)
            if answer.ended:
                if not finished:
                    handle.cancel()
                del self._runs[number]
        self._settle()
        if now - started > LONG_SECONDS:
            self.guests.let_in(GUESTS_SHARE * (now - started))

    def _pass_on(self, answer: Answer, handle: openvino_genai.GenerationHandle, finished: bool) -> None:
        if answer.request.values["BEAMS"] > 1:
            if finished:
                answer.give(_best_first(handle, answer.request.values["ANSWERS"]))
            return
        ids: list[int] = []
        reason = None
        while handle.can_read():
            for output in handle.read().values():  # nothing in it where what came is empty
                ids += output.generated_ids
                reason = output.finish_reason
        if self._proposals is not None and not answer.request.values["IGNORE_EOS"]:
            at = next((at for at, token in enumerate(ids) if token in self._ends), None)
            if at is not None:
                answer.take(ids[: at + 1], STOP)
                return
        if not finished:
            answer.take(ids)
        elif reason in REASONS:
            answer.take(ids, REASONS[reason])
        else:
            answer.fail("the engine gave the answer up; its keys and values do not fit into memory")

    def _drop_due(self) -> None:
        self._end_due()
        for number, (answer, handle) in list(self._runs.items()):
            if answer.ended:
                handle.cancel()
                del self._runs[number]
        self._settle()

    def _settle(self) -> None:
        """Frees keys and values of what was cancelled, which else waits for the next step."""
        if not self._runs and self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _compiled(properties: Mapping[str, str]) -> dict[str, str]:
    """Returns the properties without one of GenAI's that the engine below it does not know."""
    return {name: value for name, value in properties.items() if name != "ATTENTION_BACKEND"}


RUNNING = openvino_genai.py_openvino_genai.GenerationStatus.RUNNING
_REASON = openvino_genai.GenerationFinishReason
REASONS = {_REASON.STOP: STOP, _REASON.LENGTH: LENGTH}


def _best_first(handle: openvino_genai.GenerationHandle, count: int) -> list[tuple[list[int], str]]:
    found = sorted(handle.read_all(), key=lambda output: -output.score)[:count]
    return [(list(output.generated_ids), REASONS.get(output.finish_reason, LENGTH)) for output in found]
