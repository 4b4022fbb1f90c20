"""Rows without padding: the tokens of all sequences one after another, and where each sequence begins.

    ids [2, 5]     a b c . .      tokens   a b c d e f g h
                   d e f g h      start    0 3 8

What is computed of a token does not depend on the sequences next to its own. CUDA graphs have fixed sizes: `filled` adds tokens that belong
to no sequence, and sequences without tokens.

Shape suffixes: n rows, L tokens of a padded row, T tokens of all rows, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from foundation.core.arrays import Features
from foundation.core.errors import InputError


@dataclass(frozen=True)
class Rows:
    """Packed rows."""

    word: Tensor
    """Token ids, int64 [T]."""
    kind: Tensor
    """Token types, int64 [T]."""
    position: Tensor
    """Positions, int64 [T]."""
    start: Tensor
    """int32 [B + 1]: sequence b has the tokens start[b] to start[b + 1] - 1."""
    first: Tensor
    """First token of each sequence, int64 [B]; any token for a sequence without one."""
    is_filled: bool = False
    """Whether there are tokens that belong to no sequence."""
    pixels: Tensor | None = None
    """Images, float32 [B, C, H, W], each of which has as many tokens; None for text."""

    @property
    def sequences(self) -> int:
        """B."""
        return len(self.start) - 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names of the fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Rows:
        """Returns the rows on a device."""
        return Rows(**{name: tensor.to(device) for name, tensor in self.tensors.items()}, is_filled=self.is_filled)


@dataclass(frozen=True)
class Limits:
    """Bounds of the ids, so that no kernel reads beyond a table."""

    words: int
    kinds: int
    longest: int
    """Most tokens of a sequence."""
    first_position: int
    """Position of the first token."""


def pack(features: Features, limits: Limits) -> Rows:
    """Returns the rows of a batch without their padding, on the CPU.

    Args:
        features: `input_ids` int64 [n, L]; `attention_mask` of the same shape, 1 for tokens and 0 for the padding after them, or none
            where nothing is padded; `token_type_ids`, or none for type 0.
        limits: Limits of ids and lengths.

    Raises:
        InputError: A row has no token, has padding before or between its tokens, is too long, or an id is beyond its table.
    """
    ids_nL = np.asarray(features["input_ids"], np.int64)
    mask_nL = np.asarray(features.get("attention_mask", np.ones_like(ids_nL))) != 0
    kinds_nL = np.asarray(features.get("token_type_ids", np.zeros_like(ids_nL)), np.int64)
    lengths_n = mask_nL.sum(axis=1)
    longest = ids_nL.shape[1]
    behind_nL = np.arange(longest) >= lengths_n[:, None]
    if not lengths_n.all() or (mask_nL == behind_nL).any():
        raise InputError(
            "attention_mask", "other values given", "1 for the tokens of a row, at least one, and 0 for the padding behind them is allowed"
        )
    if lengths_n.max(initial=0) > limits.longest:
        raise InputError("rows", f"a row has {lengths_n.max()} tokens", f"this model takes {limits.longest}")
    word, kind = ids_nL[mask_nL], kinds_nL[mask_nL]
    for name, given, size in (("input_ids", word, limits.words), ("token_type_ids", kind, limits.kinds)):
        if len(given) and (given.min() < 0 or given.max() >= size):
            raise InputError(name, f"{given.min()} to {given.max()} given", f"0 to {size - 1} is allowed")
    position = np.broadcast_to(np.arange(longest) + limits.first_position, mask_nL.shape)[mask_nL]
    start = np.concatenate([[0], lengths_n.cumsum()])
    word_T, kind_T, position_T, start_B, first_B = (
        torch.from_numpy(np.ascontiguousarray(part)) for part in (word, kind, position, start.astype(np.int32), start[:-1])
    )
    return Rows(word_T, kind_T, position_T, start_B, first_B)


def images(features: Features, shape: tuple[int, int, int], tokens: int) -> Rows:
    """Returns the rows of images, on the CPU.

    Args:
        features: `pixel_values` float32 [n, C, H, W].
        shape: C, H and W of the model.
        tokens: Tokens of an image.

    Raises:
        InputError: The images have another shape.
    """
    pixels = np.ascontiguousarray(features["pixel_values"], np.float32)
    if pixels.shape[1:] != shape or not len(pixels):
        raise InputError("pixel_values", f"{list(pixels.shape)} given", f"at least one image of {list(shape)} is allowed")
    start = torch.arange(len(pixels) + 1) * tokens
    unused = torch.zeros(len(pixels) * tokens, dtype=torch.int64)
    return Rows(unused, unused, unused, start.int(), start[:-1], pixels=torch.from_numpy(pixels))


def filled(rows: Rows, tokens: int, sequences: int) -> Rows:
    """Returns the rows filled up to so many tokens and sequences; the sequences of `rows` stay the first ones."""
    more, empty = tokens - len(rows.word), sequences - rows.sequences
    word, kind = (torch.nn.functional.pad(part, (0, more)) for part in (rows.word, rows.kind))
    position = torch.nn.functional.pad(rows.position, (0, more), value=int(rows.position[0]))
    start = torch.cat([rows.start, rows.start[-1:].expand(empty)])
    pixels = None if rows.pixels is None else torch.nn.functional.pad(rows.pixels, (0, 0, 0, 0, 0, 0, 0, empty))
    return Rows(word, kind, position, start, torch.nn.functional.pad(rows.first, (0, empty)), is_filled=True, pixels=pixels)
