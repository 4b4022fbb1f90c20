"""A language model exported for OpenVINO GenAI: its answers are checked against torch, kept, and compared with the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from compress.artifacts.artifact import Artifact
from compress.core.decoding import Answer, Decoding
from compress.core.errors import InputError
from compress.core.progress import ConsoleProgress
from compress.core.target import Target
from compress.measure.engine_process import EngineProcess
from compress.models.checkpoint import load_float
from compress.stage.context import Context
from export.export import Export
from export.generation.prompts import Generation, Prompts, greedy
from export.parity.parity import ParityError
from tests.compress import tiny_gpt
from tests.export.generation.genai_checkpoints import checkpoint
from tests.export.generation.tiny_decoders import VOCABULARY

SETTINGS = Generation(prompts=6, tokens=5)


def context(kind: str, tmp_path: Path, **changes: Any) -> Context:
    target = Target(engines=("openvino_genai",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    baseline = Artifact(tiny_gpt.checkpoint(kind), {"id": "baseline", "digest": "", "parents": []})
    given = {"task": "text-generation", "data": tiny_gpt.data(), "max_length": tiny_gpt.LENGTH, "target": target, "seed": 0}
    return Context(
        **{**given, "progress": ConsoleProgress("silent"), "scratch": tmp_path, "checkpoints": {"baseline": baseline}, **changes}
    )


def exported(kind: str, tmp_path: Path) -> dict[str, Any]:
    given, out = context(kind, tmp_path), tmp_path / "out"
    out.mkdir()
    Export(generation=SETTINGS, float_precision="fp32").run(given.baseline, given, out)
    found: dict[str, Any] = json.loads((out / "export.json").read_text())
    return found


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "modes"), [("gpt2", ["paged"]), ("mistral", ["stateful", "paged"])])
def test_the_answers_of_an_engine_are_kept_and_compared(kind: str, modes: list[str], tmp_path: Path) -> None:
    build = exported(kind, tmp_path)["builds"][0]
    assert [entry["mode"] for entry in build["engines"]] == modes
    first, *others = build["engines"]
    assert first["runnable"]
    assert first["cache_precision"] == "fp32"
    assert [entry["runnable"] for entry in others] == [False] * len(others)
    assert all("window of 6 tokens" in entry["reason"] for entry in others)
    assert first["parity"]["tokens"]["identical"] == first["parity"]["tokens"]["prompts"] == SETTINGS.prompts
    generation = first["generation"]
    assert generation["baseline"]["equal_share"] == generation["torch"]["equal_share"] == 1
    kept = load_file(tmp_path / "out" / generation["file"])
    prompts, tokens = kept["prompts"], kept["tokens"]
    blocks = [block.tolist() for block in tiny_gpt.data().evaluation.rows]  # type: ignore[union-attr]
    assert prompts.shape == (SETTINGS.prompts, tiny_gpt.LENGTH // 2)
    assert all(any(prompt == block[: len(prompt)] for block in blocks) for prompt in prompts.tolist())
    assert tokens.shape == (SETTINGS.prompts, SETTINGS.tokens)
    assert {path.name for path in (tmp_path / "out" / build["folder"] / "genai").glob("*.xml")} == {
        f"openvino_{name}.xml" for name in ("model", "tokenizer", "detokenizer")
    }


@pytest.mark.whole
def test_an_engine_with_other_tokens_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(process: EngineProcess, prompts: Any, decoding: Decoding) -> list[Answer]:
        return [Answer((tuple(range(decoding.max_tokens)),), ()) for _ in prompts]

    monkeypatch.setattr(EngineProcess, "generate", other)
    with pytest.raises(ParityError, match=r"baseline-fp32 openvino_genai paged: .* tokens that follow equal ones differ from torch"):
        exported("gpt2", tmp_path)


@pytest.mark.whole
def test_a_model_without_keys_and_values_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: object) -> None:
        raise InputError("model: generation needs a decoder that keeps keys and values of every layer")

    monkeypatch.setattr("export.generation.genai_folder.cached_graph", refused)
    builds = exported("gpt2", tmp_path)["builds"]
    assert not any(entry["runnable"] for build in builds for entry in build["engines"])
    [entry] = builds[0]["engines"]
    assert entry["reason"] == "model: generation needs a decoder that keeps keys and values of every layer"


def test_prompts_are_starts_of_evenly_spaced_blocks() -> None:
    blocks = [np.full(20, index, np.int32) for index in range(10)] + [np.zeros(3, np.int32)]
    prompts = Prompts.of_rows(blocks, Generation(prompts=4, tokens=50), 20)
    assert [row.tolist() for row in prompts.rows] == [[index] * 10 for index in (0, 3, 6, 9)]
    assert prompts.tokens == 10  # no more than the model reads
    assert np.stack(Prompts.of_rows(blocks, Generation(prompts=400, tokens=2), 20).rows).shape == (10, 10)
    with pytest.raises(InputError, match="no evaluation block of at least 10 tokens"):
        Prompts.of_rows([np.zeros(3, np.int32)], Generation(), 20)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "mixtral"])
def test_greedy_tokens_in_torch_are_those_of_a_loop_without_a_cache(kind: str) -> None:
    model: Any = load_float(checkpoint(kind))
    starts = np.random.default_rng(0).integers(3, VOCABULARY, (20, 9)).astype(np.int32)
    prompts = Prompts(tuple(starts), 12)
    ids = torch.from_numpy(starts.astype(np.int64))
    with torch.no_grad():
        for _ in range(prompts.tokens):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
    np.testing.assert_array_equal(greedy(model, prompts), ids[:, 9:].numpy())
