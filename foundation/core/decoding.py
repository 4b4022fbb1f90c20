"""How tokens are chosen from the logits of a language model. Plain data, so that it can travel to the process of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foundation.core.errors import InputError, Problem

LEAST_TEMPERATURE = 1e-6
"""A lower one overflows in fp32; 0 takes the most likely token."""
NO_TOKEN = 2**31 - 1
"""An id that no token has."""
TokenCallback = Callable[[int, Sequence[int]], None]
"""Takes the number of a prompt and its next tokens, as they come."""


def end_ids(eos_token_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the end tokens of a model, given `eos_token_id` as Transformers has it: one id, several or none."""
    return () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


@dataclass(frozen=True)
class Decoding:
    """Settings of one answer; the defaults take the most likely token until the model ends its answer.

    Sampling starts where `temperature` is above 0. The settings apply in this order: the repetition penalty, the presence and frequency
    penalties, the temperature, then top-k, top-p and min-p (`foundation.standalone.decoding_rules` is the reference).
    """

    max_tokens: int = 128
    """Most tokens to generate."""
    temperature: float = 0.0
    """The logits are divided by it before sampling; 0 takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occurred are divided by it where positive, and multiplied where negative (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer already has."""
    frequency_penalty: float = 0.0
    """Subtracted from them once for each time that the token occurs in the answer."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which goes up to the character before them. Its tokens go up to the one that completes the stop text."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own."""
    seed: int = 0
    """Seed of the sampling."""
    ignore_end: bool = False
    """Whether to continue past the end token, for measurements."""
    beams: int = 1
    """Beams of the search; above 1 nothing is sampled."""
    length_penalty: float = 1.0
    """Power of the length that the score of a beam is divided by."""
    answers: int = 1
    """Number of answers, best first; above 1 beams are needed, at least as many."""

    def __post_init__(self) -> None:
        limits: list[tuple[str, float, float, float]] = [
            ("max_tokens", self.max_tokens, 1, 1_000_000),
            ("temperature", self.temperature, 0, 100),
            ("top_k", self.top_k, 0, 10_000_000),
            ("top_p", self.top_p, 1e-6, 1),
            ("min_p", self.min_p, 0, 0.999),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 1000),
            ("presence_penalty", self.presence_penalty, -100, 100),
            ("frequency_penalty", self.frequency_penalty, -100, 100),
            ("seed", self.seed, 0, 2**63 - 1),
            ("beams", self.beams, 1, 64),
            ("length_penalty", self.length_penalty, -100, 100),
            ("answers", self.answers, 1, 64),
        ]
        problems = [
            Problem(name, f"{value:g} given", f"{low:g} to {high:g} is allowed")
            for name, value, low, high in limits
            if not low <= value <= high
        ]
        if 0 < self.temperature < LEAST_TEMPERATURE:
            problems.append(Problem("temperature", f"{self.temperature:g} given", f"0, or {LEAST_TEMPERATURE:g} to 100, is allowed"))
        if any(not text for text in self.stop):
            problems.append(Problem("stop", "an empty text given", remedy="give at least one character"))
        if (negative := next((token for token in self.stop_tokens if token < 0), None)) is not None:
            problems.append(Problem("stop_tokens", f"{negative} given", remedy="give ids of the vocabulary, from 0 on"))
        if self.length_penalty != 1 and self.beams == 1:
            problems.append(
                Problem("length_penalty", f"{self.length_penalty:g} given with 1 beam", "only a search uses it", "give 2 beams or more")
            )
        if self.beams > 1 and self.stop:
            problems.append(
                Problem(
                    "stop", f"{self.stop[0]!r} given with {self.beams} beams", "texts do not end a search", "give stop_tokens, or 1 beam"
                )
            )
        if self.beams > 1 and self.temperature > 0:
            problems.append(
                Problem("beams", f"{self.beams} given with temperature {self.temperature:g}", "beams do not sample", "give temperature 0")
            )
        if self.answers > self.beams:
            problems.append(
                Problem(
                    "answers", f"{self.answers} given with {self.beams} beam{'s' * (self.beams > 1)}", remedy="give at least as many beams"
                )
            )
        if problems:
            raise InputError.of(problems)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.temperature > 0

    def message(self) -> dict[str, object]:
        """Returns the settings as JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Decoding:
        """The inverse of `message`."""
        return cls(**{**message, "stop": tuple(message["stop"]), "stop_tokens": tuple(message["stop_tokens"])})


@dataclass(frozen=True)
class Answer:
    """The answer of a language model to one prompt."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each answer, best first, with the end token or the tokens of the stop text; one unless more were requested."""
    seconds: tuple[float, ...]
    """When each token of a single answer came, counted from the start of all prompts; empty for a search with beams."""
    proposed: int = 0
    """Tokens that were proposed to the model (`foundation.core.speculation`)."""
    accepted: int = 0
    """Proposed tokens that it accepted: tokens of the answer that cost no step of the model."""

    def message(self) -> dict[str, object]:
        """Returns the answer as JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Answer:
        """The inverse of `message`."""
        return cls(tuple(tuple(one) for one in message["tokens"]), tuple(message["seconds"]), message["proposed"], message["accepted"])
