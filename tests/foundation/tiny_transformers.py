"""Tiny models with random weights of two blocks, one for each way in which Transformers writes attention and residuals."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

LENGTH = 9
_SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}
_TEXT = {**_SIZES, "vocab_size": 60, "max_position_embeddings": 40}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40, "num_labels": 3}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**_TEXT),
    "roberta": lambda: transformers.RobertaConfig(**_TEXT),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=40, num_labels=3
    ),
    "vit": lambda: transformers.ViTConfig(**_SIZES, image_size=12, patch_size=4),
    "gpt2": lambda: transformers.GPT2Config(**_GPT, **_SPECIAL),
    "llama": lambda: transformers.LlamaConfig(**_TEXT, num_key_value_heads=2, **_SPECIAL),
}
FAMILIES = tuple(CONFIGS)


def model(family: str, seed: int = 0) -> nn.Module:
    """Returns a classifier with weights large enough to give logits of size, in evaluation mode."""
    auto = transformers.AutoModelForImageClassification if family == "vit" else transformers.AutoModelForSequenceClassification
    made: nn.Module = auto.from_config(CONFIGS[family]()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.4 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    return made


def features(family: str, seed: int = 0) -> dict[str, Tensor]:
    """Returns three rows, of text padded to one length at the end."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 12, 12, generator=generator)}
    mask = (torch.arange(LENGTH)[None] < torch.tensor([LENGTH, 7, 4])[:, None]).long()
    ids = torch.randint(3, 60, (3, LENGTH), generator=generator)
    pad = 1 if family == "roberta" else 0
    return {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask}
