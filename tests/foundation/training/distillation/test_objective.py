"""What holds for every loss: padding, other rows and the split of a batch do not matter, and a student equal to its teacher has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distill.distill import Distill
from distill.student import take_layers
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from foundation.labels.tasks import Task
from foundation.models.folder import Checkpoint
from foundation.models.forward import freeze
from foundation.training.distillation.capture import Capture
from foundation.training.distillation.masking import Masking
from foundation.training.distillation.objective import Objective, check_covered
from foundation.training.distillation.schedules import Ramp, value_at
from foundation.training.distillation.teacher import Pair, Teacher
from foundation.training.losses.distillation.distilbert import cosine
from foundation.training.losses.distillation.hidden import Hidden
from foundation.training.losses.distillation.loss import Loss, Setting, Shape, is_causal
from foundation.training.losses.distillation.presets import PRESETS
from foundation.training.losses.distillation.relational import angle_loss, distance_loss
from foundation.training.losses.distillation.soft_target import SoftTarget
from foundation.training.losses.distillation.tinybert import TinyBert
from foundation.training.rows import Rows
from foundation.training.train import Batch
from tests.soft_target import soft_target

KINDS = ("bert", "roberta", "distilbert", "gpt2", "vit")
LIKE_BERT = ("roberta", "distilbert")
"""Kinds whose layers are looked into as those of bert are (test_capture does in every test run): with each loss, the slow tests do."""
Make = Callable[..., Any]


def objective_of(losses: Any, student: nn.Module, teacher: nn.Module, rows: Any = None, labels: Any = None, hard: Any = 0.0) -> Objective:
    task: Task = "text-regression" if student.config.num_labels == 1 else "text-classification"  # type: ignore[union-attr]
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), task, "stages.distill.loss")
    pair = Pair(Capture(student, "stages.distill"), (Teacher(Capture(freeze(teacher), "stages.distill"), rows, True),), rows, labels, 0)
    return Objective(losses, [setting] * len(losses), pair, 2.0, hard, 0, task)


def parts_of(objective: Objective, features: dict[str, Tensor], step: int = 0, num_steps: int = 4) -> dict[str, Tensor]:
    rows = len(next(iter(features.values())))
    batch = Batch(features, torch.arange(rows) % 3, np.arange(rows), step, num_steps)
    return dict(objective(objective.pair.student.model, batch))


def all_steps(objective: Objective, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts of both phases of the training."""
    return {**parts_of(objective, features, 0), **parts_of(objective, features, 3)}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_were_taken_over_are_like_those_of_the_teacher(kind: str, make_model: Make, make_features: Make) -> None:
    """The last layer of the student too, which the final norm of a decoder follows, as it does not in the teacher."""
    teacher = make_model(kind, num_labels=3)
    student = take_layers(teacher, [0, 1], "k")
    for loss in (Hidden(layers=(1, 2)), TinyBert(layers=(1, 2)), Hidden(layers="searched")):
        parts = parts_of(objective_of([loss], student, teacher), make_features(kind))
        assert all(float(value.detach().abs().max()) == 0 for value in parts.values()), parts


WITHOUT_ROWS = sorted(set(PRESETS) - {"mixkd", "projected", "margin_mse", "hard_target"})  # for vectors of different widths, for candidates
ROWWISE = [name for name in WITHOUT_ROWS if not any(loss.ACROSS_ROWS for loss in PRESETS[name].losses)]


def pairs_of(kinds: Sequence[str]) -> list[Any]:
    """Presets and kinds of models that go together: the first token of a decoder stands for nothing."""
    pairs = [(preset, kind) for preset in WITHOUT_ROWS for kind in kinds if (preset, kind) != ("pkd", "gpt2")]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * (pair[1] in LIKE_BERT)) for pair in pairs]


@pytest.mark.parametrize(("preset", "kind"), pairs_of(KINDS))
def test_a_student_that_equals_its_teacher_loses_nothing(preset: Any, kind: str, make_model: Make, make_features: Make) -> None:
    teacher = make_model(kind, num_labels=3)
    parts = all_steps(objective_of(PRESETS[preset].losses, make_model(kind, num_labels=3), teacher), make_features(kind))
    for name, value in parts.items():
        if name == "gatekeeper":  # a copy of the teacher can still become surer
            continue
        torch.testing.assert_close(value, torch.zeros(3), atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("preset", "kind"), pairs_of(["bert", "roberta", "distilbert", "gpt2"]))
