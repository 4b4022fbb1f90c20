"""Tiny causal language models with a byte-level tokenizer, and a prompt file for the sentences of these tests."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from foundation.core.progress import ConsoleProgress
from foundation.models.inputs.tokenizer import train_bpe
from foundation.models.library import quiet
from tests.foundation.tiny_gpt import text
from tests.tiny_language_models import CONFIGS

SILENT = ConsoleProgress("silent")
LABELS = {"negative": ["bad", "really poor"], "positive": ["good"]}
TEMPLATE = "Review: {text}\nSentiment: {label}"
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
EXAMPLES = [
    {"text": "a great film that I love", "label": "positive"},
    {"text": "dull and poor from the first minute", "label": "negative"},
    {"text": "fine", "label": "positive"},
]
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-labellers-")


def model(kind: str = "llama", chat: bool = False) -> Path:
    """Returns the folder of a model with random weights that reads up to 512 tokens."""
    return _model(kind, chat)


@cache
def _model(kind: str, chat: bool) -> Path:
    folder = Path(_SCRATCH.name) / f"{kind}{chat}"
    folder.mkdir()
    texts = [
        "Review: a film that is good, bad, really poor, great\nSentiment: good movie was the very dull fine love hate like not\n",
        text(40),
    ]
    tokenizer = train_bpe(texts, 290, pads=False)
    tokenizer.write(folder)
    longer: dict[str, Any] = {"n_positions": 512} if kind == "gpt2" else {"max_position_embeddings": 512}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = transformers.AutoModelForCausalLM.from_config(
            CONFIGS[kind](**{"bos_token_id": 0, "eos_token_id": 0, **longer, "vocab_size": 290})
        )
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(6 * parameter if parameter.dim() > 1 else parameter + 0.3 * torch.randn_like(parameter))
    with quiet():
        made.save_pretrained(folder)
    if chat:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))
    return folder


def changed(folder: Path, copy: Path, **config: Any) -> Path:
    """Returns a copy of a model folder with other values in config.json."""
    shutil.copytree(folder, copy)
    known = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**known, **config}))
    return copy


def prompts(folder: Path, **contents: Any) -> str:
    """Writes a prompt file and returns its path."""
    path = folder / "prompts.yaml"
    path.write_text(yaml.safe_dump({"templates": [TEMPLATE], **contents}))
    return str(path)
