"""Decoders with random weights, one for each way to place positions, to share keys and values, and to mix experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 160
SPREAD = 6
"""Factor of the weights: those of a fresh model are so small that every logit is nearly the same."""
TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 96, "max_position_embeddings": 256}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
WINDOW = 8

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **TOKENS),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**WIDE),
    "opt": lambda: transformers.OPTConfig(ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=256, **SIZES),
    "bloom": lambda: transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, **TOKENS),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(sliding_window=WINDOW, **GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, **GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=16, **GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(head_dim=16, sliding_window=WINDOW, **GROUPED),
    "gemma3": lambda: transformers.Gemma3TextConfig(head_dim=16, sliding_window=WINDOW, **GROUPED),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "falcon": lambda: transformers.FalconConfig(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **GROUPED),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, **GROUPED
    ),
}


def decoder(kind: str) -> PreTrainedModel:
    """Returns a decoder of this kind, always with the same weights."""
    return with_spread_weights(CONFIGS[kind]())


def with_spread_weights(config: Any) -> PreTrainedModel:
    """Returns the decoder of a config, always with the same weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(SPREAD * parameter if parameter.dim() > 1 else parameter + 0.05 * torch.randn_like(parameter))
        model.get_input_embeddings().weight.div_(SPREAD)  # tied to the head, large ones would let every token be followed by itself
    model.eval()
    return model
