"""Which tier answers a row, and in what batches, with models that take notes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_repo.cascade.tiny_cascades import MARGIN
from triton_repo.cascade.served.tiers import Answer, InTurn, Tier, answer

SETS = {**MARGIN, "form": "set"}


@dataclass(frozen=True)
class Predicted:
    rows: list
    logits: np.ndarray


@dataclass
class Noting:
    """A model whose logits are in its rows: the tier's own number, and a margin."""

    table: np.ndarray
    """Logits of each row, float32 [rows, C]."""
    fails: frozenset[int] = frozenset()
    """Rows whose request gets an error."""
    asked: list[list[list[int]]] = field(default_factory=list)
    """Of each call the rows of each request."""

    def predict(self, requests):
        rows = [[int(value) for value in columns[0].reshape(-1)] for columns in requests]
        self.asked.append(rows)
        return ["broken" if self.fails & set(own) else Predicted(own, self.table[own]) for own in rows]

    def scored(self, predicted):
        return predicted.logits

    def response(self, predicted, **more):
        return predicted, more


def columns(rows) -> list[np.ndarray]:
    return [np.array([[str(row).encode()] for row in rows], np.object_)]


def naive(tables, thresholds, row) -> int:
    for number, threshold in enumerate(thresholds):
        two = np.sort(tables[number][row].astype(np.float64))[-2:]
        if threshold is not None and two[1] - two[0] >= threshold:
            return number
    return len(thresholds)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_go_on_until_a_tier_is_sure(data):
    count, tiers = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 3))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tables = [draw.normal(size=(count, 3)).astype(np.float32) for _ in range(tiers)]
    thresholds = data.draw(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0, 50.0]), min_size=tiers - 1, max_size=tiers - 1))
    models = [Noting(table) for table in tables]
    cascade = [Tier(model, MARGIN, threshold) for model, threshold in zip(models, [*thresholds, None], strict=True)]
    cascade[-1] = Tier(models[-1], None, None)
    cuts = sorted(data.draw(st.lists(st.integers(1, count - 1), unique=True, max_size=3))) if count > 1 else []
    requests = np.split(np.arange(count), cuts)
    found = answer(cascade, [columns(rows) for rows in requests])
    for rows, one in zip(requests, found, strict=True):
        expected = [naive(tables, thresholds, row) for row in rows]
        assert (one.tiers - 1).tolist() == expected
        np.testing.assert_array_equal(one.logits, [tables[tier][row] for tier, row in zip(expected, rows, strict=True)])
        assert (one.tiers.dtype, one.logits.dtype) == (np.int32, np.float32)
    for number, model in enumerate(models):
        reached = [row for row in range(count) if naive(tables, thresholds, row) >= number]
        runs = bool(reached) and not (number < len(thresholds) and thresholds[number] is None)
        assert [row for call in model.asked for request in call for row in request] == (reached if runs else [])
        assert len(model.asked) == runs, "rows of all requests come together"


def test_logits_that_are_no_numbers_go_on():
    table = np.array([[np.nan, 9.0], [0.0, 9.0]], np.float32)
    tiers = [Tier(Noting(table), MARGIN, 1.0), Tier(Noting(np.ones((2, 2), np.float32)), None, None)]
    (one,) = answer(tiers, [columns([0, 1])])
    assert one.tiers.tolist() == [2, 1]


def test_sets_of_labels_have_the_margin_of_the_least_sure_label():
    table = np.array([[5.0, -0.1, 5.0], [3.0, -2.0, 4.0]], np.float32)
    tiers = [Tier(Noting(table), SETS, 1.0), Tier(Noting(np.ones((2, 3), np.float32)), None, None)]
    (one,) = answer(tiers, [columns([0, 1])])
    assert one.tiers.tolist() == [2, 1]


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_any_tier_is_the_error_of_its_request_alone(fails):
    table = np.array([[0.0, 9.0], [0.0, 0.1], [0.0, 0.1]], np.float32)
    models = [Noting(table), Noting(table)]
    models[fails].fails = frozenset({1})
    tiers = [Tier(models[0], MARGIN, 1.0), Tier(models[1], None, None)]
    first, second = answer(tiers, [columns([0, 1]), columns([2])])
    assert first == "broken"
    assert isinstance(second, Answer)
    assert second.tiers.tolist() == [2]
    assert models[1].asked == [[[1], [2]] if fails else [[2]]]


def test_the_response_is_of_the_first_model_that_was_asked():
    small, large = Noting(np.zeros((1, 2), np.float32)), Noting(np.ones((1, 2), np.float32))
    (one,) = answer([Tier(small, MARGIN, 1.0), Tier(large, None, None)], [columns([0])])
    predicted, more = one.response(TIER=one.tiers)
    assert one.model is small
    assert (predicted.rows, predicted.logits.tolist(), more["TIER"].tolist()) == ([0], [[1.0, 1.0]], [2])


@dataclass
class Tokens(Noting):
    """A model with logits of tokens, as many as a row is long; words are every second token."""

    def predict(self, requests):
        rows = [[int(value) for value in columns[0].reshape(-1)] for columns in requests]
        self.asked.append(rows)
        longest = [max(LENGTHS[row] for row in own) for own in rows]
        return [Predicted(own, self.table[own][:, : 2 * most]) for own, most in zip(rows, longest, strict=True)]

    def scored(self, predicted):
        return predicted.logits[:, ::2]


LENGTHS = (1, 3, 2, 4)
"""Words of each row; a word has two tokens."""
TAGS = {**MARGIN, "form": "tags"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_of_tags_goes_on_where_one_word_is_not_sure(data):
    """The naive cascade looks at one row after the other, and a request has the places of its longest row, whoever answers it."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tables = []
    for _ in range(2):
        table = draw.normal(size=(4, 8, 3)).astype(np.float32)
        for row, words in enumerate(LENGTHS):
            table[row, 2 * words :] = 0
        tables.append(table)
    threshold = data.draw(st.sampled_from([None, 0.2, 0.6, 50.0, -1.0]))
    rows = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    models = [Tokens(table) for table in tables]
    (one,) = answer([Tier(models[0], TAGS, threshold), Tier(models[1], None, None)], [columns(rows)])
    for place, row in enumerate(rows):
        margins = [np.sort(tables[0][row, 2 * word].astype(np.float64))[-1:-3:-1] for word in range(LENGTHS[row])]
        keeps = threshold is not None and min(high - low for high, low in margins) >= threshold
        table, most = tables[0 if keeps else 1], 2 * max(LENGTHS[known] for known in rows)
        assert one.tiers[place] == (1 if keeps else 2)
        np.testing.assert_array_equal(one.logits[place], table[row, :most])
        np.testing.assert_array_equal(one.scored[place], table[row, :most:2])


def test_two_threads_ask_a_model_in_turn():
    under_way, most = [0], [0]

    class Slow:
        def predict(self, requests):
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(0.01)
            under_way[0] -= 1
            return requests

    model = InTurn(Slow())
    threads = [threading.Thread(target=model.predict, args=([[]],)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
