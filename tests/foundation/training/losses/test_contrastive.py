"""The loss of two towers: against Transformers where every text has one image, against loops where classes repeat."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.clip.modeling_clip import image_text_contrastive_loss

from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.zero_shot import ImagesAndTexts, labels_of
from foundation.stage.context import Context
from foundation.training.finetune import Finetune
from foundation.training.losses.contrastive import contrastive_loss, images_first, in_order_of_rows, scale_of
from tests.tiny_towers import TASK, stock


def drawn(seed: int, classes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns vectors of length 1, those of the images first, and the labels of pairs one after the other."""
    generator = torch.Generator().manual_seed(seed)
    vectors = functional.normalize(torch.randn(2 * len(classes), 6, generator=generator), dim=1)
    sides = np.tile([0, 1], len(classes))
    return vectors, torch.from_numpy(labels_of(sides, np.repeat(classes, 2), np.repeat(np.arange(len(classes)), 2)).array)


def naive(vectors: torch.Tensor, labels: torch.Tensor, scale: float, bias: float | None) -> list[float]:
    """Returns the loss of each row, in the order of the labels, by loops over single numbers."""
    order = [row for side in (0, 1) for row in range(len(labels)) if labels[row, 0] == side]
    vector_of = {row: vectors[place] for place, row in enumerate(order)}
    losses = []
    for row in range(len(labels)):
        others = [other for other in range(len(labels)) if labels[other, 0] != labels[row, 0]]
        z = [scale * float(vector_of[row] @ vector_of[other]) + (bias or 0.0) for other in others]
        same = [labels[other, 1] == labels[row, 1] for other in others]
        if bias is None:
            total = math.log(sum(math.exp(value) for value in z))
            losses.append(sum(total - value for value, is_same in zip(z, same, strict=True) if is_same) / max(1, sum(same)))
        else:
            losses.append(sum(math.log1p(math.exp(-value if is_same else value)) for value, is_same in zip(z, same, strict=True)))
    return losses


@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=7), st.sampled_from([None, -3.0, 0.5]))
def test_the_loss_is_that_of_loops(seed: int, classes: list[int], bias: float | None) -> None:
    vectors, labels = drawn(seed, classes)
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]  # rows need not lie in pairs
    told = None if bias is None else torch.tensor([bias])
    for given_labels in (labels, shuffled):
        found = contrastive_loss(vectors, given_labels, torch.tensor(4.0), told)
        torch.testing.assert_close(found, torch.tensor(naive(vectors, given_labels, 4.0, bias)), atol=1e-5, rtol=1e-4)


@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=1, max_size=7), st.sampled_from([None, -3.0]), st.integers(1, 3))
def test_shares_of_a_batch_have_the_losses_and_add_up_to_the_gradient_of_the_whole(
    seed: int, classes: list[int], bias: float | None, processes: int
) -> None:
    vectors, labels = drawn(seed, classes)
    told, scale = None if bias is None else torch.tensor([bias]), torch.tensor(4.0, requires_grad=True)
    rows = in_order_of_rows(vectors, labels).requires_grad_()
    torch.testing.assert_close(images_first(rows, labels).detach(), vectors, rtol=0, atol=0)
    whole = contrastive_loss(images_first(rows, labels), labels, scale, told)
    gradients, found, totals = (
        torch.autograd.grad(whole.sum(), (rows, scale)),
        torch.zeros(len(rows)),
        [torch.zeros_like(rows), torch.tensor(0.0)],
    )
    for process in range(processes):
        own = labels[:, 2] % processes == process
        losses = contrastive_loss(images_first(rows, labels), labels, scale, told, own)
        assert not losses[~own].any()
        found += losses.detach()
        totals = [total + one for total, one in zip(totals, torch.autograd.grad(losses.sum(), (rows, scale)), strict=True)]
    torch.testing.assert_close(found, whole.detach())
    for total, one in zip(totals, gradients, strict=True):
        torch.testing.assert_close(total, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_of_single_classes_it_is_the_loss_of_the_model(kind: str) -> None:
    model, classes = stock(kind), list(range(5))
    vectors, labels = drawn(1, classes)
    z = model.logit_scale.exp() * vectors[5:] @ vectors[:5].T
    bias = getattr(model, "logit_bias", None)
    if kind == "clip":
        expected = image_text_contrastive_loss(z)
    else:
        signs = 2 * torch.eye(5) - 1
        expected = -functional.logsigmoid(signs * (z + bias)).sum(dim=-1).mean()
    found = contrastive_loss(vectors, labels, scale_of(model), bias).mean()
    torch.testing.assert_close(found, expected.detach() if bias is None else expected, check_stride=False)


def test_the_scale_is_bounded_and_learned() -> None:
    model = SimpleNamespace(logit_scale=torch.nn.Parameter(torch.tensor(6.0)))
    assert float(scale_of(model)) == 100.0
    model.logit_scale.data.fill_(1.0)
    vectors, labels = drawn(2, [0, 1, 2])
    contrastive_loss(vectors, labels, scale_of(model)).sum().backward()
    assert model.logit_scale.grad.abs() > 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"loss": "ranking"}, "stages.finetune.loss: ranking given; a clip has a loss of its own: leave it out"),
        ({"micro_batch_size": 4}, "stages.finetune.micro_batch_size: 4 given; contrastive compares the rows of a batch: leave it out"),
        ({"batch_size": 5}, "stages.finetune.batch_size: 5 given; .* give an even number"),
        ({"label_smoothing": 0.1}, "stages.finetune.label_smoothing: 0.1 given; image-text has no classes: leave it out"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(changes: dict[str, object], line: str, tmp_path: object) -> None:
    _, labels = drawn(0, [0, 1])
    split = Split([b"x", "a", b"y", "b"], ImagesAndTexts(labels.numpy()))
    context = Context(TASK, Data(split, split, split, ("a", "b")), 24, Target(), 0, ConsoleProgress("silent"), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=line) as caught:
        Finetune(**changes).check(stock().config, None, context)  # type: ignore[arg-type]
    assert len(caught.value.lines) == 1
