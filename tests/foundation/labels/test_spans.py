"""Answers as spans: figures against the official script and against numbers worked out by hand, what is kept of logits, thresholds."""

from __future__ import annotations

import collections
import re
import string
from typing import Any

import numpy as np
import pytest

from compress.report.intervals import paired, single
from foundation.core.errors import InputError
from foundation.labels import spans
from foundation.measure.answers import compressed, gathered
from foundation.measure.metrics import metrics
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import N_BEST
from foundation.standalone.windows import Read, Window
from tests import questions

TASK = "question-answering"
CONTEXT = "In 1889 the U.S. built a well-known tower, the Eiffel Tower, in Paris."
WORDS = [(match.start(), match.end()) for match in re.finditer(r"\S+", CONTEXT)]
READ = Read(0, 5, np.array(WORDS), 5 + len(WORDS) + 1)


def normalize_answer(text: str) -> str:
    """As the official script has it."""
    text = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split())


def compute_f1(gold: str, predicted: str) -> float:
    """As the official script for SQuAD 2.0 has it."""
    gold_words, predicted_words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    common = collections.Counter(gold_words) & collections.Counter(predicted_words)
    same = sum(common.values())
    if len(gold_words) == 0 or len(predicted_words) == 0:
        return float(gold_words == predicted_words)
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted_words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def answered(first: int, last: int, null: float = -9.0, threshold: float | None = None, score: float = 4.0) -> Any:
    """What is kept of a window whose best span is from one word of the context to another."""
    logits = np.full((READ.length, 2), -5.0, np.float32)
    logits[0] = null / 2
    logits[5 + first, 0], logits[5 + last, 1] = score / 2, score / 2
    return spans.compress_logits(logits, READ, CONTEXT, threshold)


def text_of(answer: Any) -> str:
    start, end = answer[spans.Part.CHARACTERS].astype(int)
    return CONTEXT[start:end]


@pytest.mark.parametrize(
    ("true", "predicted", "exact", "f1"),
    [
        (["Paris"], (12, 12), 1.0, 1.0),  # "Paris."
        (["Eiffel Tower"], (8, 10), 1.0, 1.0),  # "the Eiffel Tower,"
        (["Tower"], (9, 10), 0.0, 2 / 3),  # precision 1/2, recall 1
        (["the US built it in 1889"], (1, 4), 0.0, 2 * 3 / (3 + 5)),  # "1889 the U.S. built": us and 1889 and built; 3 words of 5 true
        (["Berlin", "in Paris"], (12, 12), 0.0, 2 / 3),  # the best of several
        (["Berlin"], (12, 12), 0.0, 0.0),
        (["the"], (2, 2), 1.0, 1.0),  # no words on both sides
        ([], (12, 12), 0.0, 0.0),  # there is no answer, and one is given
        (["tower tower"], (7, 10), 0.0, 2 * 2 / (3 + 2)),  # "tower, the Eiffel Tower,": each word as often as in both
    ],
)
def test_figures_worked_out_by_hand(true: list[str], predicted: tuple[int, int], exact: float, f1: float) -> None:
    answers = answered(*predicted)[None]
    labels = spans.labels_of(np.zeros((1, 2), int), [0], [bool(true)], [true])
    assert labels.values(answers)[0][0].tolist() == [exact, pytest.approx(f1), float(bool(true))]


