"""Tiny models of every kind that is pruned, checkpoints of them, rows that need no files, and a progress that keeps what it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from foundation.stage.context import Context
from tests.told import Told
from tests.word_tokenizer import write_tokenizer

WORDS = ["bad", "dull", "film", "fine", "good", "great", "hate", "like", "love", "movie", "not", "poor", "the", "very", "was"]
VOCABULARY = len(WORDS) + 5
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0}
SIZES = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = {**SIZES, **TEXT, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "bos_token_id": 2, "eos_token_id": 3}
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **changes: transformers.BertConfig(**{**TEXT, **SIZES, **changes}),
    "roberta": lambda **changes: transformers.RobertaConfig(
        **{**TEXT, **SIZES, "type_vocab_size": 1, "bos_token_id": 2, "eos_token_id": 3, **changes}
    ),
    "distilbert": lambda **changes: transformers.DistilBertConfig(
        **{**TEXT, "n_layers": 3, "dim": 16, "n_heads": 4, "hidden_dim": 24, **changes}
    ),
    "gpt2": lambda **changes: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=40,
        n_layer=3,
        n_embd=16,
        n_head=4,
        n_inner=24,
        **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "scale_attn_by_inverse_layer_idx": True, **changes},
    ),
    "vit": lambda **changes: transformers.ViTConfig(**{**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1, **changes}),
    "llama": lambda **changes: transformers.LlamaConfig(**{**GROUPED, **changes}),
    "mixtral": lambda **changes: transformers.MixtralConfig(**{**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}),
}
KINDS = tuple(CONFIGS)
GENERATES = ("gpt2", "llama", "mixtral")


def task_of_kind(kind: str) -> Task:
    return "image-classification" if kind == "vit" else "text-generation" if kind in GENERATES else "text-classification"


@cache
def _model(kind: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    config = with_class(CONFIGS[kind](**dict(changes)), task_of_kind(kind))
    with torch.random.fork_rng():
        torch.manual_seed(len(changes))
        model = with_linears(auto_class(task_of_kind(kind)).from_config(config)).eval()
        model.config.use_cache = False
        with torch.no_grad():  # larger than drawn, so that logits, hidden states and attention differ from row to row
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.1))
    return model


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Gives a model of 3 layers of one of `KINDS`, config keys changed as asked; a new one each time."""
    return lambda kind, **changes: copy.deepcopy(_model(kind, tuple(sorted(changes.items()))))


@pytest.fixture(scope="session")
def make_features() -> Callable[..., dict[str, torch.Tensor]]:
    """Gives random inputs of a kind of model: `rows` of up to `length` tokens, each row after the first shorter."""

    def make(kind: str, rows: int = 3, length: int = 9, seed: int = 0, vocabulary: Iterable[int] = range(5, VOCABULARY)) -> Any:
        random = np.random.default_rng(seed)
        if kind == "vit":
            return {"pixel_values": torch.from_numpy(random.standard_normal((rows, 1, 8, 8), np.float32))}
        ids = random.choice(list(vocabulary), (rows, length))
        if kind in GENERATES:
            return {"input_ids": torch.from_numpy(ids)}
        mask = np.arange(length) < np.maximum(2, length - 2 * np.arange(rows))[:, None]
        return {"input_ids": torch.from_numpy(np.where(mask, ids, 0)), "attention_mask": torch.from_numpy(mask.astype(np.int64))}

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Any]) -> Callable[..., Path]:
    """Gives the folder of a checkpoint with a tokenizer or an image processor; never written to."""
    from foundation.artifacts.artifact import write_json
    from foundation.models.checkpoint import save
    from foundation.models.inputs.images import image_settings

    @cache
    def write(kind: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        model = make_model(kind, **changes)
        names = ("score",) if model.config.num_labels == 1 else ("negative", "positive")
        model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
        save(model, tmp_path_factory.mktemp("nothing"), folder, "drawn")
        if kind == "vit":
            write_json(folder / "preprocessor_config.json", image_settings(model.config))
        else:
            write_tokenizer(folder, WORDS)
        return folder

    return write


def sentences(num_rows: int, seed: int) -> Split:
    """Rows that are positive where they hold 'great'."""
    draw = np.random.default_rng(seed)
    words = [list(draw.choice(WORDS, draw.integers(1, 9))) for _ in range(num_rows)]
    rows = [" ".join([*row, "great" if i % 2 else "poor"]) for i, row in enumerate(words)]
    return Split(list(rows), ClassIds(np.array(["great" in row.split() for row in rows], np.int64)))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def make_context(checkpoint: Callable[..., Path], told: Told, tmp_path: Path) -> Callable[..., Context]:
    """Gives a context of a run whose baseline is a checkpoint."""

    def make(teacher: Path | None = None, made_by: str = "model") -> Context:
        return context_of(teacher or checkpoint("bert"), tmp_path / "scratch", told, made_by)

    return make


def context_of(teacher: Path, scratch: Path, told: Told, made_by: str = "model") -> Context:
    """Returns a context of a run whose baseline is a checkpoint."""
    splits = [sentences(num_rows, seed) for seed, num_rows in enumerate((48, 20, 20))]
    data = Data(splits[0], splits[1], splits[2], ("negative", "positive"))
    baseline = Artifact(teacher, {"id": "baseline", "stage": made_by, "digest": "0" * 64})
    target = Target(sequence_lengths=(8,))
    return Context("text-classification", data, 16, target, 0, told, scratch, {"baseline": baseline}, teachers=(baseline,))
