"""Losses of a tag for each word: cross entropy and the divergence of the probabilities, at the first token of each word.

loss_b = mean over the words w of row b of -log softmax(z_p(w))[y_w]       p(w): the first token of w; its other tokens are not trained

A word without a token (`foundation.labels.tags`) is left out; a row without any has loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.tags import NO_PIECE
from foundation.training.losses.answer_loss import AnswerLoss


class TagLoss(AnswerLoss):
    """Logits `[b, L, C]` of all tokens, labels int32 `[b, C + W, 2]`, of which entries without a token do not count."""

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross entropy of the words."""
        tag_bK, piece_bK = labels.long().unbind(dim=-1)
        tag_bK = tag_bK.where(piece_bK != NO_PIECE, 0)
        logits_bKC = logits.gather(1, piece_bK.clamp(min=0)[..., None].expand(-1, -1, logits.shape[-1]))
        losses = functional.cross_entropy(logits_bKC.flatten(0, 1), tag_bK.flatten(), reduction="none", label_smoothing=label_smoothing)
        return word_mean(losses.view_as(tag_bK), piece_bK)

    def over_choices(self, values: Tensor, labels: Tensor) -> Tensor:
        """The mean over the words, of values of all tokens `[b, L]`."""
        piece_bK = labels[..., 1].long()
        return word_mean(values.gather(1, piece_bK.clamp(min=0)), piece_bK)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """As for classes, and 0 at tokens that no word is read from."""
        piece_bK = labels[..., 1].long()
        read_bL = torch.zeros(logits.shape[:2], device=logits.device)
        read_bL.scatter_reduce_(1, piece_bK.clamp(min=0), (piece_bK != NO_PIECE).float(), "amax")
        return super().drawn_gradient(logits, labels, temperature, generator) * read_bL[..., None]


def word_mean(values_bK: Tensor, piece_bK: Tensor) -> Tensor:
    """Returns the mean of each row over its words that have a token, `[b]`; 0 for a row without any."""
    words_bK = piece_bK != NO_PIECE
    return values_bK.where(words_bK, 0.0).sum(dim=1) / words_bK.sum(dim=1).clamp(min=1)
