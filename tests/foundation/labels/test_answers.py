"""What holds for every kind of answer, and that no other code asks which kind it is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from foundation.labels import candidates, captions, next_token, relevance, spans, tags, text_groups, transcripts, vectors, zero_shot
from foundation.labels.classes import ClassIds
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets
from foundation.labels.tasks import TASKS
from foundation.labels.value import Numbers
from foundation.standalone.windows import Read
from tests.foundation.labels import test_transcripts

ROOT = Path(__file__).resolve().parents[3]
ANSWERS = {row.answer.FORM: row.answer for row in TASKS.values()}
N = 12


def predictions(form: type[Labels], seed: int) -> tuple[np.ndarray, Labels]:
    """Returns predictions and labels of their form."""
    random = np.random.default_rng(seed)
    if form is next_token.Tokens:
        ids = random.integers(0, 9, (N, 5))
        return np.stack([random.random((N, 5)), ids], axis=-1).astype(np.float32), next_token.Tokens(np.zeros((N, 5), np.int32))
    if form is tags.Tags:
        names = ("O", "B-A", "I-A", "B-B")
        words = [np.arange(1, 4)] * N
        return random.normal(size=(N, 3, 4)).astype(np.float32), tags.labels_of([["O"] * 3] * N, words, names)
    if form is spans.Spans:
        context = "one two three four five six seven eight"
        ends = np.cumsum([len(word) + 1 for word in context.split()]) - 1
        read = Read(0, 4, np.stack([ends - [len(word) for word in context.split()], ends], axis=1), 12)
        kept = [spans.compress_logits(random.normal(size=(12, 2)).astype(np.float32), read, context, 0.0) for _ in range(N)]
        return np.stack(kept), spans.labels_of(np.zeros((N, 2), int), range(N), [True] * N, [["one two"]] * N)
    if form is transcripts.Transcripts:
        names = ("<pad>", "|", "a", "b")
        logits = random.normal(size=(N, 8, 4)).astype(np.float32)
        prepared = test_transcripts.prepared((16,), labels=names)
        kept = transcripts.TranscriptAnswer().compressed(prepared, [test_transcripts.sound(16)] * N, logits)
        return kept, transcripts.labels_of(["a b"] * N, names)
    made = random.normal(size=(N, 1 if form is Numbers else 4)).astype(np.float32)
    if form is LabelSets:
        return made, LabelSets(random.random((N, 4)) < 0.5)
    labels: dict[type[Labels], Labels] = {Numbers: Numbers(np.zeros(N, np.float32)), vectors.Pairs: vectors.labels_of(np.zeros(N // 2))}
    return made, labels.get(form, ClassIds(np.zeros(N, np.int64)))


@pytest.mark.parametrize("form", ANSWERS)
def test_equal_predictions_do_not_differ_and_others_do(form: type[Labels]) -> None:
    answer, (one, labels), (other, _) = ANSWERS[form], predictions(form, 0), predictions(form, 1)
    changed, moved = answer.differences(one, one)
    assert not changed.any()
    assert not moved.any()
    assert answer.disagreement(one, one) == pytest.approx(0, abs=1e-12)
    assert answer.disagreement(one, other) > 0
    assert answer.differences(one, other)[1].max() > 0
    assert labels.unit(one) > 0


@pytest.mark.parametrize("form", ANSWERS)
def test_distances_are_0_for_equal_logits_only(form: type[Labels]) -> None:
    random = np.random.default_rng(0)
    shape = (N, 3, 7) if form in (next_token.Tokens, tags.Tags) else (N, 1 if form is Numbers else 7)
    one, other = (random.normal(size=shape) for _ in range(2))
    if form in (spans.Spans, transcripts.Transcripts):
        one, other = (predictions(form, seed)[0] for seed in (0, 1))
    assert ANSWERS[form].distances(one, one) == pytest.approx(np.zeros(N))
    assert (ANSWERS[form].distances(one, other) > 0).all()


@pytest.mark.parametrize("task", [task for task, row in TASKS.items() if not row.searches and not row.generates])
def test_a_teacher_agrees_with_the_labels_made_of_its_answers(task: str) -> None:
    from foundation.measure.metrics import metrics, primary

    answers, labels = predictions(TASKS[task].answer.FORM, 3)
    if TASKS[task].two_towers:
        form = captions if TASKS[task].captioned else zero_shot
        labels = form.labels_of(np.arange(N) % 2, np.arange(N) // 2 % 3)
    if TASKS[task].needs_negatives:
        labels = text_groups.labels_of([(f"{n}", f"{n}+", f"{n}-") for n in range(N // 3)])
        answers = answers[: len(labels)]
    made = labels.pseudo_labels(answers)
    assert type(made) is type(labels) is type(TASKS[task].answer.read(labels.array))
    assert len(made) == len(labels)
    best = 1.0 if primary(task).higher_is_better else 0.0
    name = "text_to_image_recall@1" if TASKS[task].captioned else TASKS[task].metric  # an image may be the nearest of no caption
    assert metrics(task, answers, made)[name] == pytest.approx(best)


def matching(pattern: str) -> list[str]:
    """Returns the lines of the product outside of the labels that a pattern matches."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("compress", "foundation", "quantize", "distill", "prune", "export", "triton_repo")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith("foundation/labels/")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.whole
def test_other_code_asks_labels_and_not_the_shape_of_their_array() -> None:
    """What follows from a form is a method of its class; a file has the form of its task."""
    assert matching(r"\blabels(_\w+)?\.(array\.)?(ndim\b|shape\[1\] [=<>!i]|is_floating_point)|issubdtype\(labels") == []
    known = {"retrieval": relevance.labels_of(1, 2, [(0, 1, 1)]), "reranking": candidates.labels_of([0, 0], [1, 0], [[1, 0]])}
    assert all(type(TASKS[task].answer.read(labels.array)) is type(labels) for task, labels in known.items())


def test_other_code_never_asks_which_answer_it_is() -> None:
    """What follows from a kind of answer is a method or a constant of its class."""
    assert matching(r"isinstance\([^)]*answer\b|\.answer\.(form|FORM) (is|==)") == []


@pytest.mark.parametrize("form", ANSWERS)
def test_predictions_hold_as_many_numbers_as_the_forecast_says(form: type[Labels]) -> None:
    if form is next_token.Tokens:  # the forecast counts their labels
        return
    answers, _ = predictions(form, 0)
    assert answers[0].size == ANSWERS[form].numbers(answers.shape[-1], answers.shape[1] if answers.ndim == 3 else 1)
