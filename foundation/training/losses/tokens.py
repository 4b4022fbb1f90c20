"""Losses of next-token prediction in torch: against the text, and against the logits of another model.

    nll_t = -log softmax(z_t)[x_{t+1}]                          z_t: logits at position t, x_{t+1}: the next token
    kl_t  = T^2 KL(softmax(y_t / T) || softmax(z_t / T))        y_t: logits of the other model
    loss_b = mean over the predicted tokens of block b

Training blocks all have the same length, so the mean of their means is the mean over all tokens of a batch,
however it is split.

Where processes share tokens, logits belong to own tokens, and their losses are gathered (`foundation.models.layers.own_answers`).

Tensor names carry their shapes: b blocks, L positions, T = L - 1 predicted tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.next_token import IGNORED
from foundation.models.layers.own_answers import sharers
from foundation.models.layers.token_shares import Group, joined
from foundation.training.losses.answer_loss import AnswerLoss


def token_losses(logits_bLV: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Returns the mean cross entropy over the predicted tokens of each block, float32 `[b]`.

    Args:
        logits_bLV: float32.
        labels: int32 `[b, at least L - 1]`, `IGNORED` where there is no token to predict.
        label_smoothing: Share of the target probability that is spread over the vocabulary.
    """
    group = sharers()
    if group is not None:
        own_bT = group.own(_of_all(labels, logits_bLV.shape[1] * group.processes)[..., None])[..., 0]
        return _shared_mean(_cross_entropy(logits_bLV, own_bT.long(), label_smoothing), labels, group)
    labels_bT = labels[:, : logits_bLV.shape[1] - 1].long()
    return block_mean(_cross_entropy(logits_bLV[:, :-1], labels_bT, label_smoothing), labels_bT)


def _cross_entropy(logits_bTV: Tensor, labels_bT: Tensor, label_smoothing: float) -> Tensor:
    """Returns the cross entropy of each token, float32 `[b, T]`; 0 where there is none to predict."""
    rows = logits_bTV.flatten(0, 1), labels_bT.flatten()
    return functional.cross_entropy(*rows, reduction="none", ignore_index=IGNORED, label_smoothing=label_smoothing).view_as(labels_bT)


def _of_all(labels: Tensor, length: int) -> Tensor:
    """Returns labels padded to so many positions; the added positions predict nothing."""
    cut = labels[:, :length]
    return functional.pad(cut, (0, length - cut.shape[1]), value=IGNORED)


def _shared_mean(values_bT: Tensor, labels: Tensor, group: Group) -> Tensor:
    """Returns the mean of each block over its predicted tokens, `[b]`, from values of own tokens."""
    length = values_bT.shape[1] * group.processes
    values_bL = joined(values_bT[..., None], group, length)[..., 0]
    return block_mean(values_bL, _of_all(labels, length))


def block_mean(values_bT: Tensor, labels_bT: Tensor) -> Tensor:
    """Returns the mean of each block over its predicted tokens, `[b]`; 0 for a block without any."""
    predicted_bT = labels_bT != IGNORED
    kept_bT = torch.where(predicted_bT, values_bT, torch.zeros((), dtype=values_bT.dtype, device=values_bT.device))
    return kept_bT.sum(dim=1) / predicted_bT.sum(dim=1).clamp(min=1)


class TokenLoss(AnswerLoss):
    """Logits `[b, L, V]`, ids of the next tokens int32 `[b, at least L - 1]`."""

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross entropy of the predicted tokens."""
        return token_losses(logits, labels, label_smoothing)

    def choices(self, logits: Tensor) -> Tensor:
        """Every position but the last, which has no next token, `[b, T, V]`; with shared tokens only this process's positions."""
        return logits[:, :-1] if sharers() is None else logits

    def over_choices(self, values: Tensor, labels: Tensor) -> Tensor:
        """The mean over the predicted tokens."""
        group = sharers()
        return block_mean(values, labels[:, : values.shape[1]]) if group is None else _shared_mean(values, labels, group)

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """As for classes, and 0 where no token is predicted."""
        predicted_bL = functional.pad(labels[:, : logits.shape[1] - 1] != IGNORED, (0, 1))
        return super().drawn_gradient(logits, labels, temperature, generator) * predicted_bL[..., None]
