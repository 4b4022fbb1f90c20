"""Losses of spans against Transformers' own loss, and against sums written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import BertForQuestionAnswering

from foundation.labels import spans
from foundation.models.checkpoint import load
from foundation.models.heads.reader import PADDING_LOGIT
from foundation.training.losses.spans import SpanLoss
from tests import questions

PLACES = np.array([[3, 5], [0, 0], [7, 7]])
LABELS = torch.from_numpy(spans.labels_of(PLACES, [0, 1, 2], [True, False, True], [[], [], []]).array)
LENGTHS = (9, 6, 12)


def features() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[int(place < length) for place in range(12)] for length in LENGTHS])
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def drawn(seed: int) -> torch.Tensor:
    """Logits as a model gives them: those of padding are very low."""
    logits = torch.randn(3, 12, 2, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(features()["attention_mask"][..., None] == 0, PADDING_LOGIT)


def test_logits_are_those_of_the_stock_class_without_padding() -> None:
    given, ours = features(), load(questions.checkpoint())
    stock: Any = BertForQuestionAnswering.from_pretrained(questions.checkpoint()).eval()
    with torch.inference_mode():
        theirs, found = stock(**given), ours(**given).logits
    real = given["attention_mask"] == 1
    assert torch.allclose(found[real], torch.stack([theirs.start_logits, theirs.end_logits], dim=-1)[real], atol=1e-5)
    assert (found[~real] == PADDING_LOGIT).all()
    assert type(ours).__name__ == "BertForQuestionAnswering"


def test_the_loss_is_that_of_transformers_where_nothing_is_padded() -> None:
    given = {name: values[:, :6] for name, values in features().items()}
    places = torch.tensor([[3, 5], [0, 0], [2, 2]])
    labels = torch.from_numpy(spans.labels_of(places.numpy(), [0, 1, 2], [True] * 3, [[], [], []]).array)
    stock: Any = BertForQuestionAnswering.from_pretrained(questions.checkpoint()).eval()
    with torch.inference_mode():
        wanted = stock(**given, start_positions=places[:, 0], end_positions=places[:, 1]).loss
        found = SpanLoss().labelled(load(questions.checkpoint())(**given).logits, labels)
    assert torch.allclose(found.mean(), wanted, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_window_has_the_mean_of_start_and_end_over_its_own_tokens(smoothing: float) -> None:
    logits, wanted = drawn(0), []
    for row, length in enumerate(LENGTHS):
        sides = []
        for side in range(2):
            logs = torch.log_softmax(logits[row, :length, side], dim=0)
            sides.append(-(1 - smoothing) * logs[PLACES[row, side]] - smoothing * logs.mean())
        wanted.append(torch.stack(sides).mean())
    assert torch.allclose(SpanLoss().labelled(logits, LABELS, smoothing), torch.stack(wanted), atol=1e-5)


def test_a_teacher_is_heard_at_the_tokens_that_are_no_padding() -> None:
    ours, theirs, wanted = drawn(0), drawn(1), []
    for row, length in enumerate(LENGTHS):
        p, q = (torch.softmax(logits[row, :length] / 2.0, dim=0) for logits in (theirs, ours))
        wanted.append(4.0 * (p * (p / q).log()).sum(dim=0).mean())
    assert torch.allclose(SpanLoss().taught(ours, theirs, LABELS, 2.0), torch.stack(wanted), atol=1e-5)


def test_several_teachers_are_averaged_by_side() -> None:
    made = SpanLoss().averaged([drawn(0), drawn(1)], [0.25, 0.75], 1.0)
    assert made.shape == (3, 12, 2)
    wanted = 0.25 * torch.softmax(drawn(0), dim=1) + 0.75 * torch.softmax(drawn(1), dim=1)
    assert torch.allclose(torch.softmax(made, dim=1), wanted, atol=1e-6)


def test_drawn_gradients_are_those_of_the_loss_for_drawn_spans() -> None:
    logits = drawn(0).requires_grad_()
    gradient = SpanLoss().drawn_gradient(logits, LABELS, 1.0, torch.Generator().manual_seed(0))
    assert gradient.shape == logits.shape
    p = torch.softmax(logits, dim=1)
    chosen = (p - gradient).round()  # 1 at the drawn token of each side
    assert torch.allclose(p - gradient, chosen, atol=1e-6)
    assert (chosen.sum(dim=1) == 1).all()
    places = chosen.argmax(dim=1)
    loss = sum(functional.cross_entropy(logits[..., side], places[:, side], reduction="sum") for side in range(2))
    assert torch.allclose(torch.autograd.grad(loss, logits)[0], gradient, atol=1e-6)
