"""Layers whose inputs are 0 on all calibration rows, as after pruning every neuron before them: they answer with their bias.

python -m pytest tests/quantize/test_silent_layers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load
from foundation.models.forward import forward
from foundation.stage.context import Context
from quantize.ptq import silent_warnings
from quantize.quantize import Quantize
from tests import tiny_language_models as tiny

pytestmark = pytest.mark.whole
SILENT = "transformer.h.1.mlp.c_proj"
IDS = torch.from_numpy(np.stack(tiny.blocks(4, 9).rows)).long()


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """A GPT-2 whose second layer has no neuron left: what c_proj reads is gelu(0)."""
    folder = tiny.write(tmp_path / "model", "gpt2", n_layer=2)
    for file in folder.glob("model*.safetensors"):
        tensors = load_file(file)
        save_file({name: tensor * (".1.mlp.c_fc" not in name) for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def quantized(folder: Path, context: Context, **settings: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Returns the figures, the output of the silent layer, and the bias of the float model."""
    out, outputs = context.scratch.parent / "out", []
    out.mkdir()
    figures = Quantize(id="quantize", **settings).run(Artifact(folder, {}), context, out)
    model = load(out)
    model.get_submodule(SILENT).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.inference_mode():
        assert forward(model, {"input_ids": IDS}).isfinite().all()
    return figures, outputs[0], load(folder).get_parameter(f"{SILENT}.bias").detach()


@pytest.mark.parametrize("scheme", ["fp8", "w8a8"])
def test_a_quantized_one_answers_with_its_bias(scheme: str, pruned: Path, blocks_context: Context) -> None:
    figures, output, bias = quantized(pruned, blocks_context, scheme=scheme, stream=True, smoothquant=False)
    torch.testing.assert_close(output, bias.expand_as(output), rtol=0, atol=0)
    layer = next(layer for layer in figures["layers"] if layer["name"] == SILENT)
    assert (layer["max_abs"], layer["input_scale"], layer["clipped"]) == (0, 1, 0)
    assert layer.get("input_sqnr_db") is None  # zeros are exact
    assert [warning for warning in figures["warnings"] if "1 layers are 0 on all calibration rows" in warning and SILENT in warning]


def test_in_memory_it_stays_float(pruned: Path, blocks_context: Context) -> None:
    figures, output, bias = quantized(pruned, blocks_context, scheme="w8a8", stream=False, smoothquant=False)
    torch.testing.assert_close(output, bias.expand_as(output), rtol=0, atol=0)
    assert "the same for every row" in figures["float_layers"][SILENT]
    assert not any("0 on all calibration rows" in warning for warning in figures["warnings"])


def test_a_layer_without_a_range_is_no_reason_to_warn() -> None:
    dynamic: Any = {"name": "a", "max_abs": 0.0, "weight_sqnr_db": 40.0}
    assert not silent_warnings([dynamic, {**dynamic, "input_scale": 0.1, "max_abs": 2.0}])
