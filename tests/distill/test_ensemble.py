"""Several teachers: what the mean of their softened answers is, and what a student learns from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load
from foundation.models.forward import forward, freeze
from foundation.stage.context import Context
from foundation.training.distillation.ensemble import shares
from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.value import ValueLoss
from foundation.training.rows import Rows
from foundation.training.train import Batch
from tests.problems import raises_problem
from tests.soft_target import soft_target

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]


@given(st.integers(1, 4), st.integers(2, 6), st.floats(0.5, 8), st.integers(0, 10**6), st.sampled_from([1.0, 30.0, 300.0]))
def test_soft_targets_of_the_average_are_those_of_the_mean_probabilities(
    count: int, classes: int, temperature: float, seed: int, size: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    teachers = [size * torch.randn(3, classes, generator=random) for _ in range(count)]
    student = torch.randn(3, classes, generator=random)
    weights = shares(torch.rand(count, generator=random).add(0.1).tolist(), count)
    assert sum(weights) == pytest.approx(1)
    mean = sum(weight * torch.softmax(z.double() / temperature, dim=1) for weight, z in zip(weights, teachers, strict=True))
    assert isinstance(mean, torch.Tensor)
    log_q = torch.log_softmax(student.double() / temperature, dim=1)
    expected = temperature**2 * (torch.special.xlogy(mean, mean) - mean * log_q).sum(dim=1)
    found = soft_target(student, ClassLoss().averaged(teachers, weights, temperature), temperature)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * temperature**2)


def test_equal_teachers_say_what_one_says_and_values_are_averaged() -> None:
    z = torch.randn(4, 3)
    one = ClassLoss().averaged([z, z, z], shares((), 3), 2.0)
    torch.testing.assert_close(torch.softmax(one / 2, dim=1), torch.softmax(z / 2, dim=1))
    values = [torch.tensor([[1.0]]), torch.tensor([[4.0]])]
    assert ValueLoss().averaged(values, shares((1.0, 3.0), 2), 2.0).item() == pytest.approx(3.25)


@pytest.mark.slow
def test_a_student_learns_from_two_teachers(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    """One of them has other tokens; both are asked beforehand, and the student ends closer to their mean than to either."""
    other = checkpoint("bert", words=("poor", "great", "movie"))
    context = make_context()
    context = dataclasses.replace(context, teachers=(context.baseline, Artifact(other, {"id": "other", "digest": "1" * 64})))
    (tmp_path / "out").mkdir()
    stage = Distill(teacher=("baseline", "assistant"), epochs=15, batch_size=24, learning_rate=5e-3, hard_weight=0)
    figures = stage.run(context.baseline, context, tmp_path / "out")
    assert (figures["teacher"], figures["teacher_logits"]) == ("baseline + other", "cached")
    assert len(list((tmp_path / "scratch").glob("teacher-*"))) == 2
    student, answers = load(tmp_path / "out"), []
    from foundation.models.folder import Checkpoint

    rows = context.data.train.rows
    for folder in (context.baseline.path, other):
        encoded = Checkpoint(folder).preprocessor(context.task, 16, context.target).encode(rows, 0)
        with torch.no_grad():
            answers.append(forward(load(folder), {name: torch.from_numpy(value) for name, value in encoded.items()}))
            if folder is not other:
                ours = forward(student, {name: torch.from_numpy(value) for name, value in encoded.items()})
    apart = [float(soft_target(ours, theirs, 2.0).mean()) for theirs in (ClassLoss().averaged(answers, (0.5, 0.5), 2.0), *answers)]
    assert apart[0] < 0.5 * min(apart[1:])


def test_a_teacher_of_more_weight_is_learned_from_more(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    """The answers to the rows of a batch are the weighted mean, and so is what the weights kept are chosen by."""
    from distill.steps import Steps
    from foundation.models.folder import Checkpoint

    context, other = make_context(), checkpoint("bert", num_labels=2, num_hidden_layers=3)
    folder = context.baseline.path
    context = dataclasses.replace(context, teachers=(context.baseline, Artifact(other, {"id": "other", "digest": "1" * 64})))
    student, teachers = load(folder), [freeze(load(where)) for where in (folder, other)]
    prepared = Checkpoint(folder).preprocessor(context.task, 16, context.target)
    indices = np.arange(6)
    features = Rows.prepare(context.data.train.rows, prepared).batch(indices)
    z = [forward(model, features).detach() for model in teachers]
    for weights, expected in (((), (0.5, 0.5)), ((3.0, 1.0), (0.75, 0.25))):
        steps = Steps(Distill(teacher=("baseline", "x/y"), teacher_weights=weights, hard_weight=0), folder, context)
        split, labelled = steps.rows()
        objective = steps.objective(student, teachers, prepared, [prepared, prepared], split, labelled)
        parts = objective(student, Batch(features, torch.from_numpy(split.labels.array[indices]), indices, 0, 9))
        mean = sum(weight * torch.softmax(one / 2, dim=1) for weight, one in zip(expected, z, strict=True))
        assert isinstance(mean, torch.Tensor)
        expected_b = soft_target(z[0], 2 * mean.log(), 2.0)
        torch.testing.assert_close(parts["soft_target"].detach(), expected_b, atol=1e-2, rtol=1e-2)
        assert float(expected_b.max()) > 0.1
        judged = steps.selection_context(teachers, [prepared, prepared]).data.selection.labels
        logits = [forward(model, Rows.prepare(context.data.selection.rows, prepared).batch(np.arange(20))).detach() for model in teachers]
        mean = sum(weight * torch.softmax(one, dim=1) for weight, one in zip(expected, logits, strict=True))
        assert isinstance(mean, torch.Tensor)
        assert judged.array.tolist() == mean.argmax(dim=1).tolist()


@pytest.mark.parametrize("loss", ["minilm", "mixkd", "relational", "distilbert"])
def test_losses_that_look_inside_take_one_teacher(loss: Any, make_context: Contexts, checkpoint: Any) -> None:
    config = load(checkpoint("bert", num_labels=2)).config
    with raises_problem("stages.distill.teacher", "2", "works with one", "give one teacher, or loss: soft_target"):
        Distill(teacher=("baseline", "input"), loss=loss).check(config, config, make_context())
    Distill(teacher=("baseline",), loss=loss).check(config, config, make_context())


@pytest.mark.parametrize("changes", [{"teacher": []}, {"teacher_weights": [1, 2]}, {"teacher": ["a", "b"], "teacher_weights": [1, 0]}])
def test_weights_go_with_teachers(changes: Any) -> None:
    with pytest.raises(ValidationError):
        Distill(**changes)


def test_the_recipe_knows_every_teacher(tmp_path: Path) -> None:
    from compress.recipe import check, read

    recipe = {"name": "x", "model": {"path": "a/b", "task": "text-classification"}, "data": {"path": "a/b"}}
    with raises_problem("stages.distill.teacher", "'bseline'", "baseline, input", "did you mean 'baseline'"):
        check({**recipe, "stages": [{"distill": {"teacher": ["input", "bseline"]}}]})
    (tmp_path / "teacher").mkdir()
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: x\nmodel: {path: a/b, task: text-classification}\ndata: {path: a/b}\n"
        "stages: [{distill: {teacher: [baseline, ./teacher], extra_text: {path: ./more.txt}}}]\n"
    )
    [stage] = read(file).stages
    assert stage.teacher == ("baseline", str(tmp_path / "teacher"))
    assert stage.extra_text.path == str(tmp_path / "more.txt")
