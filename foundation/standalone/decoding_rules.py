"""Chooses tokens from logits: the most likely, sampled, or by a search with beams. Needs numpy only; it is copied to servers.

A model is a function of one step: `step(tokens, order)` appends tokens[i] to the text that was number order[i] of the step before, and
returns the logits of the next token, float32 [len(tokens), V]. A text that is done is left out of `order`, one with several good
continuations is in it several times.

The search follows `generate` of Transformers (5.x, early_stopping False) step by step, so that its answers are the same:

    candidates   the (1 + number of end tokens) K best continuations of the K running texts by the sum of their log-probabilities
    finished     of the first K candidates those that end, scored by sum / length^penalty; the K best of all are kept
    running      the K best candidates that do not end
    stop         once the best running text, scored at its length, is no better than the worst of K finished ones

Where length^penalty leaves the range of float32, scores are compared by their logarithms instead, sign first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Step = Callable[[NDArray[np.int64], NDArray[np.int32]], Logits]
NEVER = np.float32(-np.inf)
"""Score of what must not be chosen. Transformers writes -1e9, which penalties of long answers reach."""
LARGEST_POWER = 1e25
"""A sum of log-probabilities divided by this, or multiplied with it, is still a float32."""


class Structure(Protocol):
    """A limit on the tokens of one answer, such as a JSON schema."""

    @property
    def complete(self) -> bool:
        """Whether the answer is complete: no token may follow but an end token."""

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Returns whether each token may come next [size]; at least one may."""

    def take(self, token: int) -> None:
        """Takes the next token."""


@dataclass(frozen=True)
class Rules:
    """How the tokens of one answer are chosen. The limits of sampling apply in the order of the fields."""

    max_tokens: int
    """Most tokens of the answer, at least 1."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer; the last token of the answer."""
    first: int | None = None
    """The first token, if the model fixes it (the language of mBART's answer)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occurred are divided by it where positive, and multiplied where negative (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occurred."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens as often as they occurred."""
    temperature: float = 0.0
    """The logits are divided by it before sampling; 0 takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the largest probability."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass
class Text:
    """One answer under way."""

    rules: Rules
    start: int
    """Start token of the decoder."""
    tokens: list[int] = field(default_factory=list)
    """Its tokens so far."""
    before: Sequence[int] = ()
    """Tokens read besides the start: the prompt of a decoder, which the repetition penalty counts too."""
    stopped: bool = False
    """Whether somebody outside has ended it."""
    structure: Structure | None = None
    """The limit on its tokens, besides a first one that the model fixes; None: all are allowed."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.rules.seed)

    @property
    def last(self) -> int:
        """The next input token of the decoder."""
        return self.tokens[-1] if self.tokens else self.start

    @property
    def ended(self) -> str | None:
        """Why the answer is complete: stop (an end token, a complete structure, or ended from outside) or length; None while it is not."""
        if self.stopped or (self.structure is not None and self.structure.complete) or (self.tokens and self.tokens[-1] in self.rules.ends):
            return "stop"
        return "length" if len(self.tokens) >= self.rules.max_tokens else None

    def take(self, logits_V: Logits) -> int:
        """Chooses the next token, appends and returns it."""
        rules = self.rules
        if rules.first is not None and not self.tokens:
            token = rules.first
        else:
            scores_V = penalized(logits_V, (self.start, *self.before), self.tokens, rules)
            if self.structure is not None:
                scores_V = np.where(self.structure.allowed(len(scores_V)), scores_V, NEVER)
            token = int(scores_V.argmax()) if rules.temperature == 0 else self._drawn(scores_V)
            if self.structure is not None:
                self.structure.take(token)
        self.tokens.append(token)
        return token

    def _drawn(self, scores_V: Logits) -> int:
        chances_V = softmax(limited(scores_V.astype(np.float64) / self.rules.temperature, self.rules))
        return int(self._random.choice(len(chances_V), p=chances_V))


def write(step: Step, texts: Sequence[Text], on_token: Callable[[int, int], None] = lambda number, token: None) -> None:
    """Completes texts that are all at their start.

    Args:
        step: The model.
        texts: The texts; those that end leave the model.
        on_token: Called with the number of a text and its next token.
    """
    running = list(range(len(texts)))
    order = np.arange(len(texts), dtype=np.int32)
    while running:
        logits = step(np.array([texts[number].last for number in running], np.int64), order)
        for place, number in enumerate(running):
            on_token(number, texts[number].take(logits[place]))
        places = [place for place, number in enumerate(running) if texts[number].ended is None]
        running, order = [running[place] for place in places], np.array(places, np.int32)


def search(step: Step, rules: Rules, start: int, beams: int, length_penalty: float, before: Sequence[int] = ()) -> list[list[int]]:
    """Returns the `beams` best answers found, best first; `step` is the model, see `searching` for the rest."""
    steps = searching(rules, start, beams, length_penalty, before)
    try:
        tokens, order = next(steps)
        while True:
            tokens, order = steps.send(step(tokens, order))
    except StopIteration as found:
        best: list[list[int]] = found.value
        return best


