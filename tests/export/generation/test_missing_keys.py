"""What a decoder keeps: the config tells what the graph with a cache can be made of, and nothing that can is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from export.generation.cached_graph import cached_graph
from export.generation.missing_keys import missing_keys
from foundation.core.errors import InputError
from foundation.models.library import model_class
from tests.export.generation.tiny_decoders import CONFIGS

TASK = "text-generation"
STATE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160}
SIZES: dict[str, Any] = {**STATE, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0}
MAMBA2: dict[str, Any] = {**SIZES, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 4}
MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
GRANITE: dict[str, Any] = {**MAMBA2, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 64}

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({**STATE, "state_size": 4}, "keeps none"),
    "falcon_mamba": ({**STATE, "state_size": 4}, "keeps none"),
    "mamba2": ({**STATE, "state_size": 4, "num_heads": 8, "head_dim": 16, "n_groups": 1}, "keeps none"),
    "rwkv": ({**STATE, "attention_hidden_size": 64}, "keeps none"),
    "openai-gpt": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160}, "keeps none"),
    "jamba": ({**SIZES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, "in 1 of 2 layers"),
    "zamba2": ({**SIZES, "layer_types": ["linear_attention", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 8}, "in 2 of 2 layers"),
    "bamba": ({**MAMBA2, "attn_layer_indices": [1]}, "in 1 of 2 layers"),
    "granitemoehybrid": ({**GRANITE, "layer_types": ["mamba", "attention"]}, "in 1 of 2 layers"),
    "falcon_h1": ({**MAMBA2, "mamba_d_ssm": 128}, "in 2 of 2 layers"),
    "recurrent_gemma": ({**SIZES, "lru_width": 64, "block_types": ["recurrent", "attention"]}, "in 1 of 2 layers"),
    "qwen3_next": ({**SIZES, **MIXED, "num_experts": 0}, "in 1 of 2 layers"),
    "minimax": ({**SIZES, **MIXED, "num_local_experts": 2}, "in 1 of 2 layers"),
    "lfm2": ({**SIZES, "layer_types": ["conv", "full_attention"]}, "in 1 of 2 layers"),
}


def told(config: PreTrainedConfig) -> str | None:
    return missing_keys(config, model_class(config, TASK))


@pytest.mark.parametrize("kind", OTHERS)
def test_what_keeps_something_else_is_told_from_the_config(kind: str) -> None:
    sizes, words = OTHERS[kind]
    said = told(CONFIG_MAPPING[kind](**sizes))
    assert said is not None
    assert words in said
    assert f"this {kind} keeps" in said


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_keeps_keys_and_values_is_taken(kind: str) -> None:
    assert told(CONFIGS[kind]()) is None


@pytest.mark.whole
def test_a_hybrid_whose_layers_are_all_attention_is_taken_and_has_a_graph() -> None:
    config = CONFIG_MAPPING["granitemoehybrid"](**GRANITE, layer_types=["attention", "attention"])
    assert told(config) is None
    torch.manual_seed(0)
    assert len(cached_graph(AutoModelForCausalLM.from_config(config).eval()).get_variables()) == 4


def test_layers_that_read_the_keys_of_another_keep_none_and_are_taken() -> None:
    shared = CONFIG_MAPPING["gemma3n_text"](**SIZES, head_dim=16, layer_types=["full_attention"] * 2, num_kv_shared_layers=1)
    assert told(shared) is None


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "bamba"])
def test_the_graph_refuses_what_the_config_tells(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**OTHERS[kind][0])).eval()
    with pytest.raises(InputError, match=f"keeps keys and values of every layer; this {kind} keeps"):
        cached_graph(model)
