"""Pruning a causal language model: with its next tokens as labels, and what later stages make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from export.compressed_tensors import obstacle
from export.graph.onnx import export_float
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.prune import Prune
from quantize.quantize import Quantize
from tests.foundation import tiny_gpt
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    baseline = Artifact(tiny_gpt.checkpoint("mistral"), {"id": "baseline", "stage": "model", "digest": "0" * 64})
    data, target = tiny_gpt.data(), Target(sequence_lengths=(8,))
    return Context(
        "text-generation", data, tiny_gpt.LENGTH, target, 0, told, tmp_path / "scratch", {"baseline": baseline}, teachers=(baseline,)
    )


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("gpt2", "fisher"),
        ("mistral", "activation"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("gpt2", "activation"), ("mistral", "fisher"))),  # either is above
    ],
)
def test_it_is_pruned_and_trained_by_its_own_next_tokens(kind: str, method: Any, context: Context, tmp_path: Path) -> None:
    folder = tiny_gpt.checkpoint(kind)
    source = Artifact(folder, {"id": "baseline", "stage": "model", "digest": "0" * 64})
    stage = Prune(
        method=method,
        allocation="global",
        granularity=("heads", "ffn", "hidden"),
        multiple_of=8,
        rows=32,
        recover={"epochs": 1, "learning_rate": 1e-3},
    )
    config = load(folder).config
    stage.check(config, config, context)
    out = tmp_path / "out"
    out.mkdir()
    figures = stage.run(source, replace(context, teachers=(source,)), out)
    assert figures["sparsity"] >= 0.5
    assert {"cross_entropy", "teacher"} <= figures["steps"][0]["losses"][0].keys()
    sizes = Structure.of(load(out), "out").sizes
    assert sizes.hidden < 32
    assert sizes.heads[0] // sizes.key_value_heads[0] == (1 if kind == "gpt2" else 2)


@pytest.mark.slow
def test_later_stages_take_it(context: Context, tmp_path: Path) -> None:
    folder, pruned, quantized = tiny_gpt.checkpoint("mistral"), tmp_path / "pruned", tmp_path / "quantized"
    pruned.mkdir()
    quantized.mkdir()
    source = Artifact(folder, {"id": "baseline", "stage": "model", "digest": "0" * 64})
    stage = Prune(method="fisher", allocation="global", multiple_of=8, rows=32, sparsity=0.3, protect=("*.layers.0",), recover=None)
    stage.run(source, context, pruned)
    model = load(pruned)
    assert model.config.compress_architecture["model_type"] == "mistral"  # type: ignore[union-attr]
    Quantize(calibration={"rows": 32}, weight_bits=8, smoothquant=False).run(Artifact(pruned, {"id": "prune"}), context, quantized)  # type: ignore[arg-type]
    assert "only compress.api.load_checkpoint builds such a shape" in str(obstacle(Checkpoint(quantized)))
    graph = export_float(Checkpoint(pruned), tiny_gpt.prepared("mistral"), tmp_path / "model.onnx")
    ids = np.stack(context.data.evaluation.rows[:2]).astype(np.int64)  # type: ignore[arg-type]
    (logits,) = onnxruntime.InferenceSession(str(graph)).run(None, {"input_ids": ids})
    with torch.inference_mode():
        np.testing.assert_allclose(logits, model(input_ids=torch.from_numpy(ids)).logits.numpy(), atol=1e-4)


def test_there_are_no_texts_to_split(context: Context) -> None:
    config = load(tiny_gpt.checkpoint()).config
    with raises_problem("stages.prune.granularity", "vocabulary", "text-generation"):
        Prune(granularity=("heads", "vocabulary")).check(config, config, context)
