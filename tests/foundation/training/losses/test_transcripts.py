"""Connectionist temporal classification against all paths written out, at rows with padding, and texts that do not fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from foundation.labels.transcripts import labels_of
from foundation.models.heads.reader import PADDING_LOGIT
from foundation.training.losses.transcripts import TranscriptLoss, real_frames

LABELS = ("a", "<pad>", "|", "b")
BLANK = 1


def with_padding(logits: torch.Tensor, frames: list[int]) -> torch.Tensor:
    made = logits.clone()
    for row, count in enumerate(frames):
        made[row, count:] = PADDING_LOGIT
        made[row, count:, BLANK] = 0
    return made


def naive(logits: torch.Tensor, text: list[int]) -> float:
    """Adds up the probabilities of every path that is the text without repeats and blanks."""
    p_FV = torch.softmax(logits.double(), dim=-1).tolist()
    total = 0.0
    for path in itertools.product(range(len(LABELS)), repeat=len(p_FV)):
        collapsed = [token for token, _ in itertools.groupby(path) if token != BLANK]
        if collapsed == text:
            total += float(np.prod([p_FV[frame][token] for frame, token in enumerate(path)]))
    return -float(np.log(total)) / max(1, len(text))


def test_the_loss_is_that_of_all_paths_over_the_frames_that_are_no_padding() -> None:
    texts, frames = ["a", "a b", "bb", "ab"], [1, 5, 4, 5]
    logits = with_padding(torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0)), frames)
    labels = torch.from_numpy(labels_of(texts, LABELS).array)
    ids = [[0], [0, 2, 3], [3, 3], [0, 3]]
    expected = [naive(row[:count], text) for row, count, text in zip(logits, frames, ids, strict=True)]
    assert TranscriptLoss().labelled(logits, labels).tolist() == pytest.approx(expected, rel=1e-5)
    assert real_frames(logits).sum(dim=1).tolist() == frames


def test_a_text_that_does_not_fit_has_no_loss_and_no_gradient() -> None:
    logits = with_padding(torch.randn(2, 4, 4), [2, 4]).requires_grad_()  # "bb" needs three frames
    losses = TranscriptLoss().labelled(logits, torch.from_numpy(labels_of(["bb", "bb"], LABELS).array))
    losses.sum().backward()
    assert losses[0] == 0
    assert losses[1] > 0
    assert logits.grad is not None
    assert not logits.grad[0].any()
    assert logits.grad[1].any()


def test_label_smoothing_adds_the_cross_entropy_of_frames_to_equal_probabilities() -> None:
    logits = with_padding(torch.randn(2, 4, 4), [3, 4])
    labels = torch.from_numpy(labels_of(["ab", "b"], LABELS).array)
    plain, smooth = (TranscriptLoss().labelled(logits, labels, share) for share in (0.0, 0.2))
    extra = torch.stack([-torch.log_softmax(row[:count], -1).mean() for row, count in zip(logits, [3, 4], strict=True)])
    torch.testing.assert_close(smooth, 0.8 * plain + 0.2 * extra)


def test_a_teacher_is_learned_at_the_frames_that_are_no_padding() -> None:
    ours, theirs = (with_padding(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed)), [2, 5]) for seed in (1, 2))
    labels = torch.from_numpy(labels_of(["a", "b"], LABELS).array)
    found = TranscriptLoss().taught(ours, theirs, labels, 2.0)
    for row, count in enumerate([2, 5]):
        p, q = (torch.softmax(values[row, :count] / 2, -1) for values in (theirs, ours))
        torch.testing.assert_close(found[row], 4 * (p * (p / q).log()).sum(-1).mean(), rtol=1e-4, atol=1e-6)
    gradient = TranscriptLoss().drawn_gradient(ours, labels, 1.0, torch.Generator().manual_seed(0))
    assert not gradient[0, 2:].any()
    assert gradient[0, :2].any()
