"""Augmentation by masking: adds copies of the rows with some tokens masked, anew in every epoch.

    x'_t = [MASK] with probability p, else x_t        drawn for each copy in each step from (seed, step, row)

Tang et al. 2019 (https://arxiv.org/abs/1903.12136, section 3.3) mask words with p = 0.1 to show what a word contributes to the prediction.
Student and teacher get the same masked tokens, so the teacher runs on every batch. A label may no longer hold after masking, so copies
count in every loss except the hard-target loss. Special tokens and padding are never masked. Not supported: the paper's replacement by
words of the same part of speech and its n-gram sampling; word replacement by a language model or GloVe as in TinyBERT
(https://arxiv.org/abs/1909.10351, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.models.inputs.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class Augment(Config):
    """Copies of the text rows with some tokens masked."""

    mask: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Probability that a token is masked."""
    copies: Annotated[int, Field(ge=1, le=100)] = 1
    """Masked copies of each row in an epoch, besides the row itself; each epoch masks other tokens."""


@dataclass(frozen=True)
class Masking:
    """Masks tokens of the masked copies in a batch."""

    probability: float
    mask_id: int
    """Id of the mask token."""
    special_ids: tuple[int, ...]
    """Ids of special tokens, which are never masked."""
    seed: int
    originals: int
    """Rows from this position on are copies."""

    def __call__(self, features: Mapping[str, Tensor], indices: NDArray[np.int64], step: int) -> dict[str, Tensor]:
        """Returns the features of a batch with its copies masked.

        Args:
            features: Inputs of the model; `input_ids` int64 `[b, L]` among them.
            indices: Position of each row `[b]`.
            step: Number of the step.
        """
        import torch

        ids_bL = features["input_ids"]
        chosen_bL = np.zeros(ids_bL.shape, bool)
        for position in np.flatnonzero(indices >= self.originals):  # drawn from the left, so padding does not change the draws
            random = np.random.default_rng([self.seed, step, int(indices[position])])
            chosen_bL[position] = random.random(ids_bL.shape[1]) < self.probability
        special_bL = torch.isin(ids_bL, torch.tensor(self.special_ids, device=ids_bL.device))
        masked_bL = torch.from_numpy(chosen_bL).to(ids_bL.device) & ~special_bL
        return {**features, "input_ids": ids_bL.masked_fill(masked_bL, self.mask_id)}


def masking_of(settings: Augment, folder: Path, seed: int, originals: int, key: str) -> Masking:
    """Returns the masking for the tokenizer of a checkpoint.

    Args:
        settings: The masking settings.
        folder: The checkpoint.
        seed: Seed of the training.
        originals: Number of rows before their copies.
        key: Key path of the settings, for error messages.

    Raises:
        InputError: The tokenizer has no mask token.
    """
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.mask_token_id is None:
        raise InputError(key, "given, but the student's tokenizer has no mask token", remedy="remove it, or give loss: mixkd")
    return Masking(settings.mask, tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), seed, originals)
