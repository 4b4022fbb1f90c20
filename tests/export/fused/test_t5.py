"""The encoder of T5 as a model of vectors: RMSNorm before the layers, relative positions, no scaling of scores, ReLU or a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export.fused import parts
from export.fused.parts import plan_of
from export.fused.plan import read_plan, write_plan
from export.fused.rows import Limits, pack
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from tests.export.fused import encoders
from tests.export.fused.encoders import Answers, Shape, Ways
from tests.export.fused.test_forward import compare_codes
from tests.export.fused.test_parts import quantized
from tests.seldom import seldom

Interpreted = Callable[..., Any]
GATED = {"feed_forward_proj": "gated-gelu"}
SHAPES = {
    "relu": Shape("t5", vectors={}),
    "gated": Shape("t5", vectors={}, config=GATED),
    "gated, mixed": Shape(
        "t5", vectors={"pooling": "cls"}, config=GATED,
        floats=("0.layer.0.SelfAttention.v", "1.layer.1.DenseReluDense.wi_1"), smooth=("0.layer.1.DenseReluDense.wo",),
        uneven=("0.layer.1.DenseReluDense.wi_0",),
    ),
    "gated, in blocks": Shape("t5", vectors={"normalize": False}, config=GATED, sparsity=0.6),
}  # fmt: skip


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", seldom(SHAPES, ("gated, in blocks",)))
def test_codes_and_vectors_are_torchs(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    given, folder = encoders.features(3), encoders.checkpoint(tmp_path, SHAPES[name])
    vectors, read = encoders.in_torch(folder, given)
    answers: Answers = interpreted(encoders.in_kernels, folder, given)
    same = compare_codes(read, answers, given["attention_mask"].sum(axis=1).tolist())
    assert sum(same) >= 2
    torch.testing.assert_close(answers.logits[same], vectors[same], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.whole
def test_a_vector_has_the_same_bits_whatever_is_packed_beside_its_row(interpreted: Interpreted, tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, Shape("t5", vectors={}, config={"num_layers": 1}))
    ways: Ways = interpreted(encoders.in_ways, folder, encoders.features(2))
    for found in (ways.padded, ways.filled, ways.alone):
        assert torch.equal(found, ways.packed)
    assert torch.equal(ways.recorded_logits, ways.logits)


@pytest.mark.parametrize("gated", [False, True])
def test_the_parts_are_found_and_come_back_from_the_file(gated: bool, tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, SHAPES["gated" if gated else "relu"])
    plan, model = plan_of(Checkpoint(folder), longest=40), load(folder)
    write_plan(plan, tmp_path / "plan")
    names = [name for name, module in model.named_modules() if hasattr(module, "weight_scale")]
    for found in (plan, read_plan(tmp_path / "plan").to(torch.device("cpu"))):
        assert [layer.name for layer in found.linears] == names
        assert (found.kind, found.position, found.longest, found.pre_norm) == (None, None, 40, True)
        assert found.activation == ("gelu_tanh" if gated else "relu")
        assert found.relative is not None
        assert plan.relative is not None
        assert torch.equal(found.relative, plan.relative)
        for block in found.blocks:
            assert (block.scaling, block.heads, block.head_dim) == (1.0, 2, 32)
            assert not any(norm.centred for norm in (block.out_norm, block.ffn_norm, found.norm))
            assert (block.gate is None) == (not gated)
            assert block.gate is None or (block.gate.name.endswith("wi_0") and block.up.name.endswith("wi_1"))
    last: Any = model.get_submodule("encoder.final_layer_norm")
    assert torch.equal(plan.blocks[-1].ffn_norm.gain, last.weight)
    assert plan.norm.eps == last.variance_epsilon


def test_the_gate_is_found_by_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = encoders.checkpoint(tmp_path, SHAPES["gated"]), parts.block_paths

    def turned(model: Any) -> Any:
        found = read(model)
        return replace(found, feed_forward=tuple((up, gate, down) for gate, up, down in found.feed_forward))

    monkeypatch.setattr(parts, "block_paths", turned)
    for block in plan_of(Checkpoint(folder)).blocks:
        assert block.gate is not None
        assert block.gate.name.endswith("wi_0")


def test_the_numbers_of_distances_are_the_models(tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, SHAPES["relu"])
    relative, tokens, model = plan_of(Checkpoint(folder), longest=300).relative, torch.arange(300), load_float(folder)
    attention: Any = model.get_submodule("encoder.block.0.layer.0.SelfAttention")
    assert relative is not None
    with torch.inference_mode():
        every = attention.compute_bias(300, 300)[0]
    assert torch.equal(relative[:, tokens[None, :] - tokens[:, None] + 299], every)
    assert len(relative[0].unique()) == 7  # distance 0, two near ones and one far one on either side


def test_a_row_that_is_longer_than_the_plan_is_refused() -> None:
    with pytest.raises(InputError, match="a row has 12 tokens"):
        pack(encoders.features(2), Limits(50, 1, 11, 0))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.UMT5Config(vocab_size=50, d_model=64, d_kv=32, num_heads=2, num_layers=2, d_ff=96), "2 tables of relative positions"),
        (encoders.CONFIGS["t5"](feed_forward_proj="gated-mish"), "its activation is mish; gelu, gelu_tanh, relu, silu are written"),
    ],
)
def test_others_are_refused_with_the_reason(config: Any, why: str, tmp_path: Path) -> None:
    encoders.built(config, Shape(vectors={})).save_pretrained(tmp_path)
    quantized(tmp_path)
    with pytest.raises(InputError, match=f"BERT, T5 and ViT.*{why}"):
        plan_of(Checkpoint(tmp_path))


def test_a_norm_that_adds_to_its_gain_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An RMSNorm has no other form than the one that the kernels compute: the parts are proved with that form."""
    folder, loaded = encoders.checkpoint(tmp_path, SHAPES["relu"]), parts.load_float

    def shifted(path: Path) -> Any:
        model = loaded(path)
        norm: Any = model.get_submodule("encoder.block.0.layer.0.layer_norm")
        norm.register_forward_hook(lambda module, inputs, output: output / module.weight * (1 + module.weight))
        return model

    monkeypatch.setattr(parts, "load_float", shifted)
    with pytest.raises(InputError, match="computes otherwise"):
        plan_of(Checkpoint(folder))
