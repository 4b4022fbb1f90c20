"""Losses of pairs and triplets without scores: against loops, against the formulas of sentence-transformers, by their properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from torch import Tensor
from torch.nn import functional

from foundation.labels.text_groups import labels_of
from foundation.labels.vectors import Pairs
from foundation.training.losses.table import losses_of
from foundation.training.losses.text_groups import group_loss
from foundation.training.losses.vector import VectorLoss, compares_rows

LETTERS = strategies.sampled_from("abcdef")
GROUPS = {size: strategies.lists(strategies.tuples(*[LETTERS] * size), min_size=1, max_size=7) for size in (2, 3, 5)}
UNEQUAL = strategies.lists(strategies.lists(LETTERS, min_size=2, max_size=5).map(tuple), min_size=1, max_size=7)
ROWS = {**GROUPS, 0: UNEQUAL}
"""Pairs, triplets, groups of three negatives, and with the key 0 groups of none to three."""


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


def drawn(count: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32))


def naive(groups: list[tuple[str, ...]], vectors: list[list[list[float]]], loss: str) -> list[float]:
    """Returns the loss of each group by loops over anchors and candidates, with the rule of what is no negative in words."""
    candidates = [(text, vectors[p][part], p, part) for p, group in enumerate(groups) for part, text in enumerate(group) if part]
    losses = []
    for p, group in enumerate(groups):
        anchor, text, positive = vectors[p][0], group[0], group[1]
        answers = {other[1] for other in groups if other[0] == text}  # all that answers this text, in this batch
        negatives = [vector for name, vector, q, part in candidates if (q, part) != (p, 1) and name != text and name not in answers]
        own = vectors[p][1]
        assert positive in answers
        if loss == "ranking":
            others = sum(math.exp(20 * cosine(anchor, vector)) for vector in negatives)
            losses.append(-math.log(math.exp(20 * cosine(anchor, own)) / (math.exp(20 * cosine(anchor, own)) + others)))
        elif max(map(len, groups)) > 2:
            each = [max(0.0, math.dist(anchor, own) - math.dist(anchor, vectors[p][part]) + 5) for part in range(2, len(group))]
            losses.append(sum(each) / len(each) if each else 0.0)
        else:
            apart = [2 - 2 * cosine(anchor, vector) for vector in negatives]
            losses.append(max(0.0, 2 - 2 * cosine(anchor, own) - min(apart) + 0.2) if apart else 0.0)
    return losses


@pytest.mark.parametrize("loss", ["ranking", "triplet"])
@pytest.mark.parametrize("size", ROWS)
@given(data=strategies.data())
def test_the_losses_are_the_formulas_for_every_text(size: int, loss: str, data: strategies.DataObject) -> None:
    groups = data.draw(ROWS[size])
    size = max(map(len, groups))
    vectors, labels = drawn(size * len(groups), len(groups)), torch.from_numpy(labels_of(groups).array)
    order = data.draw(strategies.permutations(range(len(labels))))
    found = group_loss(vectors[order], labels[order], loss)
    expected = naive(groups, vectors.reshape(len(groups), size, -1).tolist(), loss)
    assert found.tolist() == pytest.approx([expected[row // size] for row in order], abs=2e-4)


@pytest.mark.parametrize("loss", ["ranking", "triplet"])
@given(groups=UNEQUAL, processes=strategies.integers(1, 4))
def test_shares_of_a_batch_have_the_losses_and_add_up_to_the_gradient_of_the_whole(
    loss: str, groups: list[tuple[str, ...]], processes: int
) -> None:
    labels, size = torch.from_numpy(labels_of(groups).array), max(map(len, groups))
    vectors = drawn(len(labels)).requires_grad_()
    whole = group_loss(vectors, labels, loss)
    gradient, found, total = torch.autograd.grad(whole.sum(), vectors)[0], torch.zeros(len(labels)), torch.zeros_like(vectors)
    for process in range(processes):
        own = (labels[:, 1] % processes) == process
        losses = group_loss(vectors, labels, loss, own)
        found[own] = losses[own].detach()
        total += torch.autograd.grad(losses[own].sum(), vectors)[0]
    assert size >= 2
    torch.testing.assert_close(found, whole.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


def test_a_filler_is_no_candidate() -> None:
    groups = [("a", "p", "n", "m"), ("b", "q", "o")]
    vectors, labels = drawn(8), torch.from_numpy(labels_of(groups).array)
    losses = group_loss(vectors, labels)
    moved = vectors.clone()
    moved[7] = moved[0]  # the filler lies where the first anchor is
    torch.testing.assert_close(group_loss(moved, labels), losses, rtol=0, atol=0)
    assert float(losses[7]) == float(losses[4]) > 0  # it has the loss of its group, so that the mean over texts is that over groups


def multiple_negatives_ranking(anchors: Tensor, *documents: Tensor) -> Tensor:
    """MultipleNegativesRankingLoss of sentence-transformers in one direction, as it computes it: the mean over anchors."""
    every = torch.cat(documents, dim=0)
    scores = functional.normalize(anchors, dim=1) @ functional.normalize(every, dim=1).T * 20.0
    return functional.cross_entropy(scores, torch.arange(len(anchors)))


def triplet(anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """TripletLoss of sentence-transformers with its default distance and margin: the mean over triplets."""
    near, far = (functional.pairwise_distance(anchor, other, p=2) for other in (positive, negative))
    return functional.relu(near - far + 5).mean()


@pytest.mark.parametrize("size", [2, 3, 6])
def test_where_no_text_occurs_twice_these_are_the_losses_of_sentence_transformers(size: int) -> None:
    groups = [tuple(f"{part}{number}" for part in range(size)) for number in range(9)]
    vectors, labels = drawn(9 * size).requires_grad_(), torch.from_numpy(labels_of(groups).array)
    parts = [vectors[part::size] for part in range(size)]
    torch.testing.assert_close(group_loss(vectors, labels, "ranking").mean(), multiple_negatives_ranking(*parts))
    if size == 3:
        ours = group_loss(6 * vectors, labels, "triplet").mean()  # some triplets are beyond the margin
        theirs = triplet(*(6 * vectors[part::3] for part in range(3)))
        torch.testing.assert_close(ours, theirs)
        for one, other in zip(torch.autograd.grad(ours, vectors), torch.autograd.grad(theirs, vectors), strict=True):
            torch.testing.assert_close(one, other)
        assert 0 < int((group_loss(6 * vectors, labels, "triplet") == 0).sum()) < 27


def test_a_positive_that_occurs_twice_is_no_negative() -> None:
    vectors = drawn(4)
    vectors[3] = vectors[1]
    twice, apart = (group_loss(vectors, torch.from_numpy(labels_of([("a", "p"), ("b", other)]).array)) for other in ("p", "q"))
    assert twice.tolist() == [0.0] * 4  # nothing else is in the batch
    assert float(apart[0]) == pytest.approx(math.log(2), abs=1e-5)  # taken for a negative it could not be told from the positive


def test_texts_of_a_group_that_is_not_whole_have_no_loss() -> None:
    vectors, labels = drawn(9).abs(), torch.from_numpy(labels_of([("a", "p", "n"), ("b", "q", "m"), ("c", "r", "o")]).array)
    for loss in ("ranking", "triplet"):
        found = group_loss(vectors[[0, 1, 2, 3, 5, 6, 7]], labels[[0, 1, 2, 3, 5, 6, 7]], loss)  # a positive and a negative are missing
        assert [float(value) == 0 for value in found[:5]] == [False, False, False, True, True]
        assert bool((found[5:] == 0).all()) == (loss == "triplet")
    assert group_loss(vectors[:1], labels[:1]).tolist() == [0.0]
    assert group_loss(vectors[:2], labels[:2], "triplet").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("loss", ["ranking", "triplet"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_finite_also_of_equal_vectors(size: int, loss: str) -> None:
    vectors = torch.ones(2 * size, 3, requires_grad=True)
    labels = torch.from_numpy(labels_of([("a", "p", "n")[:size], ("b", "p", "m")[:size]]).array)
    group_loss(vectors, labels, loss).sum().backward()
    assert vectors.grad is not None
    assert torch.isfinite(vectors.grad).all()


def test_the_usual_loss_is_that_of_the_rows() -> None:
    groups, pairs = labels_of([("a", "p"), ("b", "q")]), Pairs(np.float32([[0, 1]] * 2))
    ranking, cosine = (losses_of("sentence-embedding", labels=labels) for labels in (groups, pairs))
    assert (ranking.name, cosine.name) == ("ranking", "cosine")
    assert VectorLoss(groups, "triplet").name == "triplet"
    of_batch = torch.from_numpy(groups.array)
    torch.testing.assert_close(ranking.labelled(drawn(4), of_batch), group_loss(drawn(4), of_batch, "ranking"))
    assert cosine.labelled(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.from_numpy(pairs.array)).tolist() == [0, 0]


def test_only_losses_with_given_negatives_may_be_parted() -> None:
    pairs, triplets = labels_of([("a", "p"), ("b", "q")]), labels_of([("a", "p", "n"), ("b", "q", "n", "m")])
    assert [compares_rows(loss, pairs) for loss in ("cosine", "ranking", "triplet")] == [False, True, True]
    assert [compares_rows(loss, triplets) for loss in ("ranking", "triplet")] == [True, False]
