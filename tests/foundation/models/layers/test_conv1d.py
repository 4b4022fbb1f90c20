"""GPT-2's Conv1D as a linear layer: the same function inside, stock shapes on disk, the head tied to the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from foundation.models.checkpoint import load, save
from foundation.models.forward import forward, linears
from foundation.models.layers.conv1d import stock_state, with_linears
from tests.foundation import tiny_gpt

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def stock() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(tiny_gpt.checkpoint()).eval()
    return model


def test_a_model_computes_the_same_without_conv1d(stock: nn.Module) -> None:
    model = load(tiny_gpt.checkpoint())
    assert sum(isinstance(module, Conv1D) for module in stock.modules()) == 8
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    assert list(linears(model))[:2] == ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"]
    with torch.inference_mode():
        torch.testing.assert_close(forward(model, {"input_ids": IDS}), stock(input_ids=IDS).logits)


def test_what_is_saved_is_stock_bit_for_bit(stock: nn.Module, tmp_path: Path) -> None:
    model = load(tiny_gpt.checkpoint())
    layer = model.get_submodule("transformer.h.1.attn.c_proj")  # square: turned the wrong way, it would load without a complaint
    plain = nn.Linear(32, 32)
    plain.load_state_dict(layer.state_dict())
    model.get_submodule("transformer.h.1.attn").c_proj = plain
    save(model, tiny_gpt.checkpoint(), tmp_path, "Saved.")
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for name, value in stock.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(tiny_gpt.checkpoint() / "model.safetensors").keys()


def test_the_head_stays_tied_to_the_embedding(tmp_path: Path) -> None:
    model = load(tiny_gpt.checkpoint())
    with torch.no_grad():
        model.get_submodule("transformer.wte").weight.add_(1.0)  # type: ignore[operator,union-attr]
    save(model, tiny_gpt.checkpoint(), tmp_path, "Saved.")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = load(tmp_path)
    head, embedding = again.get_submodule("lm_head").weight, again.get_submodule("transformer.wte").weight
    assert head is embedding
    torch.testing.assert_close(head, model.get_submodule("lm_head").weight)


def test_a_model_without_conv1d_is_left_alone(tiny_bert: Path) -> None:
    model = load(tiny_bert)
    modules = dict(model.named_modules())
    assert dict(with_linears(model).named_modules()) == modules
    state = model.state_dict()
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in stock_state(model).items())
