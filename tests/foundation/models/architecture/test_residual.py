"""Norms over the residual stream, their readers, and gains that move.

python -m pytest tests/foundation/models/architecture/test_residual.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foundation.models.architecture.residual import NormKind, fold, kind_of, norms_of, stream_of
from foundation.models.architecture.structure import Structure
from foundation.models.layers.conv1d import with_linears

KEY = "stages.quantize.rotation"
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=32, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False
    ),
}
FEATURES = {"input_ids": torch.arange(8)[None]}


def made(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = with_linears(transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**FEATURES).logits
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda: nn.LayerNorm(12), NormKind(centred=True, offset=0)),
        (lambda: nn.LayerNorm(12, bias=False), NormKind(centred=True, offset=0)),
        (lambda: nn.RMSNorm(12), NormKind(centred=False, offset=0)),
        (lambda: LlamaRMSNorm(12), NormKind(centred=False, offset=0)),
        (lambda: GemmaRMSNorm(12), NormKind(centred=False, offset=1)),
    ],
)
def test_how_a_norm_uses_its_weight_is_observed(norm: Any, kind: NormKind, device: str) -> None:
    given = norm().to(device)
    if device == "cpu":
        nn.init.normal_(given.weight)
        before = given.weight.clone()
    assert kind_of(given) == kind
    assert given.weight.device.type == device
    assert device == "meta" or torch.equal(given.weight, before)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_every_norm_is_read_by_the_layers_behind_it(kind: str) -> None:
    model = made(kind)
    structure = Structure.of(model, KEY)
    stream = stream_of(model, structure, lambda: model(**FEATURES))
    readers = {(name, norm) for (name, _), norm in stream.gains.items()}
    block, head = ("transformer.h.1", "transformer.ln_f") if kind == "gpt2" else ("model.layers.1", "model.norm")
    expected = {
        "gpt2": [("attn.c_attn.weight", "ln_1"), ("mlp.c_fc.weight", "ln_2")],
        "mixtral": [("mlp.gate.weight", "post_attention_layernorm"), ("mlp.experts.gate_up_proj", "post_attention_layernorm")],
    }.get(kind, [("mlp.gate_proj.weight", "post_attention_layernorm"), ("mlp.up_proj.weight", "post_attention_layernorm")])
    if kind != "gpt2":
        expected += [(f"self_attn.{part}_proj.weight", "input_layernorm") for part in "qkv"]
    found = {(name.removeprefix(f"{block}."), norm.removeprefix(f"{block}.")) for name, norm in readers if name.startswith(f"{block}.")}
    assert found == set(expected)
    assert ("lm_head.weight", head) in readers
    assert set(stream.norms) == set(norms_of(model, structure))
    assert len(stream.norms) == 5
    assert stream.unread == []


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_folding_leaves_norms_without_gain_and_changes_no_output(kind: str) -> None:
    model = made(kind)
    expected = logits(model)
    stream = stream_of(model, Structure.of(model, KEY), lambda: model(**FEATURES))
    fold(model, stream)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    for name, norm in stream.norms.items():
        weight = model.get_parameter(f"{name}.weight")
        assert torch.equal(weight, torch.full_like(weight, 1 - norm.offset))
    if kind == "gpt2":  # the head has no bias that could take over the bias of the last norm
        assert not bool(model.transformer.h[0].ln_1.bias.any())
        assert bool(model.transformer.ln_f.bias.any())
    again = logits(model)
    fold(model, stream)
    torch.testing.assert_close(logits(model), again)
