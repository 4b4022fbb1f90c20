"""Exports of tiny decoders on our kernels, with a tokenizer of words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from export.engines import torch_kernels_decoder
from export.engines.spec import BuildRequest, EngineSpec
from export.engines.torch_kernels import MODE
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import WORDS, Shape

ENGINE, NAME = "torch_kernels_decoder", "quantize-int8"
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
LAYERS = {"gpt2": "n_layer", "llama": "num_hidden_layers"}


def checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a decoder of one layer in int8; words w0 to w49 are its tokens, and w1 ends no answer."""
    path = decoders.checkpoint(folder, Shape(family, config={LAYERS[family]: 1}), seed)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", chat_template=CHAT)
    made.save_pretrained(path)
    return path


def export(root: Path, path: Path) -> Artifact:
    """Writes an export artifact whose one build the engine on our kernels runs."""
    build = root / NAME
    build.mkdir(parents=True)
    lines: list[str] = []
    asked = BuildRequest(
        ENGINE, Checkpoint(path), build / "model.onnx", root, build, build, "int8", "fp32", False, (8,),
        Target(engines=(ENGINE,), batch_sizes=(1,), threads=1), lines.append,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_kernels_decoder, "nodes_of", lambda model: {})
        entries = [entry.written() for entry in torch_kernels_decoder.build(asked)]
    assert not lines
    document = {"variant": "quantize", "precision": "int8", "folder": NAME, "onnx": "model.onnx", "engines": entries}
    (root / "export.json").write_text(json.dumps({"schema": 1, "builds": [document]}))
    return Artifact(root, {"id": "export", "digest": "0"})


def spec(root: Path) -> EngineSpec:
    """Returns how the engine of such an export is opened."""
    folder = root / NAME / torch_kernels_decoder.FOLDER
    return EngineSpec(ENGINE, MODE, "int8", "fp32", "cpu", 1, str(folder / torch_kernels_decoder.FILE), str(folder))
