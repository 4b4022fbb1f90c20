"""Checkpoints of tiny decoders with a tokenizer of their own, float or quantized, and the folders that OpenVINO GenAI reads."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from export.generation.genai_folder import write_genai_folder
from export.generation.on_grids import on_grids
from foundation.models.checkpoint import load_float, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import with_separate_experts
from foundation.models.library import quiet
from foundation.schemes.checkpoint import save_quantization
from tests.export.generation.test_codes import chosen
from tests.export.generation.tiny_decoders import VOCABULARY, decoder

_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-genai-")


def checkpoint(kind: str, scheme: str | None = None) -> Path:
    """Returns a checkpoint; `scheme` quantizes the layers of its blocks to random scales."""
    return _checkpoint(kind, scheme)


def genai_folder(kind: str, scheme: str | None = None) -> Path:
    """Returns the folder of a checkpoint."""
    return _genai_folder(kind, scheme)


@cache
def _checkpoint(kind: str, scheme: str | None) -> Path:
    folder = Path(_SCRATCH.name, f"{kind}-{scheme}")
    folder.mkdir()
    if scheme is None:
        with quiet():
            decoder(kind).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return folder
    torch.manual_seed(2)
    model: Any = with_separate_experts(load_float(checkpoint(kind)))
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            layers[name] = chosen(scheme, module.weight.detach())
            module.weight.data = layers[name].on_grid(module.weight.detach())
    save(model, checkpoint(kind), folder, "Quantized.")
    save_quantization(folder, layers, {})
    return folder


@cache
def _genai_folder(kind: str, scheme: str | None) -> Path:
    folder = Path(_SCRATCH.name, f"{kind}-{scheme}-genai")
    write_genai_folder(on_grids(Checkpoint(checkpoint(kind, scheme))), folder, {})
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of single letters and digits; every id of the vocabulary is a token."""
    words = {chr(ord("a") + index) if index < 26 else f"<{index}>": index for index in range(VOCABULARY)}
    made = Tokenizer(models.BPE(words, [], unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="a", pad_token="a", bos_token="b")


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Returns prompts of random tokens, int32."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]
