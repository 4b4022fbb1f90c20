#!/usr/bin/env bash
# PEFT 0.21.2: `add_weighted_adapter` of one adapter with weight 1 is another adapter, if it is an rsLoRA, a DoRA or has a bias. The guess was that
# the new adapter computes the weighted sum, or that what cannot be summed is refused, as it is for `modules_to_save`.
#
# Seen (2026-11-28): the new adapter is made from the settings of the first one, with the scale 1 in mind. An rsLoRA then has the scale root of its
# rank: of rank 16 it counts 4.00 times, two of them joined 5.66 times. A DoRA loses its magnitudes (0.07 times), a bias is left out (0.87 times). A
# plain LoRA is right. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq peft==0.21.2 transformers==5.23.0 torch==2.13.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

RANK = 16
KINDS = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}, "LoRA with bias": {"lora_bias": True}}


def trained(**arguments: bool) -> PeftModel:
    """A layer with two adapters whose numbers are drawn at random, as if they had been trained."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0"], **arguments)
    model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config, adapter_name="one")
    model.add_adapter("two", config)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data += torch.randn_like(value) * (0.5 if "magnitude" in name else 0.05)
    return model.eval()


def effect(model: PeftModel, adapter: str) -> Tensor:
    model.set_adapter(adapter)
    with model.disable_adapter():
        without = model(inputs)
    return model(inputs) - without


inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
print(f"PEFT {version('peft')}, rank {RANK}")
with torch.no_grad():
    for kind, arguments in KINDS.items():
        for adapters, way in ((["one"], "linear"), (["one", "two"], "cat"), (["one", "two"], "svd")):
            model = trained(**arguments)
            right = sum(effect(model, adapter) for adapter in adapters)
            model.add_weighted_adapter(adapters, [1.0] * len(adapters), "sum", combination_type=way, svd_rank=2 * RANK)
            made = effect(model, "sum")
            ratio = (made * right).sum() / (right * right).sum()
            print(f"{kind}, {way} of {len(adapters)}: {ratio:.2f} times the effect, off by {(made - right).norm() / right.norm():.2f}")
            usual = {"LoRA": 1.0, "rsLoRA": (RANK if way == "linear" else 2 * RANK) ** 0.5}.get(kind)
            assert (abs(ratio - usual) < 0.01) if usual else ratio < 0.95, "the behaviour has changed"
PYTHON
