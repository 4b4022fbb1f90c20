"""Distilling a causal language model: token by token, from layers of its own, into a checkpoint of stock shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from distill.distill import Distill
from distill.student import take_layers
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.checkpoint import load
from foundation.models.forward import forward, freeze
from foundation.stage.context import Context
from foundation.training.distillation.capture import Capture
from foundation.training.distillation.objective import Objective
from foundation.training.distillation.teacher import Pair, Teacher
from foundation.training.losses.distillation.loss import Setting, Shape
from foundation.training.losses.distillation.soft_target import SoftTarget
from foundation.training.rows import Rows
from foundation.training.train import Batch
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    data = tiny_gpt.data()
    few = replace(data, train=data.train.take(range(64)), selection=data.selection.take(range(16)))
    teacher = Artifact(tiny_gpt.checkpoint(), {"id": "baseline", "digest": "teacher", "stage": "model"})
    shared = {"checkpoints": {"baseline": teacher}, "teachers": (teacher,)}
    return Context("text-generation", few, tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch", **shared)


def test_soft_and_hard_targets_are_means_over_tokens(context: Context) -> None:
    teacher = load(tiny_gpt.checkpoint())
    student = take_layers(teacher, [0], "stages.distill.student")
    rows = Rows.prepare(context.data.train.rows[:3], tiny_gpt.prepared())
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-generation", "stages.distill.loss")
    labels = context.data.train.labels[:3]
    pair = Pair(Capture(student, "x"), (Teacher(Capture(freeze(teacher), "x"), rows, True),), rows, labels, 0)
    features = rows.batch(np.arange(3))
    objective = Objective([SoftTarget()], [setting], pair, 2.0, 0.5, 0, "text-generation")
    parts = objective(student, Batch(features, torch.from_numpy(labels.array), np.arange(3), 0, 1))
    ours, theirs = (forward(model, features)[:, :-1].detach().double() for model in (student, teacher))
    p, q = (torch.softmax(logits / 2, dim=-1) for logits in (theirs, ours))
    expected = 4 * (p * (p.log() - q.log())).sum(-1).mean(1)
    torch.testing.assert_close(parts["soft_target"].detach().double(), expected, rtol=1e-4, atol=1e-6)
    hard = [0.5 * functional.cross_entropy(ours[row], features["input_ids"][row, 1:]) for row in range(3)]
    torch.testing.assert_close(parts["hard_target"].detach().double(), torch.stack(hard), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["soft_target", "minilm", "tinybert", "distilbert"])
def test_a_student_of_fewer_layers_is_a_stock_checkpoint(loss: Any, context: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    stage = Distill(student={"layers": 1}, loss=loss, epochs=1, batch_size=16)  # type: ignore[arg-type]
    stage.check(AutoConfig.from_pretrained(tiny_gpt.checkpoint()), AutoConfig.from_pretrained(tiny_gpt.checkpoint()), context)
    figures = stage.run(Artifact(tiny_gpt.checkpoint(), {}), context, tmp_path / "out")
    assert figures["teacher_logits"] == "live"  # [n, L, V] are never kept
    assert figures["selection"]["metric"] == "perplexity"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(10)[None]
    assert stock.config.n_layer == 1
    with torch.inference_mode():
        torch.testing.assert_close(stock(input_ids=ids).logits, forward(load(tmp_path / "out"), {"input_ids": ids}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss": "mixkd"}, "stages.distill.loss: mixkd given; mixkd needs one prediction per row, text-generation has many"),
        ({"losses": [{"name": "relational"}]}, "stages.distill.losses: relational given; relational needs one prediction per row"),
        ({"student": {"path": "owner/name"}}, "stages.distill.student.path: owner/name given; text-generation keeps the tokens"),
    ],
)
def test_what_compares_one_answer_a_row_is_refused(settings: dict[str, Any], match: str, context: Context) -> None:
    config = AutoConfig.from_pretrained(tiny_gpt.checkpoint())
    with pytest.raises(InputError, match=match) as caught:
        Distill(**settings).check(config, config, context)
    assert len(caught.value.lines) == 1