def test_more_padding_changes_nothing(preset: Any, kind: str, make_model: Make, make_features: Make) -> None:
    teacher = make_model(kind, num_labels=3)
    student = take_layers(teacher, [0, 2], "k")
    with torch.no_grad():
        student.get_input_embeddings().weight.mul_(2)  # type: ignore[operator]  # or they would be those of the teacher
    objective = objective_of(PRESETS[preset].losses, student, teacher)
    some, more = (all_steps(objective, make_features(kind, rows=4, padding=padding)) for padding in (0, 7))
    assert some
    for name, value in some.items():
        assert float(value.detach().min()) > 1e-6, name
        torch.testing.assert_close(value, more[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", ROWWISE)
def test_a_row_has_its_value_in_any_batch(preset: Any, make_model: Make, make_features: Make) -> None:
    teacher = make_model("bert", num_labels=3)
    objective = objective_of(PRESETS[preset].losses, take_layers(teacher, [0, 2], "k"), teacher, hard=0.5)
    features = make_features("bert", rows=4)
    whole = all_steps(objective, features)
    for row in range(4):
        alone = {name: value[row : row + 1] for name, value in features.items()}
        batch = Batch(alone, torch.tensor([row % 3]), np.array([row]), 0, 4)
        for name, value in objective(objective.pair.student.model, batch).items():
            torch.testing.assert_close(value, whole[name][row : row + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("preset", WITHOUT_ROWS)
def test_the_student_gets_the_gradient_and_the_teacher_none(preset: Any, make_model: Make, make_features: Make) -> None:
    teacher = make_model("bert", num_labels=3)
    student = take_layers(teacher, [0, 2], "k")
    objective = objective_of(PRESETS[preset].losses, student, teacher)
    teacher.requires_grad_(True)  # or it had none in any case
    torch.stack(list(all_steps(objective, make_features("bert")).values())).sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    gradients = {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert float(gradients["bert.encoder.layer.0.output.dense.weight"].abs().sum()) > 0


@pytest.mark.parametrize("preset", ["distilbert", "minilmv2", "pkd", "tinybert", "relational"])
def test_a_narrower_student_is_brought_to_the_width_of_the_teacher(preset: Any, make_model: Make, make_features: Make) -> None:
    teacher, student = make_model("bert", num_labels=3), make_model("bert", num_labels=3, hidden_size=8, num_hidden_layers=2)
    objective = objective_of(PRESETS[preset].losses, student, teacher)
    shapes = [tuple(parameter.shape) for parameter in objective.parameters()]
    assert shapes == {"distilbert": [(16, 8)], "pkd": [(16, 8)], "tinybert": [(16, 8)] * 2}.get(preset, [])
    torch.stack(list(all_steps(objective, make_features("bert")).values())).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in objective.parameters())


def test_of_equal_widths_nothing_is_trained_along_and_the_teacher_is_no_part(make_model: Make) -> None:
    teacher = make_model("bert")
    objective = objective_of((TinyBert(), Hidden()), take_layers(teacher, [0, 1], "k"), teacher)
    assert list(objective.parameters()) == []
    assert objective.state_dict() == {}
    objective.train()
    assert not teacher.training


def test_new_projections_come_from_the_seed_and_touch_no_generator(make_model: Make) -> None:
    state = torch.get_rng_state()
    models = make_model("bert", hidden_size=8), make_model("bert")
    one, same = (objective_of((Hidden(),), *models).state_dict() for _ in range(2))
    assert torch.equal(one["built.0.weight"], same["built.0.weight"])
    assert torch.equal(state, torch.get_rng_state())


def test_weights_labels_and_equal_names_add_up(make_model: Make, make_features: Make) -> None:
    teacher = make_model("bert", num_labels=3)
    student, features = take_layers(teacher, [0], "k"), make_features("bert")
    single = parts_of(objective_of((SoftTarget(),), student, teacher), features)["soft_target"]
    several = (SoftTarget(weight=0.25), SoftTarget(weight=Ramp(start=1.0, end=4.0)), SoftTarget(weight=9.0, steps=(0.5, 1.0)))
    objective = objective_of(several, student, teacher, hard=Ramp(start=0.0, end=3.0))
    for step, (soft, hard) in enumerate([(1.25, 0.0), (2.25, 1.0), (12.25, 2.0), (13.25, 3.0)]):
        parts = parts_of(objective, features, step)
        torch.testing.assert_close(parts["soft_target"], soft * single)
        expected = hard * nn.functional.cross_entropy(student(**features).logits, torch.arange(3), reduction="none")
        torch.testing.assert_close(parts["hard_target"], expected)


def test_each_model_runs_once_a_step_and_only_where_it_is_needed(make_model: Make, make_features: Make) -> None:
    teacher = make_model("bert", num_labels=3)
    student, counts = take_layers(teacher, [0, 2], "k"), {"student": 0, "teacher": 0}
    for name, model in (("student", student), ("teacher", teacher)):
        model.register_forward_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
    losses = tuple(loss.model_copy(update={"steps": (0.0, 0.5)}) for loss in PRESETS["distilbert"].losses)
    objective = objective_of((*losses, TinyBert(steps=(0.0, 0.5))), student, teacher, hard=1.0)
    parts_of(objective, make_features("bert"), 0)
    assert counts == {"student": 1, "teacher": 1}
    assert set(parts_of(objective, make_features("bert"), 2)) == {"hard_target"}
    assert counts == {"student": 2, "teacher": 1}


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_last_state_is_compared_not_one_inside(kind: str, make_model: Make, make_features: Make) -> None:
    """With the weights of the presets, on what Transformers calls the last hidden state."""
    models = make_model(kind, num_labels=3, num_hidden_layers=2), make_model(kind, num_labels=3)
    features = make_features(kind, rows=4)
    ours, theirs = (model(**features, output_hidden_states=True).hidden_states[-1] for model in models)
    mask = features["attention_mask"].bool()
    parts = parts_of(objective_of(PRESETS["distilbert"].losses, *models), features)
    torch.testing.assert_close(parts["cosine"], cosine(ours, theirs, mask), atol=1e-4, rtol=1e-3)
    logits = [model(**features).logits for model in models]
    torch.testing.assert_close(parts["soft_target"], 5 * soft_target(*logits, 2.0), atol=1e-3, rtol=1e-3)
    parts = parts_of(objective_of(PRESETS["relational"].losses, *models), features)
    means = [torch.stack([row[kept].mean(0) for row, kept in zip(states, mask, strict=True)]) for states in (ours, theirs)]
    torch.testing.assert_close(parts["distance"], 25 * distance_loss(*means), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(parts["angle"], 50 * angle_loss(*means), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(parts["soft_target"], soft_target(*logits, 2.0), atol=1e-3, rtol=1e-3)


def test_presets_weigh_their_losses_as_published() -> None:
    weights = {name: ([(loss.name, loss.weight) for loss in preset.losses], preset.hard_weight) for name, preset in PRESETS.items()}
    assert weights == {
        "soft_target": ([("soft_target", 1.0)], 0.5),
        "distilbert": ([("soft_target", 5.0), ("cosine", 1.0)], 2.0),
        "minilm": ([("soft_target", 1.0), ("minilm", 1.0)], 0.0),
        "minilmv2": ([("soft_target", 1.0), ("minilmv2", 1.0)], 0.0),
        "pkd": ([("soft_target", 0.5), ("hidden", 1.0)], 0.5),
        "tinybert": ([("tinybert", 1.0), ("soft_target", 1.0)], 0.0),
        "mixkd": ([("soft_target", 1.0), ("mixkd", 1.0)], 1.0),
        "logit_standardization": ([("logit_standardization", 9.0)], 0.1),
        "relational": ([("soft_target", 1.0), ("relational", 1.0)], 0.5),
        "similarity": ([("similarity", 1.0)], 0.0),
        "projected": ([("projected", 1.0)], 0.0),
        "margin_mse": ([("margin_mse", 1.0)], 0.0),
        "gatekeeper": ([("soft_target", 0.5), ("gatekeeper", 1.0)], 0.0),
        "hard_target": ([], 1.0),
    }


def test_the_temperature_follows_its_ramp(make_model: Make, make_features: Make) -> None:
    models, features = (make_model("bert", num_labels=3, num_hidden_layers=2), make_model("bert", num_labels=3)), make_features("bert")
    objective = objective_of((SoftTarget(),), *models)
    objective.temperature = Ramp(start=4.0, end=1.0)
    logits = [model(**features).logits for model in models]
    for step, temperature in enumerate([4.0, 3.0, 2.0, 1.0]):
        expected = soft_target(*logits, temperature)
        torch.testing.assert_close(parts_of(objective, features, step)["soft_target"], expected, atol=1e-4, rtol=1e-4)


def test_both_models_see_the_masked_copies(make_model: Make, make_features: Make) -> None:
    """Losses of two models that differ, as on tokens that were hidden by hand; row 0 is no copy."""
    models, features = (make_model("bert", num_labels=3, num_hidden_layers=2), make_model("bert", num_labels=3)), make_features("bert")
    masking, losses = Masking(0.5, 4, (0, 1, 2, 3, 4), 3, 1), (SoftTarget(), Hidden())
    objective = objective_of(losses, *models)
    pair = objective.pair
    pair.masking = masking
    ids = features["input_ids"].clone()
    for row in (1, 2):
        drawn = np.random.default_rng([3, 2, row]).random(ids.shape[1])
        for token in range(ids.shape[1]):
            if drawn[token] < 0.5 and int(ids[row, token]) > 4:
                ids[row, token] = 4
    assert (ids != features["input_ids"]).any(dim=1).tolist() == [False, True, True]
    masked = parts_of(objective, features, 2)
    expected = parts_of(objective_of(losses, *models), {**features, "input_ids": ids}, 2)
    for name, value in expected.items():
        torch.testing.assert_close(masked[name], value)
    for name, value in parts_of(objective_of(losses, *models), features, 2).items():
        assert (masked[name] != value).tolist() == [False, True, True], name


class TestMixtures:
    """MixKD takes rows of its own, so it needs real ones."""

    @pytest.fixture
    def objective(self, checkpoint: Make, make_model: Make) -> Objective:
        folder = checkpoint("bert", num_labels=2)
        prepared = Checkpoint(folder).preprocessor("text-classification", 16, Target(sequence_lengths=(8,)))
        rows = Rows.prepare(["great movie", "the film was not good", "bad", "very very fine film", "love", "hate it"], prepared)
        teacher = make_model("bert", num_labels=2)
        return objective_of(
            PRESETS["mixkd"].losses, take_layers(teacher, [0, 2], "k"), teacher, rows, ClassIds(np.array([1, 0, 0, 1, 1, 0])), 1.0
        )

    def batch(self, objective: Objective, indices: list[int]) -> Batch:
        rows = np.array(indices)
        return Batch(objective.pair.rows.batch(rows), torch.from_numpy(objective.pair.labels.array[rows]), rows, 1, 4)

    def test_a_row_has_its_value_in_any_batch(self, objective: Objective) -> None:
        model = objective.pair.student.model
        whole = objective(model, self.batch(objective, [4, 0, 3, 1]))
        assert set(whole) == {"soft_target", "mixed_labels", "mixed_answers", "hard_target"}
        for position, row in enumerate([4, 0, 3, 1]):
            for name, value in objective(model, self.batch(objective, [row])).items():
                torch.testing.assert_close(value, whole[name][position : position + 1], atol=1e-4, rtol=1e-4)

    def test_the_student_gets_the_gradient_and_the_teacher_none(self, objective: Objective) -> None:
        model = objective.pair.student.model
        objective.pair.teacher.capture.model.requires_grad_(True)  # or it had none in any case
        parts = objective(model, self.batch(objective, [0, 1, 2]))
        (parts["mixed_labels"] + parts["mixed_answers"]).sum().backward()
        assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0  # type: ignore[union-attr,operator]
        assert all(parameter.grad is None for parameter in objective.pair.teacher.capture.model.parameters())


@pytest.mark.parametrize(
    ("spans", "hard", "reached"),
    [
        ([(0.0, 1.0)], 0.0, None),
        ([(0.5, 1.0), (0.0, 0.5)], 0.0, None),
        ([(0.0, 0.9), (0.2, 0.4), (0.3, 1.0)], 0.0, None),
        ([(0.2, 0.4)], 0.1, None),
        ([(0.2, 1.0)], 0.0, "0 of"),
        ([(0.0, 0.4), (0.5, 1.0)], 0.0, "0.4 of"),
        ([(0.0, 0.4)], 0.0, "0.4 of"),
    ],
)
def test_steps_without_a_loss_are_found(spans: Any, hard: float, reached: str | None) -> None:
    losses: list[Loss] = [SoftTarget(steps=span) for span in spans]
    if reached is None:
        check_covered(losses, hard, "stages.distill.losses")
        return
    with pytest.raises(InputError, match=f"no loss is active from {reached} the steps on"):
        check_covered(losses, hard, "stages.distill.losses")


@given(st.lists(st.floats(0.01, 0.99), max_size=4), st.integers(1, 50))
def test_every_step_of_a_divided_training_has_one_loss(cuts: list[float], num_steps: int) -> None:
    edges = sorted({0.0, 1.0, *cuts})
    losses = [SoftTarget(steps=span) for span in pairwise(edges)]
    for step in range(num_steps):
        assert sum(loss.counts(step, num_steps) for loss in losses) == 1


def test_a_ramp_is_a_straight_line() -> None:
    ramp = Ramp(start=4.0, end=1.0)
    assert [value_at(ramp, step, 4) for step in range(4)] == [4.0, 3.0, 2.0, 1.0]
    assert value_at(ramp, 0, 1) == 4.0
    assert value_at(2.5, 7, 9) == 2.5


DECODER = {"model_type": "gpt2", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ("minilm", {"num_attention_heads": 2}, "minilm given; the student has 2 heads, the teacher 4: give minilmv2"),
        ("tinybert", {"num_attention_heads": 2}, "tinybert given; the student has 2 heads, the teacher 4"),
        ("logit_standardization", {"num_labels": 2}, "it needs at least 3 classes, the model has 2: give soft_target"),
        ("pkd", {"num_hidden_layers": 1}, "skip given; it leaves the last layer out, and the student has only one"),
        ([{"name": "hidden", "layers": [2, 5]}], {}, r"losses\[0\].layers: \[2, 5\] given; give at most 4 layers, each from 1 to 4"),
        ([{"name": "minilmv2", "teacher_layer": 5}], {}, r"losses\[0\].teacher_layer: 5 given; the teacher has 4 layers"),
        ([{"name": "minilmv2", "relation_heads": 3}], {}, r"relation_heads: 3 given; a divisor of both widths is allowed \(student 16"),
        (
            [{"name": "hidden", "tokens": "first"}],
            DECODER,
            r"losses\[0\]: hidden of the first token given",
        ),
        (
            [{"name": "relational", "tokens": "first"}],
            DECODER,
            r"losses\[0\]: relational of the first token given",
        ),
        (
            "pkd",
            DECODER,
            r"loss: hidden of .* given; the student is a gpt2, whose first token attends only to itself: give",
        ),
        (
            [{"name": "relational"}],
            {"micro": 4},
            r"losses\[0\]: relational compares the rows of a batch; remove micro_batch_size \(4 given\)",
        ),
    ],
)
def test_losses_that_do_not_fit_are_found_without_weights(
    loss: Any, changes: Any, message: str, make_model: Make, make_context: Make
) -> None:
    micro = changes.pop("micro", None) if "micro" in changes else None
    given = {"losses": loss} if isinstance(loss, list) else {"loss": loss}
    stage = Distill(**given, student={"config": {k: v for k, v in changes.items() if k != "num_labels"}}, micro_batch_size=micro)
    labels = changes.get("num_labels", 3)
    config = make_model("bert", num_labels=labels).config
    with pytest.raises(InputError, match=message):
        stage.check(config, config, make_context())


def test_decoders_are_told_by_their_configs(make_model: Make) -> None:
    import transformers

    causal = {kind for kind in KINDS if Shape.of(make_model(kind).config).causal}
    assert causal == {"gpt2"}
    assert is_causal(transformers.LlamaConfig())
    assert is_causal(transformers.BertConfig(is_decoder=True))
    assert not is_causal(transformers.ModernBertConfig())
