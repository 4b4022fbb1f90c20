from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from foundation.labels.value import Numbers
from foundation.models.folder import Checkpoint
from foundation.training.distillation.capture import Capture
from foundation.training.distillation.masking import Masking
from foundation.training.distillation.teacher import NOTHING, Pair, Teacher
from foundation.training.losses.classes import ClassLoss
from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape
from foundation.training.losses.distillation.mixkd import NEIGHBOURS, MixKD, draw, mixture
from foundation.training.losses.value import ValueLoss
from foundation.training.rows import ByLength, Rows
from foundation.training.train import Batch
from tests.problems import raises_problem


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_a_mixture_is_the_mean_of_the_embeddings(kind: str, make_model: Any, make_features: Any) -> None:
    model = make_model(kind)
    first, second = (make_features(kind, seed=seed) for seed in (1, 2))
    second["attention_mask"] = second["attention_mask"].flip(0)  # other rows are the long ones
    share = torch.tensor([0.25, 1.0, 0.0])
    mixed = mixture(model, first, second, share)
    table = model.get_input_embeddings().weight
    for row in range(3):
        for token in range(9):
            one, other = (table[features["input_ids"][row, token]] for features in (first, second))
            torch.testing.assert_close(mixed["inputs_embeds"][row, token], share[row] * one + (1 - share[row]) * other)
            either = int(first["attention_mask"][row, token]) or int(second["attention_mask"][row, token])
            assert int(mixed["attention_mask"][row, token]) == either


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "vit"])
def test_a_mixture_of_a_row_with_itself_is_the_row(kind: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    mixed = model(**mixture(model, features, features, torch.tensor([0.3, 1.0, 0.0])))
    torch.testing.assert_close(mixed.logits, model(**features).logits, atol=1e-4, rtol=1e-4)


def test_mixed_pixels_are_mixed_patch_embeddings(make_model: Any, make_features: Any) -> None:
    model, first, second = make_model("vit"), make_features("vit", seed=1), make_features("vit", seed=2)
    share = torch.tensor([0.1, 0.5, 0.9])
    embed = model.vit.embeddings.patch_embeddings
    expected = share[:, None, None] * embed(first["pixel_values"]) + (1 - share[:, None, None]) * embed(second["pixel_values"])
    torch.testing.assert_close(embed(mixture(model, first, second, share)["pixel_values"]), expected, atol=1e-5, rtol=1e-5)


def test_token_types_are_those_of_the_first_row_where_it_has_a_token(make_model: Any) -> None:
    first = {
        "input_ids": torch.tensor([[5, 6, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "token_type_ids": torch.tensor([[0, 1, 0]]),
    }
    second = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1]]),
        "token_type_ids": torch.tensor([[0, 0, 1]]),
    }
    assert mixture(make_model("bert"), first, second, torch.tensor([0.5]))["token_type_ids"].tolist() == [[0, 1, 1]]


def test_mixed_targets_are_those_of_mixed_one_hot_labels() -> None:
    logits, share = torch.randn(4, 3), torch.tensor([0.0, 0.3, 0.5, 1.0])
    first, second = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0, 2])
    eye = torch.eye(3)
    soft = share[:, None] * eye[first] + (1 - share[:, None]) * eye[second]
    expected = torch.nn.functional.cross_entropy(logits, soft, reduction="none")
    torch.testing.assert_close(ClassLoss().mixed(logits, first, second, share), expected)
    values = ValueLoss().mixed(torch.tensor([[1.0]]), torch.tensor([0.0]), torch.tensor([4.0]), torch.tensor([0.25]))
    assert values.tolist() == [4.0]  # (1 - 3)^2


