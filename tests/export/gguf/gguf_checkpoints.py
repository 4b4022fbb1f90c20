"""Tiny decoders and an embedder with tokenizers of their own, quantized or not, for files of GGUF."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from export.gguf.vocabulary import LLAMA3, QWEN2
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.scales import Scales
from foundation.schemes.tables import save_tables
from quantize.embeddings import quantize_tables
from tests.export.gguf.test_blocks import grid

SCRATCH = TemporaryDirectory(prefix="gguf-")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes of which every row has whole blocks of 256."""
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(vocab_size=300, **GROUPED),
    "wide llama": lambda: transformers.LlamaConfig(vocab_size=300, **{**GROUPED, **WIDE}),
    "llama3": lambda: transformers.LlamaConfig(
        vocab_size=300,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        **GROUPED,
    ),
    "qwen2": lambda: transformers.Qwen2Config(vocab_size=300, **{name: size for name, size in GROUPED.items() if name != "head_dim"}),
    "qwen3": lambda: transformers.Qwen3Config(vocab_size=300, **GROUPED),
    "mistral": lambda: transformers.MistralConfig(vocab_size=300, sliding_window=None, **GROUPED),
}
TEXTS = ["It's 1,234 o'clock; the cafe costs 56 EUR.\n\n  Two  spaces", "we'll see what they've done to the towns and the rivers"]
END, CHAT = "<|end|>", "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level(rules: str) -> Tokenizer:
    """A byte-level BPE with the rules that llama.cpp has under a name."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules in ("gpt-2", "smollm"))
    split = {"llama-bpe": LLAMA3, "smaug-bpe": LLAMA3, "qwen2": QWEN2}.get(rules)
    chain: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules == "smollm" else []
    chain += [] if split is None else [pre_tokenizers.Split(Regex(split[1]), "isolated", invert=False)]
    made = Tokenizer(models.BPE(ignore_merges=rules == "llama-bpe"))
    made.pre_tokenizer = pre_tokenizers.Sequence([*chain, plain]) if chain else plain
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    if rules == "llama-bpe":
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    return made


def word_piece() -> Tokenizer:
    """An uncased tokenizer of BERT's kind."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(TEXTS * 4, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False))
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: object) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "layer" in name}


def quantize_layers(model: nn.Module, folder: Path, scheme: str, group: int) -> None:
    scales: dict[str, Scales] = {}
    for name, layer in linears(model).items():
        scales[name] = grid(scheme, layer.weight.detach(), group)
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    save_quantization(folder, scales, {})


@cache
def decoder(kind: str, scheme: str = "", group: int = 32, tables: bool = False, rules: str = "smollm") -> Path:
    """Writes a decoder whose weights are large enough to give logits of size."""
    torch.manual_seed(0)
    folder = Path(SCRATCH.name) / f"{kind}-{scheme}-{group}-{tables}-{rules}"
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(5 * parameter if parameter.ndim > 1 else parameter + 0.05 * torch.randn_like(parameter))
    folder.mkdir()
    if scheme:
        quantize_layers(model, folder, scheme, group)
    if tables:
        save_tables(folder, quantize_tables(model)[0])
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    save_tokenizer(folder, byte_level(rules), bos_token="<s>", eos_token=END, chat_template=CHAT)
    return folder


@cache
def embedder(scheme: str = "", pooling: str = "mean") -> Path:
    """Writes a BERT whose answers are vectors of texts."""
    torch.manual_seed(0)
    folder = Path(SCRATCH.name) / f"bert-{scheme}-{pooling}"
    config = transformers.BertConfig(vocab_size=100, max_position_embeddings=40, **SIZES)
    model = transformers.BertModel(config, add_pooling_layer=False)
    folder.mkdir()
    if scheme:
        quantize_layers(model, folder, scheme, 32)
    model.save_pretrained(folder)
    settings = {"pooling": pooling, "normalize": True, "dimensions": None, "prompt": "", "max_length": 40}
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "sentence_embedding": settings}))
    save_tokenizer(folder, word_piece(), pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return folder
