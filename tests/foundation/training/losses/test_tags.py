"""Losses of tags against sums written out word by word."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foundation.labels import tags
from foundation.training.losses.tags import TagLoss

NAMES = ("O", "B-A", "I-A")
TAGS = [["O", "B-A", "I-A"], ["B-A"], ["O", "O"]]
PIECES = [np.array([1, 2, 4]), np.array([3]), np.array([-1, -1])]


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(seed))


def words() -> list[list[tuple[int, int]]]:
    """The tag and the token of each word that has one."""
    return [
        [(NAMES.index(tag), int(piece)) for tag, piece in zip(row, pieces, strict=True) if piece >= 0]
        for row, pieces in zip(TAGS, PIECES, strict=True)
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_row_has_the_mean_of_its_words(smoothing: float) -> None:
    logits, labels = drawn(0), torch.from_numpy(tags.labels_of(TAGS, PIECES, NAMES).array)
    logs, wanted = torch.log_softmax(logits, dim=-1), []
    for row, found in enumerate(words()):
        each = [-(1 - smoothing) * logs[row, piece, tag] - smoothing * logs[row, piece].mean() for tag, piece in found]
        wanted.append(sum(each, torch.tensor(0.0)) / max(1, len(each)))
    assert torch.allclose(TagLoss().labelled(logits, labels, smoothing), torch.stack(wanted), atol=1e-6)


def test_a_teacher_is_heard_at_the_words_alone() -> None:
    ours, theirs, labels = drawn(0), drawn(1), torch.from_numpy(tags.labels_of(TAGS, PIECES, NAMES).array)
    p, q = (torch.softmax(logits / 2.0, dim=-1) for logits in (theirs, ours))
    wanted = []
    for row, found in enumerate(words()):
        each = [4.0 * (p[row, piece] * (p[row, piece] / q[row, piece]).log()).sum() for _, piece in found]
        wanted.append(sum(each, torch.tensor(0.0)) / max(1, len(each)))
    assert torch.allclose(TagLoss().taught(ours, theirs, labels, 2.0), torch.stack(wanted), atol=1e-5)


def test_drawn_gradients_are_zero_where_no_word_is_read() -> None:
    labels = torch.from_numpy(tags.labels_of(TAGS, PIECES, NAMES).array)
    gradient = TagLoss().drawn_gradient(drawn(0), labels, 1.0, torch.Generator().manual_seed(0))
    read = {(row, piece) for row, found in enumerate(words()) for _, piece in found}
    assert {tuple(place) for place in torch.nonzero(gradient.abs().sum(dim=-1)).tolist()} == read