@given(st.integers(1, 60), st.integers(0, 5), st.integers(0, 3))
def test_partners_are_other_rows_and_do_not_depend_on_the_batch(num_rows: int, step: int, seed: int) -> None:
    rows = ByLength.of(np.random.default_rng(seed).integers(1, 30, num_rows))
    indices = np.random.default_rng(seed + 1).permutation(num_rows)
    partners, shares = draw(indices, step, rows, seed, 0.4)
    assert ((partners != indices) | (num_rows == 1)).all()
    assert ((partners >= 0) & (partners < num_rows)).all()
    assert ((shares >= 0) & (shares <= 1)).all()
    half, some = draw(indices[num_rows // 2 :], step, rows, seed, 0.4)
    assert np.array_equal(half, partners[num_rows // 2 :])
    assert np.array_equal(some, shares[num_rows // 2 :])


def test_partners_are_of_like_length_and_change_with_the_step() -> None:
    lengths = np.random.default_rng(0).permutation(5000)
    rows, indices = ByLength.of(lengths), np.arange(0, 5000, 50)
    first, shares = draw(indices, 0, rows, 0, 0.4)
    assert np.abs(lengths[first] - lengths[indices]).max() <= NEIGHBOURS
    assert len(set((lengths[first] - lengths[indices]).tolist())) > 80
    second, _ = draw(indices, 1, rows, 0, 0.4)
    assert (first != second).mean() > 0.9
    assert 0.4 < shares.mean() < 0.6
    assert ((shares < 0.1) | (shares > 0.9)).mean() > 0.4  # Beta(0.4, 0.4) is high at both ends


def test_every_partner_is_drawn_equally_often() -> None:
    rows, counts = ByLength.of(np.full(6, 9)), np.zeros((6, 6))
    for step in range(300):
        partners, _ = draw(np.arange(6), step, rows, 0, 1.0)
        counts[np.arange(6), partners] += 1
    assert (np.diag(counts) == 0).all()
    others = counts[~np.eye(6, dtype=bool)]
    assert 30 < others.min() <= others.max() < 95  # 60 expected


@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 3))
def test_a_copy_of_the_row_is_no_partner(num_rows: int, copies: int, seed: int) -> None:
    rows = ByLength.of(np.tile(np.random.default_rng(seed).integers(1, 9, num_rows), 1 + copies))
    for step in range(8):
        indices = np.arange(num_rows * (1 + copies))
        partners, _ = draw(indices, step, rows, seed, 0.4, num_rows)
        assert ((partners % num_rows != indices % num_rows) | (num_rows == 1)).all()


TEXTS = ["great movie", "the film was not good", "bad", "very very fine film", "love", "hate it"]


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("classes", [1, 3])
def test_the_parts_are_the_formulas(classes: int, copies: int, make_model: Any, checkpoint: Any) -> None:
    """Partners, shares and hidden tokens are drawn anew here, and every row is asked by itself."""
    seed, step, alpha, temperature, originals = 5, 3, 0.7, 3.0, len(TEXTS)
    student, teacher = (make_model("bert", num_labels=classes, num_hidden_layers=layers).eval() for layers in (2, 4))
    task: Any = "text-regression" if classes == 1 else "text-classification"
    prepared = Checkpoint(checkpoint("bert", num_labels=2)).preprocessor(task, 16, Target(sequence_lengths=(8,)))
    rows = Rows.prepare(TEXTS * (1 + copies), prepared)
    values = np.linspace(-1, 2, originals).astype(np.float32) if classes == 1 else np.arange(originals) % classes
    labels, masking = np.tile(values, 1 + copies), Masking(0.5, 4, (0, 1, 2, 3, 4), 11, originals) if copies else None
    asked = Teacher(Capture(teacher, "key"), rows, True, masking=masking)
    few = originals if copies else None
    pair = Pair(Capture(student, "key"), (asked,), rows, (Numbers if classes == 1 else ClassIds)(labels), seed, few, masking=masking)
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), task, "key")
    indices = np.array([4, 0, 3, 1, *([7, 9, 11] if copies else [])])
    batch = Batch(rows.batch(indices), torch.from_numpy(labels[indices]), indices, step, 9)
    inputs = LossInputs(setting, batch, temperature, NOTHING, NOTHING, pair)
    parts = MixKD(alpha=alpha, labels=0.5, answers=2.0).parts(inputs, None)

    def embedded(model: Any, index: int, width: int) -> torch.Tensor:
        ids = prepared.encode([(TEXTS * 2)[index]], width)["input_ids"][0]
        if index >= originals:
            hidden = np.random.default_rng([11, step, index]).random(16) < 0.5
            ids = np.array([4 if hidden[position] and token > 4 else token for position, token in enumerate(ids)])
        result: torch.Tensor = model.get_input_embeddings().weight[torch.from_numpy(ids)]
        return result

    by_length = rows.by_length.order.tolist()
    for position, index in enumerate(indices.tolist()):
        random = np.random.default_rng([seed, step, index])
        others = [other for other in by_length if other % originals != index % originals]
        partner = others[int(random.integers(len(others)))]
        share = float(random.beta(alpha, alpha))
        width = max(int(rows.lengths[index]), int(rows.lengths[partner]))
        z_s, z_t = (
            model(
                inputs_embeds=(share * embedded(model, index, width) + (1 - share) * embedded(model, partner, width))[None],
                attention_mask=torch.ones(1, width, dtype=torch.int64),
            ).logits[0]
            for model in (student, teacher)
        )
        y, other = (float(labels[row]) for row in (index, partner))
        if classes == 1:
            hard, soft = (z_s[0] - share * y - (1 - share) * other) ** 2, (z_s[0] - z_t[0]) ** 2
        else:
            log_q, p = torch.log_softmax(z_s, 0), torch.softmax(z_t / temperature, 0)
            hard = -share * log_q[int(y)] - (1 - share) * log_q[int(other)]
            soft = temperature**2 * (p * (p.log() - torch.log_softmax(z_s / temperature, 0))).sum()
        if copies and (index >= originals or partner >= originals):
            hard = torch.zeros(())
        torch.testing.assert_close(parts["mixed_labels"][position], 0.5 * hard, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(parts["mixed_answers"][position], 2.0 * soft, atol=1e-4, rtol=1e-4)


class _Rows:
    """Stands for training rows."""

    def __init__(self, features: dict[str, torch.Tensor]) -> None:
        self.features, self.lengths = features, features["attention_mask"].sum(1).numpy()

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        return {name: value[torch.from_numpy(indices)] for name, value in self.features.items()}


def test_a_model_that_looks_for_the_end_in_the_tokens_is_refused(make_model: Any, make_features: Any) -> None:
    rows: Any = _Rows(make_features("gpt2"))
    decoder, encoder = Capture(make_model("gpt2"), "stages.distill"), Capture(make_model("bert"), "stages.distill")
    MixKD().prepare(Pair(encoder, (Teacher(encoder, rows, True),), rows, np.zeros(3), 0))
    with raises_problem("stages.distill", "mixkd", "gpt2", "embeddings"):
        MixKD().prepare(Pair(encoder, (Teacher(decoder, rows, True),), rows, np.zeros(3), 0))
