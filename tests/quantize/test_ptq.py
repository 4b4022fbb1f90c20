"""The steps of post-training quantization: the choice of layers in several families, and weight scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from foundation.models.forward import linears
from foundation.schemes.int8 import levels, on_grid, weight_scale
from quantize.ptq import HEAD, choose_layers, mse_weight_scale

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 30}

FAMILIES = {
    "roberta": (lambda: transformers.RobertaConfig(**TEXT), 12, ["classifier.dense", "classifier.out_proj"]),
    "distilbert": (
        lambda: transformers.DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
        12,
        ["pre_classifier", "classifier"],
    ),
    "electra": (
        lambda: transformers.ElectraConfig(**TEXT, embedding_size=8),
        12,
        ["electra.embeddings_project", "classifier.dense", "classifier.out_proj"],
    ),
    "albert": (
        lambda: transformers.AlbertConfig(**TEXT, embedding_size=8),
        6,
        ["albert.encoder.embedding_hidden_mapping_in", "albert.pooler", "classifier"],
    ),
    "deberta": (lambda: transformers.DebertaV2Config(**TEXT), 12, ["pooler.dense", "classifier"]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_blocks_are_chosen_in_every_family(family: str) -> None:
    config, num_chosen, heads = FAMILIES[family]
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(config())
    chosen, kept = choose_layers(model, linears(model), (), "stages.quantize.exclude")
    assert len(chosen) == num_chosen
    assert kept == dict.fromkeys(heads, HEAD)


def test_layers_of_a_vision_model_are_chosen() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForImageClassification.from_config(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4))
    chosen, kept = choose_layers(model, linears(model), (), "stages.quantize.exclude")
    assert len(chosen) == 12
    assert kept == {"classifier": HEAD}


@pytest.mark.parametrize("bits", [8, 7])
def test_weight_scales_are_as_good_as_any_of_a_search(bits: int) -> None:
    weight, largest = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)), levels(bits)
    weight[0] = 0
    weight[1, 0] = 20
    scale = mse_weight_scale(weight, largest)

    def error(scale_O: torch.Tensor) -> torch.Tensor:
        return (on_grid(weight, scale_O, largest) - weight).square().sum(1)

    full = weight_scale(weight, largest)
    tried = torch.stack([error(full * clip) for clip in np.linspace(0.8, 1, 21)])
    assert torch.allclose(error(scale), tried.min(dim=0).values, rtol=1e-3)
    assert (error(scale) <= error(full)).all()
    assert scale[0] == 1
