"""The embedding of a model with virtual tokens while these are learned (`foundation.training.few_parameters.prompt_tuning`).

Tensor names: b rows, L tokens, k virtual tokens, D channels of the embedding.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn


class VirtualEmbedding(nn.Module):
    """Embeds tokens of the vocabulary by its matrix, and ids after them by a module of peft.

    Args:
        tokens: The embedding of the vocabulary.
        prompt: Maps the numbers of the virtual tokens, int64 `[k]`, to embeddings, float `[k, D]`.
        count: k.
    """

    places: Tensor

    def __init__(self, tokens: nn.Embedding, prompt: nn.Module, count: int) -> None:
        super().__init__()
        self.tokens, self.prompt = tokens, prompt
        self.register_buffer("places", torch.arange(count, device=tokens.weight.device), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The matrix of the vocabulary, of which models ask device and number format."""
        return self.tokens.weight

    def forward(self, ids_bL: Tensor) -> Tensor:
        """Returns the embeddings, float `[b, L, D]`, of ids of the vocabulary and of virtual tokens, int64 `[b, L]`."""
        numbers_bL = ids_bL - self.tokens.num_embeddings
        rows_kD = self.prompt(self.places).to(self.tokens.weight.dtype)
        known = self.tokens(ids_bL.masked_fill(numbers_bL >= 0, 0))
        return torch.where((numbers_bL >= 0)[..., None], rows_kD[numbers_bL.clamp(min=0)], known)

    def merged(self) -> nn.Embedding:
        """Returns one embedding, whose last k rows are the virtual tokens; `[vocabulary + k, D]`."""
        rows_kD = self.prompt(self.places).to(self.tokens.weight.dtype)
        weight = torch.cat([self.tokens.weight, rows_kD]).detach()
        made = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        made.padding_idx, made.weight = self.tokens.padding_idx, nn.Parameter(weight)
        return made


def prompt_module(count: int, init: Literal["vocabulary", "random"], encoder: str | None, embedding: nn.Embedding) -> nn.Module:
    """Returns the module of peft that makes the embeddings of virtual tokens.

    Args:
        count: Number of virtual tokens.
        init: How they start, without an encoder.
        encoder: Network of P-tuning: mlp or lstm; None for prompt tuning.
        embedding: The embedding of the vocabulary.
    """
    import peft
    from peft.tuners.prompt_tuning.config import PromptTuningInit

    library: Any = peft  # without types
    width = embedding.weight.shape[1]
    common: dict[str, Any] = {"num_virtual_tokens": count, "token_dim": width, "num_transformer_submodules": 1}
    if encoder is None:
        start = PromptTuningInit.SAMPLE_VOCAB if init == "vocabulary" else PromptTuningInit.RANDOM
        made: nn.Module = library.PromptEmbedding(library.PromptTuningConfig(prompt_tuning_init=start, **common), embedding)
        return made
    network = {"encoder_reparameterization_type": encoder.upper(), "encoder_hidden_size": width, "encoder_dropout": 0.0}
    encoded: nn.Module = library.PromptEncoder(library.PromptEncoderConfig(**network, **common))
    return encoded
