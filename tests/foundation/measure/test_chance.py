"""No limit on what accuracy is lost is met by garbage: for the primary metric of every kind of answer, a model that answers at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from foundation.labels import candidates, captions, next_token, relevance, spans, tags, text_groups, transcripts, vectors, zero_shot
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets
from foundation.labels.tasks import TASKS, Task
from foundation.labels.value import Numbers
from foundation.measure.chance import chance, nothing_right
from foundation.measure.metrics import primary
from tests.plain_reports import judge

ROWS = 60


class Case(NamedTuple):
    """Labels of one task, what a good model answers, and what answers look like."""

    labels: Labels
    good: np.ndarray


def of_classes(draw: np.random.Generator) -> Case:
    labels = draw.integers(0, 3, ROWS)
    return Case(ClassIds(labels), np.eye(3)[labels])


def of_sets(draw: np.random.Generator) -> Case:
    labels = draw.random((ROWS, 4)) < 0.3
    return Case(LabelSets(labels), np.where(labels, 1.0, -1.0))


def of_values(draw: np.random.Generator) -> Case:
    labels = draw.normal(size=ROWS).astype(np.float32)
    return Case(Numbers(labels), labels[:, None] + 0.1)


def of_tags(draw: np.random.Generator) -> Case:
    names = ("O", "B-A", "I-A")
    rows = [[str(tag) for tag in draw.choice(names, 5, p=(0.6, 0.3, 0.1))] for _ in range(ROWS)]
    labels = tags.labels_of(rows, [np.arange(1, 6)] * ROWS, names)
    return Case(labels, np.eye(3)[labels.array[:, 3:, 0]] + 0.1)


def of_questions(draw: np.random.Generator) -> Case:
    words = [f"word{draw.integers(40)}" if draw.random() < 0.7 else "" for _ in range(ROWS)]
    labels = spans.labels_of(np.zeros((ROWS, 2)), range(ROWS), [bool(word) for word in words], [[word] if word else [] for word in words])
    good = np.zeros((ROWS, spans.Part.WORDS.stop), np.float32)
    good[:, spans.Part.WORDS] = spans.NO_WORD
    for row, word in zip(good, words, strict=True):
        row[spans.Part.SCORE], row[spans.Part.NULL] = bool(word), not word
        row[spans.Part.WORDS.start : spans.Part.WORDS.start + 2] = spans.code_of(word or "other")
    return Case(labels, good)


def of_speech(draw: np.random.Generator) -> Case:
    vocabulary = ("<pad>", "<unk>", "|", *"abcdef")
    texts = ["".join(str(letter) for letter in draw.choice(list("abcdef "), 12)) for _ in range(ROWS)]
    texts = [" ".join(text.split()) or "a" for text in texts]
    good = np.zeros((ROWS, 12, transcripts.Part.WIDTH))
    for row, text in zip(good, texts, strict=True):
        row[: len(text), transcripts.Part.CHARACTER] = [ord(letter) for letter in text]
    return Case(transcripts.labels_of(texts, vocabulary), good)


def of_pairs(draw: np.random.Generator) -> Case:
    first = draw.normal(size=(ROWS, 8))
    second = first + draw.random((ROWS, 1)) * draw.normal(size=(ROWS, 8))
    cosines = vectors.cosines(first, second)
    return Case(vectors.labels_of(cosines), np.stack([first, second], axis=1).reshape(2 * ROWS, 8))


def of_triplets(draw: np.random.Generator) -> Case:
    groups = [(f"a{number}", f"p{number}", f"n{number}") for number in range(ROWS)]
    own = draw.normal(size=(ROWS, 8))
    good = np.stack([own, own + 0.1, draw.normal(size=(ROWS, 8))], axis=1)
    return Case(text_groups.labels_of(groups), good.reshape(3 * ROWS, 8))


def of_searches(draw: np.random.Generator) -> Case:
    documents = draw.normal(size=(ROWS, 8))
    labels = relevance.labels_of(ROWS, ROWS, [(number, ROWS - 1 - number, 1) for number in range(ROWS)])
    return Case(labels, np.concatenate([documents[::-1] + 0.1, documents]))


def of_candidates(draw: np.random.Generator) -> Case:
    grades = np.concatenate([draw.permutation([1, 0, 0, 0, 0, 0]) for _ in range(ROWS)])
    return Case(candidates.labels_of(np.repeat(np.arange(ROWS), 6), grades, [[1]] * ROWS), grades[:, None].astype(np.float64))


def of_captions(draw: np.random.Generator) -> Case:
    images = draw.normal(size=(ROWS, 8))
    sides = np.repeat([zero_shot.IMAGE, zero_shot.TEXT], ROWS)
    labels = captions.labels_of(sides, np.tile(np.arange(ROWS), 2))
    return Case(labels, np.concatenate([images, images + 0.1]))


def of_images(draw: np.random.Generator) -> Case:
    classes, texts = draw.integers(0, 4, ROWS), draw.normal(size=(4, 8))
    sides = np.repeat([zero_shot.IMAGE, zero_shot.TEXT], [ROWS, 4])
    labels = zero_shot.labels_of(sides, np.concatenate([classes, np.arange(4)]))
    return Case(labels, np.concatenate([texts[classes] + 0.1, texts]))


def of_tokens(draw: np.random.Generator) -> Case:
    labels = draw.integers(0, 20, (ROWS, 6)).astype(np.int32)
    labels[::3, 4:] = next_token.IGNORED
    return Case(next_token.Tokens(labels), np.stack([np.full(labels.shape, 0.2), labels], axis=-1))


CASES: dict[Task, Callable[[np.random.Generator], Case]] = {
    "text-classification": of_classes,
    "multi-label-classification": of_sets,
    "token-classification": of_tags,
    "question-answering": of_questions,
    "text-regression": of_values,
    "image-text": of_images,
    "image-text-retrieval": of_captions,
    "sentence-embedding": of_pairs,
    "sentence-triplets": of_triplets,
    "retrieval": of_searches,
    "reranking": of_candidates,
    "text-generation": of_tokens,
    "text-to-text": of_tokens,
    "image-classification": of_classes,
    "audio-classification": of_classes,
    "speech-recognition": of_speech,
}


def garbage(case: Case, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields answers that do not depend on the rows."""
    yield from case.labels.constants(case.good)
    if not case.labels.SHUFFLED:
        shape = case.labels.array.shape
        yield np.stack([np.full(shape, np.log(20.0)), np.zeros(shape)], axis=-1)
        return
    yield draw.normal(size=case.good.shape)
    yield case.good[draw.permutation(len(case.good))]


