"""Speeds of engines with and without tokens that are proposed to them (`foundation.core.speculation`), side by side.

Both answer the prompts of the export, since what is accepted depends on the text: random tokens would show nothing. Each engine runs in its
own process, and the two take turns as in `foundation.measure.generation`; every turn asks other prompts.

    tokens per second   tokens of all streams / time to the last one
    tokens per step     tokens / passes of the model; 1 without proposals
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.timed import ProposedSpeed
from foundation.core.decoding import Answer, Decoding
from foundation.core.progress import Progress
from foundation.core.speculation import per_step
from foundation.measure.engine_process import EngineProcess
from foundation.measure.generation import STREAMS, TURNS, WARM_UP_TOKENS
from foundation.measure.tokens import ended
from foundation.stage.context import Job

ROUNDING = 2
Recorded = tuple[Sequence[NDArray[np.int32]], NDArray[np.int32]]


def measure_proposals(
    pairs: Sequence[tuple[Job, Job]], recorded: Sequence[Recorded], tokens: int, progress: Progress
) -> list[tuple[int, ProposedSpeed]]:
    """Measures engines alone and with proposals.

    Args:
        pairs: Each engine alone, and with what proposes tokens to it.
        recorded: For each pair prompts, int32 [P] each, and the answers that were kept, int32 [n, T]; end tokens count where one has ended.
        tokens: Tokens of an answer.
        progress: Shows a bar.

    Returns:
        For each pair and number of streams the index of the pair and its row.

    Raises:
        EngineError: An engine failed.
    """
    rows = []
    with progress.bar("proposals", len(pairs) * len(STREAMS) * TURNS) as advance:
        for index, (pair, (asked, answers)) in enumerate(zip(pairs, recorded, strict=True)):
            goes_on = not ended(answers)
            with ExitStack() as stack:
                processes = [stack.enter_context(EngineProcess(job)) for job in pair]
                for streams in STREAMS:
                    alone, helped = Turns(), Turns()
                    for turn in range(TURNS):
                        chosen = [asked[(turn * streams + one) % len(asked)] for one in range(streams)]
                        for process, turns in zip(processes, (alone, helped), strict=True):
                            if turn == 0:
                                process.generate(chosen, Decoding(max_tokens=WARM_UP_TOKENS, ignore_end=True))
                            turns.take(process.generate(chosen, Decoding(max_tokens=tokens, ignore_end=goes_on)))
                        advance(1)
                    row = ProposedSpeed(
                        prompt_tokens=int(np.median([len(prompt) for prompt in asked])),
                        streams=streams,
                        tokens=tokens,
                        tokens_per_s=helped.rate,
                        tokens_per_s_alone=alone.rate,
                        **accepted(helped.answers),
                        n=len(helped.answers),
                        peak_memory_bytes=processes[1].peak_memory_bytes,
                    )
                    rows.append((index, row))
    return rows


class Turns:
    """The answers of one engine."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._seconds = 0.0

    def take(self, answers: Sequence[Answer]) -> None:
        """Adds the answers to prompts that were asked at once."""
        self.answers += answers
        self._seconds += max(answer.seconds[-1] for answer in answers)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return round(sum(len(answer.seconds) for answer in self.answers) / self._seconds, ROUNDING)


def accepted(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Returns `proposed`, `accepted` and `tokens_per_step` of answers."""
    taken, tokens = sum(one.accepted for one in answers), sum(len(one.tokens[0]) for one in answers)
    return {"proposed": sum(one.proposed for one in answers), "accepted": taken, "tokens_per_step": per_step(tokens, taken)}
