"""Padding: selects the activations of real tokens. Images have no padding.

The mask of an encoder-decoder's batch marks the tokens of the source. The decoder reads the target after a start token, which may be the
padding token itself (T5): its real tokens are all up to the last one that is not padding, and the first.

Models read the padding id of their config: decoders with a classification head look for the last token that is not padding, and RoBERTa
counts positions past it. So that id pads, and not the tokenizer's, which Transformers pads with and may differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.models.inputs.tokenizer_file import names_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MASKED: Final = -30000.0
"""Added to the scores of padding. exp(-30000 + score) is 0 in float32 as with the lowest float, and float16 can still hold it."""


def pad_token_id(config: PreTrainedConfig, folder: Path, tokenizer: Tokenizer) -> int:
    """Returns the id that pads the rows of a model: as its config says, or as its tokenizer does where the config says nothing.

    Args:
        config: Transformers config of the model.
        folder: Folder with its tokenizer files.
        tokenizer: The tokenizer.

    Raises:
        InputError: Neither names a padding token.
    """
    own = configured_pad(config)
    if own is not None:
        return own
    named = named_pad(folder, tokenizer)
    if named is None:
        raise InputError(
            f"{folder}",
            "no padding token",
            remedy="set pad_token in tokenizer_config.json to a token of its vocabulary that no text ends with",
        )
    return named


def named_pad(folder: Path, tokenizer: Tokenizer) -> int | None:
    """Returns the id of the padding token that the tokenizer files of a folder name."""
    name = names_of(folder, tokenizer).get("pad_token")
    return tokenizer.token_to_id(name) if isinstance(name, str) else None


def configured_pad(config: PreTrainedConfig) -> int | None:
    """Returns the padding id of a Transformers config; None where it has none that is a token."""
    own = getattr(config, "pad_token_id", None)
    return own if isinstance(own, int) and 0 <= own < config.vocab_size else None


def settle_padding(config: PreTrainedConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Gives a config without a padding id, in place, the one of its tokenizer: a batch needs it where a model looks for the last token.

    Args:
        config: Transformers config of a text model, for which `configured_pad` is None.
        folder: Folder with its tokenizer files.
        tokenizer: The tokenizer.

    Raises:
        InputError: There is no padding token, or texts end with it: the model would read the token before as the last one.
    """
    found = pad_token_id(config, folder, tokenizer)
    if tokenizer.encode("x").ids[-1:] == [found]:
        token = shown(tokenizer.id_to_token(found))
        raise InputError(
            f"{folder}",
            f"config.json has no pad_token_id, and the padding token {token} also ends every text",
            remedy="set pad_token in tokenizer_config.json to another token of its vocabulary",
        )
    config.pad_token_id = found


def padding_of(config: PreTrainedConfig, folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the `pad_token` of tokenizer_config.json that pads as the config of a model says; empty where the tokenizer's does.

    Args:
        config: Transformers config of a text model.
        folder: Folder with its tokenizer files.
        tokenizer: The tokenizer.
    """
    own = configured_pad(config)
    wanted = None if own is None else tokenizer.id_to_token(own)
    return {} if wanted is None or named_pad(folder, tokenizer) in (None, own) else {"pad_token": wanted}


def read_by_decoder(decoder_ids_bL: Tensor, pad: int) -> Tensor:
    """Returns which tokens of a decoder's inputs, int64 `[b, L]`, are not padding, bool `[b, L]`."""
    real_bL = decoder_ids_bL != pad
    before_last_bL = real_bL.flip(1).cummax(dim=1).values.flip(1)
    before_last_bL[:, 0] = True
    return before_last_bL


def mask_of(features: Mapping[str, Tensor], length: int) -> Tensor | None:
    """Returns which of `length` tokens, or frames of a waveform, are not padding, bool `[b, L]`; None where a batch has no mask.

    The mask of a waveform counts samples. Convolutions make fewer frames of them, evenly spaced: a frame is real where the sample at its
    place is, so that one that ends in padding counts.

    Args:
        features: Features of the batch.
        length: Tokens, or frames at any depth of the model.
    """
    mask = features.get("attention_mask")
    if mask is None:
        return None
    mask_bL = mask.bool()
    return mask_bL if mask_bL.shape[1] == length else mask_bL[:, torch.arange(length, device=mask.device) * mask_bL.shape[1] // length]


def real_rows(x: Tensor, features: Mapping[str, Tensor], channel_axis: int = -1) -> Tensor:
    """Returns the rows of [n, L, I] where `attention_mask` is set (`mask_of`), as [N, I]; all rows if `x` has another shape.

    Args:
        x: The tensor.
        features: Features of the batch that it was computed from.
        channel_axis: Axis of I; 1 for what a convolution reads and writes, [n, I, L] or [n, I, H, W].
    """
    x = x.movedim(channel_axis, -1)
    mask = features.get("attention_mask")
    if mask is not None and x.dim() == 3 and (x.shape[:2] == mask.shape or ("input_values" in features and len(x) == len(mask))):
        return x[mask_of(features, x.shape[1])]
    return x.reshape(-1, x.shape[-1])
