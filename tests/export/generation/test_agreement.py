"""A language model exported for OpenVINO GenAI: its answers are checked against torch, kept, and compared with the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from export.builds import Build, computes_bf16
from export.choices import Generation
from export.export import Export
from export.exporter import Exporter
from export.generation import agreement as agreement_module
from export.generation.agreement import Agreement
from export.generation.prompts import BATCH_SIZE, Prompts, _batches, greedy, takes_padding
from export.parity.parity import ParityError
from foundation.artifacts.artifact import Artifact
from foundation.core.decoding import Answer, Decoding
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.next_token import labels_of
from foundation.measure.answers import load_predictions
from foundation.measure.engine_process import EngineProcess
from foundation.measure.predictions import predict
from foundation.measure.tokens import load_mixed_answers
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from tests.export.generation.genai_checkpoints import checkpoint
from tests.export.generation.tiny_decoders import CONFIGS, VOCABULARY, with_spread_weights
from tests.foundation import tiny_gpt

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

SETTINGS = Generation(prompts=6, tokens=5)


def context(kind: str, tmp_path: Path, **changes: Any) -> Context:
    target = Target(engines=("openvino_genai",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    baseline = Artifact(tiny_gpt.checkpoint(kind), {"id": "baseline", "digest": "", "parents": []})
    given = {"task": "text-generation", "data": tiny_gpt.data(), "max_length": tiny_gpt.LENGTH, "target": target, "seed": 0}
    return Context(
        **{**given, "progress": ConsoleProgress("silent"), "scratch": tmp_path, "checkpoints": {"baseline": baseline}, **changes}
    )


def exported(kind: str, tmp_path: Path, settings: Generation = SETTINGS, **changes: Any) -> dict[str, Any]:
    given, out = context(kind, tmp_path, **changes), tmp_path / "out"
    out.mkdir()
    Export(generation=settings, float_precision="fp32").run(given.baseline, given, out)
    found: dict[str, Any] = json.loads((out / "export.json").read_text())
    return found


@pytest.mark.parametrize(
    ("kind", "modes"), [("gpt2", ["paged"]), pytest.param("mistral", ["stateful", "paged"], marks=pytest.mark.slow)], ids=str
)
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
    rows, answers = load_mixed_answers(tmp_path / "out" / generation["file"]) or ([], tokens)
    assert len({len(row) for row in rows}) > 2
    torch_answers = greedy(load_float(tiny_gpt.checkpoint(kind)), Prompts(tuple(rows), SETTINGS.tokens))
    np.testing.assert_array_equal(answers, torch_answers)
    assert {path.name for path in (tmp_path / "out" / build["folder"] / "genai").glob("*.xml")} == {
        f"openvino_{name}.xml" for name in ("model", "tokenizer", "detokenizer")
    }


def random_blocks(count: int, seed: int) -> Split:
    rows = list(np.random.default_rng(seed).integers(3, VOCABULARY, (count, 32)).astype(np.int32))
    return Split(list(rows), labels_of(rows, 31))


@pytest.mark.slow
def test_an_int8_cache_is_evaluated_and_not_held_to_torch(tmp_path: Path) -> None:
    """Of this model it changes more answers than the gate allows."""
    baseline = Artifact(checkpoint("gpt2"), {"id": "baseline", "digest": "", "parents": []})
    data = Data(random_blocks(4, 0), random_blocks(16, 1), random_blocks(16, 2), ())
    settings = Generation(prompts=12, tokens=16, kv_cache="int8")
    build = exported("gpt2", tmp_path, settings, data=data, max_length=32, checkpoints={"baseline": baseline})["builds"][0]
    [entry] = build["engines"]
    assert (entry["mode"], entry["runnable"], entry["cache_precision"]) == ("paged", True, "int8")
    assert entry["properties"]["KV_CACHE_PRECISION"] == "u8"  # what is served
    assert entry["parity"]["tokens"]["identical"] == 12
    generation, cost = entry["generation"], entry["generation"]["float_cache"]
    assert generation["torch"]["identical"] < 12
    assert cost["tokens"]["equal_share"] == generation["torch"]["equal_share"]  # with a float cache the answers are those of torch
    for metric in ("perplexity", "accuracy"):
        assert cost["metrics"][metric] == pytest.approx(entry["metrics"][metric], rel=1e-3)
    floating, own = (load_predictions(tmp_path / "out" / one["predictions"], "text-generation")[0] for one in (cost, entry))
    expected = predict(load_float(checkpoint("gpt2")), Preprocessor.load(tmp_path / "out" / build["folder"]), data.evaluation.rows, 32)
    near, far = (float(np.abs(one[..., 0] - expected[..., 0]).max()) for one in (floating, own))
    assert near < 1e-4 < far


def test_a_compressed_checkpoint_answers_some_of_the_prompts_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement_module, "OWN_PROMPTS", 3)
    baseline = Artifact(checkpoint("llama"), {"id": "baseline", "digest": "", "parents": []})
    target = Target(engines=("onnxruntime_decoder",), batch_sizes=(1,), sequence_lengths=(8,), threads=1)
    data = Data(random_blocks(4, 0), random_blocks(8, 1), random_blocks(8, 2), ())
    given, out = context("gpt2", tmp_path, data=data, max_length=32, checkpoints={"baseline": baseline}, target=target), tmp_path / "out"
    out.mkdir()
    agreement, found = Agreement(given, SETTINGS), {}
    for name, path, precision in (("baseline", baseline.path, "fp32"), ("quantize", checkpoint("llama", "w4a16"), "w4a16")):
        build = Build(name, Checkpoint(path), precision, "baseline")
        (entry,) = Exporter(build, given, out, "fp32", {}, agreement).run().engines
        assert entry.generation is not None
        found[name] = entry.generation
        assert entry.generation.baseline is not None
        assert entry.generation.baseline.prompts == SETTINGS.prompts
    original, compressed = found["baseline"].torch, found["quantize"].torch
    assert original is not None
    assert compressed is not None
    assert (original.prompts, original.identical) == (SETTINGS.prompts, SETTINGS.prompts)
    assert (compressed.prompts, compressed.identical) == (3, 3)
    assert found["quantize"].baseline.identical < SETTINGS.prompts  # or any rows would do


@pytest.mark.slow
def test_a_mode_whose_float_part_is_bf16_keeps_answers_of_its_own(tmp_path: Path) -> None:
    """On a processor without bf16 there is one mode, and nothing to mix up."""
    baseline = Artifact(checkpoint("gpt2"), {"id": "baseline", "digest": "", "parents": []})
    data = Data(random_blocks(4, 0), random_blocks(8, 1), random_blocks(8, 2), ())
    given, out = context("gpt2", tmp_path, data=data, max_length=32, checkpoints={"baseline": baseline}), tmp_path / "out"
    out.mkdir()
    agreement = Agreement(given, SETTINGS.model_copy(update={"kv_cache": "int8"}))
    build = Build("quantize", Checkpoint(checkpoint("gpt2", "w8a8")), "int8", "baseline")
    engines = Exporter(build, given, out, "bf16", {}, agreement).run().written()["engines"]
    kept = [path for entry in engines for path in (entry["generation"]["file"], entry["generation"]["float_cache"]["predictions"])]
    assert len(kept) == len(set(kept)) == 2 * len(engines)
    assert {entry["float_precision"] for entry in engines} == ({"bf16", "fp32"} if computes_bf16(given) else {"fp32"})


def test_an_engine_with_other_tokens_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(process: EngineProcess, prompts: Any, decoding: Decoding, on_tokens: Any) -> list[Answer]:
        return [Answer((tuple(range(decoding.max_tokens)),), ()) for _ in prompts]

    monkeypatch.setattr(EngineProcess, "generate", other)
    with pytest.raises(ParityError, match=r"baseline-fp32 openvino_genai paged: .* differ from torch"):
        exported("gpt2", tmp_path)


def test_a_model_without_keys_and_values_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: object) -> None:
        raise InputError("model", "generation needs a decoder that keeps keys and values of every layer")

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


def test_the_gate_asks_prompts_of_several_lengths_at_once() -> None:
    blocks = [np.arange(40, dtype=np.int32) + index for index in range(100)]
    starts = Prompts.of_rows(blocks, Generation(prompts=6, tokens=8), 40)
    text = np.concatenate(blocks)

    def lengths(longest: int | None, switch: int | None) -> list[int]:
        mixed = starts.mixed(blocks, longest, switch)
        assert mixed.tokens == starts.tokens == 8
        assert not mixed.ends
        for row in (row for row in mixed.rows if len(row) <= 40):
            assert row.tolist() == next(start for start in starts.rows if start[0] == row[0])[: len(row)].tolist()
        long = [mixed.rows[place] for place in mixed.long]
        assert all(row.tobytes() in text.tobytes() for row in long)
        assert len({row.tobytes() for row in mixed.rows}) == len(mixed.rows)
        assert [len(row) for row in mixed.rows if len(row) <= 40] == [20, 15, 10, 5, 20, 15]
        return [len(row) for row in long]

    assert lengths(None, None) == [300, 299, 298, 297]
    assert lengths(1024, 500) == [300, 543, 298, 541]  # longer than a part, and longer than where positions are stretched from
    assert lengths(1024, 4096) == [300, 299, 298, 297]  # torch would take too long
    assert lengths(307, 64) == [108, 107, 106, 105]  # of 307 tokens 8 are for the answer
    assert lengths(308, 64) == [300, 107, 298, 105]
    assert lengths(60, None) == []


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


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "gemma2", "opt", "bloom", "mixtral"])
def test_prompts_of_other_lengths_are_answered_as_alone(kind: str) -> None:
    """Windows of 8 tokens, learned and rotated positions, ALiBi."""
    model: Any = load_float(checkpoint(kind))
    random = np.random.default_rng(1)
    lengths = [1, 2, 5, 9, 9, 30, 31, 60]
    rows = [random.integers(3, VOCABULARY, length).astype(np.int32) for length in random.permutation(lengths)]
    counted: list[int] = []
    found = greedy(model, Prompts(tuple(rows), 12), counted.append)
    alone = [greedy(model, Prompts((row,), 12))[0] for row in rows]
    np.testing.assert_array_equal(found, np.stack(alone))
    assert sum(counted) == len(rows) * 12
    assert takes_padding(model) == (kind != "bloom")
    assert len(counted) == 12 * (1 if takes_padding(model) else len(set(lengths)))


def test_a_batch_is_not_filled_up_without_end() -> None:
    rows = [np.zeros(length, np.int32) for length in (400, 10, 10, 11, 3, *[10] * 40)]
    batches = list(_batches(rows, 100))
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        lengths = [len(rows[index]) for index in batch]
        assert len(batch) <= BATCH_SIZE
        assert sum(max(lengths) - length for length in lengths) <= 100
    assert len(batches) == 3
    assert all(len({len(rows[index]) for index in batch}) == 1 for batch in _batches(rows, 0))


@pytest.mark.parametrize(
    ("rope", "takes"), [({"rope_type": "dynamic", "factor": 2.0}, False), ({"rope_type": "linear", "factor": 2.0}, True), ({}, True)]
)
def test_positions_that_depend_on_the_longest_text_are_not_filled_up(rope: dict[str, Any], takes: bool) -> None:
    config = CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
    assert takes_padding(with_spread_weights(config)) == takes
