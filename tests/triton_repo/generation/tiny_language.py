"""Folders of tiny language models as OpenVINO GenAI reads them, and what Transformers answers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from export.generation.cached_graph import cached_graph
from foundation.artifacts.artifact import Artifact, write_json
from foundation.models.inputs.language import of_transformers
from foundation.standalone.language_text import SETTINGS
from tests.export.generation.tiny_decoders import CONFIGS, VOCABULARY, decoder

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")
CHAT = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
PROPERTIES = {
    "INFERENCE_NUM_THREADS": "1",
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
MODES = {"paged": "PA", "stateful": "SDPA"}
_SCRATCH = tempfile.TemporaryDirectory(prefix="tiny-language-")


def tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of single bytes: printable ASCII, and bytes of which two or three make a letter, so that answers break letters apart."""
    alphabet = dict(enumerate(_alphabet()))
    chosen = [*range(32, 127), 0xC3, 0xE2, *range(0x80, 0xBC)]
    words = [*SPECIAL, *(alphabet[byte] for byte in chosen)][:VOCABULARY]
    assert len(words) == VOCABULARY, len(words)
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<pad>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT
    )


def _alphabet() -> list[str]:
    """The letter that byte-level BPE writes for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@cache
def genai_folder(kind: str, chat: bool = True) -> Path:
    """The folder of a decoder; always with the same weights."""
    folder = Path(_SCRATCH.name, f"{kind}-{chat}")
    folder.mkdir()
    openvino.save_model(cached_graph(decoder(kind)), folder / "openvino_model.xml", compress_to_fp16=False)
    words = tokenizer()
    if not chat:
        words.chat_template = None
    words.save_pretrained(folder)
    write_json(folder / SETTINGS, asdict(of_transformers(words).settings))
    config = CONFIGS[kind]()
    config.save_pretrained(folder)
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    (folder / "generation_config.json").write_text(json.dumps(tokens))
    return folder


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Prompts of random tokens that are not special, int32."""
    random = np.random.default_rng(seed)
    return [random.integers(len(SPECIAL), VOCABULARY, length).astype(np.int32) for length in lengths]


def greedy(kind: str, prompt: np.ndarray, tokens: int, **settings: Any) -> list[int]:
    """What Transformers answers, token by token the most likely one; end tokens do not end it."""
    ids = torch.tensor(prompt[None].astype(np.int64))
    found = decoder(kind).generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=PAD, **settings)
    return found[0, ids.shape[1] :].tolist()


def export(
    root: Path, kinds: tuple[tuple[str, str], ...] = (("llama", "paged"),), count: int = 6, tokens: int = 12, drafted: bool = False
) -> Artifact:
    """An export artifact with one build for each kind of decoder and mode; drafted: each proposes tokens to itself."""
    builds = []
    for kind, mode in kinds:
        name = f"{kind}-fp32"
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "genai").symlink_to(genai_folder(kind))
        asked = np.stack(prompts((9,) * count))
        answered = np.array([greedy(kind, prompt, tokens) for prompt in asked], np.int32)
        save_file({"prompts": asked, "tokens": answered}, folder / "answers.safetensors")
        engine = {
            "engine": "openvino_genai",
            "mode": mode,
            "float_precision": "fp32",
            "runnable": True,
            "file": f"{name}/genai/openvino_model.xml",
            "properties": {**PROPERTIES, "ATTENTION_BACKEND": MODES[mode]},
            "generation": {"file": f"{name}/answers.safetensors"},
        }
        if drafted:
            engine["speculation"] = {"draft": name, "file": engine["file"], "tokens": 4, "properties": engine["properties"]}
        builds.append({"variant": kind, "precision": "fp32", "folder": name, "onnx": "model.onnx", "engines": [engine]})
    (root / "export.json").write_text(json.dumps({"schema": 1, "builds": builds}))
    return Artifact(root, {"digest": "0"})
