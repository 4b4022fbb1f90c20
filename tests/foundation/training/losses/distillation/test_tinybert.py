from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.models.architecture.blocks import blocks_of
from foundation.training.distillation.capture import Capture
from foundation.training.losses.distillation.hidden import distance
from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape
from foundation.training.losses.distillation.tinybert import TinyBert, score_distance


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_the_distance_of_scores_is_the_formula(rows: int, heads: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(rows, heads, length, length, generator=generator) for _ in range(2))
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    allowed = (mask[:, :, None] & mask[:, None, :])[:, None]
    student[~allowed.expand_as(student)] = torch.nan  # whatever padding holds
    result = score_distance(student, teacher, allowed)
    for row in range(rows):
        tokens, total = int(lengths[row]), 0.0
        for head in range(heads):
            for i in range(tokens):
                for j in range(tokens):
                    total += (float(student[row, head, i, j]) - float(teacher[row, head, i, j])) ** 2
        assert math.isclose(float(result[row]), total / heads / tokens**2, rel_tol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_it_compares_embeddings_and_hidden_states_of_the_pairs(kind: str, make_model: Any, make_features: Any) -> None:
    teacher, student, features = make_model(kind), make_model(kind, num_hidden_layers=2), make_features(kind)
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-classification", "key")
    loss = TinyBert()
    trained = loss.build(setting)
    captured = [Capture(model, "key")(features, wanted) for model, wanted in zip((student, teacher), loss.wants(setting), strict=True)]
    result = loss.parts(LossInputs(setting, None, 1.0, *captured, None), trained)  # type: ignore[arg-type]
    states: list[list[Any]] = []
    for model in (student, teacher):
        before = [model(**features, output_hidden_states=True).hidden_states[0]]
        states.append(before)
        for block in blocks_of(model, "key").values():
            block.register_forward_hook(
                lambda _, inputs, output, found=before: found.append(output[0] if isinstance(output, tuple) else output)
            )
        model(**features)
    ours, theirs = states
    mask = captured[0].mask
    assert mask is not None
    torch.testing.assert_close(result["embedding"], distance(ours[0], theirs[0], mask), atol=1e-4, rtol=1e-3)
    hidden = sum(distance(ours[m], theirs[2 * m], mask) for m in (1, 2))
    torch.testing.assert_close(result["hidden"], hidden, atol=1e-3, rtol=1e-3)


def test_scores_are_those_before_the_softmax(make_model: Any, make_features: Any) -> None:
    teacher, student, features = make_model("bert"), make_model("bert", num_hidden_layers=1), make_features("bert")
    outputs: list[Any] = []
    for model, layer in ((student, 0), (teacher, 3)):
        attention = model.bert.encoder.layer[layer].attention.self
        for linear in (attention.query, attention.key):
            linear.register_forward_hook(lambda _, inputs, output: outputs.append(output.unflatten(2, (4, 4)).transpose(1, 2)))
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-classification", "key")
    loss = TinyBert()
    captured = [Capture(model, "key")(features, wanted) for model, wanted in zip((student, teacher), loss.wants(setting), strict=True)]
    result = loss.parts(LossInputs(setting, None, 1.0, *captured, None), loss.build(setting))["attention"]  # type: ignore[arg-type]
    for row in range(3):
        length = int(features["attention_mask"][row].sum())
        ours, theirs = (q[row, :, :length] @ k[row, :, :length].mT / 2 for q, k in (outputs[:2], outputs[2:]))
        torch.testing.assert_close(result[row], (ours - theirs).square().mean(), atol=1e-4, rtol=1e-4)
