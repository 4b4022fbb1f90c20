"""Losses of pairs against written-out loops, and batches that keep pairs together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from foundation.core.errors import InputError
from foundation.core.runs import equal
from foundation.data.splits import Data, Split
from foundation.labels import text_groups
from foundation.labels.value import Numbers
from foundation.labels.vectors import labels_of
from foundation.training.allowed import check_together
from foundation.training.distillation.distilled import Distilled
from foundation.training.finetune import Finetune
from foundation.training.losses.table import losses_of
from foundation.training.losses.vector import pair_loss, vector_distance
from foundation.training.rows import plan_runs
from foundation.training.train import TrainConfig
from prune.recovery import part_of
from quantize.budget import loss
from tests.export import sentiment
from tests.problems import raises_problem
from tests.tiny_embedding import vectors as drawn

SCORES = (0.9, 0.2, 0.8)
ORDER = [3, 0, 4, 2, 1, 5]


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return sum(a * b for a, b in zip(one.tolist(), other.tolist(), strict=True)) / math.hypot(*one.tolist()) / math.hypot(*other.tolist())


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns vectors of pairs in order, and vectors and labels as a batch has them."""
    vectors, labels = torch.randn(6, 4), torch.from_numpy(labels_of(np.array(SCORES)).array)
    return vectors, vectors[ORDER], labels[ORDER]


def test_the_cosine_loss_is_the_formula_for_both_texts() -> None:
    vectors, given, labels = batch()
    found = pair_loss(given, labels)
    for place, row in enumerate(ORDER):
        pair = row // 2
        expected = (cosine(vectors[2 * pair], vectors[2 * pair + 1]) - SCORES[pair]) ** 2
        assert float(found[place]) == pytest.approx(expected, abs=1e-5)


