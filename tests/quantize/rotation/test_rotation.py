"""Rotated models answer as before, in every architecture that can be rotated: python -m pytest tests/quantize/rotation/test_rotation.py"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from foundation.models.architecture.attention import probe
from foundation.models.architecture.residual import stream_of
from foundation.models.architecture.shapes import auto_class
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import save
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, levels, on_grid, quantize, weight_scale
from quantize.calibration import input_scale
from quantize.rotation.orthogonal import randomized_hadamard
from quantize.rotation.rotation import Rotations, Turn, apply, rotate, try_rotation, value_indices
from tests.architectures.table import ARCHITECTURES
from tests.pretend_cuda import gpu
from tests.problems import raises_problem
from tests.quantize.outliers import planted_stream

pytestmark = pytest.mark.whole
KEY = "stages.quantize.rotation"
GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
PRIME: dict[str, Any] = {**GROUPED, "hidden_size": 37, "head_dim": 6, "intermediate_size": 48, "vocab_size": 64}
WIDE: dict[str, Any] = {**GROUPED, "hidden_size": 256, "intermediate_size": 128, "vocab_size": 64}
OWN: dict[str, dict[str, Any]] = {
    "llama of a prime width": {"model_type": "mistral", **PRIME},
    "wide llama": {"model_type": "llama", **WIDE},
    "wide qwen2": {"model_type": "qwen2", **WIDE},
    "llama, tied": {**ARCHITECTURES["llama"].config, "tie_word_embeddings": True},
    "llama with biases": {**ARCHITECTURES["llama"].config, "attention_bias": True, "mlp_bias": True},
}
EXACT = ["llama", "llama, tied", "llama with biases", "llama of a prime width", "mistral", "qwen2", "qwen3", "gemma", "gpt2"]
OTHERS = ["mixtral", "qwen3_moe", "gpt_neox", "phi", "phi3", "vit"]


@cache
def _made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    row = ARCHITECTURES.get(name, ARCHITECTURES["llama"])
    keys = dict(OWN.get(name, row.config))
    config = with_class(transformers.AutoConfig.for_model(keys.pop("model_type"), **keys), row.task)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = with_linears(auto_class(row.task, config).from_config(config)).eval()
        model.config.use_cache = False
        with torch.no_grad():  # biases and gains that differ from channel to channel
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.3))
        return model, probe(model)


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns a new model with random weights, and a row for it."""
    model, features = _made(name)
    return copy.deepcopy(model), features


def logits(model: Any, features: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**features).logits


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def rotations_of(model: nn.Module, features: dict[str, Tensor], seed: int = 0) -> Rotations:
    structure = Structure.of(model, KEY)
    return Rotations.of(model, structure, stream_of(model, structure, lambda: model(**features)), seed, values=True)


def _norm_in_float64(module: Any, x: Tensor) -> Tensor:
    """The norms of Transformers compute in float32, whatever they are given."""
    offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return (offset + module.weight) * x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


@pytest.mark.first(1)
@pytest.mark.parametrize("name", EXACT)
def test_a_rotated_model_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, features = made(name)
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", _norm_in_float64)
    before, expected = copy.deepcopy(model), logits(model, features)
    apply(model, rotations_of(model, features))
    assert relative(logits(model, features), expected) < 1e-9
    changed = [name for name, value in model.named_parameters() if not torch.allclose(value, before.get_parameter(name))]
    assert len(changed) > 0.7 * len(dict(model.named_parameters()))


@pytest.mark.first(1)
@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_a_rotated_model_answers_as_before_and_is_a_stock_one(name: str, tmp_path: Path) -> None:
    model, features = made(name)
    expected = logits(model, features)
    figures = rotate(model, features, 0, KEY)
    assert relative(logits(model, features), expected) < 1e-4
    assert figures["difference"] == relative(logits(model, features), expected)
    assert figures["values"] is True
    (tmp_path / "source").mkdir()
    (tmp_path / "out").mkdir()
    save(model, tmp_path / "source", tmp_path / "out", "Rotated.")
    stock = getattr(transformers, model.config.architectures[0]).from_pretrained(tmp_path / "out").eval()
    assert relative(logits(stock, features), expected) < 1e-4


