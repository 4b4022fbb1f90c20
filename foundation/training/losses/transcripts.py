"""Losses of a text that is spoken: connectionist temporal classification, and the divergence of the probabilities of frames.

loss_b = -log sum over paths a of prod over frames f of softmax(z_f)[a_f] / |y_b|      Graves et al. 2006, https://www.cs.toronto.edu/~graves/icml_2006.pdf

A path has one token for each frame; it counts if it is y_b without the tokens that repeat the one before, and without blanks. Frames of
padding are marked by their logits (`foundation.models.heads.transcriber`) and left out. A text that needs more frames than its sound has,
one for each token and one for each blank between two that are equal, has loss 0 and no gradient.

Label smoothing adds the cross entropy of frames to equal probabilities (Kim et al. 2018, https://arxiv.org/abs/1710.06535).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.transcripts import NO_TOKEN
from foundation.models.heads.reader import PADDING_LOGIT
from foundation.training.losses.answer_loss import AnswerLoss


class TranscriptLoss(AnswerLoss):
    """Logits `[b, F, V]` of all frames, labels int32 `[b, 2, 1 + T]` (`foundation.labels.transcripts`)."""

    name: str = "ctc"

    def labelled(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """-log p of the text, by its number of tokens."""
        real_bF, tokens_bT = real_frames(logits), labels[:, 1, 1:].long()
        logs_bFV = torch.log_softmax(logits, dim=-1)
        counts_b = (tokens_bT != NO_TOKEN).sum(dim=1)
        losses_b = functional.ctc_loss(
            logs_bFV.transpose(0, 1),
            tokens_bT.clamp(min=0),
            real_bF.sum(dim=1),
            counts_b,
            blank=int(labels[0, 1, 0]),
            reduction="none",
            zero_infinity=True,
        )
        losses_b = losses_b / counts_b.clamp(min=1)
        if label_smoothing:
            losses_b = (1 - label_smoothing) * losses_b + label_smoothing * frame_mean(-logs_bFV.mean(dim=-1), real_bF)
        return losses_b

    def taught(self, logits: Tensor, target: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """The divergence of each frame, as for classes, in the mean over the frames that are no padding."""
        return frame_mean(_divergence(logits, target, temperature), real_frames(target))

    def drawn_gradient(self, logits: Tensor, labels: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """A token is drawn for each frame; 0 at padding."""
        return super().drawn_gradient(logits, labels, temperature, generator) * real_frames(logits)[..., None]


def real_frames(logits: Tensor) -> Tensor:
    """Returns which frames are no padding, bool `[b, F]`: in those all tokens but the blank have `PADDING_LOGIT`."""
    return logits.topk(2, dim=-1).values[..., 1] > PADDING_LOGIT / 2


def frame_mean(values_bF: Tensor, real_bF: Tensor) -> Tensor:
    """Returns the mean of each row over its frames that are no padding, `[b]`."""
    return values_bF.where(real_bF, 0.0).sum(dim=1) / real_bF.sum(dim=1).clamp(min=1)


def _divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    ours, theirs = (torch.log_softmax(values / temperature, dim=-1) for values in (logits, target))
    return temperature**2 * functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)
