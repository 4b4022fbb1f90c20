"""Multiply-accumulates counted in torch are those of the ONNX graph of the same checkpoint, under the same names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import MixtralConfig, T5Config

from export.graph.macs import Gemm, count_macs
from export.graph.onnx import export_float
from export.graph.traced_macs import traced_macs
from foundation.artifacts.graph import Graph
from foundation.core.target import Target
from foundation.labels.tasks import Task
from foundation.models.folder import Checkpoint
from tests.export.generation import genai_checkpoints, tiny_encoder_decoders
from tests.export.generation.tiny_decoders import CONFIGS, GROUPED
from tests.seldom import seldom

pytestmark = pytest.mark.whole

BATCH, LENGTH = 3, 12
SHALLOW, SHALLOW_T5 = "mixtral of one layer", "t5 of few layers"


@pytest.fixture(scope="module", autouse=True)
def _of_one_layer() -> Iterator[None]:
    """Every further layer is as the first one, and takes two seconds to trace: a mixture expert by expert."""
    t5 = {**tiny_encoder_decoders.T5, "num_layers": 1, "num_decoder_layers": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_encoder_decoders.CONFIGS, SHALLOW_T5, lambda: T5Config(**t5))
        patch.setitem(CONFIGS, SHALLOW, lambda: MixtralConfig(num_local_experts=4, **{**GROUPED, "num_hidden_layers": 1}))
        yield


def both(checkpoint: Checkpoint, task: Task, folder: Path) -> tuple[list[Gemm], list[Gemm]]:
    """Returns the products counted in torch and in the ONNX graph."""
    prepared = checkpoint.preprocessor(task, LENGTH, Target(sequence_lengths=(LENGTH,)))
    graph = Graph(export_float(checkpoint, prepared, folder / "model.onnx", all_tokens=True))
    return traced_macs(checkpoint, task, BATCH, LENGTH), count_macs(graph, BATCH, LENGTH)


def by_node(gemms: list[Gemm]) -> dict[str, tuple[str, str, int]]:
    return {gemm.node.replace("/Gemm", "/MatMul"): (gemm.name, gemm.kind, gemm.macs) for gemm in gemms}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom((*CONFIGS, SHALLOW), CONFIGS.keys() - {"llama"}))
def test_of_every_decoder(kind: str, tmp_path: Path) -> None:
    found, expected = both(Checkpoint(genai_checkpoints.checkpoint(kind)), "text-generation", tmp_path)
    assert by_node(found) == by_node(expected)
    assert found[-1].name == expected[-1].name == ("embed_out" if kind == "gpt_neox" else "lm_head")


@pytest.mark.slow
def test_each_expert_of_a_quantized_mixture_has_products_of_its_own(tmp_path: Path) -> None:
    found, expected = both(Checkpoint(genai_checkpoints.checkpoint(SHALLOW, "w8a8-dynamic")), "text-generation", tmp_path)
    assert by_node(found) == by_node(expected)
    assert "model.layers.0.mlp.experts.down_proj.3/MatMul" in by_node(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", seldom((*tiny_encoder_decoders.CONFIGS, SHALLOW_T5), tiny_encoder_decoders.CONFIGS))
def test_of_encoder_decoders(kind: str, tmp_path: Path) -> None:
    found, expected = both(Checkpoint(tiny_encoder_decoders.checkpoint(kind)), "text-to-text", tmp_path)
    assert by_node(found) == by_node(expected)
