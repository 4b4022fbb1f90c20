"""The watch over a cascade: what it counts, audits, bets on and sends, and when it rings."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from tests.triton_repo.backend_stand_in import MetricFamily
from tests.triton_repo.cascade.test_tiers import Noting, columns
from triton_repo.cascade.served import watch as module
from triton_repo.cascade.served.e_process import EProcess
from triton_repo.cascade.served.metrics import FAMILIES, PREFIX, Metrics
from triton_repo.cascade.served.tiers import Answer
from triton_repo.cascade.served.watch import Seen, Watch, different

SETTINGS = {"escalation": [0.2], "disagreement": 0.01, "form": "class", "limit": None, "audit": 0.5, "false_alarm": 0.1, "instances": 1}
TABLE = np.eye(3, dtype=np.float32)
"""Logits of the last tier: the answer to row i is i % 3."""


class Table(Noting):
    """A last tier that knows any row."""

    def predict(self, requests):
        self.asked.append([[int(value) for value in one[0].reshape(-1)] for one in requests])
        return [type("Predicted", (), {"logits": TABLE[np.array(rows) % 3]})() for rows in self.asked[-1]]


def answer_of(answers, tiers) -> Answer:
    return Answer(TABLE[np.array(answers)], TABLE[np.array(answers)], np.array(tiers, np.int32), None, None)


def watching(last: Any = None, **changes) -> Watch:
    MetricFamily.made.clear()
    metrics = Metrics(MetricFamily, {"model": "m", "version": "1", "instance": "0"})
    return Watch(last or Table(TABLE), {**SETTINGS, **changes}, metrics, "m")


def seen(rows, answers, tiers, audited) -> Seen:
    places = np.array(audited, np.intp)
    return Seen([column[places] for column in columns(rows)], answer_of(answers, tiers), places)


def values() -> dict[str, float]:
    """The metrics that were sent, by name and last label."""
    found = {}
    for name, family in MetricFamily.made.items():
        for labels, metric in family.metrics.items():
            known = dict(labels)
            assert (known.pop("model"), known.pop("version"), known.pop("instance")) == ("m", "1", "0")
            found[",".join([name.removeprefix(PREFIX), *known.values()])] = metric.value
    return found


def test_what_it_counts_and_bets_on():
    last = Table(TABLE)
    one = watching(last)
    one.take(
        [
            seen([0, 1, 2, 3], [0, 2, 2, 0], [1, 1, 2, 2], [1, 2, 3]),  # row 1 is answered otherwise; 2 and 3 came from the last tier
            seen([4, 5], [1, 2], [1, 1], []),
            seen([6], [0], [1], [0]),
        ]
    )
    assert last.asked == [[[1]], [[6]]], "the last tier has answered the escalated rows already"
    assert one.rows.tolist() == [5, 2]
    assert (one.audited, one.disagreements, one.skipped) == (4, 1, 0)
    for test, bound, shares in (("escalation_1", 0.2, [0.5, 0.0, 0.0]), ("disagreement", 0.01, [1 / 3, 0.0])):
        alone = EProcess(bound)
        alone.update(np.array(shares))
        assert one.tests[test].log_values == alone.log_values
        assert one.tests[test].count == len(shares)
    one.send()
    assert values() == {
        "rows_total,1": 5,
        "rows_total,2": 2,
        "escalation_rate,1": 2 / 7,
        "log_e_value,escalation_1": float(one.tests["escalation_1"].log_values),
        "log_e_value,disagreement": float(one.tests["disagreement"].log_values),
        "alarm,escalation_1": 0,
        "alarm,disagreement": 0,
        "audited_rows_total": 4,
        "audit_disagreements_total": 1,
        "audit_skipped_rows_total": 0,
    }
    assert MetricFamily.made.keys() == {f"{PREFIX}{name}" for name in FAMILIES}
    one.send()
    assert values()["rows_total,1"] == 5, "a counter is sent what is new"


def test_three_tiers_have_a_test_of_each_escalation_and_share_the_alarm():
    one = watching(escalation=[0.3, 0.1], instances=2)
    one.take([seen([0, 1, 2, 3], [0, 1, 2, 0], [1, 2, 3, 3], [])])
    assert list(one.tests) == ["escalation_1", "escalation_2", "disagreement"]
    assert one.alpha == pytest.approx(0.1 / 3 / 2)
    assert one.rows.tolist() == [1, 1, 2]
    for test, share in (("escalation_1", 0.75), ("escalation_2", 0.5)):
        alone = EProcess(one.tests[test].bound)
        alone.update(np.array([share]))
        assert one.tests[test].log_values == alone.log_values
    one.send()
    assert (values()["escalation_rate,1"], values()["escalation_rate,2"]) == (0.75, 0.5)


def test_a_middle_tier_is_audited_too():
    one = watching(escalation=[0.3, 0.1])
    one.take([seen([0, 1], [1, 1], [2, 3], [0, 1])])
    assert (one.audited, one.disagreements) == (2, 1)


@pytest.mark.whole
@pytest.mark.parametrize(("escalated", "wrong", "rings"), [(0.3, 0.0, ["escalation_1"]), (0.15, 0.1, ["disagreement"]), (0.15, 0.002, [])])
def test_it_rings_once_and_stays(escalated, wrong, rings, capsys):
    draw = np.random.default_rng(0)
    one = watching(audit=1.0, false_alarm=0.01)
    for start in range(0, 3000, 100):
        some = []
        for row in range(start, start + 100):
            tier = 2 if draw.random() < escalated else 1
            other = tier == 1 and draw.random() < wrong
            some.append(seen([row], [(row + other) % 3], [tier], [0]))
        one.take(some)
    one.take([seen([0], [0], [1], [0])] * 3000)  # all is well again
    one.send()
    assert {test for test in one.tests if values()[f"alarm,{test}"]} == set(rings)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[3] for line in lines] == rings
    for line in lines:
        assert line.startswith("compress: cascade m: ")
        assert f">= {-math.log(0.005):.1f}" in line


def test_without_an_audit_there_is_no_test_of_disagreement_and_a_bound_of_one_has_none():
    assert list(watching(audit=0.0).tests) == ["escalation_1"]
    one = watching(escalation=[1.0], audit=0.0)
    one.take([seen([0], [0], [2], [])])
    one.send()
    assert one.tests == {}
    assert values()["rows_total,2"] == 1


def test_a_failing_last_tier_leaves_the_row_out():
    one = watching(Noting(TABLE, frozenset({1})))
    one.take([seen([1], [1], [1], [0]), seen([2], [2], [1], [0])])
    assert (one.audited, one.disagreements, one.skipped) == (1, 0, 1)
    assert one.tests["disagreement"].count == 1


def test_rows_are_drawn_before_it_is_known_who_answers_them():
    one = watching(audit=0.2)
    rng = np.random.default_rng(5)
    for row in range(400):
        tiers = rng.integers(1, 3, 10)
        one.note(columns(range(row, row + 10)), answer_of([0] * 10, tiers))
    found = [one._waiting.get_nowait() for _ in range(400)]
    places = np.concatenate([some.audited for some in found])
    drawn = np.concatenate([some.answer.tiers[some.audited] for some in found])
    assert abs(len(places) - 800) < 5 * math.sqrt(4000 * 0.2 * 0.8)
    assert abs((drawn == 2).mean() - 0.5) < 0.1
    for row, some in enumerate(found):
        assert [int(value) for value in some.columns[0].reshape(-1)] == [row + place for place in some.audited]


def test_when_it_is_behind_audits_are_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    one = watching(audit=1.0)
    for row in range(5):
        one.note(columns([row, row]), answer_of([0, 0], [1, 1]))
    found = [one._waiting.get_nowait() for _ in range(5)]
    assert [len(some.audited) for some in found] == [2, 2, 2, 0, 0]
    assert one.skipped == 4
    assert all(len(some.answer.tiers) == 2 for some in found), "they are counted by tier all the same"


def test_the_thread_takes_and_sends_what_waits_and_ends(monkeypatch):
    monkeypatch.setattr(module, "SEND_SECONDS", 0.02)
    one = watching(audit=1.0)
    one.start()
    for row in range(50):
        one.note(columns([row]), answer_of([row % 3], [1]))
    deadline = time.monotonic() + 10
    while values().get("rows_total,1", 0) < 50:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    one.note(columns([50]), answer_of([0], [2]))
    one.close()
    assert not one._thread.is_alive()
    assert (values()["rows_total,2"], values()["audited_rows_total"]) == (1, 51)


def test_answers_differ_by_the_first_largest_logit_or_by_a_label_of_the_set():
    some, other = np.array([[1, 1, 0], [0, 2, 1]], np.float32), np.array([[3, 2, 0], [0, 1, 2]], np.float32)
    assert different(some, other, "class", None).tolist() == [False, True]
    sets = np.array([[1, -1], [1, -1]], np.float32), np.array([[9, -2], [1, 0.5]], np.float32)
    assert different(*sets, "set", None).tolist() == [False, True]
    assert different(np.array([[0.0]], np.float32), np.array([[-1.0]], np.float32), "set", None).tolist() == [False]


def test_tags_differ_by_the_tag_of_a_word_and_places_without_a_word_do_not_count():
    last = np.array([[[1, 2], [0, 0]], [[1, 2], [3, 1]]], np.float32)
    same = np.array([[[0, 9], [0, 0], [0, 0]], [[1, 4], [2, 1], [0, 0]]], np.float32)
    assert different(last, same, "tags", None).tolist() == [False, False]
    assert different(same, last, "tags", None).tolist() == [False, False]
    assert different(last, same[:, :, ::-1], "tags", None).tolist() == [True, True]
    assert different(last[:1], np.array([[[0, 9], [0, 1]]], np.float32), "tags", None).tolist() == [True], "a word that only one has"
    assert different(last[:1], np.array([[[0, 9], [1, 0]]], np.float32), "tags", None).tolist() == [True], "and with the first tag"


def test_numbers_and_vectors_differ_by_their_distance():
    values = np.array([[1.0], [1.0], [-2.0]], np.float32), np.array([[1.25], [1.3], [-2.5]], np.float32)
    assert different(*values, "value", 0.25).tolist() == [False, True, True]
    last, other = np.array([[3, 4], [3, 4]], np.float32), np.array([[3, 4.5], [3, 3.4]], np.float32)
    assert different(last, other, "vector", 0.1).tolist() == [False, True]
    assert different(last, other, "vector", 0.2).tolist() == [False, False]
    assert different(last, other, "vector", 0.09).tolist() == [True, True]
    longer = np.array([[3, 5.1]], np.float32)
    assert different(last[:1], longer, "vector", 0.2).tolist() == [True], "of the length of the last tier's, 0.22"
    assert different(longer, last[:1], "vector", 0.2).tolist() == [False], "0.19"
