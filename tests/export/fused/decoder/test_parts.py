"""The parts of decoders, found by structure and proved by computing; what is built otherwise is refused in one line with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from export.fused.decoder import parts
from export.fused.decoder.parts import decoder_plan
from export.fused.decoder.plan import read_decoder, write_decoder
from export.fused.parts import plan_of
from foundation.core.errors import InputError
from foundation.models.checkpoint import load, load_float
from foundation.models.folder import Checkpoint
from foundation.schemes.attention_products import ProductScales
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int4 import Int4Scales, group_scale
from foundation.schemes.int4_by_int8 import BlockScales
from foundation.schemes.int8 import DynamicScales, weight_scale
from foundation.schemes.scales import Grid
from foundation.schemes.sites import Sites, save_sites
from foundation.schemes.tables import on_table_grid, row_scale, save_tables
from tests.export.fused.decoder import decoders
from tests.export.fused.decoder.decoders import LENGTH, LLAMA, WORDS, Shape

SMALL = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LONG = {**SMALL, "intermediate_size": 96, "max_position_embeddings": LENGTH, "num_key_value_heads": 1, "pad_token_id": 0}
OTHERS: dict[str, Any] = {
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=LENGTH),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=96, max_position_embeddings=LENGTH),
    "bloom": transformers.BloomConfig(vocab_size=WORDS, hidden_size=64, n_layer=1, n_head=2),
    "qwen3": transformers.Qwen3Config(**LONG, head_dim=32),
    "mistral": transformers.MistralConfig(**LONG, sliding_window=8),
    "granite": transformers.GraniteConfig(**LONG, residual_multiplier=0.5),
    "gemma": transformers.GemmaConfig(**LONG, head_dim=32),
    "mish": transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=1, n_head=2, activation_function="mish", bos_token_id=1, eos_token_id=2
    ),
}
WHY = {
    "opt": "its queries, keys or values are changed before attention",
    "gpt_neox": "GPTNeoX",
    "bloom": "BloomModel has no layers",
    "qwen3": "its queries and keys are normalized",
    "mistral": f"it looks back on 8 of {LENGTH} tokens",
    "granite": "computes otherwise",
    "gemma": "GemmaRMSNorm",
    "mish": "its activation is mish; gelu, gelu_tanh, relu, silu are written",
}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_parts_are_found(family: str, tmp_path: Path) -> None:
    folder = decoders.checkpoint(tmp_path, Shape(family))
    write_decoder(decoder_plan(Checkpoint(folder), {"a": {"input": "x"}}), tmp_path / "plan")
    plan, model = read_decoder(tmp_path / "plan").to(torch.device("cpu")), load(folder)
    names = [name for name, module in model.named_modules() if hasattr(module, "weight_scale")]
    assert sorted(layer.name for layer in plan.linears if layer.is_int8) == sorted(names)
    for layer in plan.linears:
        if layer.is_int8:
            module = model.get_submodule(layer.name)
            assert torch.equal(layer.weight.codes, module.weight)
            assert layer.input_scale == module.input_scale.item()
    heads = (2, 2, 32) if family == "gpt2" else (4, 2, 16)
    assert [(block.heads, block.key_heads, block.head_dim) for block in plan.blocks] == [heads] * 2
    assert (plan.position is None, plan.rotary is None) == ((family == "llama"), (family == "gpt2"))
    assert (plan.longest, plan.head_name, plan.nodes) == (LENGTH, "lm_head", {"a": {"input": "x"}})
    assert (plan.head is None) == (family == "gpt2")  # tied
    assert plan.activation == ("gelu_tanh" if family == "gpt2" else "silu")
    assert [block.attention_norm.centred for block in plan.blocks] == [family == "gpt2"] * 2
    assert 0.5 < plan.integer_share < 1


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(OTHERS[name]).save_pretrained(tmp_path)
    quantize(tmp_path)
    with pytest.raises(InputError, match=WHY[name]):
        decoder_plan(Checkpoint(tmp_path))


def quantize(folder: Path, make: Any = lambda weight: DynamicScales(weight_scale(weight, 127), 8)) -> None:
    """Adds the files of a checkpoint one of whose layers is quantized."""
    model = load_float(folder)
    name, layer = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    save_quantization(folder, {name: make(layer.weight.data)}, {})


def test_modules_of_gpt2_that_compute_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, loaded = decoders.checkpoint(tmp_path), parts.load_float

    def scaled(path: Path) -> Any:
        model = loaded(path)
        model.get_submodule("transformer.h.0.mlp").register_forward_hook(lambda module, inputs, output: 1.1 * output)
        return model

    monkeypatch.setattr(parts, "load_float", scaled)
    with pytest.raises(InputError, match=r"modules of GPT-2 and computes otherwise \(logits"):
        decoder_plan(Checkpoint(folder))


def test_scaling_by_layer_is_read_where_it_is_the_models(tmp_path: Path) -> None:
    plan = decoder_plan(Checkpoint(decoders.checkpoint(tmp_path, Shape(config={"scale_attn_weights": False}))))
    assert [block.scaling for block in plan.blocks] == [1.0, 1.0]


def test_int8_products_of_attention_are_refused(tmp_path: Path) -> None:
    folder = decoders.checkpoint(tmp_path)
    save_sites(folder, Sites({"transformer.h.0.attn/qk": ProductScales(torch.tensor(0.1), torch.tensor(0.1))}))
    with pytest.raises(InputError, match=r"transformer.h.0.attn/qk is int8.*; quantize without"):
        decoder_plan(Checkpoint(folder))


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    quantize(tmp_path, lambda weight: BlockScales.of_grid(Grid(group_scale(weight, 32)), 32))
    with pytest.raises(InputError, match="is quantized as w4a8-block; the fused kernels run w8a8 and w8a8-dynamic and w8a16 and w4a16"):
        decoder_plan(Checkpoint(tmp_path))


def test_real_offsets_are_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    quantize(tmp_path, lambda weight: Int4Scales(group_scale(weight, 32), 32, None, torch.ones(len(weight), 2)))
    with pytest.raises(InputError, match="k_quant given; torch_kernels_decoder multiplies by no real offsets"):
        decoder_plan(Checkpoint(tmp_path))


def test_tables_with_int8_rows_keep_their_codes(tmp_path: Path) -> None:
    folder = decoders.checkpoint(tmp_path)
    model: Any = load_float(folder)
    scale = row_scale(model.transformer.wte.weight.data)
    save_tables(folder, {"transformer.wte": scale})
    rows = on_table_grid(model.transformer.wte.weight.data, scale)
    plan = decoder_plan(Checkpoint(folder))
    write_decoder(plan, tmp_path / "plan")
    for word in (plan.word, read_decoder(tmp_path / "plan").word):
        assert word.rows.dtype == torch.int8
        assert torch.equal(word.rows.float() * word.scale[:, None], rows)


def test_encoders_engine_names_the_one_for_decoders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="head of a language model; give torch_kernels_decoder"):
        plan_of(Checkpoint(decoders.checkpoint(tmp_path)))
