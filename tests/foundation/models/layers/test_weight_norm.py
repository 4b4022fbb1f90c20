"""Weight norm: folding and putting it back give the same layer, and weights on a grid stay on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import AutoModelForAudioClassification

from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.forward import forward
from foundation.models.importing import import_model
from foundation.models.layers.weight_norm import fold_weight_norm, unfolded
from tests import tiny_sounds

VALUES = {"input_values": torch.sin(torch.arange(960.0)).reshape(1, 960)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waveforms")
    import_model(ModelConfig(**tiny_sounds.model(tiny_sounds.waveform_config())), ("a", "b", "c"), 0, folder)
    return folder


@pytest.mark.parametrize("axis", [0, 2])
def test_a_folded_layer_computes_the_formula(axis: int) -> None:
    torch.manual_seed(0)
    layer: Any = weight_norm(nn.Conv1d(4, 6, 3), dim=axis)
    layer.parametrizations.weight.original0.data *= 1.7
    g, v = layer.parametrizations.weight.original0.detach(), layer.parametrizations.weight.original1.detach()
    norm = v.square().sum(dim=[other for other in range(3) if other != axis], keepdim=True).sqrt()
    x = torch.randn(2, 4, 9)
    with torch.no_grad():
        expected = layer(x)
    model = nn.Sequential(layer)
    fold_weight_norm(model)
    assert type(model[0]) is nn.Conv1d
    torch.testing.assert_close(model[0].weight.detach(), g * v / norm)
    torch.testing.assert_close(model(x), expected)


def test_weights_on_a_grid_come_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    grid = torch.randint(-127, 128, (32, 8, 16)).float() * (torch.rand(32, 1, 1) * 0.01)
    stock = nn.Sequential(weight_norm(nn.Conv1d(32, 32, 16, groups=4), dim=2))
    state = unfolded(stock, {"0.weight": grid, "0.bias": torch.zeros(32)})
    assert set(state) == set(stock.state_dict())
    stock.load_state_dict(state)
    torch.testing.assert_close(stock[0].weight.detach(), grid)  # as stock Transformers has it
    fold_weight_norm(stock)
    assert torch.equal(stock[0].weight.detach(), grid)


def test_a_checkpoint_is_stock_and_loads_without_weight_norm(checkpoint: Path, tmp_path: Path) -> None:
    stock, model = AutoModelForAudioClassification.from_pretrained(checkpoint).eval(), load(checkpoint)
    layer = model.get_submodule("wav2vec2.encoder.pos_conv_embed.conv")
    assert type(layer) is nn.Conv1d
    with torch.inference_mode():
        torch.testing.assert_close(forward(model, VALUES), stock(**VALUES).logits)
        layer.weight.mul_(1.5)  # type: ignore[operator,union-attr]
    save(model, checkpoint, tmp_path, "Changed.")
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(checkpoint / "model.safetensors").keys()
    again = load(tmp_path)
    assert torch.equal(again.get_submodule("wav2vec2.encoder.pos_conv_embed.conv").weight, layer.weight)  # type: ignore[arg-type]
    with torch.inference_mode():
        torch.testing.assert_close(
            AutoModelForAudioClassification.from_pretrained(tmp_path).eval()(**VALUES).logits, forward(model, VALUES)
        )