def verdict(task: Task, case: Case, before: np.ndarray, after: np.ndarray, limit: float) -> dict[str, Any]:
    metric = primary(task)
    one, other = (metric.of(*case.labels.values(answers)) for answers in (before, after))
    report = {
        "baseline": "baseline",
        "metric": {"name": TASKS[task].metric, "chance": chance(metric, before, case.labels)},
        "variants": [
            {"id": "baseline", "accuracy": {"torch": {"value": one, "n": 9}}},
            {"id": "last", "accuracy": {"torch": {"value": other, "n": 9}}},
        ],
    }
    return next(goal for goal in judge({"max_drop": limit}, report) if goal["goal"] == "max_drop")


def test_every_task_has_a_case() -> None:
    assert set(CASES) == set(TASKS)
    assert len({type(CASES[task](np.random.default_rng(0)).labels) for task in CASES}) >= 12


@pytest.mark.parametrize("task", CASES)
def test_garbage_never_meets_a_limit_and_a_good_model_does(task: Task) -> None:
    draw = np.random.default_rng(0)
    case = CASES[task](draw)
    for after in garbage(case, draw):
        assert verdict(task, case, case.good, after, 0.02)["met"] is False
        wide = verdict(task, case, case.good, after, 1.0)
        assert wide["met"] is not True
        assert wide["met"] is False or "knows nothing" in wide["reason"]
    same = verdict(task, case, case.good, case.good, 0.02)
    assert (same["met"], same["value"]) == (True, 0)


@pytest.mark.parametrize("task", CASES)
def test_a_baseline_that_knows_nothing_is_no_measure(task: Task) -> None:
    draw = np.random.default_rng(1)
    case = CASES[task](draw)
    for before in case.labels.constants(case.good):
        found = verdict(task, case, before, before, 0.02)
        assert (found["met"], found["value"]) == (None, 0)
        assert "knows nothing" in found["reason"]


def test_chance_is_the_best_of_the_constants_and_of_other_orders() -> None:
    labels = np.repeat([0, 1], [80, 20])
    assert chance(primary("text-classification"), np.eye(2)[labels], ClassIds(labels)) == 0.8
    tokens = next_token.Tokens(np.array([[0, 0, 1, next_token.IGNORED]], np.int32))
    answers = np.zeros((1, 4, 2), np.float32)
    entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    assert chance(primary("text-generation"), answers, tokens) == pytest.approx(np.exp(entropy), rel=1e-6)


@pytest.mark.parametrize(
    ("task", "figures", "warns"),
    [
        ("text-classification", {"accuracy": 0.0}, True),
        ("text-classification", {"accuracy": 0.01}, False),
        ("token-classification", {"entity_f1": 0.00004}, True),
        ("speech-recognition", {"wer": 1.0}, True),
        ("speech-recognition", {"wer": 0.9}, False),
        ("text-regression", {"pearson": 0.0}, False),
    ],
)
def test_a_baseline_of_nothing_right_is_warned_of(task: Task, figures: dict[str, float], warns: bool) -> None:
    found = nothing_right(task, figures, 30)
    assert (found is not None) is warns
    assert found is None or ("on 30 evaluation rows" in found and TASKS[task].metric in found)
