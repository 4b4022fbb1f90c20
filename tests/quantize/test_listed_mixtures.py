"""Switch Transformers and NLLB-MoE through the stage `quantize`: every expert gets integers, also one that few rows or none reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.models.checkpoint import load, load_float
from foundation.models.layers.routed import experts_of
from foundation.schemes.checkpoint import load_quantization
from quantize.quantize import Quantize
from tests.export.generation import tiny_encoder_decoders

pytestmark = pytest.mark.whole

EXPERTS = 24
SPARSE = {"num_experts": EXPERTS, "expert_capacity": 4}
KINDS: dict[str, Any] = {
    "switch": lambda: transformers.SwitchTransformersConfig(
        **{**tiny_encoder_decoders.T5, **SPARSE, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    ),
    "nllb": lambda: transformers.NllbMoeConfig(
        **{**tiny_encoder_decoders.BART, **SPARSE, "encoder_sparse_step": 2, "decoder_sparse_step": 3, "moe_token_dropout": 0.0}
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    monkeypatch.setitem(tiny_encoder_decoders.CONFIGS, name, KINDS[name])
    return name


def quantized(kind: str, out: Path, **settings: Any) -> dict[str, Any]:
    source = Artifact(tiny_encoder_decoders.checkpoint(kind), {"id": "baseline", "stage": "model"})
    out.mkdir()
    return dict(Quantize(**settings).run(source, tiny_encoder_decoders.context(kind, out), out))


def test_every_expert_gets_integers_and_the_load_is_told(kind: str, tmp_path: Path) -> None:
    figures = quantized(kind, tmp_path / "out", calibration={"rows": 8})
    layers, _ = load_quantization(tmp_path / "out")
    places = experts_of(load(tmp_path / "out"))
    assert len(places) >= 2
    assert sum(".expert_" in name for name in layers) == 2 * EXPERTS * len(places)
    for module in places.values():
        assert not any(isinstance(layer, nn.Linear) for layer in module.modules())
    assert figures["experts"].keys() == places.keys()
    assert min(min(tokens) for tokens in figures["experts"].values()) == 0, "no expert is without tokens: the test says nothing"
    assert any("calibrated on all tokens of their layer" in line for line in figures["warnings"])


def test_every_expert_answers_as_before(kind: str, tmp_path: Path) -> None:
    quantized(kind, tmp_path / "out", calibration={"rows": 40}, weight_bits=8)
    before, after = load_float(tiny_encoder_decoders.checkpoint(kind)), load(tmp_path / "out")
    seen: dict[str, torch.Tensor] = {}
    for name in experts_of(after):
        before.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
    ids = torch.from_numpy(tiny_encoder_decoders.sources(tuple(range(1, 10)))[8].astype("int64"))[None]
    with torch.inference_mode():
        before(input_ids=ids, decoder_input_ids=torch.tensor([[tiny_encoder_decoders.START, 7]]))
        for name, module in experts_of(after).items():
            for number in range(EXPERTS):
                expected = before.get_submodule(f"{name}.expert_{number}")(seen[name])
                found = module.expert(number, seen[name])
                assert float((found - expected).norm() / expected.norm()) < 0.05, (name, number)
