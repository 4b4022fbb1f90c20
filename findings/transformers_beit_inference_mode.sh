#!/usr/bin/env bash
# Transformers 5.23.0, torch 2.13.0: a BEiT that was run in inference mode stops another BEiT of the same process from training. The guess was
# that two model objects share nothing, and that inference mode of one (an evaluation, a teacher) leaves the other as it was.
#
# Seen: the index of relative positions is cached by the size of the window in a cache of the whole process. The first model's forward pass in
# inference mode puts an inference tensor there, and the loss of the second model raises "Inference tensors cannot be saved for backward" on
# its first step. The same models train after an evaluation under no_grad. So does a process that trains before it evaluates: what was cached
# first decides.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.models.beit.modeling_beit import BeitRelativePositionBias


def model():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BeitConfig(**sizes, image_size=8, patch_size=4, num_channels=1, use_relative_position_bias=True)
    return transformers.BeitForImageClassification(config)


def seen(order):
    for cell in BeitRelativePositionBias.generate_relative_position_index.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    images, evaluated, trained = torch.zeros(2, 1, 8, 8), model().eval(), model()
    try:
        for step in order:
            if step == "train":
                trained(images, labels=torch.tensor([0, 1])).loss.backward()
            else:
                with torch.no_grad() if step == "no_grad" else torch.inference_mode():
                    evaluated(images)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "trains"


orders = (("inference_mode", "train"), ("no_grad", "train"), ("train", "inference_mode", "train"))
found = [seen(order) for order in orders]
for order, what in zip(orders, found, strict=True):
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {', '.join(order)}: {what}")
assert found == ["Inference tensors cannot be saved for backward", "trains", "trains"], "the behaviour has changed"
PYTHON