def test_figures_are_those_of_the_official_script() -> None:
    random = np.random.default_rng(0)
    answers, true = [], []
    for _ in range(200):
        first = int(random.integers(len(WORDS)))
        answers.append(answered(first, int(random.integers(first, min(len(WORDS), first + 5)))))
        places = [sorted(random.integers(0, len(WORDS), 2)) for _ in range(random.integers(0, 4))]
        true.append([CONTEXT[WORDS[low][0] : WORDS[high][1]] for low, high in places])
    labels = spans.labels_of(np.zeros((200, 2), int), range(200), [bool(texts) for texts in true], true)
    wanted = []
    for answer, texts in zip(answers, true, strict=True):
        golds = [text for text in texts if normalize_answer(text)] or [""]
        exact = max(float(normalize_answer(gold) == normalize_answer(text_of(answer))) for gold in golds)
        wanted.append((exact, max(compute_f1(gold, text_of(answer)) for gold in golds), float(bool(texts))))
    found = labels.values(np.stack(answers))[0]
    assert found == pytest.approx(np.array(wanted))
    assert 0.1 < found[:, 1].mean() < 0.9
    told = metrics(TASK, np.stack(answers), labels)
    has = np.array(wanted)[:, 2] == 1
    assert told["answer_f1"] == pytest.approx(np.array(wanted)[:, 1].mean())
    assert told["answer_exact_match"] == pytest.approx(np.array(wanted)[:, 0].mean())
    assert told["has_answer_f1"] == pytest.approx(np.array(wanted)[has, 1].mean())
    assert told["no_answer_f1"] == pytest.approx(np.array(wanted)[~has, 1].mean())
    assert list(metrics(TASK, np.stack(answers)[has], labels[has])) == ["answer_f1", "answer_exact_match"]


def test_a_question_takes_the_best_span_and_the_least_null_score_of_its_windows() -> None:
    answers = np.stack([answered(1, 1, 2.0, 0.0, 3.0), answered(12, 12, 6.0, 0.0, 5.0), answered(3, 3, 9.0, 0.0, 4.0)])
    labels = spans.labels_of(np.zeros((3, 2), int), [0, 0, 1], [True, False], [["Paris"], []])
    assert labels.questions(answers) == [spans.Question(1, False), spans.Question(2, True)]  # 2 < 5: the other window knows better
    assert spans.choices(answers).tolist() == [[3, 7], [-1, -1], [-1, -1]]
    assert labels.values(answers)[0].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert labels.count() == 2
    never = np.stack([answered(1, 1, 99.0, None)])
    assert not labels[:1].questions(never)[0].none


def test_intervals_are_of_questions_and_not_of_windows() -> None:
    random = np.random.default_rng(0)
    answers = np.stack([answered(int(place), int(place)) for place in random.integers(0, len(WORDS), 60)])
    labels = spans.labels_of(np.zeros((60, 2), int), np.repeat(np.arange(30), 2), [True] * 30, [["Paris", "1889", "tower"]] * 30)
    from foundation.measure.metrics import METRICS

    told = single(METRICS["answer_f1"], answers, labels)
    figures = labels.values(answers)[0][:, 1]
    assert told.n == 30
    assert told.value == pytest.approx(figures.mean())
    assert told.low < told.value < told.high
    assert abs(told.high - told.low - 4 * figures.std() / 30**0.5) < 0.15
    assert paired(METRICS["answer_f1"], answers, answers, labels).difference == 0


def test_kept_logits_are_the_largest_ones_of_the_context() -> None:
    random = np.random.default_rng(0)
    characters = np.array([(2 * place, 2 * place + 1) for place in range(40)])
    logits = random.standard_normal((60, 2)).astype(np.float32)  # 15 of them padding
    kept = spans.compress_logits(logits, Read(0, 4, characters, 45), "x " * 40, 1.5)
    sides = spans.sides_of(kept[None])
    for side in range(2):
        own = logits[4:44, side]
        order = sorted(range(40), key=lambda place: -own[place])[:N_BEST]
        assert sides.places[0, side].tolist() == [place + 4 for place in order]
        assert sides.logits[0, side].tolist() == own[order].tolist()
        assert sides.first[0, side] == logits[0, side]
        assert sides.total[0, side] == pytest.approx(np.log(np.exp(logits[:45, side].astype(np.float64)).sum()), rel=1e-6)
    assert kept[spans.Part.NULL] == pytest.approx(float(logits[0].sum()) - 1.5)
    few = spans.sides_of(spans.compress_logits(logits, Read(0, 4, characters[:3], 8), "x " * 3, None)[None])
    assert (few.places == spans.NO_PLACE).sum() == 2 * (N_BEST - 3)


def test_logits_that_are_no_numbers_are_told_by_the_row() -> None:
    prepared = Preprocessor("text", ("input_ids",), ("start", "end"), TASK, 48, (48,), response="span", tokenizer=questions.tokenizer())
    rows = [Window("where is ann ?", "ann is in oslo .", 0, 5)] * 3
    logits = np.zeros((3, 48, 2), np.float32)
    logits[1, 3] = np.nan
    logits[2, 40] = np.nan  # padding, which nobody reads
    found = compressed(prepared, rows, logits)
    assert np.isfinite(found).all(axis=1).tolist() == [True, False, True]
    with pytest.raises(InputError, match=r"logits of 1 of 3 rows are NaN .* first in row 1"):
        gathered([([0, 1, 2], found)], 3)


def test_words_are_told_apart_by_their_numbers() -> None:
    words = [f"word{number}" for number in range(20000)]
    assert len({spans.code_of(word) for word in words}) == len(words)
    assert all(np.float32(part) == part for part in spans.code_of("tower"))


def test_long_answers_are_compared_as_a_whole() -> None:
    text = " ".join(f"w{number}" for number in range(100))
    characters = np.array([(0, len(text))])
    logits = np.zeros((3, 2), np.float32)
    one, same, other = (spans.compress_logits(logits, Read(0, 1, characters, 3), words, None) for words in (text, text, text[:-1] + "8"))
    assert spans.predicted_words(one) == spans.predicted_words(same)
    assert spans.predicted_words(one) != spans.predicted_words(other)
    assert len(spans.predicted_words(one)) == spans.MOST_WORDS


@pytest.mark.first(1)
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_threshold_is_the_best_of_all(seed: int, windows: int) -> None:
    """A question has up to so many windows; there is no answer where even the least of their null scores is above the best span."""
    random = np.random.default_rng(seed)
    rows, numbers, answerable = [], [], []
    for number in range(40):
        has = bool(random.random() < 0.5)
        for _ in range(random.integers(1, windows + 1)):
            place = 12 if random.random() < 0.7 else 1
            rows.append(answered(place, place, float(random.integers(-6, 7) + (0 if has else 3)), 0.0, float(random.integers(1, 6))))
            numbers.append(number)
        answerable.append(has)
    answers = np.stack(rows)
    labels = spans.labels_of(np.zeros((len(rows), 2), int), numbers, answerable, [["Paris"] if has else [] for has in answerable])
    more, best = spans.best_threshold(answers, labels)

    def f1_at(threshold: float) -> float:
        moved = answers.copy()
        moved[:, spans.Part.NULL] -= np.float32(threshold)
        return float(labels.values(moved)[0][:, 1].mean())

    tried = {threshold: f1_at(threshold) for threshold in np.arange(-15, 15, 0.5)}
    assert f1_at(more) == pytest.approx(best)
    assert best == pytest.approx(max(tried.values()))
    assert (more == 0) == (f1_at(0) >= best - 1e-9)  # nothing is moved without need


def test_answers_of_a_teacher_become_the_true_ones() -> None:
    answers = np.stack([answered(1, 1), answered(12, 12, 9.0, 0.0), answered(9, 10)])
    labels = spans.labels_of(np.array([[6, 6], [0, 0], [9, 9]]), [0, 1, 2], [True] * 3, [["x"]] * 3)
    made = labels.pseudo_labels(answers)
    assert made.array[:, 0, 0].tolist() == labels.array[:, 0, 0].tolist()
    assert made.array[:, 0, 1].tolist() == [[0, 1], [1, 0], [2, 1]]
    assert made.values(answers)[0][:, :2].tolist() == [[1, 1]] * 3
    assert spans.true_words(made.array[1]) == [()]
