"""Tiny causal language models with random weights, large enough to give logits of size, and blocks of random ids for them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from foundation.data.splits import Data, Split
from foundation.labels.next_token import labels_of
from foundation.models.library import quiet

LENGTH, VOCABULARY = 12, 64
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **other: transformers.LlamaConfig(**{**LLAMA, **other}),
    "mistral": lambda **other: transformers.MistralConfig(**{**LLAMA, "sliding_window": 5, **other}),
    "qwen2": lambda **other: transformers.Qwen2Config(
        **{**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, **other}
    ),
    "gpt2": lambda **other: transformers.GPT2Config(
        **{
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 16,
            "vocab_size": VOCABULARY,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **other,
        }
    ),
}
MIXTURES: dict[str, Callable[..., Any]] = {
    "mixtral": lambda **other: transformers.MixtralConfig(**{**LLAMA, "num_local_experts": 4, **other}),
}
"""Apart: their experts are stacked, so that they are neither linked nor streamed as the others are."""


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float32, shard: str = "40KB", **settings: Any) -> Path:
    """Writes a model of random weights and a tokenizer, and returns the folder, which is made anew."""
    from tokenizers import Tokenizer, models

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config({**CONFIGS, **MIXTURES}[kind](use_cache=False, **settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(6 * parameter if parameter.dim() > 1 else parameter + 0.3 * torch.randn_like(parameter))
    with quiet():
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}\n")
    return folder


def blocks(count: int, seed: int, last: int = LENGTH) -> Split:
    """Returns blocks of random ids, the last one of another length."""
    random = np.random.default_rng(seed)
    rows = [random.integers(0, VOCABULARY, LENGTH if i < count - 1 else last).astype(np.int32) for i in range(count)]
    return Split(list(rows), labels_of(rows, LENGTH - 1))


def data() -> Data:
    return Data(blocks(40, 0), blocks(5, 1), blocks(9, 2, last=7), ())
