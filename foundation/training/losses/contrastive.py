"""The loss of two towers: an image has to be near the texts of its class, and a text near the images of its class, within a batch.

With the vectors x_i of images and t_j of texts, all of length 1, y_ij = 1 where both are of one class, else 0, and the model's own scale s
and bias b:

    z_ij    = s x_i . t_j (+ b)
    CLIP    loss of x_i = - sum_j y_ij / sum_k y_ik  log softmax_j(z_ij)      and of t_j the same over images (https://arxiv.org/abs/2103.00020,
                                                                             figure 3)
    SigLIP  loss of x_i = - sum_j log sigmoid((2 y_ij - 1) z_ij)             and of t_j the same over images (https://arxiv.org/abs/2303.15343,
                                                                             section 3.2)

A model with a bias is a SigLIP. In the papers every text belongs to only one image, y is the identity, and these are their losses; where
several images of a batch are of one class, they are no negatives of each other (UniCL, https://arxiv.org/abs/2204.03610, section 3.2).
s is at most 100, as in CLIP. Several processes gather the vectors of a batch (`foundation.training.processes.gathered`); each computes the
losses of its own rows, images against all texts and texts against all images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from foundation.labels.zero_shot import IMAGE, TEXT
from foundation.training.precision import in_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_SCALE = 100.0


def contrastive_loss(
    vectors_nD: Tensor, labels_n3: Tensor, scale: Tensor, bias: Tensor | None = None, own_n: Tensor | None = None
) -> Tensor:
    """Returns the loss of each row, float32 `[n]`, in the order of the labels.

    Args:
        vectors_nD: Vectors of length 1: all images, then all texts, each in the order of its rows; float32.
        labels_n3: Side, class and number of the pair of each row, float32 (`foundation.labels.zero_shot`).
        scale: s, float32 of one number.
        bias: b of SigLIP; None for CLIP.
        own_n: The rows whose loss is asked for, bool; others get 0. None: all.
    """
    with in_float32(vectors_nD):
        return _contrastive_loss(vectors_nD, labels_n3, scale, bias, own_n)


def _contrastive_loss(vectors_nD: Tensor, labels_n3: Tensor, scale: Tensor, bias: Tensor | None, own_n: Tensor | None) -> Tensor:
    images, texts = (torch.nonzero(labels_n3[:, 0] == side)[:, 0] for side in (IMAGE, TEXT))
    image_AD, text_BD = vectors_nD[: len(images)].float(), vectors_nD[len(images) :].float()
    same_AB = labels_n3[images, 1][:, None] == labels_n3[texts, 1][None, :]
    losses_n = torch.zeros_like(labels_n3[:, 0])
    if own_n is not None:
        ours = own_n[images], own_n[texts]
        logits_IB = scale.float() * image_AD[ours[0]] @ text_BD.T
        logits_TA = scale.float() * text_BD[ours[1]] @ image_AD.T
        own = _of_rows(logits_IB, same_AB[ours[0]], bias), _of_rows(logits_TA, same_AB.T[ours[1]], bias)
        return losses_n.index_add(0, torch.cat([images[ours[0]], texts[ours[1]]]), torch.cat(own))
    logits_AB = scale.float() * image_AD @ text_BD.T
    if bias is None:
        own = _of_rows(logits_AB, same_AB, bias), _of_rows(logits_AB.T, same_AB.T, bias)
    else:
        loss_AB = _of_pairs(logits_AB, same_AB, bias)
        own = loss_AB.sum(dim=1), loss_AB.sum(dim=0)
    return losses_n.index_add(0, torch.cat([images, texts]), torch.cat(own))


def in_order_of_rows(vectors_nD: Tensor, labels_n3: Tensor) -> Tensor:
    """Returns vectors as a model gives them, all images and then all texts, in the order of the labels."""
    return torch.zeros_like(vectors_nD).index_copy(0, torch.argsort(labels_n3[:, 0], stable=True), vectors_nD)


def images_first(vectors_nD: Tensor, labels_n3: Tensor) -> Tensor:
    """Returns vectors in the order of the labels as a model gives them: the inverse of `in_order_of_rows`."""
    return vectors_nD[torch.argsort(labels_n3[:, 0], stable=True)]


def scale_of(model: PreTrainedModel) -> Tensor:
    """Returns s of a model."""
    scale: Tensor = model.logit_scale.exp().clamp(max=LARGEST_SCALE)
    return scale


def _of_rows(logits_AB: Tensor, same_AB: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the loss of each row with all columns, float32 `[A]`."""
    return _cross_entropy(logits_AB, same_AB) if bias is None else _of_pairs(logits_AB, same_AB, bias).sum(dim=1)


def _of_pairs(logits_AB: Tensor, same_AB: Tensor, bias: Tensor) -> Tensor:
    """Returns the loss of SigLIP for each image and text, float32 `[A, B]`."""
    return -functional.logsigmoid((2.0 * same_AB - 1.0) * (logits_AB + bias.float()))


def _cross_entropy(logits_AB: Tensor, same_AB: Tensor) -> Tensor:
    """Returns the cross entropy of each row with all columns of its class alike, float32 `[A]`; 0 where there is none."""
    target_AB = same_AB / same_AB.sum(dim=1, keepdim=True).clamp(min=1)
    return -(target_AB * functional.log_softmax(logits_AB, dim=1)).sum(dim=1)
