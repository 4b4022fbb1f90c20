"""What engines that generate are asked: the starts of evaluation blocks, and the greedy answers of torch to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers.cache_utils import DynamicCache

from compress.core.config import Config
from compress.core.errors import InputError
from compress.standalone.preprocess import Row

PROMPT_TOKENS = 32
"""Tokens of a prompt: a quarter of a usual block."""
BATCH_SIZE = 16
Tokens = NDArray[np.int32]


class Generation(Config):
    """How engines that answer prompts keep keys and values, and what they are asked to prove that they are right."""

    kv_cache: Literal["float", "fp16", "int8"] = "float"
    """What keys and values are kept in. float: the precision that the engine computes in, fp32 or bf16; fp16: half the memory of fp32;
    int8: a quarter. Less than float changes answers; the report shows by how much."""
    prompts: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Number of prompts, the starts of evaluation blocks."""
    tokens: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Tokens of each answer, taken greedily; together with the prompt at most data.max_length."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of equal length, and how long the answers are."""

    ids: Tokens
    """int32 [n, P]."""
    tokens: int
    """T, tokens of an answer."""

    @classmethod
    def of_blocks(cls, blocks: Sequence[Row], settings: Generation, max_length: int) -> Prompts:
        """Takes the starts of evenly spaced blocks.

        Args:
            blocks: Token ids, int32 [L] each.
            settings: How many, and how long the answers may be.
            max_length: Most tokens that the model reads.

        Raises:
            InputError: No block is long enough.
        """
        length = min(PROMPT_TOKENS, max_length // 2)
        long = [block[:length] for block in blocks if isinstance(block, np.ndarray) and len(block) >= length]
        if not long or length < 1:
            raise InputError(f"data: no evaluation block of at least {length} tokens to take prompts from; give longer texts")
        chosen = np.unique(np.linspace(0, len(long) - 1, min(settings.prompts, len(long))).round().astype(np.int64))
        return cls(np.stack([long[index] for index in chosen]).astype(np.int32), min(settings.tokens, max_length - length))


def greedy(model: nn.Module, prompts: Prompts) -> Tokens:
    """Returns the most likely tokens of a decoder, one after the other, int32 [n, T]; end tokens do not end an answer.

    Args:
        model: A causal language model of Transformers in eval mode, float or quantized.
        prompts: The prompts.
    """
    device = next(iter(model.parameters())).device
    parts = []
    with torch.inference_mode():
        for start in range(0, len(prompts.ids), BATCH_SIZE):
            ids = torch.from_numpy(prompts.ids[start : start + BATCH_SIZE].astype(np.int64)).to(device)
            parts.append(_greedy(model, ids, prompts.tokens).cpu().numpy().astype(np.int32))
    return np.concatenate(parts)


def _greedy(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    cache, chosen, new = DynamicCache(config=model.config), [], ids
    for _ in range(tokens):
        logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
        new = logits[:, -1:].argmax(dim=-1)
        chosen.append(new)
    return torch.cat(chosen, dim=1)


def save_answers(path: Path, prompts: Prompts, tokens: Tokens) -> None:
    """Writes `prompts` int32 [n, P] and `tokens` int32 [n, T] to a safetensors file."""
    save_file({"prompts": np.ascontiguousarray(prompts.ids), "tokens": np.ascontiguousarray(tokens)}, path)


def load_answers(path: Path) -> tuple[Tokens, Tokens]:
    """Returns prompts int32 [n, P] and tokens int32 [n, T] of a file written by `save_answers`."""
    found = load_file(path)
    return found["prompts"], found["tokens"]
