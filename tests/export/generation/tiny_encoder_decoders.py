"""Encoder-decoders with random weights and more layers in the decoder than in the encoder, their checkpoints, and sources for them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from export.generation.encoder_decoder_folder import write_encoder_decoder_folder
from export.generation.on_grids import on_grids
from foundation.artifacts.artifact import Artifact
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.next_token import labels_of
from foundation.models.checkpoint import load_float, save
from foundation.models.config import set_labels
from foundation.models.folder import Checkpoint
from foundation.models.library import quiet
from foundation.schemes.checkpoint import save_quantization
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, TokenPair
from tests.export.generation.genai_checkpoints import tokenizer
from tests.export.generation.test_codes import chosen
from tests.export.generation.tiny_decoders import VOCABULARY

LENGTH = 16
PAD, BOS, EOS, START = 0, 1, 2, 0
FIRST = 5
"""First token of every answer of mBART: the language."""
TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": START,
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, **TOKENS}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 96,
    "forced_eos_token_id": None,
    **TOKENS,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5Config(**T5),
    "mt5": lambda: transformers.MT5Config(**{**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": lambda: transformers.UMT5Config(**T5),
    "longt5": lambda: transformers.LongT5Config(**T5),
    "bart": lambda: transformers.BartConfig(**BART),
    "mbart": lambda: transformers.MBartConfig(**BART),
    "marian": lambda: transformers.MarianConfig(**{**BART, "decoder_vocab_size": VOCABULARY}),
    "pegasus": lambda: transformers.PegasusConfig(**BART),
    "m2m_100": lambda: transformers.M2M100Config(**BART),
    "blenderbot": lambda: transformers.BlenderbotConfig(**BART),
    "plbart": lambda: transformers.PLBartConfig(**BART),
}
DIFFERENT = ("t5", "bart", "marian")
"""Kinds whose ways differ most: a table of a side, positions of either side, embeddings of either side."""
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-encoder-decoders-")


def encoder_decoder(kind: str) -> Any:
    """Returns an encoder-decoder of this kind, always with the same weights, whose answers depend on the source."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    set_labels(config, "text-to-text", ())
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    spread = 3 if "t5" in kind else 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(spread * parameter if parameter.dim() > 1 else parameter + 0.05 * torch.randn_like(parameter))
    if kind == "mbart":
        model.generation_config.forced_bos_token_id = FIRST
    return model.eval()


def checkpoint(kind: str, scheme: str | None = None) -> Path:
    """Returns a checkpoint with the preprocessor's files; `scheme` quantizes all layers but the head to random scales."""
    return _checkpoint(kind, scheme)


def folder(kind: str, scheme: str | None = None) -> Path:
    """Returns the folder of a checkpoint that the engine opens."""
    return _folder(kind, scheme)


@cache
def _checkpoint(kind: str, scheme: str | None) -> Path:
    folder = Path(_SCRATCH.name, f"{kind}-{scheme}")
    folder.mkdir()
    if scheme is None:
        with quiet():
            encoder_decoder(kind).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        preprocessor().save(folder)
        return folder
    torch.manual_seed(2)
    model: Any = load_float(checkpoint(kind))
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            layers[name] = chosen(scheme, module.weight.detach())
            module.weight.data = layers[name].on_grid(module.weight.detach())
    save(model, checkpoint(kind), folder, "Quantized.")
    save_quantization(folder, layers, {})
    preprocessor().save(folder)
    return folder


@cache
def _folder(kind: str, scheme: str | None) -> Path:
    made = Path(_SCRATCH.name, f"{kind}-{scheme}-folder")
    write_encoder_decoder_folder(on_grids(Checkpoint(checkpoint(kind, scheme))), made, {})
    return made


def preprocessor() -> Preprocessor:
    """Returns the preprocessor of all kinds."""
    return Preprocessor(
        modality="text",
        input_names=("input_ids", "attention_mask", "decoder_input_ids"),
        labels=(),
        task="text-to-text",
        max_length=32,
        buckets=(16, 32),
        pad_token_id=PAD,
        decoder_start_token_id=START,
        tokenizer=tokenizer().backend_tokenizer,
    )


def sources(lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Returns sources of random tokens, int32."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]


def split(count: int, seed: int = 0) -> Split:
    """Returns pairs of sources of 1 to 9 random tokens with one answer."""
    rows = [TokenPair(source, np.array([7, EOS], np.int32)) for source in sources(tuple(1 + number % 9 for number in range(count)), seed)]
    return Split(list(rows), labels_of(rows, LENGTH - 1))


def context(kind: str, folder: Path) -> Context:
    """Returns what stages share: 40 pairs to learn from, and the float checkpoint as the teacher."""
    teacher = Artifact(checkpoint(kind), {"id": "baseline", "digest": kind, "stage": "model"})
    data, target = Data(split(40), split(8, 1), split(8, 2), ()), Target(sequence_lengths=(LENGTH,))
    made = Context("text-to-text", data, LENGTH, target, 0, ConsoleProgress("silent"), folder / "scratch")
    return replace(made, teachers=(teacher,), checkpoints={"baseline": teacher})