def test_weights_are_those_of_the_formulas() -> None:
    """Written out with whole matrices, for a layer of a Llama with shared values and biases."""
    model, features = made("llama with biases")
    before = {name: value.double().clone() for name, value in model.named_parameters()}
    rotations = rotations_of(model, features, 5)
    apply(model, rotations)
    after = {name: value.double() for name, value in model.named_parameters()}
    layer, config = "model.layers.1", model.config
    turn = rotations.turns["model.embed_tokens.weight"][0].rotation.matrix_DD
    of_head = rotations.turns[f"{layer}.self_attn.o_proj.weight"][1].rotation.matrix_DD
    values = torch.block_diag(*[of_head] * config.num_key_value_heads)
    queries = torch.block_diag(*[of_head] * config.num_attention_heads)
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
    gain, second, last = (torch.diag(before[f"{name}.weight"]) for name in norms)
    expected = {
        "model.embed_tokens.weight": before["model.embed_tokens.weight"] @ turn,
        f"{layer}.self_attn.q_proj.weight": before[f"{layer}.self_attn.q_proj.weight"] @ gain @ turn,
        f"{layer}.self_attn.q_proj.bias": before[f"{layer}.self_attn.q_proj.bias"],
        f"{layer}.self_attn.v_proj.weight": values.T @ before[f"{layer}.self_attn.v_proj.weight"] @ gain @ turn,
        f"{layer}.self_attn.v_proj.bias": values.T @ before[f"{layer}.self_attn.v_proj.bias"],
        f"{layer}.self_attn.o_proj.weight": turn.T @ before[f"{layer}.self_attn.o_proj.weight"] @ queries,
        f"{layer}.self_attn.o_proj.bias": turn.T @ before[f"{layer}.self_attn.o_proj.bias"],
        f"{layer}.mlp.up_proj.weight": before[f"{layer}.mlp.up_proj.weight"] @ second @ turn,
        f"{layer}.mlp.down_proj.weight": turn.T @ before[f"{layer}.mlp.down_proj.weight"],
        f"{layer}.mlp.down_proj.bias": turn.T @ before[f"{layer}.mlp.down_proj.bias"],
        f"{layer}.input_layernorm.weight": torch.ones(config.hidden_size),
        "model.norm.weight": torch.ones(config.hidden_size),
        "lm_head.weight": before["lm_head.weight"] @ last @ turn,
    }
    for name, weight in expected.items():
        torch.testing.assert_close(after[name], weight.double(), rtol=1e-5, atol=1e-5, msg=name)


def test_tables_are_rotated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, features), (parts, _) = made("llama"), made("llama")
    apply(model, rotations_of(model, features))
    monkeypatch.setattr("quantize.rotation.rotation.PART_BYTES", 8 * 32 * 5)
    apply(parts, rotations_of(parts, features))
    for name, weight in model.named_parameters():
        torch.testing.assert_close(parts.get_parameter(name), weight)


