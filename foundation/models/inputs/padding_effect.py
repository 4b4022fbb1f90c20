"""How far the answers of a text model depend on the padding behind a row, which an attention mask should hide.

    effect = max |f(row with k padded tokens) - f(row)| / max |f(row)|        rows of random tokens, by their logits f

Rows are padded to a bucket, and in a server to the longest row of their batch. So a model with an effect answers otherwise by its bucket
and by its neighbours. In Transformers 5.23 the attention mask does not reach every operation of ConvBERT and Nystromformer (convolutions),
CANINE and Funnel (pooling), YOSO (hashes) and XLNet, whose head reads the last position (findings/transformers_padding_seen.sh).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foundation.models.config import most_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LENGTHS, PADDED = (7, 11), (1, 8)
"""Tokens of the rows, and how many are padded behind them."""
SEEN = 1e-4
"""An effect that rounding does not have: of models that hide padding it is below 1e-5."""


def padding_effect(config: PreTrainedConfig, answer: Callable[[Mapping[str, Tensor]], Tensor]) -> float:
    """Returns the effect of padding, 0 for a model that has none.

    Args:
        config: The model's Transformers config.
        answer: Maps features to logits, float32 `[b, C]`.
    """
    pad, end = config.pad_token_id or 0, getattr(config, "eos_token_id", None)
    generator, longest = torch.Generator().manual_seed(0), most_tokens(config)
    found = [0.0]
    for length in LENGTHS:
        row = torch.randint(0, config.vocab_size, (1, length), generator=generator)
        row[(row == pad) | (row == end)] = 3 if 3 not in (pad, end) else 4
        if isinstance(end, int) and end < config.vocab_size:
            row[0, -1] = end  # some heads read the state of the end token
        alone = _answered(answer, row, torch.ones_like(row))
        for count in PADDED:
            if longest is None or length + count <= longest:
                ids = torch.nn.functional.pad(row, (0, count), value=pad)
                padded = _answered(answer, ids, torch.nn.functional.pad(torch.ones_like(row), (0, count)))
                found.append(float((padded - alone).abs().max() / alone.abs().max().clamp(min=1e-6)))
    return max(found)


def _answered(answer: Callable[[Mapping[str, Tensor]], Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return answer({"input_ids": ids, "attention_mask": mask})
