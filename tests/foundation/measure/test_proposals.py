"""Speeds with and without proposed tokens: what is counted, and that both engines are asked the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from foundation.artifacts.timed import ProposedSpeed
from foundation.core.decoding import Answer, Decoding
from foundation.core.progress import ConsoleProgress
from foundation.measure import proposals
from foundation.measure.proposals import measure_proposals
from foundation.measure.tokens import ENDED

PROMPTS = np.arange(5 * 3, dtype=np.int32).reshape(5, 3)
WHOLE, ENDS = np.zeros((5, 8), np.int32), np.full((1, 8), ENDED, np.int32)


@dataclass
class Job:
    name: str
    token_ms: float
    accepted: int = 0
    """Of 6 proposed tokens."""


ASKED: list[tuple[str, list[int], int]] = []
ENDINGS: list[bool] = []


@dataclass
class Process:
    job: Job
    peak_memory_bytes: int = 1000

    def generate(self, prompts: list[np.ndarray], decoding: Decoding) -> list[Answer]:
        ENDINGS.append(not decoding.ignore_end)
        ASKED.append((self.job.name, [int(prompt[0]) // 3 for prompt in prompts], decoding.max_tokens))
        seconds = tuple(self.job.token_ms * (step + 1) / 1e3 for step in range(decoding.max_tokens))
        answer = Answer((tuple(range(decoding.max_tokens)),), seconds, 6 if self.job.accepted else 0, self.job.accepted)
        return [answer] * len(prompts)


@contextmanager
def opened(job: Job) -> Iterator[Process]:
    yield Process(job)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ProposedSpeed]]:
    ASKED.clear()
    ENDINGS.clear()
    monkeypatch.setattr(proposals, "EngineProcess", opened)
    monkeypatch.setattr(proposals, "STREAMS", (1, 2))
    pair: Any = (Job("alone", 4.0), Job("helped", 2.0, accepted=4))
    return measure_proposals([pair, pair], [(PROMPTS, WHOLE), (PROMPTS[:1], ENDS)], 8, ConsoleProgress("silent"))


def test_both_are_asked_the_same_prompts_in_turn(rows: list[tuple[int, ProposedSpeed]]) -> None:
    first = [("alone", [0], 4), ("alone", [0], 8), ("helped", [0], 4), ("helped", [0], 8)]
    assert ASKED[:8] == [*first, ("alone", [1], 8), ("helped", [1], 8), ("alone", [2], 8), ("helped", [2], 8)]
    several = [prompts for name, prompts, tokens in ASKED[8:16] if name == "helped" and tokens == 8]
    assert several == [[0, 1], [2, 3], [4, 0]]
    assert {tuple(prompts) for _, prompts, _ in ASKED[16:]} == {(0,), (0, 0)}  # the other pair has one prompt


def test_answers_end_where_those_that_were_kept_did(rows: list[tuple[int, ProposedSpeed]]) -> None:
    measured = [ends for ends, (_, _, tokens) in zip(ENDINGS, ASKED, strict=True) if tokens == 8]
    assert measured == [False] * 12 + [True] * 12


def test_rates_and_counts_are_those_of_all_turns(rows: list[tuple[int, ProposedSpeed]]) -> None:
    assert [(job, row.streams, row.n) for job, row in rows] == [(0, 1, 3), (0, 2, 6), (1, 1, 3), (1, 2, 6)]
    one, two = rows[0][1], rows[1][1]
    assert (one.tokens_per_s_alone, one.tokens_per_s) == (250, 500)
    assert (two.tokens_per_s_alone, two.tokens_per_s) == (500, 1000)
    assert (one.proposed, one.accepted, one.tokens_per_step) == (18, 12, 2)  # 24 tokens in 12 steps
    assert (two.proposed, two.accepted, two.tokens_per_step) == (36, 24, 2)
    assert (one.prompt_tokens, one.tokens, one.peak_memory_bytes) == (3, 8, 1000)