@pytest.mark.parametrize("chosen", [None, [5, 6, 7, 8, 9, 0]])
def test_weights_are_rotated_on_the_device_where_they_are(chosen: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = randomized_hadamard(12 if chosen is None else 3, torch.Generator().manual_seed(0))
    turn = Turn(1, rotation, None if chosen is None else torch.tensor(chosen))
    weight = torch.randn(4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = turn.of(weight)
    with gpu(monkeypatch):
        found = turn.of(weight.to("cuda"))
        assert found.device.type == "cuda"
        assert torch.equal(found.cpu(), expected)


def test_the_seed_decides() -> None:
    models = [made("llama")[0] for _ in range(3)]
    features = made("llama")[1]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        apply(model, rotations_of(model, features, seed))
    first, again, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_tied_head_becomes_a_matrix_of_its_own_where_the_last_norm_has_a_gain() -> None:
    model, features = made("llama, tied")
    neutral, _ = made("llama, tied")
    with torch.no_grad():
        neutral.model.norm.weight.fill_(1.0)
    table = model.lm_head.weight.numel()
    assert rotate(model, features, 0, KEY)["untied_weights"] == table
    assert model.config.tie_word_embeddings is False
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert rotate(neutral, features, 0, KEY)["untied_weights"] == 0
    assert neutral.lm_head.weight is neutral.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bert", "lie on the residual stream"),
        ("gemma2", "model.layers.0.post_attention_layernorm"),
        ("olmo2", "model.layers.1.post_feedforward_layernorm"),
        ("t5", "two stacks"),
        ("resnet", "stages of different sizes"),
    ],
)
def test_a_model_that_cannot_be_rotated_is_refused_before_anything_runs(name: str, why: str) -> None:
    row = ARCHITECTURES[name]
    keys = dict(row.config)
    config = with_class(transformers.AutoConfig.for_model(keys.pop("model_type"), **keys), row.task)
    with raises_problem(KEY, why):
        try_rotation(config, KEY)


def test_a_model_whose_outputs_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, features = made("llama")
    try_rotation(model.config, KEY)
    monkeypatch.setattr("quantize.rotation.orthogonal.Rotation.of", lambda self, x_ND: 1.01 * x_ND)
    with raises_problem(KEY, "change by"):
        rotate(model, features, 0, KEY)


@pytest.mark.parametrize("interleaved", [False, True])
def test_indices_of_values(interleaved: bool) -> None:
    """Of two heads of 3 dimensions: beside names that are laid out as the layer has them."""
    model, _ = made("gpt_neox" if interleaved else "gpt2")
    attention = Structure.of(model, KEY).attentions[0]
    assert attention.interleaved == interleaved
    names = [f"{what}{head}.{place}" for what in "qkv" for head in range(attention.heads) for place in range(attention.head_dim)]
    if interleaved:
        names = [f"{what}{head}.{place}" for head in range(attention.heads) for what in "qkv" for place in range(attention.head_dim)]
    found = value_indices(attention, [("query", 0), ("key", 1), ("value", 2)])
    expected = [f"v{head}.{place}" for head in range(attention.heads) for place in range(attention.head_dim)]
    assert [names[index] for index in found] == expected


def int8_error(model: Any, features: dict[str, Tensor]) -> float:
    """Returns the error of the logits with the linear layers of the blocks in int8, one scale for each input tensor."""
    expected, small = logits(model, features), copy.deepcopy(model)

    def rounded(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = input_scale(float(inputs[0].abs().max()))
        return (quantize(inputs[0], scale, ACTIVATION_LOW, ACTIVATION_HIGH).float() * scale,)

    for name, layer in small.named_modules():
        if isinstance(layer, nn.Linear) and ".layers." in name:
            layer.register_forward_pre_hook(rounded)
            with torch.no_grad():
                layer.weight.copy_(on_grid(layer.weight, weight_scale(layer.weight, levels(8)), levels(8)))
    found = logits(small, features)
    return float((found - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("name", ["wide llama", "wide qwen2"])
def test_planted_outliers_vanish(name: str) -> None:
    """Three channels of the stream are 50 times as large as the others."""
    plain, features = made(name)
    hard = made(name)[0]
    planted_stream(hard, channels=(1, 7, 20), factor=50.0)
    turned = copy.deepcopy(hard)
    rotate(turned, features, 0, KEY)
    without, planted, rotated = (int8_error(one, features) for one in (plain, hard, turned))
    assert planted > 2 * without
    assert rotated < 0.4 * planted
