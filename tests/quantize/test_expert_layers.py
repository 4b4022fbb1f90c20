"""Mixtures through the stage `quantize`: every expert gets integers, rare ones are told of, and a plain load sees the grid weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from export.compressed_tensors import obstacle
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import separate_experts
from foundation.models.library import quiet
from foundation.schemes.checkpoint import load_quantization
from foundation.stage.context import Context
from quantize.quantize import Quantize
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole

EXPERTS = 2 * 4 * 2
"""Layers, experts, products of each."""
ATTENTION = 2 * 4


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    return Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch")


def mixture() -> Artifact:
    return Artifact(tiny_gpt.checkpoint("mixtral"), {"id": "baseline", "stage": "model"})


def perplexity(folder: Path, context: Context) -> float:
    answers = predict(load(folder), tiny_gpt.prepared("mixtral"), context.data.evaluation.rows, 32)
    return metrics("text-generation", answers, context.data.evaluation.labels)["perplexity"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheme": "w8a8-dynamic"},
        {"scheme": "w4a16", "group_size": 16},
        {"scheme": "w4a16", "group_size": 16, "rounding": "gptq"},
        {"scheme": "w4a16", "group_size": 16, "awq": True},
        {"rounding": "gptq", "smoothquant": {"prescale": True}},
        {"bias_correction": True},
    ],
    ids=str,
)
def test_every_expert_gets_integers(settings: dict[str, Any], context: Context, tmp_path: Path) -> None:
    source = mixture()
    figures = Quantize(**{"calibration": {"rows": 64}, **settings}).run(source, context, tmp_path)
    layers, kept = load_quantization(tmp_path)
    assert kept == {"lm_head": "head"}
    assert sum(".experts." in name for name in layers) == EXPERTS
    assert len(layers) == EXPERTS + ATTENTION
    assert sorted(figures["experts"]) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert all(sum(tokens) == 64 * tiny_gpt.LENGTH * 2 for tokens in figures["experts"].values())
    assert abs(perplexity(tmp_path, context) / perplexity(source.path, context) - 1) < (0.08 if "w4" in str(settings) else 0.01)
    loaded = load(tmp_path)
    for module in separate_experts(loaded).values():
        assert not any(isinstance(layer, nn.Linear) for layer in module.modules())
        assert not module.everywhere


def test_a_plain_load_sees_the_grid_weights_of_every_expert(context: Context, tmp_path: Path) -> None:
    Quantize(calibration={"rows": 64}, weight_bits=8).run(mixture(), context, tmp_path)  # type: ignore[arg-type]
    layers, _ = load_quantization(tmp_path)
    with quiet():
        stock: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    stacked = stock.model.layers[1].mlp.experts.down_proj.detach()
    for expert in range(4):
        scales = layers[f"model.layers.1.mlp.experts.down_proj.{expert}"]
        torch.testing.assert_close(scales.on_grid(stacked[expert]), stacked[expert], rtol=1e-6, atol=0)
    assert len({float(layers[f"model.layers.1.mlp.experts.down_proj.{expert}"].input_scale) for expert in range(4)}) == 4  # type: ignore[attr-defined]
    message = obstacle(Checkpoint(tmp_path))
    assert message is not None
    assert "experts that Transformers keeps in one tensor" in message


def test_the_router_stays_as_it_is(context: Context, tmp_path: Path) -> None:
    Quantize(calibration={"rows": 64}).run(mixture(), context, tmp_path)  # type: ignore[arg-type]
    before, after = load_float(mixture().path), load_float(tmp_path)
    for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        if "mlp.gate." in name:
            assert torch.equal(one, other)


def test_experts_with_few_tokens_are_told_of_and_calibrated_on_all(context: Context, tmp_path: Path) -> None:
    (tmp_path / "few").mkdir(), (tmp_path / "own").mkdir()
    few = Quantize(calibration={"rows": 64, "expert_tokens": 10**6}).run(mixture(), context, tmp_path / "few")  # type: ignore[arg-type]
    own = Quantize(calibration={"rows": 64, "expert_tokens": 0}).run(mixture(), context, tmp_path / "own")  # type: ignore[arg-type]
    assert any("8 of 8 experts saw fewer than 1000000 calibration tokens" in line for line in few["warnings"])
    assert not any("saw fewer" in line for line in own["warnings"])
    names = [f"model.layers.0.mlp.experts.gate_up_proj.{expert}" for expert in range(4)]
    ranges = [{figure["name"]: figure["max_abs"] for figure in found["layers"]} for found in (few, own)]
    assert len({ranges[0][name] for name in names}) == 1  # all of them saw the same tokens
    assert max(ranges[1][name] for name in names) == ranges[0][names[0]]
    assert len({ranges[1][name] for name in names}) > 1


@pytest.mark.slow
def test_experts_are_trained_in_int8(context: Context, tmp_path: Path) -> None:
    settings = {"mode": "qat", "qat": {"epochs": 0.5, "learning_rate": 1e-3, "batch_size": 16}, "calibration": {"rows": 64}}
    Quantize(**settings).run(mixture(), context, tmp_path)  # type: ignore[arg-type]
    before, after = load_float(mixture().path), load_float(tmp_path)
    moved = [
        float((one - other).abs().max())
        for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if name.endswith("experts.down_proj")
    ]
    assert min(moved) > 4e-4  # further than rounding to the grid moves a weight
    assert abs(perplexity(tmp_path, context) / perplexity(mixture().path, context) - 1) < 0.01


def test_a_mixture_is_not_streamed(context: Context, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"experts.gate_up_proj has 3 dimensions; .*matrices and vectors"):
        Quantize(calibration={"rows": 64}, stream=True).run(mixture(), context, tmp_path)  # type: ignore[arg-type]
