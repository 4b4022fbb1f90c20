#!/usr/bin/env bash
# PEFT 0.21.2: LoRA on torch's nn.MultiheadAttention counts twice in the output projection. The guess was W + scaling * B A for every weight that has
# an adapter, as the file of the adapter says and every other reader computes.
#
# Seen (2026-11-28): in and out of the merged state the answers are those of W + 2 B A in the output projection, and of W + B A in the others. The
# gradient is that of B A once, half of the slope that the loss has. Nothing warns; a reader that adds B A once gets another model (38 % off here).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq peft==0.21.2 transformers==5.23.0 torch==2.13.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from copy import deepcopy
from importlib.metadata import version

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.attention(rows, rows, rows, need_weights=False)[0]


torch.manual_seed(0)
block = Block().double().eval()
plain, rows = deepcopy(block), torch.randn(3, 7, 32, dtype=torch.float64)
model = get_peft_model(block, LoraConfig(r=4, lora_alpha=4, target_modules=["attention"], init_lora_weights=False)).double().eval()
state = get_peft_model_state_dict(model)
print(*state)
factors = {name.split("attention.", 1)[1]: value for name, value in state.items()}


def by_hand(times: float) -> Tensor:
    """Answers with the products of the factors added to the weights, the one of the output projection so many times."""
    attention = deepcopy(plain).attention
    with torch.no_grad():
        attention.in_proj_weight += factors["lora_B.weight"] @ factors["lora_A.weight"]
        attention.out_proj.weight += times * factors["base_layer.out_proj.lora_B.weight"] @ factors["base_layer.out_proj.lora_A.weight"]
        return attention(rows, rows, rows, need_weights=False)[0]


with torch.no_grad():
    answers = model(rows)
    merged = deepcopy(model).merge_and_unload()(rows)
off = {times: ((answers - by_hand(times)).norm() / answers.norm()).item() for times in (1, 2)}
print(f"PEFT {version('peft')}: off by {off[1]:.3f} from counting once, by {off[2]:.0e} from counting twice; merged", torch.dist(merged, answers).item())

[weight] = [value for name, value in model.named_parameters() if name.endswith("out_proj.lora_B.default.weight")]
loss = (model(rows) ** 2).mean()
loss.backward()
step = torch.randn_like(weight) * 1e-5
with torch.no_grad():
    weight += step
    above = (model(rows) ** 2).mean()
    weight -= 2 * step
    below = (model(rows) ** 2).mean()
true, given = ((above - below) / 2).item(), (weight.grad * step).sum().item()
print(f"slope of the loss by differences {true:.3e}, by autograd {given:.3e}")
assert off[1] > 0.1 and off[2] < 1e-9 and abs(true / given - 2) < 1e-3, "the behaviour has changed"
PYTHON
