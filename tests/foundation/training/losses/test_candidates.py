"""Losses of candidates: against loops over the formulas, and by their properties; their gradients however batches are divided."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from foundation.labels import candidates
from foundation.training.choices import OrderLoss
from foundation.training.losses.candidates import OVER_LISTS, USUAL, CandidateLoss
from foundation.training.losses.lambdarank import lambdarank, places
from foundation.training.losses.listwise import listwise
from foundation.training.losses.ranknet import ranknet
from foundation.training.losses.table import loss_names, losses_of

Lists = list[list[tuple[float, int]]]
"""Score and grade of each candidate, by query."""
SCORES = st.sampled_from([-3.0, -0.5, 0.0, 0.0, 0.25, 1.0, 4.0])  # equal ones are frequent
LISTS = st.lists(st.lists(st.tuples(SCORES, st.integers(0, 3)), min_size=1, max_size=6), min_size=1, max_size=4)
NAMES: list[OrderLoss] = ["listwise", "ranknet", "lambdarank"]


def naive_listwise(one: list[tuple[float, int]]) -> float:
    total, every = sum(grade for _, grade in one), sum(math.exp(score) for score, _ in one)
    return -sum(grade / total * math.log(math.exp(score) / every) for score, grade in one) if total else 0.0


def naive_ranknet(one: list[tuple[float, int]]) -> float:
    found = [math.log1p(math.exp(low - high)) for high, better in one for low, worse in one if better > worse]
    return sum(found) / len(found) if found else 0.0


def dcg(grades: list[int]) -> float:
    return sum(grade / math.log2(2 + place) for place, grade in enumerate(grades))


def naive_lambdarank(one: list[tuple[float, int]]) -> float:
    """Swaps every two candidates and computes NDCG anew."""
    order = sorted(range(len(one)), key=lambda row: (-one[row][0], one[row][1], row))
    grades = [one[row][1] for row in order]
    ideal, loss = dcg(sorted(grades, reverse=True)), 0.0
    for i in range(len(order)):
        for j in range(len(order)):
            if grades[i] > grades[j]:
                swapped = list(grades)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                loss += abs(dcg(grades) - dcg(swapped)) / ideal * math.log1p(math.exp(one[order[j]][0] - one[order[i]][0]))
    return loss


NAIVE: dict[OrderLoss, Callable[[list[tuple[float, int]]], float]] = {
    "listwise": naive_listwise,
    "ranknet": naive_ranknet,
    "lambdarank": naive_lambdarank,
}


def tensors(lists: Lists) -> tuple[Tensor, Tensor, Tensor]:
    rows = [(score, grade, 7 * number) for number, one in enumerate(lists) for score, grade in one]
    scores, grades, numbers = zip(*rows, strict=True)
    return torch.tensor(scores), torch.tensor(grades, dtype=torch.float32), torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
@given(lists=LISTS, data=st.data())
def test_each_candidate_has_the_loss_of_its_query_in_any_order_of_rows(name: OrderLoss, lists: Lists, data: st.DataObject) -> None:
    scores, grades, numbers = tensors(lists)
    order = data.draw(st.permutations(range(len(scores))))
    found = OVER_LISTS[name](scores[order], grades[order], numbers[order])
    expected = [NAIVE[name](one) for one in lists for _ in one]
    assert found.tolist() == pytest.approx([expected[row] for row in order], abs=2e-5)


@pytest.mark.parametrize("name", NAMES)
@given(lists=LISTS, shifts=st.lists(st.sampled_from([-8.0, 0.0, 2.0, 16.0]), min_size=4, max_size=4))
def test_only_differences_within_a_query_count(name: OrderLoss, lists: Lists, shifts: list[float]) -> None:
    scores, grades, numbers = tensors(lists)
    moved = scores + torch.tensor(shifts)[(numbers / 7).long()]
    torch.testing.assert_close(OVER_LISTS[name](moved, grades, numbers), OVER_LISTS[name](scores, grades, numbers), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(lists=LISTS)
def test_queries_do_not_touch_each_other_and_gradients_sum_to_zero(name: OrderLoss, lists: Lists) -> None:
    scores, grades, numbers = tensors(lists)
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(OVER_LISTS[name](scores, grades, numbers).sum(), scores)
    assert bool(torch.isfinite(gradient).all())
    start = 0
    for one in lists:
        own = gradient[start : start + len(one)]
        alone = tensors([one])
        alone[0].requires_grad_()
        (expected,) = torch.autograd.grad(OVER_LISTS[name](*alone).sum(), alone[0])
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
        assert float(own.sum()) == pytest.approx(0, abs=1e-4)
        if len({grade for _, grade in one}) == 1 and name != "listwise":
            assert own.tolist() == [0.0] * len(one)
        start += len(one)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_learned_where_there_is_nothing_to_tell(name: OrderLoss) -> None:
    for one in ([(1.5, 2)], [(1.5, 0)], [(0.5, 0), (-1.0, 0)]):  # one candidate, and nothing that is relevant
        scores, grades, numbers = tensors([one])
        scores.requires_grad_()
        loss = OVER_LISTS[name](scores, grades, numbers)
        loss.sum().backward()
        assert loss.tolist() == [0.0] * len(one)
        assert scores.grad is not None
        assert scores.grad.tolist() == [0.0] * len(one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grades", [[0, 1], [0, 0, 2, 0], [3, 0, 1, 0, 2], [1, 1, 0]])
def test_following_the_gradient_orders_by_grade(name: OrderLoss, grades: list[int]) -> None:
    scores, given_b, numbers = (
        torch.zeros(len(grades), requires_grad=True),
        torch.tensor(grades, dtype=torch.float32),
        torch.zeros(len(grades)),
    )
    for _ in range(100):
        (gradient,) = torch.autograd.grad(OVER_LISTS[name](scores, given_b, numbers).sum(), scores)
        scores = (scores - 0.5 * gradient).detach().requires_grad_()
    found = scores.tolist()
    assert all(found[i] > found[j] for i in range(len(grades)) for j in range(len(grades)) if grades[i] > grades[j])


@given(st.integers(2, 8), st.integers(0, 99))
def test_listwise_of_one_relevant_candidate_is_the_cross_entropy_of_its_place(size: int, seed: int) -> None:
    scores, right = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, size - 1, size // 2])
    grades = 2.0 * functional.one_hot(right, size)
    found = listwise(scores.reshape(-1), grades.reshape(-1), torch.arange(3).repeat_interleave(size).float())
    torch.testing.assert_close(found.reshape(3, size)[:, 0], functional.cross_entropy(scores, right, reduction="none"))


@given(LISTS)
def test_the_place_of_a_candidate_is_that_of_the_report_but_for_ties(lists: Lists) -> None:
    scores, grades, numbers = tensors(lists)
    labels = candidates.labels_of((numbers / 7).int().tolist(), grades.int().tolist(), [[grade for _, grade in one] for one in lists])
    untied = scores - 1e-3 * grades - 1e-5 * torch.arange(len(scores))
    order = torch.cat([torch.from_numpy(query.rows) for query in labels.ordered(untied[:, None].numpy())])
    expected = torch.cat([torch.arange(1, len(one) + 1) for one in lists]).float()
    assert places(scores, grades, numbers)[order].tolist() == expected.tolist()


def test_a_change_at_the_top_weighs_more() -> None:
    grades, numbers = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), torch.zeros(5)
    gradients = []
    for function in (ranknet, lambdarank):
        scores = torch.tensor([0.0, 0.4, 0.3, 0.2, 0.1], requires_grad=True)
        gradients.append(torch.autograd.grad(function(scores, grades, numbers).sum(), scores)[0])
    shares = [gradient[1] / gradient[4] for gradient in gradients]  # the first of all wrong ones beside the last
    assert float(shares[0]) < 1.2
    assert float(shares[1]) > 4


def labels_of(lists: Lists) -> Tensor:
    numbers = [number for number, one in enumerate(lists) for _ in one]
    grades = [grade for one in lists for _, grade in one]
    return torch.from_numpy(candidates.labels_of(numbers, grades, [[*(grade for _, grade in one), 3] for one in lists]).array)


@given(LISTS)
def test_pointwise_is_the_cross_entropy_of_the_share_of_the_largest_grade(lists: Lists) -> None:
    labels, scores = labels_of(lists), tensors(lists)[0]
    found = CandidateLoss("pointwise").labelled(scores[:, None], labels)
    sigmoid = [1 / (1 + math.exp(-score)) for score in scores.tolist()]
    shares = [grade / 3 for one in lists for _, grade in one]
    expected = [-share * math.log(p) - (1 - share) * math.log(1 - p) for p, share in zip(sigmoid, shares, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    labels[:, 2:] = 0  # nothing is relevant
    assert CandidateLoss("pointwise").labelled(scores[:, None], labels).tolist() == pytest.approx(
        [-math.log(1 - p) for p in sigmoid], abs=1e-5
    )


@given(LISTS)
def test_losses_by_name_read_scores_grades_and_queries_of_the_labels(lists: Lists) -> None:
    labels, (scores, grades, numbers) = labels_of(lists), tensors(lists)
    for name in NAMES:
        found = losses_of("reranking", name).labelled(scores[:, None], labels)
        torch.testing.assert_close(found, OVER_LISTS[name](scores, grades, numbers))


def test_the_losses_that_a_task_chooses_from() -> None:
    assert losses_of("reranking").name == USUAL
    assert loss_names("reranking") == ("listwise", "ranknet", "lambdarank", "pointwise")
    assert loss_names("retrieval") == ("cosine", "ranking", "triplet", "margin_mse")
    assert loss_names("text-regression") == loss_names("image-text") == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_better_order_is_a_lower_loss(name: OrderLoss) -> None:
    """Scores that tell what is relevant from what is not: the surer, the lower the loss, the better the NDCG."""
    draw = np.random.default_rng(0)
    grades = np.concatenate([draw.permutation([3, 1, *[0] * 6]) for _ in range(40)])
    labels = candidates.labels_of(np.repeat(range(40), 8).tolist(), grades.tolist(), [[3, 1]] * 40)
    noise, found, orders = draw.normal(size=320), [], []
    for strength in (-1.0, 0.0, 0.5, 1.0, 2.0):
        scores = (strength * grades + noise).astype(np.float32)[:, None]
        found.append(float(CandidateLoss(name).labelled(torch.from_numpy(scores), torch.from_numpy(labels.array)).mean()))
        orders.append(labels.values(scores)[0][:, 0].mean())
    assert found == sorted(found, reverse=True)
    assert orders == sorted(orders)


def test_bfloat16_scores_are_compared_in_float32() -> None:
    labels = labels_of([[(0.0, 1), (0.0, 0)]])
    with torch.autocast("cpu", torch.bfloat16):
        found = CandidateLoss("listwise").labelled(torch.tensor([[1.0], [1.0078125]], dtype=torch.bfloat16), labels)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(0.0078125))] * 2, rel=1e-6)
