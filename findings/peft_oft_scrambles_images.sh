#!/usr/bin/env bash
# PEFT 0.21.2: OFT on a convolution scrambles its input before it has learned anything, and the merged model is another one.
# The guess was that a fresh adapter changes nothing, since its rotation is the identity, and that merging keeps the answers: both hold for HRA, LoHa, LoKr and LoRA
# on the same layers, and for OFT on a Linear.
#
# Seen (2026-11-29): the patches of the image are rotated and put together to an image again. There places and channels are mixed up, and patches
# that overlap are added, so that the convolution sees no picture: the answers of a fresh adapter on a 3x3 kernel are three lengths away from
# the layer's own and have nothing in common with them (cosine 0.05), on the patches of a ViT (16x16) 18 lengths. A network is trained on that, with
# or without a falling loss. merge_and_unload rotates the weights, as the paper does: after the merge a fresh adapter is the base model again, and
# a trained one is a model that was never evaluated. Nothing warns, and shapes are right. Kernels of 1x1 are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq peft==0.21.2 transformers==5.23.0 torch==2.13.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from copy import deepcopy
from importlib.metadata import version

import torch
from peft import HRAConfig, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

ADAPTERS = (OFTConfig(oft_block_size=4), HRAConfig(), LoHaConfig(), LoKrConfig(), LoraConfig())
LAYERS = (
    ("linear", nn.Linear(64, 8), (64, 64)),
    ("1x1", nn.Conv2d(16, 8, 1), (2, 16, 8, 8)),
    ("3x3", nn.Conv2d(16, 8, 3, padding=1), (2, 16, 8, 8)),
    ("patches of 16x16", nn.Conv2d(3, 8, 16, stride=16), (2, 3, 64, 64)),
)


def distance(found: Tensor, right: Tensor) -> float:
    return ((found - right).norm() / right.norm()).item()


torch.manual_seed(0)
print(f"PEFT {version('peft')}")
for name, layer, shape in LAYERS:
    images = torch.randn(shape)
    right = layer(images).detach()
    for config in ADAPTERS:
        config = deepcopy(config)
        config.target_modules = ["0"]
        model = get_peft_model(nn.Sequential(deepcopy(layer)), config).eval()
        with torch.no_grad():
            fresh = model(images)
            fresh_merged = deepcopy(model).merge_and_unload()(images)
            for part, value in model.named_parameters():
                if value.requires_grad:
                    value += 0.05 * torch.randn_like(value)
            trained = model(images)
            moved = distance(trained, deepcopy(model).merge_and_unload()(images))
        cosine = cosine_similarity(fresh.flatten(), right.flatten(), dim=0).item()
        print(f"{name}, {type(config).__name__}: fresh {distance(fresh, right):.2f} from the layer's own answers (cosine {cosine:.2f}), "
              f"fresh and merged {distance(fresh_merged, right):.2f}; trained {moved:.2f} from its merged copy")
        assert distance(fresh_merged, right) < 1e-5
        if isinstance(config, OFTConfig) and name in ("3x3", "patches of 16x16"):
            assert distance(fresh, right) > 2 and abs(cosine) < 0.2 and moved > 0.5, "the behaviour has changed"
        else:
            assert distance(fresh, right) < 1e-5 and moved < 1e-4
PYTHON
