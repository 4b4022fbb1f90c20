"""Augmentation by masking: every epoch asks the teacher about copies of the rows, too, with some tokens hidden.

    x'_t = [MASK] with probability p, else x_t        drawn for each copy in each step from (seed, step, row)

Tang et al. 2019 (https://arxiv.org/abs/1903.12136, section 3.3) hide words with p = 0.1, to see what a word adds to the answer. Student
and teacher get the same hidden tokens, so that the teacher runs on every batch. Whether a label still holds is not known: copies take
part in every loss but that of the labels. Special tokens and padding are never hidden. Left out: the same paper's words of equal part of
speech and its n-grams, and the words of a language model or of GloVe of TinyBERT (https://arxiv.org/abs/1909.10351, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from compress.core.config import Config
from compress.core.errors import InputError
from compress.models.tokenizer import load_tokenizer


class Augment(Config):
    """Copies of the text rows with some tokens hidden."""

    mask: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Probability that a token is hidden."""
    copies: Annotated[int, Field(ge=1, le=100)] = 1
    """Copies of each row in an epoch, beside the row itself; each epoch hides other tokens."""


@dataclass(frozen=True)
class Masking:
    """Hides tokens of the copies among the rows."""

    probability: float
    mask_id: int
    """The token that stands for a hidden one."""
    shown: tuple[int, ...]
    """Ids of special tokens, which are never hidden."""
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
        ids_bL = features["input_ids"]
        chosen_bL = np.zeros(ids_bL.shape, bool)
        for position in np.flatnonzero(indices >= self.originals):  # values are drawn from the left: padding changes none of them
            random = np.random.default_rng([self.seed, step, int(indices[position])])
            chosen_bL[position] = random.random(ids_bL.shape[1]) < self.probability
        hidden_bL = torch.from_numpy(chosen_bL).to(ids_bL.device) & ~torch.isin(ids_bL, torch.tensor(self.shown, device=ids_bL.device))
        return {**features, "input_ids": ids_bL.masked_fill(hidden_bL, self.mask_id)}


def masking_of(settings: Augment, folder: Path, seed: int, originals: int, key: str) -> Masking:
    """Returns the masking for the tokenizer of a checkpoint.

    Args:
        settings: How much is hidden.
        folder: The checkpoint.
        seed: Seed of the training.
        originals: Number of rows before their copies.
        key: Key path of the settings, for messages.

    Raises:
        InputError: Its tokenizer has no mask token.
    """
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.mask_token_id is None:
        raise InputError(f"{key}: given, and the tokenizer of the student has no mask token; leave it out, or give loss: mixkd")
    return Masking(settings.mask, tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), seed, originals)
