#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX512-BF16: one evaluation changes a 4-bit model for good. The guess was that a forward pass in eval mode
# leaves weights, gradients and files as they were, so that a QLoRA run may evaluate between its steps.
#
# Seen (2026-11-28): the first pass in eval mode packs the weights anew. From then on the layer passes no gradient on, in train mode as well:
# adapters before it get a wrong gradient, or none, while the loss stays right. torch warns once that a kernel has no gradient of its own. Without
# double quantization (the default of BitsAndBytesConfig) a state_dict after the pass holds its scales transposed, and loads as another model.
# dequantize_4bit, with which PEFT merges adapters, reads the packed bytes as if they were not packed. Before the pass all three are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 bitsandbytes==0.50.2
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


def frozen(exact: torch.Tensor) -> Linear4bit:
    """A 4-bit layer as Transformers builds it: NF4, no double quantization."""
    layer = Linear4bit(128, 128, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4")
    layer.weight = Params4bit(exact, requires_grad=False, compress_statistics=False, quant_type="nf4")
    return layer.to("cpu")


def gradient(adapter: nn.Linear, layer: nn.Module) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a trained adapter with a frozen layer and its shortcut behind it."""
    layer.train()
    adapter.zero_grad()
    hidden = adapter(inputs)
    loss = ((hidden + layer(hidden)) ** 2).mean()
    loss.backward()
    return loss.item(), adapter.weight.grad.clone()


def stored(layer: Linear4bit) -> torch.Tensor:
    """The weights that a state_dict holds."""
    state = layer.state_dict()
    extra = {name.removeprefix("weight."): value for name, value in state.items() if name != "weight"}
    weight = Params4bit.from_prequantized(state["weight"], extra, device="cpu")
    return functional.dequantize_4bit(weight.data, weight.quant_state).float()


def off(value: torch.Tensor, right: torch.Tensor) -> float:
    return ((value.float() - right.float()).norm() / right.float().norm()).item()


torch.manual_seed(0)
exact, inputs, adapter = torch.randn(128, 128, dtype=torch.bfloat16) / 8, torch.randn(16, 128).bfloat16(), nn.Linear(128, 128).bfloat16()
layer = frozen(exact)
weights = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
packs = functional.has_avx512bf16() and layer.support_avx512bf16_for_cpu
loss, right = gradient(adapter, layer)
print(f"bitsandbytes {version('bitsandbytes')}, packs for AVX512-BF16: {packs}")
print(f"before an evaluation: loss {loss:.4f}, state_dict off by {off(stored(layer), weights):.4f}")
with torch.no_grad():
    layer.eval()(inputs)
merged = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
later, wrong = gradient(adapter, layer)
hidden = adapter(inputs)
(expected,) = torch.autograd.grad(((hidden + layer(hidden).detach()) ** 2).mean(), adapter.weight)
print(f"after it: loss {later:.4f}, gradient off by {off(wrong, right):.2f}, and {off(wrong, expected):.4f} from one that skips the layer")
print(f"after it: dequantize_4bit off by {off(merged, weights):.2f}, state_dict off by {off(stored(layer), weights):.2f}")
assert abs(later - loss) < 0.02 * loss
if packs:
    assert off(wrong, right) > 0.2 and off(wrong, expected) < 1e-3, "the behaviour has changed"
    assert off(merged, weights) > 0.5 and off(stored(layer), weights) > 0.15, "the behaviour has changed"
else:
    assert off(wrong, right) < 1e-3 and off(merged, weights) == 0 and off(stored(layer), weights) == 0, "the behaviour has changed"
PYTHON