def searching(
    rules: Rules, start: int, beams: int, length_penalty: float, before: Sequence[int] = ()
) -> Generator[tuple[NDArray[np.int64], NDArray[np.int32]], Logits, list[list[int]]]:
    """Searches step by step, so that others may step in between: yields tokens and order, is sent their logits, returns the answers.

    Args:
        rules: Limits of the answer; nothing is sampled.
        start: What the decoder reads first.
        beams: K of the module docstring, at least 1.
        length_penalty: Power of the length that scores are divided by.
        before: What the model has read before the start.
    """
    running: list[list[int]] = [[] for _ in range(beams)]
    scores_K = np.array([0.0] + [NEVER] * (beams - 1), np.float32)
    finished: list[tuple[tuple[float, ...], list[int]]] = []
    scored = scores(length_penalty, rules.max_tokens)
    order, candidates = np.arange(beams, dtype=np.int32), max(2, 1 + len(rules.ends)) * beams
    for length in range(1, rules.max_tokens + 1):
        logits = yield np.array([text[-1] if text else start for text in running], np.int64), order
        total_KV = np.stack([_log_chances(logits[k], (start, *before), running[k], rules) for k in range(beams)]) + scores_K[:, None]
        best = np.argsort(-total_KV.reshape(-1), kind="stable")[:candidates]
        beam, token = best // total_KV.shape[1], best % total_KV.shape[1]
        score = total_KV.reshape(-1)[best]
        ends = np.array([int(one) in rules.ends or length == rules.max_tokens for one in token])
        for place in np.flatnonzero(ends[:beams] & (score[:beams] > NEVER)):  # more beams than there are texts hold none
            finished.append((scored(score[place], length), [*running[beam[place]], int(token[place])]))
        finished = sorted(finished, key=lambda one: one[0], reverse=True)[:beams]
        alive = np.where(ends, NEVER, score)
        kept = np.argsort(-alive, kind="stable")[:beams]
        running = [[*running[beam[place]], int(token[place])] for place in kept]
        scores_K, order = alive[kept].astype(np.float32), beam[kept].astype(np.int32)
        is_full = len(finished) == beams
        if ends.all() or (is_full and not (scores_K[0] > NEVER and scored(scores_K[0], length) > finished[-1][0])):
            break
    return [tokens for _, tokens in finished]


def scores(length_penalty: float, max_tokens: int) -> Callable[[np.float32, int], tuple[float, ...]]:
    """Returns the score of a text of a search by its sum of log-probabilities and its length; a better one is larger.

    Args:
        length_penalty: Power of the length that sums are divided by.
        max_tokens: Most tokens of a text; every score of a search has the same form.
    """
    if abs(length_penalty) * math.log(max_tokens) <= math.log(LARGEST_POWER):
        return lambda total, length: (float(total / np.float32(length**length_penalty)),)  # rounded as in Transformers

    def scored(total: np.float32, length: int) -> tuple[float, ...]:
        if total == 0:
            return 0.0, 0.0
        sign = math.copysign(1.0, total)
        return sign, sign * (math.log(abs(float(total))) - length_penalty * math.log(length))

    return scored


def penalized(logits_V: Logits, read: Sequence[int], tokens: Sequence[int], rules: Rules) -> Logits:
    """Returns logits after the penalties of repetition; the penalty of Keskar et al. also counts what was read before, as in
    Transformers."""
    if rules.repetition_penalty == 1 and rules.presence_penalty == 0 and rules.frequency_penalty == 0:
        return logits_V
    scores_V = np.array(logits_V, np.float32)
    seen = list({*read, *tokens})
    found = scores_V[seen]
    scores_V[seen] = np.where(found < 0, found * rules.repetition_penalty, found / rules.repetition_penalty)
    for token in set(tokens):
        scores_V[token] -= rules.presence_penalty + rules.frequency_penalty * tokens.count(token)
    return scores_V


def limited(scores_V: NDArray[Any], rules: Rules) -> NDArray[Any]:
    """Returns scores [V] with minus infinity for tokens that top-k, top-p or min-p leave out; the most likely always stays."""
    scores_V = scores_V.copy()
    if 0 < rules.top_k < len(scores_V):
        scores_V[scores_V < np.sort(scores_V)[-rules.top_k]] = -np.inf
    if rules.top_p < 1:
        ranks = np.argsort(-scores_V, kind="stable")
        chances = softmax(scores_V)[ranks]
        before = np.cumsum(chances) - chances
        scores_V[ranks[before >= rules.top_p]] = -np.inf
    if rules.min_p > 0:
        chances_V = softmax(scores_V)
        scores_V[chances_V < rules.min_p * chances_V.max()] = -np.inf
    return scores_V


def softmax(scores_V: NDArray[Any]) -> NDArray[Any]:
    """Returns the probabilities of scores [V]."""
    powers_V = np.exp(scores_V - scores_V.max())
    chances_V: NDArray[Any] = powers_V / powers_V.sum()
    return chances_V


def _log_chances(logits_V: Logits, read: Sequence[int], tokens: Sequence[int], rules: Rules) -> Logits:
    """Returns the penalized log-probabilities of the next token [V]."""
    if rules.first is not None and not tokens:
        forced_V = np.full(len(logits_V), -np.inf, np.float32)
        forced_V[rules.first] = 0
        return forced_V
    shifted_V = logits_V - logits_V.max()
    return penalized(shifted_V - np.log(np.exp(shifted_V).sum()), read, tokens, rules)
