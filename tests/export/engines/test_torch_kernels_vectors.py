"""A whole run of a model of vectors on our kernels, in the interpreter: the gate on every layer, the evaluation, and the repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from compress.pipeline import run
from compress.recipe import check
from export.engines import torch_kernels
from export.engines.spec import EngineSpec
from export.engines.torch_kernels import MODE
from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from export.parity.parity import check_layers, compare_layers, quantized_gemms
from foundation.artifacts.graph import Graph
from foundation.core.progress import ConsoleProgress
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests import tiny_embedding, without_clocks
from tests.export.engines.test_torch_kernels import probed, request
from tests.export.fused import encoders

pytest.importorskip("triton")  # the extra `kernels`, which `dev` includes
TARGET = {"engines": ["torch_kernels", "onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8], "threads": 1}
STAGES = [{"quantize": {"calibration": {"rows": 16}}}, {"export": {"float_precision": "fp32"}}, {"triton_repo": {"serve": False}}]


GATED = {
    "bert": encoders.Shape(vectors={}),
    "t5": encoders.Shape("t5", vectors={}, config={"num_layers": 1}),
    "gated t5": encoders.Shape("t5", vectors={"pooling": "cls"}, config={"num_layers": 1, "feed_forward_proj": "gated-gelu"}),
}
LAYERS = {"bert": 12, "t5": 6, "gated t5": 7}


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_every_layer_passes_the_gate(name: str, interpreted: Callable[..., Any], tmp_path: Path) -> None:
    """The plan of the graph that is exported, against the integers of torch; rows are as long as the longest length of the target."""
    checkpoint, build = encoders.checkpoint(tmp_path, GATED[name]), tmp_path / "build"
    prepared = Preprocessor(
        "text", ("input_ids", "attention_mask"), ("vector",), "sentence-embedding", encoders.LENGTH, (8, encoders.LENGTH), dimensions=64,
        pad_token_id=1, response="vector", tokenizer=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    )  # fmt: skip
    build.mkdir()
    prepared.save(build)
    insert_qdq(Graph(export_float(Checkpoint(checkpoint), prepared, tmp_path / "float.onnx")), Checkpoint(checkpoint), build / "model.onnx")
    (entry,) = torch_kernels.build(replace(request(build, checkpoint, []), buckets=(8, encoders.LENGTH)))
    assert entry.runnable, entry.reason
    spec = EngineSpec("torch_kernels", MODE, "int8", "fp32", "cpu", 1, str(tmp_path / str(entry.file)), str(build), (1, 4))
    gemms, given = quantized_gemms(Graph(build / "model.onnx")), encoders.features(2)
    assert len(gemms) == LAYERS[name]
    vectors, tensors, _ = interpreted(probed, spec, list(dict.fromkeys(name for gemm in gemms for name in gemm.tensors)), given)
    check_layers("torch_kernels", compare_layers(gemms, tensors))
    wanted, _ = encoders.in_torch(checkpoint, given)
    np.testing.assert_allclose(vectors, wanted.numpy(), atol=0.05)


MODELS = {
    "bert": (lambda folder: tiny_embedding.folder(folder, 2), tiny_embedding.WIDTH, 12),
    "t5": (tiny_embedding.t5_folder, 24, 12),
    "gated t5": (lambda folder: tiny_embedding.t5_folder(folder, gated=True, layers=1), 24, 7),
}
"""Writes the model; numbers of its vectors; layers in int8."""


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", MODELS)
def test_a_run_gates_evaluates_and_writes_the_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    make, width, layers = MODELS[name]
    model, data = make(tmp_path / "source"), tiny_embedding.pairs(tmp_path / "data", train=24, test=3)
    recipe = check({**tiny_embedding.recipe("tiny", model, data), "target": TARGET, "stages": STAGES})
    outcome = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet"))
    stages = tmp_path / "run" / "stages"
    builds = json.loads(next(stages.glob("export-*/export.json")).read_text())["builds"]
    entry = next(one for one in builds[-1]["engines"] if one["engine"] == "torch_kernels")
    assert (entry["runnable"], entry["parity"]["passed"]) == (True, True), entry["reason"]
    assert len(entry["parity"]["layers"]) == layers
    assert outcome.report["variants"][-1]["accuracy"]["torch_kernels"]["n"] == 3
    (folder,) = stages.glob("triton_repo-*/model_repository_kernels/quantize-int8")
    config = (folder / "config.pbtxt").read_text()
    assert 'name: "VECTOR"' in config
    assert f"dims: {width}" in config
    assert (folder / "1" / "plan.safetensors").stat().st_size > 0
