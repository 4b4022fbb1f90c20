"""A tiny model of sentence-transformers with random weights, and pairs of made-up sentences with scores."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

from tests.export import sentiment

WIDTH = 32


def folder(
    out: Path,
    layers: int = 1,
    *,
    mode: str = "mean_tokens",
    normalize: bool = True,
    prompt: str = "",
    dropout: float = 0.1,
    **pooling: Any,
) -> Path:
    """Writes a folder as sentence-transformers does: BERT, a pooling, and the module Normalize if asked for."""
    shutil.copytree(sentiment.checkpoint(), out, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    words = len(sentiment.SPECIALS + sentiment.WORDS)
    config = BertConfig(
        vocab_size=words, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=sentiment.LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    sentiment.drawn(BertModel, config).save_pretrained(out)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kinds[path]}"} for i, path in enumerate(kinds)
    ]
    (out / "modules.json").write_text(json.dumps(modules))
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, f"pooling_mode_{mode}": True, **pooling}))
    (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": sentiment.LENGTH, "do_lower_case": False}))
    prompts = {"prompts": {"query": prompt}, "default_prompt_name": "query"} if prompt else {}
    (out / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return out


def t5_folder(out: Path, *, gated: bool = False, dense: Mapping[str, Any] | None = None, layers: int = 2) -> Path:
    """Writes a folder like sentence-t5: the encoder of T5, a mean, a linear layer and the length 1.

    Args:
        out: The folder.
        gated: Whether feed-forward networks have a gate, as in v1.1.
        dense: Settings of the linear layer that differ: `out_features`, `bias` and `activation_function`.
        layers: Layers of the encoder.
    """
    folder(out)
    config = T5Config(
        vocab_size=len(sentiment.SPECIALS + sentiment.WORDS), d_model=WIDTH, d_kv=8, num_heads=4, d_ff=64, num_layers=layers,
        feed_forward_proj="gated-gelu" if gated else "relu",
    )  # fmt: skip
    sentiment.drawn(T5EncoderModel, config).save_pretrained(out)
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**raw, "is_encoder_decoder": True}))  # as the Hub's files say
    modules = json.loads((out / "modules.json").read_text())
    layer = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (out / "modules.json").write_text(json.dumps([*modules[:2], layer, {**modules[2], "idx": 3, "name": "3", "path": "3_Normalize"}]))
    (out / "2_Dense").mkdir()
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    settings = {"in_features": WIDTH, "out_features": 24, "bias": False, **identity, **(dense or {})}
    (out / "2_Dense" / "config.json").write_text(json.dumps(settings))
    weights = {"linear.weight": torch.randn(settings["out_features"], WIDTH)}
    weights |= {"linear.bias": torch.randn(settings["out_features"])} if settings["bias"] else {}
    save_file(weights, out / "2_Dense" / "model.safetensors")
    return out


def pairs(out: Path, train: int = 300, test: int = 40, names: tuple[str, str, str] = ("first", "second", "score")) -> Path:
    """Writes train.csv and test.csv: pairs, and as score the share of words that they have in common, from 0 to 5."""
    out.mkdir()
    texts = iter(sentiment.rows(2 * (train + test)))
    for split, count in {"train": train, "test": test}.items():
        with (out / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for _ in range(count):
                one, other = next(texts), next(texts)
                ours, theirs = set(one.split()), set(other.split())
                writer.writerow([one, other, round(5 * len(ours & theirs) / len(ours | theirs), 2)])
    return out


def triplets(out: Path, train: int = 300, validation: int = 40, test: int = 40) -> Path:
    """Writes train, validation and test as jsonl: an anchor, a positive that shares its first word, and a negative that does not."""
    out.mkdir()
    texts = list(dict.fromkeys(sentiment.rows(8 * (train + validation + test))))
    first = [text.split()[0] for text in texts]
    rows = []
    for place, text in enumerate(texts):
        near, far = (
            [other for other in range(place + 1, min(place + 40, len(texts))) if (first[other] == first[place]) == same]
            for same in (True, False)
        )
        if near and far:
            rows.append({"anchor": text, "positive": texts[near[0]], "negative": texts[far[0]]})
    assert len(rows) >= train + validation + test, len(rows)
    start = 0
    for split, count in {"train": train, "validation": validation, "test": test}.items():
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[start : start + count]))
        start += count
    return out


def recipe(name: str, model: Path, data: Path) -> dict[str, Any]:
    """Returns name, model and data; target and stages are the caller's."""
    columns = {"text": "first", "text_pair": "second", "label": "score"}
    return {
        "name": name,
        "model": {"path": str(model), "task": "sentence-embedding"},
        "data": {"path": str(data), "columns": columns, "max_length": sentiment.LENGTH},
    }


def vectors(count: int, width: int = 4, seed: int = 0) -> np.ndarray:
    """Returns random vectors, float32 [count, width]."""
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
