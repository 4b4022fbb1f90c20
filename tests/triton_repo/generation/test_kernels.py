"""The repository of decoders on our kernels: complete without the training environment, and it answers as the engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from foundation.core.decoding import Decoding
from tests.export.fused.decoder.decoders import LENGTH, WORDS
from tests.seldom import seldom
from tests.triton_repo.generation import tiny_kernels as tiny
from triton_repo.config import from_text
from triton_repo.generation.config import LanguageSettings, language_config
from triton_repo.generation.layout import write_language_repository
from triton_repo.layout import served_models
from triton_repo.own_modules import ROOT

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes
pytestmark = pytest.mark.whole

PROMPTS = [[5, 9, 31, 7], [3], [40, 4, 4, 18, 22]]
TOKENS = 4
WORDS_OF = {"TEXT": "w5 w9 w31 w7", "MESSAGES": json.dumps([{"role": "user", "content": "w5 w9"}])}


def written(root: Path, family: str) -> Path:
    """Writes the repository of a tiny decoder; returns the folder of the model."""
    exported = tiny.export(root / "export", tiny.checkpoint(root, family))
    models = served_models(exported, (tiny.ENGINE,))
    (settings,) = write_language_repository(root / "repository", models, batch_sizes=(1, 2), max_batch_size=3, max_waiting=5)
    assert (settings.max_running, settings.context, settings.vocabulary) == (3, LENGTH, WORDS)
    return root / "repository" / tiny.NAME


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all tests read; none writes there."""
    return written(tmp_path_factory.mktemp("kernels"), "llama")


def test_the_folder_and_its_configuration(folder: Path) -> None:
    config = from_text((folder / "config.pbtxt").read_text())
    assert MessageToDict(config, preserving_proto_field_name=True)["instance_group"] == [{"kind": "KIND_GPU", "count": 1}]
    assert json.loads(config.parameters["properties"].string_value) == {"float_precision": "fp32"}
    assert (config.parameters["mode"].string_value, config.parameters["cache_tokens"].string_value) == ("packed", "0")
    version = folder / "1"
    assert {path.name for path in (version / "kernels").iterdir()} >= {"plan.safetensors", "tokenizer.json", "chat.json", "config.json"}
    names = {path.relative_to(version).as_posix() for path in version.rglob("*.py")}
    assert {"model.py", "kernels.py", "batched.py", "kernel_decoder.py", "packages/export/kernels/paged_attention.py"} <= names
    assert not [name for name in names if "openvino" in name or "onnx" in name or "export/engines" in name or "foundation/models" in name]
    assert (version / "kernel_decoder.py").read_bytes() == (ROOT / "export/fused/decoder/served.py").read_bytes()
    readme = (folder.parent / "README.md").read_text()
    assert "pip install torch triton safetensors tokenizers jinja2" in readme
    assert "openvino " not in readme


def test_clients_see_what_they_see_of_every_language_model(folder: Path) -> None:
    ours = from_text((folder / "config.pbtxt").read_text())
    other = language_config(LanguageSettings("other", "paged", "decoder", {}, 64, 100, 8))
    assert (ours.input, ours.output) == (other.input, other.output)
    assert ours.model_transaction_policy.decoupled
    assert (ours.max_batch_size, ours.backend) == (0, "python")
    assert {*ours.parameters} == {*other.parameters, "cache_tokens"}


def engine_answers(spec: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Returns the greedy tokens of the engine; called in the process that interprets."""
    from export.engines.torch_kernels_decoder import TorchKernelsDecoder

    answers = TorchKernelsDecoder(spec).generate(
        [np.array(prompt, np.int32) for prompt in prompts], Decoding(max_tokens=tokens, ignore_end=True)
    )
    return [list(answer.tokens[0]) for answer in answers]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", seldom(("gpt2", "llama"), ("gpt2",)))
def test_it_answers_as_the_engine_does_from_its_folder_alone(family: str, tmp_path: Path, interpreted: Callable[..., Any]) -> None:
    folder = written(tmp_path, family)
    expected = interpreted(engine_answers, tiny.spec(tmp_path / "export"), PROMPTS, TOKENS)
    chat = interpreted(engine_answers, tiny.spec(tmp_path / "export"), [[5, 9, 3]], TOKENS)[0]
    ask = {"MAX_TOKENS": TOKENS, "IGNORE_EOS": True, "PIECE_SECONDS": 0.0}
    prompts = [{"INPUT_IDS": prompt, **ask} for prompt in PROMPTS]
    scenes = {
        "alone": [prompts[0], *({name: words, **ask} for name, words in WORDS_OF.items())],
        "together": [{**prompts[2], "MAX_TOKENS": TOKENS + 4}, *prompts, {**prompts[1], "TEMPERATURE": 1.0}],
        "cancelled": {"INPUT_IDS": [7], **ask, "MAX_TOKENS": LENGTH - 1},
        "wrong": [
            {"INPUT_IDS": [5] * LENGTH, **ask},
            {"INPUT_IDS": [5, WORDS], **ask},
            {"MAX_TOKENS": 3},
            {**prompts[0], "BEAMS": 2, "STREAM": False},
        ],
    }
    before = sorted(folder.rglob("*"))
    found = served(folder, scenes, tmp_path)
    assert sorted(folder.rglob("*")) == before
    assert (found["outside"], found["warnings"], found["ordinals"]) == ([], [], [0, 1])
    assert "export.fused.decoder.texts" in found["modules"]
    assert [one["tokens"] for one in found["alone"]] == [expected[0], expected[0], chat]
    assert found["alone"][0]["text"] == " ".join(f"w{token}" for token in expected[0])
    assert [(one["reason"], one["prompt"], one["pieces"]) for one in found["alone"]] == [("length", 4, TOKENS)] * 2 + [
        ("length", 3, TOKENS)
    ]
    first, *others, sampled = found["together"]
    assert first["tokens"][:TOKENS] == expected[2]
    assert [one["tokens"] for one in others] == expected
    assert (len(first["tokens"]), len(sampled["tokens"])) == (TOKENS + 4, TOKENS)
    assert found["elsewhere"]["tokens"] == expected[0]
    assert found["cancelled"]["reason"] == "cancelled"
    assert 0 < len(found["cancelled"]["tokens"]) < LENGTH - 1
    words = (
        f"the prompt has {LENGTH} tokens; {LENGTH - 1} are allowed",
        f"INPUT_IDS: {WORDS} given",
        "no prompt given",
        "not search with beams",
    )
    assert [(word in one["error"], one["code"], one["responses"]) for word, one in zip(words, found["wrong"], strict=True)] == [
        (True, 2, 1)
    ] * 4
    assert found["left"] == [0, [], True]  # nothing runs, and every page is free


def served(folder: Path, scenes: dict[str, Any], place: Path) -> dict[str, Any]:
    """Runs the model of a folder in a process without the training environment; returns what it answered."""
    config = MessageToDict(from_text((folder / "config.pbtxt").read_text()), preserving_proto_field_name=True)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    script = Path(__file__).with_name("serve_kernels.py")
    command = [sys.executable, "-P", str(script), str(folder / "1"), json.dumps(config), json.dumps(scenes)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=place, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer
