"""Tokens from logits: penalties and limits as Transformers has them, texts that leave a batch, searches that find the best there is."""

from __future__ import annotations

import itertools
import math
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as stock

from foundation.standalone.decoding_rules import Rules, Text, limited, penalized, scores, search, softmax, write

V = 7
SCORES = st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V).map(lambda values: np.array(values, np.float32))


class Chain:
    """A model that looks at the whole text: logits by its tokens, always the same; it counts its rows."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.texts, self.rows = seed, [()], []

    def logits(self, text: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([self.seed, *text]).normal(0, 2, V).astype(np.float32)

    def step(self, tokens: np.ndarray, order: np.ndarray) -> np.ndarray:
        before = self.texts if len(self.texts) > 1 or not order.any() else self.texts * (int(order.max()) + 1)
        self.texts = [(*before[place], int(token)) for token, place in zip(tokens, order, strict=True)]
        self.rows.append(len(tokens))
        return np.stack([self.logits(text) for text in self.texts])


@given(SCORES, st.lists(st.integers(0, V - 1), max_size=5), st.floats(0.5, 3), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_are_those_of_transformers_and_of_the_formula(
    logits: np.ndarray, tokens: list[int], repetition: float, presence: float, frequency: float
) -> None:
    start = 3
    repeated = penalized(logits, (start,), tokens, Rules(max_tokens=1, repetition_penalty=repetition))
    theirs = stock.RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([[start, *tokens]]), torch.from_numpy(logits[None].copy()))
    np.testing.assert_allclose(repeated, theirs[0].numpy(), rtol=1e-6)
    counted = penalized(logits, (start,), tokens, Rules(max_tokens=1, presence_penalty=presence, frequency_penalty=frequency))
    for token in range(V):
        expected = logits[token] - (presence * (token in tokens) + frequency * tokens.count(token))
        assert math.isclose(counted[token], expected, rel_tol=1e-4, abs_tol=1e-4)


@given(SCORES, st.integers(0, V + 2), st.floats(0.05, 1), st.floats(0, 0.9))
def test_limits_of_sampling_are_those_of_transformers(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    if len(set(scores.tolist())) < V:
        return  # equal scores have no order
    given_scores, ids = torch.from_numpy(scores[None].astype(np.float64)), torch.zeros(1, 1, dtype=torch.long)
    warpers: list[Any] = [stock.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [stock.TopPLogitsWarper(top_p), stock.MinPLogitsWarper(min_p)]
    for warper in warpers:
        given_scores = warper(ids, given_scores)
    found = limited(scores.astype(np.float64), Rules(max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p))
    near = abs(np.cumsum(np.sort(softmax(scores.astype(np.float64)))[::-1]) - top_p).min() < 1e-6
    if not near:  # a sum that is top_p but for rounding may fall on either side
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(given_scores[0].numpy()))
    assert np.isfinite(found[scores.argmax()])


def test_a_draw_follows_its_seed_and_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    drawn = [Text(Rules(max_tokens=1, temperature=1.0, seed=seed), 0).take(logits) for seed in range(2000)]
    shares = np.bincount(drawn, minlength=4) / 2000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125], atol=0.035)  # over three standard deviations
    first, again = (Text(Rules(max_tokens=9, temperature=1.0, seed=5), 0) for _ in range(2))
    for _ in range(9):
        first.take(logits), again.take(logits)
    assert first.tokens == again.tokens


def test_texts_leave_as_they_end_and_the_others_go_on_alike() -> None:
    rules = [Rules(max_tokens=most, ends=frozenset({end})) for most, end in ((1, 0), (12, 1), (5, 2), (9, 3))]
    texts, chain = [Text(rule, start=1) for rule in rules], Chain()
    chain.texts = [()] * 4
    told: list[tuple[int, int]] = []
    write(chain.step, texts, lambda number, token: told.append((number, token)))
    for number, (rule, text) in enumerate(zip(rules, texts, strict=True)):
        expected: list[int] = []
        while not expected or (expected[-1] not in rule.ends and len(expected) < rule.max_tokens):
            expected.append(int(chain.logits((1, *expected)).argmax()))
        assert text.tokens == expected
        assert [token for row, token in told if row == number] == expected
        assert text.ended == ("stop" if expected[-1] in rule.ends else "length")
    assert chain.rows == sorted(chain.rows, reverse=True)
    assert chain.rows[0] == 4


def best(chain: Chain, rules: Rules, penalty: float, count: int) -> list[list[int]]:
    """All answers there are, the best first: enumerated."""
    scored = []
    for length in range(1, rules.max_tokens + 1):
        for tokens in itertools.product(range(V), repeat=length):
            ended = tokens[-1] in rules.ends
            if (length < rules.max_tokens and not ended) or any(token in rules.ends for token in tokens[:-1]):
                continue
            total = 0.0
            for at, token in enumerate(tokens):
                logits = chain.logits((1, *tokens[:at])).astype(np.float64)
                total += logits[token] - np.log(np.exp(logits).sum())
            scored.append((total / length**penalty, list(tokens)))
    return [tokens for _, tokens in sorted(scored, key=lambda one: -one[0])[:count]]


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0, 100.0, -100.0]))
def test_a_search_with_a_beam_for_every_text_finds_the_best(seed: int, penalty: float) -> None:
    rules, chain = Rules(max_tokens=2, ends=frozenset({0})), Chain(seed)
    found = search(chain.step, rules, 1, V * V, penalty)
    if penalty == 0:  # without a bonus for length no later text can overtake: the search is complete
        assert found == best(Chain(seed), rules, penalty, len(found))
    assert found[0] == best(Chain(seed), rules, penalty, 1)[0]


TOTALS = st.one_of(st.just(0.0), st.floats(-1e6, -(2.0**-60), width=32), st.floats(2.0**-60, 1e6, width=32))
"""Sums of log-probabilities; one next to 0 is that of a certain text, whose rounding is 1e-8."""


@given(TOTALS, TOTALS, st.integers(1, 10**6), st.integers(1, 10**6), st.floats(-100, 100, width=32))
@example(-1.0, -1.0, 1300, 1299, 100.0)
@example(-1.0, -1.0, 1300, 1299, -100.0)
@example(0.0, -1.0, 1300, 1299, 100.0)
@example(1.0, 2.0, 1300, 1299, 100.0)
def test_scores_are_in_the_order_of_exact_ones_whatever_the_penalty(
    one: float, two: float, first: int, second: int, penalty: float
) -> None:
    with localcontext(Context(prec=60, Emax=10**6, Emin=-(10**6))):
        exact = [Decimal(total) / Decimal(length) ** Decimal(penalty) for total, length in ((one, first), (two, second))]
        close = abs(exact[0] - exact[1]) <= Decimal("1e-6") * max(abs(exact[0]), abs(exact[1]))
    scored = scores(penalty, 10**6)
    found = scored(np.float32(one), first), scored(np.float32(two), second)
    assert all(math.isfinite(part) for score in found for part in score)
    if not close:
        assert (found[0] > found[1]) == (exact[0] > exact[1])


@pytest.mark.parametrize(("penalty", "lengths"), [(100.0, [1300, 1300]), (-100.0, [1, 2])])
def test_a_search_takes_every_length_penalty_however_long_its_answers(penalty: float, lengths: list[int]) -> None:
    flat = lambda tokens, order: np.tile(np.linspace(0, 1, V, dtype=np.float32), (len(tokens), 1))  # noqa: E731
    second_best = V - 2
    assert [len(tokens) for tokens in search(flat, Rules(max_tokens=1300, ends=frozenset({second_best})), 1, 2, penalty)] == lengths


def test_a_search_goes_on_however_far_penalties_take_its_scores() -> None:
    flat = lambda tokens, order: np.zeros((len(tokens), V), np.float32)  # noqa: E731
    rules = Rules(max_tokens=12, frequency_penalty=-100.0, repetition_penalty=1000.0, presence_penalty=1e9)
    assert [len(tokens) for tokens in search(flat, rules, 1, 3, 1.0)] == [12] * 3


def test_one_beam_is_greedy() -> None:
    rules = Rules(max_tokens=8, ends=frozenset({0}))
    text, chain = Text(rules, 1), Chain(4)
    write(chain.step, [text])
    (found,) = search(Chain(4).step, rules, 1, 1, 1.0)
    assert found == text.tokens


def test_the_first_token_can_be_fixed() -> None:
    rules = Rules(max_tokens=3, first=6)
    text = Text(rules, 1)
    write(Chain().step, [text])
    assert text.tokens[0] == 6
    assert {answer[0] for answer in search(Chain().step, rules, 1, 3, 1.0)} == {6}


@pytest.mark.parametrize("first", [None, 2])
def test_a_search_stops_at_the_longest_answer(first: int | None) -> None:
    for answer in search(Chain(9).step, Rules(max_tokens=4, first=first), 1, 3, 1.0):
        assert len(answer) == 4
