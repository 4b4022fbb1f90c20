"""Embeddings in low rank on the way to engines: exported graphs, int8 rows, decoders, a whole recipe, and the kernels that refuse them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch

from compress.pipeline import run
from export.engines.onnxruntime_decoder import MODEL, OnnxRuntimeDecoder
from export.engines.registry import engine_module
from export.fused.decoder.parts import decoder_plan
from export.fused.parts import plan_of
from export.generation.decoder_parts import parts_of
from export.generation.fused_graph import fused_graph, save_fused
from export.generation.genai_folder import with_integers
from export.generation.on_grids import on_grids
from export.graph.onnx import export_float
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.low_rank_embedding import low_rank_tables
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.tables import load_tables, on_table_grid, table_modules
from prune.embeddings.low_rank import in_low_rank
from quantize.embeddings import quantize_tables
from quantize.quantize import Quantize
from tests.export import sentiment
from tests.export import tiny_checkpoints as tiny
from tests.export.engines.test_onnxruntime_decoder import folder as decoder_folder
from tests.export.engines.test_onnxruntime_decoder import spec
from tests.export.generation import genai_checkpoints
from tests.export.generation.test_agreement import context, random_blocks
from tests.export.generation.test_codes import chosen, logits
from tests.export.generation.tiny_decoders import VOCABULARY
from tests.export.graph.test_onnx import run as run_onnx
from tests.problems import raises_problem
from tests.prune import small_runs

pytestmark = pytest.mark.whole

RANK = 32
TABLE, PROJECTION = "model.embed_tokens.table", "model.embed_tokens.projection"


def low(folder: Path, out: Path, rank: int) -> Path:
    """Writes a checkpoint with embeddings in low rank."""
    model: Any = load(folder)
    out.mkdir()
    save(in_low_rank(model, torch.arange(model.config.vocab_size).double(), rank, "stages.prune")[0], folder, out, "In low rank")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "distilbert", "electra"])
def test_graphs_answer_as_torch(family: str, tmp_path: Path) -> None:
    made = low(tiny.exported(family)[0], tmp_path / "low", 5)
    path = export_float(Checkpoint(made), tiny.preprocessor(family), tmp_path / "graph" / "model.onnx")
    model = load(made)
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch, length in ((1, 2), (3, 13)):
        features = tiny.features(family, batch, length)
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits.numpy()
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(run_onnx(path, features), expected, atol=1e-4)
        np.testing.assert_allclose(compiled(features)[0], expected, atol=1e-4)
    initializers = {tuple(one.dims) for one in onnx.load(path).graph.initializer}
    width = next(iter(low_rank_tables(model).values())).embedding_dim
    assert (model.config.vocab_size, 5) in initializers
    assert (model.config.vocab_size, width) not in initializers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return low(genai_checkpoints.checkpoint("llama"), tmp_path_factory.mktemp("llama") / "low", RANK)


def test_the_narrow_table_has_int8_rows(llama: Path) -> None:
    model = load(llama)
    assert list(table_modules(model)) == [TABLE, "lm_head"]
    before = model.get_submodule(PROJECTION).weight.detach().clone()  # type: ignore[operator]
    scales, noise = quantize_tables(model)
    table: Any = model.get_submodule(TABLE).weight
    assert scales[TABLE].shape == (VOCABULARY,)
    torch.testing.assert_close(on_table_grid(table.detach(), scales[TABLE]), table.detach(), rtol=1e-6, atol=0)
    assert (noise[TABLE] or 0) > 30
    assert torch.equal(model.get_submodule(PROJECTION).weight, before)  # type: ignore[arg-type]


def test_onnxruntime_projects_what_it_looks_up(llama: Path, tmp_path: Path) -> None:
    found = on_grids(Checkpoint(llama))
    parts = parts_of(found.model)
    assert (parts.embeddings, parts.projection) == (TABLE, PROJECTION)
    assert parts_of(load(genai_checkpoints.checkpoint("llama"))).projection is None
    scales, _ = quantize_tables(found.model)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9))
    with torch.no_grad():
        expected: Any = found.model(input_ids=torch.from_numpy(ids)).logits.numpy()
    shutil.copyfile(decoder_folder("llama") / "generation_config.json", tmp_path / "generation_config.json")
    for tables in ({}, scales):
        save_fused(fused_graph(replace(found, tables=tables)), tmp_path / MODEL)
        opened = OnnxRuntimeDecoder(replace(spec("llama"), path=str(tmp_path / MODEL)))
        np.testing.assert_allclose(opened.predict({"input_ids": ids}), expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_openvino_answers_as_the_quantized_decoder(scheme: Any, stream: bool, llama: Path, tmp_path: Path) -> None:
    data = Data(random_blocks(32, 0), random_blocks(16, 1), random_blocks(16, 2), ())
    baseline = Artifact(llama, {"id": "baseline", "digest": "", "parents": []})
    given = context("gpt2", tmp_path / "scratch", checkpoints={"baseline": baseline}, data=data, max_length=32)
    out = tmp_path / "out"
    out.mkdir()
    stage = Quantize(scheme=scheme, embeddings=True, group_size=16, calibration={"rows": 32}, stream=stream)  # type: ignore[arg-type]
    figures: Any = stage.run(baseline, given, out)
    assert list(figures["tables"]) == list(load_tables(out)) == [TABLE, "lm_head"]
    assert figures["float_layers"] == {PROJECTION: "head"}
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9))
    with torch.no_grad():
        expected = load(out)(input_ids=torch.from_numpy(ids)).logits.numpy()
    graph = with_integers(on_grids(Checkpoint(out)))
    np.testing.assert_allclose(logits(graph, ids), expected, atol=1e-4 * np.abs(expected).max())


def test_the_fused_kernels_refuse_them(llama: Path, tmp_path: Path) -> None:
    bert = low(sentiment.checkpoint(), tmp_path / "bert", 8)
    shutil.copytree(llama, tmp_path / "llama")
    for folder, plan, name in (
        (tmp_path / "llama", decoder_plan, "model.layers.0.mlp.up_proj"),
        (bert, plan_of, "bert.encoder.layer.0.output.dense"),
    ):
        weight: Any = load(folder).get_parameter(f"{name}.weight")
        save_quantization(folder, {name: chosen("w8a8", weight.detach())}, {})
        with raises_problem("model", "embeddings are in low rank"):
            plan(Checkpoint(folder))


@pytest.mark.parametrize(("engine", "refuses"), [("torch_kernels", True), ("torch_kernels_decoder", True), ("openvino", False)])
def test_the_config_says_so_before_the_first_stage(engine: str, refuses: bool, tmp_path: Path) -> None:
    config = Checkpoint(low(sentiment.checkpoint(), tmp_path / "bert", 8)).config
    assert ("low rank" in (engine_module(engine).model_refusal(config) or "")) == refuses


STAGES: list[dict[str, Any]] = [
    {"prune": {"embedding_rank": 9, "granularity": ["vocabulary"], "max_unknown": 1, "recover": {"epochs": 0.25}}},
    {"prune": {"id": "blocks", "sparsity": 0.3, "multiple_of": 8, "rows": 32, "recover": {"epochs": 0.25, "loss": "minilm"}}},
    {"sparsify": {"method": "magnitude", "pattern": {"block": [65536, 1]}, "sparsity": 0.5, "recover": None}},
    {"compact": {}},
    {"distill": {"epochs": 0.25, "loss": "pkd"}},
    {"quantize": {"calibration": {"rows": 32}, "mode": "qat", "qat": {"epochs": 0.2}, "teacher": "baseline"}},
    {"export": {}},
]


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside", "no_clocks")
def test_every_stage_takes_them(tmp_path: Path) -> None:
    asked = small_runs.recipe(tmp_path, "low", sentiment.rows(150), ["onnxruntime", "openvino"], STAGES)
    outcome = run(asked, tmp_path / "run", progress=ConsoleProgress("quiet"))
    variants = {variant["id"]: variant for variant in outcome.report["variants"]}
    assert list(variants) == ["baseline", "prune", "blocks", "sparsify", "compact", "distill", "quantize"]
    for name in list(variants)[1:]:
        config: Any = Checkpoint(open_run(outcome.folder).artifacts[name].path).config
        assert config.compress_architecture["embedding_rank"] == 9, name
    for engine in ("onnxruntime", "openvino"):
        assert variants["quantize"]["accuracy"][engine]["n"] == 15
    assert "embeddings of rank 9" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
