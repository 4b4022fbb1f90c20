"""The same answer alone and in company, to the last bit: texts that come and go at random are written as each of them is alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from export.engines.onnxruntime_decoder import MODEL, OnnxRuntimeDecoder, properties
from foundation.core.decoding import Decoding
from foundation.standalone import onnx_decoder
from foundation.standalone.onnx_decoder import INVARIANT, OnnxDecoder, Texts
from tests.export.engines.test_onnxruntime_decoder import SCHEMES, folder, spec
from tests.export.generation.genai_checkpoints import prompts
from tests.export.generation.tiny_decoders import VOCABULARY

pytestmark = pytest.mark.whole

TEXTS, TOKENS, MOST = 16, 12, 8
"""Texts of a schedule, tokens that are appended to each, and texts that are written at once."""
PART = 16


@cache
def decoder(scheme: str | None, threads: int) -> OnnxDecoder:
    return OnnxDecoder(folder("llama", scheme) / MODEL, {**properties(threads), INVARIANT: "1"})


def texts_of(seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns prompts of 1 to 40 tokens, some longer than a part, and the tokens that follow."""
    random = np.random.default_rng(seed)
    return [(random.integers(3, VOCABULARY, random.integers(1, 41)), random.integers(3, VOCABULARY, TOKENS)) for _ in range(TEXTS)]


def alone(opened: OnnxDecoder, prompt: NDArray[np.int64], following: NDArray[np.int64]) -> list[bytes]:
    """Returns the logits after the prompt and after each token, of a text that is written by itself."""
    texts = opened.texts()
    return [texts.read([prompt])[0].tobytes(), *(texts.step(following[place : place + 1])[0].tobytes() for place in range(TOKENS))]


class Schedule:
    """Texts that arrive at random, are read whole or in parts between the steps of others, are written together, and leave."""

    def __init__(self, texts: Texts, given: list[tuple[NDArray[np.int64], NDArray[np.int64]]], seed: int) -> None:
        self.texts, self.given, self.random = texts, given, np.random.default_rng(seed)
        self.waiting = self.random.permutation(TEXTS).tolist()
        self.written: list[int] = []
        self.found: dict[int, list[bytes]] = {number: [] for number in self.waiting}

    def run(self) -> dict[int, list[bytes]]:
        while self.waiting or self.written:
            room = MOST - len(self.written)
            if self.waiting and room and (not self.written or self.random.random() < 0.4):
                self.arrive(self.waiting[: self.random.integers(1, room + 1)])
            elif self.written:
                self.step(self.written)
                self.leave()
        return self.found

    def arrive(self, numbers: list[int]) -> None:
        self.waiting = self.waiting[len(numbers) :]
        if len(numbers) == 1 and self.random.random() < 0.5:  # as the server reads a long one
            (prompt, _), before = self.given[numbers[0]], len(self.written)
            for start in range(0, len(prompt), PART):
                if start and self.written and all(len(self.found[number]) <= TOKENS for number in self.written):
                    self.step(self.written)
                logits = [self.texts.extend(before, prompt[start : start + PART])]
        else:
            logits = list(self.texts.read([self.given[number][0] for number in numbers]))
        self.written += numbers
        self.take(numbers, logits)
        self.leave()

    def step(self, numbers: list[int]) -> None:
        tokens = [self.given[number][1][len(self.found[number]) - 1] for number in numbers]
        self.take(numbers, list(self.texts.step(np.array(tokens))))

    def take(self, numbers: list[int], logits: list[NDArray[np.float32]]) -> None:
        for number, row in zip(numbers, logits, strict=True):
            if len(self.found[number]) <= TOKENS:
                self.found[number].append(row.tobytes())

    def leave(self) -> None:
        kept = [place for place, number in enumerate(self.written) if len(self.found[number]) <= TOKENS]
        if len(kept) < len(self.written):
            self.texts.keep(kept)
            self.written = [self.written[place] for place in kept]


def check(scheme: str | None, threads: int, schedules: int) -> None:
    opened, given = decoder(scheme, threads), texts_of(0)
    expected = {number: alone(opened, *text) for number, text in enumerate(given)}
    assert len({row for rows in expected.values() for row in rows}) == TEXTS * (TOKENS + 1)  # or equality would prove little
    for seed in range(schedules):
        assert Schedule(opened.texts(), given, seed).run() == expected, f"schedule {seed}"


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_logits_do_not_depend_on_company(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_decoder, "PART", PART)
    check(scheme, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_logits_do_not_depend_on_company_in_a_thousand_schedules(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_decoder, "PART", PART)
    check(scheme, 2, 200)


def test_the_engine_answers_alike_alone_and_in_company() -> None:
    known = spec("llama", "w4a8-block")
    engine = OnnxRuntimeDecoder(replace(known, properties={**known.properties, INVARIANT: "1"}))
    asked, decoding = prompts((1, 12, 20, 33, 7), seed=1), Decoding(max_tokens=20, ignore_end=True)
    together = engine.generate(asked, decoding)
    assert [answer.tokens for answer in together] == [engine.generate([prompt], decoding)[0].tokens for prompt in asked]
    assert engine.reported()["answers"] == "the same alone and in company"