def test_the_ranking_loss_is_the_formula_and_pairs_of_low_score_are_only_candidates() -> None:
    vectors, given, labels = batch()
    found = pair_loss(given, labels, "ranking")
    # Which text of a pair comes first in a batch is the anchor.
    first = {pair: min((row for row in ORDER if row // 2 == pair), key=ORDER.index) for pair in range(3)}
    second = {pair: 4 * pair + 1 - first[pair] for pair in range(3)}
    for place, row in enumerate(ORDER):
        pair = row // 2
        powers = [math.exp(20 * cosine(vectors[first[pair]], vectors[second[other]])) for other in range(3)]
        expected = -math.log(powers[pair] / sum(powers)) if SCORES[pair] >= 0.8 else 0.0
        assert float(found[place]) == pytest.approx(expected, abs=1e-4)
    assert float(found[ORDER.index(2)]) == 0.0


def test_the_triplet_loss_is_the_formula_with_the_hardest_negative() -> None:
    torch.manual_seed(1)
    vectors, labels = torch.randn(8, 4), torch.from_numpy(labels_of(np.array([0.9, 0.2, 0.8, 1.0])).array)
    vectors[7] = vectors[6]  # near enough: no loss
    unit = [row / math.hypot(*row.tolist()) for row in vectors]
    found = pair_loss(vectors, labels, "triplet")
    losses = []
    for pair in range(4):
        apart = [float((unit[2 * pair] - unit[2 * other + 1]).square().sum()) for other in range(4)]
        hardest = min(value for other, value in enumerate(apart) if other != pair)
        losses.append(0.0 if pair == 1 else max(0.0, apart[pair] - hardest + 0.2))
    assert losses[3] == 0
    assert max(losses) > 0
    assert found.tolist() == pytest.approx([loss for loss in losses for _ in range(2)], abs=1e-5)
    assert pair_loss(vectors[:2], labels[:2], "triplet").tolist() == [0.0, 0.0]  # nothing to be nearer than
    assert pair_loss(vectors[:1], labels[:1], "triplet").tolist() == [0.0]


def test_a_text_without_a_partner_has_no_loss() -> None:
    _, given, labels = batch()
    found = pair_loss(given[:5], labels[:5])  # the text 5 is missing
    assert [float(found[place]) == 0 for place in range(5)] == [row == 4 for row in ORDER[:5]]


def test_the_distance_of_vectors_is_relative() -> None:
    vectors, target = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert vector_distance(vectors, target).tolist() == pytest.approx([16 / 25, 0.0])


def test_every_batch_holds_whole_pairs_and_an_epoch_every_row_once() -> None:
    lengths = np.random.default_rng(0).integers(3, 30, 42)
    batches = plan_runs(lengths, 8, 0, 1, equal(42, 2))
    assert sorted(np.concatenate(batches).tolist()) == list(range(42))
    assert [len(part) for part in batches].count(8) == 5
    for part in batches:
        assert (part[::2] % 2 == 0).all()
        assert (part[1::2] == part[::2] + 1).all()
    assert [part.tolist() for part in batches] != [part.tolist() for part in plan_runs(lengths, 8, 0, 2, equal(42, 2))]


def test_rows_belong_together_only_as_whole_pairs() -> None:
    labels = labels_of(np.array(SCORES))
    split = Split(["a", "b", "c", "d", "e", "f"], labels)
    assert split.together == 2
    assert split.take([2, 3, 0, 1]).together == 2
    assert split.take([1, 2, 3, 4]).together == 1
    assert Split(["a", "b"], Numbers(np.array([0.1, 0.2], np.float32))).together == 1


def test_other_tasks_keep_their_cache_keys() -> None:
    assert "loss" not in Finetune().model_dump(mode="json")
    assert Finetune(loss="ranking").model_dump(mode="json")["loss"] == "ranking"


@pytest.mark.parametrize("loss", ["cosine", "ranking", "triplet"])
@given(scores=strategies.lists(strategies.floats(0, 1, width=32), min_size=1, max_size=7), processes=strategies.integers(1, 3))
def test_shares_of_a_batch_have_the_losses_and_add_up_to_the_gradient_of_the_whole(loss: Any, scores: list[float], processes: int) -> None:
    labels = torch.from_numpy(labels_of(np.array(scores)).array)
    vectors = torch.from_numpy(drawn(len(labels))).requires_grad_()
    whole = pair_loss(vectors, labels, loss)
    found, total = torch.zeros(len(labels)), torch.zeros_like(vectors)
    for process in range(processes):
        losses = pair_loss(vectors, labels, loss, labels[:, 0] % processes == process)
        found += losses.detach()
        total += torch.autograd.grad(losses.sum(), vectors)[0]
    torch.testing.assert_close(found, whole.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, torch.autograd.grad(whole.sum(), vectors)[0], rtol=1e-4, atol=1e-5)


def test_odd_batches_are_refused() -> None:
    config, split = TrainConfig(epochs=1, learning_rate=1e-3, batch_size=7), Split(["a", "b"] * len(SCORES), labels_of(np.array(SCORES)))
    with raises_problem("finetune.batch_size", "7", "give an even number"):
        check_together(config, split, "finetune")
    groups = [tuple(f"{part}" for part in range(9))]
    several = Split([*groups[0]], text_groups.labels_of(groups))
    with pytest.raises(InputError, match=r"size: 7 given; the 9 texts .* 7 negatives .* at least 9"):
        check_together(config, several, "finetune")
    check_together(config.model_copy(update={"batch_size": 9}), several, "finetune")


def test_a_choice_of_rows_keeps_pairs_where_labels_say_so() -> None:
    labels = labels_of(np.linspace(0, 1, 30))
    chosen = labels.sample(20)
    assert len(chosen) == 20
    assert all(row % 2 == 0 and other == row + 1 for row, other in zip(chosen[::2], chosen[1::2], strict=True))


def test_iterations_of_recovery_get_whole_pairs(tmp_path: Path) -> None:
    split = Split([f"{number}" for number in range(40)], labels_of(np.linspace(0, 1, 20)))
    context = replace(sentiment.context(tmp_path, {}), data=Data(split, split, split, ("score",)))
    rows = []
    for number in (1, 2):
        part, epochs = part_of(context, 1.0, number, 2, 8)
        assert (part.data.train.together, epochs) == (2, 1.0)
        rows += part.data.train.rows
    assert len(rows) == 48  # three batches of 8 each
    assert set(rows) == set(split.rows)


def test_a_student_learns_the_vectors_and_the_scores() -> None:
    objective = Distilled(torch.nn.Linear(1, 1), losses_of("sentence-embedding", labels=labels_of(np.array(SCORES))), 6, 4, 2.0, 0.9)
    vectors, given, labels = batch()
    target = torch.randn(6, 4)
    parts = objective.parts(given, target, labels)
    torch.testing.assert_close(parts["teacher"], 0.9 * (given - target).square().sum(dim=1) / target.square().sum(dim=1))
    torch.testing.assert_close(parts["cosine"], 0.1 * pair_loss(given, labels))
    assert len(vectors) == 6


def test_what_int8_costs_without_labels_is_told_by_the_cosines() -> None:
    before = np.random.default_rng(0).normal(size=(12, 4))
    turned = before @ np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    assert loss("sentence-embedding", before, 2 * turned, None) == pytest.approx(0.0, abs=1e-9)
    assert loss("sentence-embedding", before, before[::-1], None) > 0.1
