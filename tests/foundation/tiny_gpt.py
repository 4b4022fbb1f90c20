"""Tiny causal language models with random weights, the text that they read, and its blocks: made once for all tests, left alone by them."""

import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from compress.reading.load import load_data
from foundation.core.target import Target
from foundation.data.config import DataConfig
from foundation.data.splits import Data
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.standalone.preprocess import Preprocessor

LENGTH, VOCABULARY = 16, 300
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH},
    "mistral": {
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
        "max_position_embeddings": LENGTH,
    },
}
"""Models whose products are those that their graphs hold."""
SHALLOW = {"mistral of one layer": {**CONFIGS["mistral"], "num_hidden_layers": 1}}
"""For tests that trace: a layer takes two seconds."""
MIXTURES = {
    "mixtral": {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "max_position_embeddings": LENGTH,
    },
}
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-gpt-")


def text(lines: int, seed: int = 0) -> str:
    """Returns lines of some words each; what follows a word depends on the word, so that there is something to learn."""
    words = re.findall(r"\w+", "the old king went down to sea and saw a ship of gold under grey water there he wept for all his lost men")
    random = np.random.default_rng(seed)
    written = []
    for _ in range(lines):
        at = int(random.integers(len(words)))
        line = [words[(at + step * 3) % len(words)] for step in range(int(random.integers(4, 9)))]
        written.append(" ".join(line).capitalize() + ".\n")
    return "".join(written)


@cache
def data_folder() -> Path:
    folder = Path(_SCRATCH.name) / "text"
    folder.mkdir()
    (folder / "input.txt").write_text(text(400))
    return folder


@cache
def data() -> Data:
    config = DataConfig(path=str(data_folder()), max_length=LENGTH)
    return load_data(config, "text-generation", None, lambda line: None, TrainTokenizer(train="bpe", vocab_size=VOCABULARY))


def checkpoint(kind: str = "gpt2") -> Path:
    return _checkpoint(kind)


@cache
def _checkpoint(kind: str) -> Path:
    folder = Path(_SCRATCH.name) / kind
    folder.mkdir()
    config = ModelConfig(config={**CONFIGS, **MIXTURES, **SHALLOW}[kind], init="random", task="text-generation")
    import_model(config, (), 0, folder, tokenizer=data().tokenizer)
    return folder


def prepared(kind: str = "gpt2", lengths: tuple[int, ...] = (8,)) -> Preprocessor:
    return Checkpoint(checkpoint(kind)).preprocessor("text-generation", LENGTH, Target(sequence_lengths=lengths))
