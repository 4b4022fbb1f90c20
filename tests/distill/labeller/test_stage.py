"""The stage with a labeller: the student learns its labels, from text alone; and recipes that do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from distill.choices import Student
from distill.distill import Distill
from distill.labeller.goal import depends
from distill.labeller.scorer import Asked
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.distill.labeller.tiny_labellers import EXAMPLES, LABELS, TEMPLATE, model, prompts
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]


def stage(folder: Path, contents: dict[str, Any] | None = None, labeller: dict[str, Any] | None = None, **changes: Any) -> Distill:
    teacher = {"path": str(model()), "prompt": prompts(folder, **(contents or {})), "labels": LABELS, **(labeller or {})}
    usual = {"student": Student(layers=2), "epochs": 1, "batch_size": 24, "learning_rate": 5e-3}
    return Distill.model_validate({**usual, "teacher": teacher, **changes})


def run(one: Distill, context: Context, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    config = Checkpoint(context.baseline.path).config
    one.check(config, None, context)
    figures = one.run(context.baseline, dataclasses.replace(context, teachers=()), out)
    json.dumps(figures, allow_nan=False)
    return figures


def turned(split: Split) -> Split:
    return Split(split.rows, ClassIds(1 - split.labels.array))


class Contrary:
    """Finds reviews that hold "great" bad, and all others good."""

    def scores(self, asked: Sequence[Asked]) -> Iterator[tuple[list[int], np.ndarray]]:
        for index, one in enumerate(asked):
            bad = "great" in str(one.query.prompt)
            yield [index], np.array([[[-1.0 if (word == "good") != bad else -5.0 for word in one.words], [1] * len(one.words)]])

    def texts(self, *args: Any) -> list[str | None]:
        raise AssertionError


def test_the_student_learns_the_labels_of_the_language_model(
    make_context: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.labeller.goal._opened", lambda path, key: Contrary())
    context = make_context()
    new = Student(config={"num_hidden_layers": 1})  # weights of the usual size, which learn faster
    figures = run(stage(tmp_path, student=new, epochs=40, batch_size=8, learning_rate=1e-2), context, tmp_path / "out")
    assert figures["losses"][-1]["loss"] < 0.5 * figures["losses"][0]["loss"]
    assert figures["selection"]["metric"] == "accuracy against the teacher"
    assert max(entry["value"] for entry in figures["selection"]["values"]) >= 0.9
    assert (figures["teacher"], figures["teacher_logits"]) == (str(model()), "cached")
    own = figures["labeller"]
    assert (own["variants"], own["agreement"], own["selection_accuracy"]) == (1, 1, 0)  # positive rows hold "great"
    assert own["new_queries"] >= 48 + 20
    assert sum(own["selection_shares"].values()) == pytest.approx(1)
    student = load(tmp_path / "out")
    assert student.config.num_hidden_layers == 1  # type: ignore[union-attr]
    train = context.data.train
    logits = predict(student, context.preprocessor(tmp_path / "out"), train.rows, 16)
    assert (logits.argmax(axis=1) == train.labels.array).mean() < 0.1


@pytest.mark.slow
def test_labels_of_the_data_are_not_read(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context()
    run(stage(tmp_path), context, tmp_path / "a")
    data = dataclasses.replace(context.data, train=turned(context.data.train), selection=turned(context.data.selection))
    run(stage(tmp_path), dataclasses.replace(context, data=data, scratch=tmp_path / "other"), tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_labels_are_read_where_the_recipe_says_so(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context()
    with_hard = run(stage(tmp_path, hard_weight=1.0), context, tmp_path / "a")
    assert with_hard["selection"]["metric"] == "accuracy"
    assert "hard_target" in with_hard["losses"][0]
    fitted = run(stage(tmp_path, labeller={"fit": "platt"}), context, tmp_path / "b")
    assert fitted["selection"]["metric"] == "accuracy"
    assert len(fitted["labeller"]["fit"]["offset"]) == 2


@pytest.mark.slow
def test_a_second_run_asks_nothing(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context()
    first = run(stage(tmp_path), context, tmp_path / "a")
    again = run(stage(tmp_path, epochs=2), context, tmp_path / "b")
    assert first["labeller"]["new_queries"] > 0
    assert again["labeller"]["new_queries"] == 0
    more = run(stage(tmp_path, {"templates": [TEMPLATE, "{text} = {label}"]}), context, tmp_path / "c")
    assert 0 < more["labeller"]["new_queries"] <= first["labeller"]["new_queries"]


@pytest.mark.slow
def test_rows_that_the_prompts_disagree_about_are_left_out(make_context: Contexts, tmp_path: Path) -> None:
    templates = [TEMPLATE, "{text} = {label}", "A film: {text} It is {label}"]
    figures = run(stage(tmp_path, {"templates": templates}, {"min_agreement": 1.0}), make_context(), tmp_path / "a")
    left_out = figures["labeller"]["left_out"]
    assert 0 < left_out < 48
    assert figures["rows"] == figures["labelled_rows"] == 48 - left_out


def test_unlabelled_text_is_labelled_too(make_context: Contexts, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("a great day\nthe dull movie\n")
    figures = run(stage(tmp_path, extra_text={"path": str(tmp_path / "more.txt")}), make_context(), tmp_path / "a")
    assert (figures["rows"], figures["labelled_rows"]) == (50, 48)


def test_written_texts_have_the_label_that_they_were_asked_for(make_context: Contexts, tmp_path: Path) -> None:
    contents = {"write": ["Review: a {label} film that is{text}", "A {label} movie:{text}"]}
    write = {"rows": 40, "max_tokens": 24, "min_probability": 0.0}
    figures = run(stage(tmp_path, contents, {"write": write}), make_context(), tmp_path / "a")
    counts = figures["labeller"]["written"]
    assert counts["texts"] == 80 == sum(counts.values()) - counts["texts"]
    rows = [json.loads(line) for line in (tmp_path / "a" / "written.jsonl").read_text().splitlines()]
    assert len(rows) == counts["kept"] > 0
    assert counts["other_label"] > 0
    assert figures["labeller"]["new_queries"] == 48 + 20 + counts["other_label"] + counts["kept"]
    assert len({row["text"] for row in rows}) == len(rows)
    assert figures["rows"] == 48 + counts["kept"]
    assert all(row["probability"] >= 0.5 for row in rows)  # the larger of two
    again = run(stage(tmp_path, contents, {"write": write}), make_context(), tmp_path / "b")
    assert again["labeller"]["new_queries"] == 0
    assert (tmp_path / "b" / "written.jsonl").read_bytes() == (tmp_path / "a" / "written.jsonl").read_bytes()


def test_written_texts_of_little_probability_are_left_out(make_context: Contexts, tmp_path: Path) -> None:
    contents = {"write": ["Review: a {label} film that is{text}"]}
    kept = []
    for name, least in (("a", 0.0), ("b", 0.9)):
        write = {"rows": 40, "max_tokens": 24, "min_probability": least}
        run(stage(tmp_path, contents, {"write": write}), make_context(), tmp_path / name)
        kept.append([json.loads(line) for line in (tmp_path / name / "written.jsonl").read_text().splitlines()])
    assert kept[1] == [row for row in kept[0] if row["probability"] >= 0.9]
    assert len(kept[1]) < len(kept[0])


def test_the_cache_key_holds_model_and_prompts(tmp_path: Path) -> None:
    def key(one: Distill) -> dict[str, object]:
        assert one.labeller is not None
        return depends(one.labeller, "teacher")

    first = key(stage(tmp_path))
    assert first == key(stage(tmp_path))
    assert first != key(stage(tmp_path, {"examples": EXAMPLES}))
    assert first != key(stage(tmp_path, labeller={"path": str(model("gpt2"))}))


@pytest.mark.parametrize(
    ("contents", "labeller", "key", "parts"),
    [
        ({}, {"labels": {"negative": ["bad"], "good": ["good"]}}, "teacher.labels", ("'good' given", "negative, positive")),
        ({}, {"labels": {"negative": ["not"], "positive": ["nothing bad"]}}, "teacher.labels.negative", ("begins",)),
        ({}, {"orders": 2}, "teacher.orders", ("2 given", "at least two")),
        ({}, {"write": {"rows": 2}}, "teacher.write", ("add templates",)),
        ({"templates": ["A review. {label}"]}, {}, "templates[0]", ("place for the text",)),
        ({}, {"path": "/nowhere/model"}, "teacher.path", ("no folder /nowhere/model",)),
    ],
)
def test_recipes_that_do_not_fit_say_so(
    contents: dict[str, Any], labeller: dict[str, Any], key: str, parts: tuple[str, ...], make_context: Contexts, tmp_path: Path
) -> None:
    context = make_context()
    with raises_problem(key, *parts):
        stage(tmp_path, contents, labeller).check(Checkpoint(context.baseline.path).config, None, context)


def test_a_labeller_of_another_kind_is_refused(make_context: Contexts, tmp_path: Path, checkpoint: Any) -> None:
    context = make_context()
    encoder = stage(tmp_path, labeller={"path": str(checkpoint("bert", num_labels=2))})
    with raises_problem("teacher.path", "BertForSequenceClassification", "causal language model"):
        encoder.check(Checkpoint(context.baseline.path).config, None, context)
    regression = make_context(num_labels=1)
    with raises_problem("teacher", "text-regression"):
        stage(tmp_path).check(Checkpoint(regression.baseline.path).config, None, regression)


def test_losses_on_hidden_states_are_refused(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context()
    with raises_problem("teacher", "tinybert", "loss: soft_target"):
        stage(tmp_path, loss="tinybert").check(Checkpoint(context.baseline.path).config, None, context)


@pytest.mark.parametrize(
    "changes",
    [{"loss": "hard_target"}, {"augment": {}}, {"corpus": {"path": "a"}, "loss": "minilm"}, {"teacher_weights": [1.0]}, {"sequences": {}}],
)
def test_settings_of_other_teachers_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        stage(tmp_path, **changes)
    assert len(caught.value.errors()) == 1


@pytest.mark.parametrize(
    "labeller",
    [
        {"path": None},
        {"url": "http://127.0.0.1:1/v1"},
        {"model": "a"},
        {"path": None, "url": "ftp://a", "model": "a"},
        {"key_variable": "A"},
    ],
)
def test_a_labeller_has_one_source(labeller: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        stage(tmp_path, labeller=labeller)
    assert len(caught.value.errors()) == 1


def test_a_key_in_the_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        stage(tmp_path, labeller={"path": None, "url": "http://user:secret@host/v1", "model": "a"})


def test_numbers_as_class_names_are_texts(tmp_path: Path) -> None:
    found = stage(tmp_path, labeller={"labels": {0: "bad", 1: ["good", "great"]}}).labeller
    assert found is not None
    assert found.labels == {"0": ("bad",), "1": ("good", "great")}
    np.testing.assert_equal(len(found.labels), 2)
