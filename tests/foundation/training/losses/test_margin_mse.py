"""MarginMSE against loops and against the formula of sentence-transformers, and by its properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from torch import Tensor
from torch.nn import functional

from foundation.labels.text_groups import Groups, labels_of
from foundation.training.losses.margin_mse import margin_mse, margin_mse_of
from foundation.training.losses.table import losses_of
from foundation.training.losses.vector import VectorLoss, compares_rows

COUNTS = strategies.lists(strategies.integers(0, 4), min_size=1, max_size=6).filter(any)
"""How many negatives each group has."""


def drawn(count: int, width: int = 5, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32))


def of(counts: list[int], seed: int = 0) -> tuple[list[tuple[str, ...]], list[tuple[float, ...]], Tensor]:
    """Groups of other texts each, their margins, and labels."""
    groups = [tuple(f"{number}-{part}" for part in range(2 + count)) for number, count in enumerate(counts)]
    random = np.random.default_rng(seed)
    margins = [tuple(float(value) for value in random.normal(size=count).astype(np.float32)) for count in counts]
    return groups, margins, torch.from_numpy(labels_of(groups, margins).array)


def dot(one: Tensor, other: Tensor) -> float:
    return sum(a * b for a, b in zip(one.tolist(), other.tolist(), strict=True))


@given(counts=COUNTS, seed=strategies.integers(0, 9), data=strategies.data())
def test_it_is_the_formula_for_every_text(counts: list[int], seed: int, data: strategies.DataObject) -> None:
    groups, margins, labels = of(counts, seed)
    size = 2 + max(counts)
    vectors = drawn(size * len(groups), seed=seed)
    expected = []
    for number, own in enumerate(margins):
        rows = vectors[size * number : size * (number + 1)]
        each = [(dot(rows[0], rows[1]) - dot(rows[0], rows[2 + i]) - margin) ** 2 for i, margin in enumerate(own)]
        expected.append(sum(each) / len(each) if each else 0.0)
    order = data.draw(strategies.permutations(range(len(labels))))
    found = margin_mse(vectors[order], labels[order])
    assert found.tolist() == pytest.approx([expected[row // size] for row in order], rel=1e-4, abs=1e-5)


def test_it_is_the_loss_of_sentence_transformers() -> None:
    _, margins, labels = of([3] * 7)
    vectors = drawn(35).requires_grad_()
    anchor, positive, *negatives = (vectors[part::5] for part in range(5))
    scores = torch.stack([(anchor * positive).sum(dim=1) - (anchor * one).sum(dim=1) for one in negatives], dim=1)  # pairwise_dot_score
    theirs = functional.mse_loss(scores, torch.tensor(margins))
    ours = margin_mse(vectors, labels).mean()
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours, vectors), torch.autograd.grad(theirs, vectors), strict=True):
        torch.testing.assert_close(one, other)


@given(counts=COUNTS, width=strategies.integers(1, 8))
def test_a_teacher_gives_the_margins_of_its_own_vectors(counts: list[int], width: int) -> None:
    groups, _, plain = of(counts)
    size = 2 + max(counts)
    student, teacher = drawn(size * len(groups)), drawn(size * len(groups), width, 1)
    rows = [teacher[size * number : size * (number + 1)] for number in range(len(groups))]
    margins = [tuple(dot(own[0], own[1]) - dot(own[0], own[2 + i]) for i in range(count)) for own, count in zip(rows, counts, strict=True)]
    given_too = margin_mse(student, torch.from_numpy(labels_of(groups, margins).array))
    torch.testing.assert_close(margin_mse_of(student, teacher, plain[:, :4]), given_too, rtol=1e-4, atol=1e-4)


def test_a_student_with_the_margins_has_no_loss_wherever_its_vectors_point() -> None:
    _, _, labels = of([1, 2, 3])
    teacher = drawn(15)
    turned = teacher @ torch.linalg.qr(drawn(5, seed=3))[0]
    assert float(margin_mse_of(turned, teacher, labels).max()) < 1e-9
    assert float(margin_mse_of(2 * turned, teacher, labels).min()) > 1e-3  # the scale counts


def test_only_the_texts_of_a_group_move_with_its_loss() -> None:
    _, _, labels = of([2, 1])
    vectors = drawn(8).requires_grad_()
    margin_mse(vectors, labels)[0].backward()
    assert vectors.grad is not None
    assert [bool(row.any()) for row in vectors.grad] == [True] * 4 + [False] * 4
    margin_mse(vectors, labels)[4].backward()
    assert not vectors.grad[7].any()  # a filler


def test_it_is_the_usual_loss_of_rows_with_margins() -> None:
    _, _, labels = of([2, 1])
    groups, bare = Groups(labels.numpy()), Groups(labels.numpy()[:, :4])
    assert groups.margins is not None
    assert bare.margins is None
    losses = losses_of("sentence-triplets", labels=groups)
    assert (losses.name, losses_of("sentence-triplets", labels=bare).name) == ("margin_mse", "ranking")
    torch.testing.assert_close(losses.labelled(drawn(8), labels), margin_mse(drawn(8), labels))
    ranked = [VectorLoss(groups, "ranking").labelled(drawn(8), given_labels) for given_labels in (labels, labels[:, :4])]
    torch.testing.assert_close(*ranked)
    assert not compares_rows("margin_mse", groups)
