from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.hidden import distance


@pytest.mark.parametrize("normalize", [False, True])
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_it_is_the_formula(normalize: bool, rows: int, length: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, length, width, generator=generator) for _ in range(2))
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    student[~mask] = torch.nan  # whatever padding holds
    result = distance(student, teacher, mask, normalize)
    for row in range(rows):
        total = 0.0
        for token in range(int(lengths[row])):
            s, t = student[row, token].tolist(), teacher[row, token].tolist()
            if normalize:
                s, t = [x / math.hypot(*s) for x in s], [x / math.hypot(*t) for x in t]
            squares = sum((x - y) ** 2 for x, y in zip(s, t, strict=True))
            total += squares if normalize else squares / width
        assert math.isclose(float(result[row]), total / int(lengths[row]), rel_tol=1e-4, abs_tol=1e-6)


def test_unit_vectors_are_at_most_2_apart() -> None:
    teacher, mask = torch.randn(3, 4, 8), torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(distance(-3 * teacher, teacher, mask, normalize=True), torch.full((3,), 4.0))
    torch.testing.assert_close(distance(3 * teacher, teacher, mask, normalize=True), torch.zeros(3), atol=1e-6, rtol=0)


def test_layers_are_paired_and_added_up(make_model: object, make_features: object) -> None:
    from foundation.training.distillation.capture import Capture, Captured, Wanted
    from foundation.training.losses.distillation.hidden import Hidden
    from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape

    model, features = make_model("bert"), make_features("bert")  # type: ignore[operator]
    setting = Setting(Shape("bert", 2, 16, 4, 2), Shape("bert", 4, 16, 4, 2), "text-classification", "key")
    teacher = Capture(model, "key")(features, Wanted(hidden=True))
    student = Captured(teacher.logits, teacher.mask, tuple(2 * state for state in teacher.hidden[:3]))
    assert teacher.mask is not None
    inputs = LossInputs(setting, None, 1.0, student, teacher, None)  # type: ignore[arg-type]
    for loss, theirs in ((Hidden(), (2, 4)), (Hidden(layers=(4, 1)), (4, 1)), (Hidden(layers="last"), (3,))):
        expected = sum(distance(student.hidden[m + 1], teacher.hidden[layer], teacher.mask) for m, layer in enumerate(theirs))
        torch.testing.assert_close(loss.parts(inputs, torch.nn.Identity())["hidden"], expected)
    first = Hidden(layers=(4,), tokens="first", normalize=True).parts(inputs, torch.nn.Identity())["hidden"]
    one = torch.ones(3, 1, dtype=torch.bool)
    torch.testing.assert_close(first, distance(student.hidden[1][:, :1], teacher.hidden[4][:, :1], one, normalize=True))


def test_every_row_finds_its_own_layers(make_model: object, make_features: object) -> None:
    from foundation.training.distillation.capture import Capture, Captured, Wanted
    from foundation.training.losses.distillation.hidden import Hidden
    from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape

    model, features = make_model("bert"), make_features("bert")  # type: ignore[operator]
    setting = Setting(Shape("bert", 2, 16, 4, 2), Shape("bert", 4, 16, 4, 2), "text-classification", "key")
    teacher = Capture(model, "key")(features, Wanted(hidden=True))
    rows = torch.arange(len(teacher.logits))
    hidden = [torch.stack([teacher.hidden[layers[int(row) % 2]][row] for row in rows]) for layers in ((1, 2), (4, 3))]
    student = Captured(teacher.logits, teacher.mask, (teacher.hidden[0], *(state.requires_grad_() for state in hidden)))
    inputs = LossInputs(setting, None, 1.0, student, teacher, None)  # type: ignore[arg-type]
    loss = Hidden(layers="searched").parts(inputs, torch.nn.Identity())["hidden"]
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    fixed = Hidden(layers=(1, 4)).parts(inputs, torch.nn.Identity())["hidden"]
    assert (fixed > 0).tolist() == [int(row) % 2 == 1 for row in rows]
    moved = Captured(teacher.logits, teacher.mask, (teacher.hidden[0], hidden[0] + 0.1, hidden[1]))
    total = Hidden(layers="searched").parts(LossInputs(setting, None, 1.0, moved, teacher, None), torch.nn.Identity())["hidden"].sum()  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(total, hidden[0])
    assert slope.abs().sum() > 0


def test_what_padding_holds_reaches_no_gradient() -> None:
    """Not even as 0 times NaN."""
    from foundation.training.losses.distillation.distilbert import cosine
    from foundation.training.losses.distillation.minilm import relation_divergence
    from foundation.training.losses.distillation.tinybert import score_distance

    mask = torch.tensor([[True, True, False], [True, False, False]])
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    student[~mask], teacher[~mask] = torch.nan, torch.inf
    for loss in (distance, lambda *given: distance(*given, normalize=True), cosine):
        given_bLD = student.clone().requires_grad_()
        loss(given_bLD, teacher, mask).sum().backward()
        assert given_bLD.grad is not None
        assert given_bLD.grad.isfinite().all()
        assert ((given_bLD.grad != 0).any(dim=2) == mask).all()
    both = (mask[:, :, None] & mask[:, None, :])[:, None]
    student, teacher = torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)
    student[~both.expand_as(student)], teacher[~both.expand_as(student)] = torch.nan, torch.nan
    for scores in (lambda *given: score_distance(*given, both), lambda *given: relation_divergence(*given, mask[:, None, None, :], mask)):
        given_bhLL = student.clone().requires_grad_()
        scores(given_bhLL, teacher).sum().backward()
        assert given_bhLL.grad is not None
        assert given_bhLL.grad.isfinite().all()
        assert (given_bhLL.grad[~both.expand_as(student)] == 0).all()
