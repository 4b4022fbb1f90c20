from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foundation.training.losses.distillation.loss import Setting, Shape
from foundation.training.losses.distillation.minilm import MiniLMv2, relation_divergence, relation_heads, scaled_products


def naive(student: Tensor, teacher: Tensor, allowed: Tensor, length: int) -> float:
    """Mean over heads and real queries of KL(softmax(teacher) || softmax(student)) over the keys allowed; one row."""
    total = 0.0
    for head in range(student.shape[0]):
        for query in range(length):
            keys = [key for key in range(allowed.shape[-1]) if allowed[min(query, allowed.shape[0] - 1), key]]
            p, q = ([math.exp(float(scores[head, query, key])) for key in keys] for scores in (teacher, student))
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            total += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    return total / student.shape[0] / length


@pytest.mark.parametrize("causal", [False, True])
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_the_divergence_is_the_formula(causal: bool, rows: int, heads: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(rows, heads, length, length, generator=generator) for _ in range(2))
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    allowed = mask[:, None, None, :] & (
        torch.ones(length, length, dtype=torch.bool).tril() if causal else torch.ones(1, 1, dtype=torch.bool)
    )
    result = relation_divergence(student, teacher, allowed, mask)
    for row in range(rows):
        expected = naive(student[row], teacher[row], allowed[row, 0], int(lengths[row]))
        assert math.isclose(float(result[row]), expected, rel_tol=1e-3, abs_tol=1e-5)


def test_rows_of_padding_alone_stay_finite() -> None:
    """Queries that may see no key at all, as padding may not, give no NaN, neither in the value nor in the gradient."""
    student = torch.randn(1, 1, 3, 3, requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    allowed = torch.tensor([[[[True, False, False], [False] * 3, [False] * 3]]])
    loss = relation_divergence(student, torch.randn(1, 1, 3, 3), allowed, mask)
    loss.sum().backward()
    assert float(loss.detach()) == 0
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_heads_are_cut_anew() -> None:
    x = torch.arange(2 * 4 * 3 * 2.0).reshape(2, 4, 3, 2)  # 4 heads of 2 numbers, 3 tokens
    cut = relation_heads(x, 2)
    assert cut.shape == (2, 2, 3, 4)
    for token in range(3):
        joined = torch.cat([x[0, head, token] for head in range(4)])
        assert torch.equal(torch.cat([cut[0, head, token] for head in range(2)]), joined)
    assert torch.equal(relation_heads(x, 4), x)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 20))
def test_products_are_scaled_by_the_root_of_the_width(heads: int, length: int, width: int, seed: int) -> None:
    x = torch.randn(1, heads, length, width, generator=torch.Generator().manual_seed(seed))
    result = scaled_products(x)
    for head in range(heads):
        for i in range(length):
            for j in range(length):
                expected = sum(float(a) * float(b) for a, b in zip(x[0, head, i], x[0, head, j], strict=True)) / math.sqrt(width)
                assert math.isclose(float(result[0, head, i, j]), expected, rel_tol=1e-4, abs_tol=1e-5)


def parts(loss: Any, student: Any, teacher: Any, features: Any) -> dict[str, Tensor]:
    from foundation.training.distillation.capture import Capture
    from foundation.training.losses.distillation.loss import LossInputs

    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-classification", "key")
    ours, theirs = loss.wants(setting)
    inputs = LossInputs(setting, None, 1.0, Capture(student, "key")(features, ours), Capture(teacher, "key")(features, theirs), None)  # type: ignore[arg-type]
    return dict(loss.parts(inputs, None))


def test_minilm_compares_the_attention_of_the_eager_models(make_model: Any, make_features: Any) -> None:
    from foundation.training.losses.distillation.minilm import MiniLM

    teacher, student, features = make_model("bert"), make_model("bert", num_hidden_layers=2), make_features("bert")
    result = parts(MiniLM(), student, teacher, features)
    attentions, values = [], []
    for kind, model in (("teacher", teacher), ("student", student)):
        model.set_attn_implementation("eager")
        layer = model.bert.encoder.layer[3 if kind == "teacher" else 1].attention.self.value
        layer.register_forward_hook(lambda _, inputs, output: values.append(output.unflatten(2, (4, 4)).transpose(1, 2)))
        attentions.append(model(**features, output_attentions=True).attentions[-1])
    for row in range(3):
        length = int(features["attention_mask"][row].sum())
        p, q = (attention[row, :, :length, :length] for attention in attentions)
        torch.testing.assert_close(result["attention_relation"][row], (p * (p / q).log()).sum(-1).mean(), atol=1e-4, rtol=1e-3)
        p, q = ((v[row, :, :length] @ v[row, :, :length].mT / 2).double().softmax(-1) for v in values)
        expected = (p * (p / q).log()).sum(-1).mean().float()
        torch.testing.assert_close(result["value_relation"][row], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("teacher_layer", [None, 1, 3])
def test_minilmv2_takes_any_layer_of_the_teacher(teacher_layer: int | None, make_model: Any, make_features: Any) -> None:
    teacher, features = make_model("bert"), make_features("bert")
    student = make_model("bert", num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    outputs: dict[str, Tensor] = {}
    for side, model, layer in (("teacher", teacher, (teacher_layer or 4) - 1), ("student", student, 1)):
        for word in ("query", "key", "value"):
            linear = model.get_submodule(f"bert.encoder.layer.{layer}.attention.self.{word}")
            linear.register_forward_hook(lambda _, inputs, output, name=f"{side} {word}": outputs.update({name: output}))
    result = parts(MiniLMv2(relation_heads=4, teacher_layer=teacher_layer), student, teacher, features)
    assert set(result) == {"query_relation", "key_relation", "value_relation"}
    for word in ("query", "key", "value"):
        for row in range(3):
            length = int(features["attention_mask"][row].sum())
            total = torch.zeros(())
            for head in range(4):
                relations = []
                for side, width in (("teacher", 4), ("student", 2)):
                    x = outputs[f"{side} {word}"][row, :length, head * width : (head + 1) * width]
                    relations.append((x @ x.T / math.sqrt(width)).softmax(-1))
                total = total + (relations[0] * (relations[0] / relations[1]).log()).sum(-1).mean() / 4
            torch.testing.assert_close(result[f"{word}_relation"][row], total, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("student", "teacher", "expected"), [(384, 768, 48), (384, 384, 48), (8, 16, 8), (312, 768, 24), (7, 768, 1)])
def test_as_many_relation_heads_as_divide_both_widths(student: int, teacher: int, expected: int) -> None:
    setting = Setting(Shape("bert", 2, student, 1, 2), Shape("bert", 2, teacher, 1, 2), "text-classification", "key")
    assert MiniLMv2()._heads(setting) == expected


def test_heads_that_differ_from_stage_to_stage_are_compared_as_they_are() -> None:
    swin: Any = Shape("swin", 2, 16, [2, 4], 2)  # type: ignore[arg-type]
    assert Setting(swin, swin, "image-classification", "loss").same_heads
    assert not Setting(swin, Shape("vit", 2, 16, 4, 2), "image-classification", "loss").same_heads
