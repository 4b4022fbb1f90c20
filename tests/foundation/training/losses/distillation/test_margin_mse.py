"""Margin-MSE: against a loop over pairs, by what it leaves free, and where it is refused."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.loss import Setting, Shape
from foundation.training.losses.distillation.margin_mse import MarginMSE, margin_mse
from foundation.training.losses.distillation.mixkd import MixKD
from tests.problems import raises_problem

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
ONE = Shape(kind="bert", layers=1, hidden=8, heads=1, classes=1)


@given(SIZES, st.integers(0, 99), st.data())
def test_it_is_the_mean_over_pairs_of_a_query_in_any_order_of_rows(sizes: list[int], seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(sum(sizes), generator=generator) for _ in range(2))
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).float()
    expected: list[float] = []
    for number, size in enumerate(sizes):
        s, t = (scores[numbers == number].tolist() for scores in (student, teacher))
        apart = [((s[i] - s[j]) - (t[i] - t[j])) ** 2 for i, j in permutations(range(size), 2)]
        expected += [sum(apart) / len(apart) if apart else 0.0] * size
    order = data.draw(st.permutations(range(sum(sizes))))
    found = margin_mse(student[order], teacher[order], numbers[order])
    assert found.tolist() == pytest.approx([expected[row] for row in order], abs=1e-4)


def test_the_level_of_the_scores_is_free_and_their_distance_is_not() -> None:
    teacher, numbers = torch.tensor([3.0, -1.0, 0.5, 2.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    moved = teacher + torch.tensor([5.0, 5.0, 5.0, -2.0])
    assert margin_mse(moved, teacher, numbers).tolist() == pytest.approx([0.0] * 4, abs=1e-10)
    assert min(margin_mse(0.5 * teacher, teacher, numbers)[:3].tolist()) > 0.5


def test_a_single_candidate_has_a_gradient_of_zero() -> None:
    student = torch.tensor([2.0], requires_grad=True)
    margin_mse(student, torch.tensor([0.0]), torch.tensor([4.0])).sum().backward()
    assert student.grad is not None
    assert student.grad.tolist() == [0.0]


def test_it_is_for_candidates_and_negatives_and_mixtures_are_not() -> None:
    with raises_problem("distill.losses[0]", "margin_mse", "text-regression", "reranking", "give another"):
        MarginMSE().wants(Setting(ONE, ONE, "text-regression", "distill.losses[0]"))
    assert MarginMSE().wants(Setting(ONE, ONE, "reranking", "loss"))[0].logits
    with raises_problem("loss", "mixkd", "give soft_target or margin_mse"):
        MixKD().wants(Setting(ONE, ONE, "reranking", "loss"))
