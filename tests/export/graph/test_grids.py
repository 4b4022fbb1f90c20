"""Weights that a quantized checkpoint stores in 16 bits, and the graph that is made of them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from export.engines.onnxruntime import properties
from export.graph.grids import put_on_grids
from export.graph.quantized import write_graphs
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.layers.experts import with_separate_experts
from foundation.stage.context import Context
from quantize.quantize import Quantize
from tests import tiny_language_models as tiny
from tests.told import Told

pytestmark = pytest.mark.whole
SCHEMES = [
    {"scheme": "w4a16", "group_size": 16, "symmetric": False, "embeddings": True},
    {"scheme": "w4a16", "group_size": 16},
    {"scheme": "w8a8-dynamic"},
]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("text-generation", tiny.data(), tiny.LENGTH, Target(sequence_lengths=(tiny.LENGTH,)), 0, Told(), tmp_path / "scratch")


def checkpoint(kind: str, dtype: torch.dtype, context: Context, shape: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Path:
    out = context.scratch.parent / "quantized"
    out.mkdir()
    Quantize(stream=True, **settings).run(Artifact(tiny.write(context.scratch.parent / "model", kind, dtype, **shape), {}), context, out)
    return out


@pytest.mark.parametrize("settings", SCHEMES, ids=["zero points", "int4", "int8"])
def test_short_weights_come_onto_their_grids(settings: dict[str, Any], context: Context) -> None:
    folder = checkpoint("llama", torch.bfloat16, context, **settings)
    model = with_separate_experts(load_float(folder))
    before = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    layers, tables = put_on_grids(model, Checkpoint(folder))
    assert bool(tables) == bool(settings.get("embeddings"))
    for name, scales in layers.items():
        weight = model.get_submodule(name).weight
        torch.testing.assert_close(scales.on_grid(weight), weight, rtol=1e-6, atol=0)
        assert not torch.equal(weight, before[name])
        torch.testing.assert_close(weight, before[name], rtol=2**-8, atol=0)  # half a step of bfloat16


def test_whole_floats_stay_as_they_are_stored(context: Context) -> None:
    """What is stored in float32 and off its grid is damaged: it is not mended in silence."""
    folder = checkpoint("llama", torch.float32, context, **SCHEMES[1])
    model = with_separate_experts(load_float(folder))
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight.data[0, 0] += 0.01
    before = layer.weight.clone()
    put_on_grids(model, Checkpoint(folder))
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize(("kind", "settings"), [("llama", SCHEMES[0]), pytest.param("gpt2", SCHEMES[2], marks=pytest.mark.slow)])
def test_the_graph_of_a_short_checkpoint_answers_as_torch(kind: str, settings: dict[str, Any], context: Context, tmp_path: Path) -> None:
    import onnxruntime

    folder = checkpoint(kind, torch.bfloat16, context, {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}[kind], **settings)
    processor = Checkpoint(folder).preprocessor("text-generation", tiny.LENGTH, context.target)
    (tmp_path / "graph").mkdir()
    graph = write_graphs(Checkpoint(folder), processor, tmp_path / "graph" / "model.onnx", ["openvino"])
    options = onnxruntime.SessionOptions()
    for name, value in properties(1).items():
        if "." in name:
            options.add_session_config_entry(name, value)
    features = processor.encode(list(tiny.blocks(4, 9).rows))
    (found,) = onnxruntime.InferenceSession(str(graph), options).run(["logits"], dict(features))
    model = load(folder) if settings["scheme"] == "w4a16" else load_float(folder)
    with torch.inference_mode():
        expected = forward(model, {name: torch.from_numpy(array) for name, array in features.items()})
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-2 if kind == "gpt2" else 2e-4)
