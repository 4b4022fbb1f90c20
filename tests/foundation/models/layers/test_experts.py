"""Experts as linear layers: the same model, saved as Transformers knows it; each calibrated on its own tokens, rare ones on all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from export.graph.experts import make_exportable
from foundation.models.layers.conv1d import stock_state
from foundation.models.layers.experts import separate_experts, with_separate_experts
from foundation.models.layers.routed import on_all_tokens
from foundation.models.library import quiet
from quantize.calibration import Histogram, collect
from quantize.experts import rare, rare_warning, tokens_routed

V = 64
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS: dict[str, Any] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**MOE, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def mixture(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **CONFIGS[kind], **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


IDS = torch.arange(2 * 17).remainder(V).reshape(2, 17)


@pytest.mark.parametrize("kind", CONFIGS)
def test_separate_experts_are_the_same_model_in_every_form(kind: str) -> None:
    model = mixture(kind)
    expected = logits(model, IDS)
    with_separate_experts(model)
    assert separate_experts(model)
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-5)
    with on_all_tokens(model):
        torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-5)
    assert not any(module.everywhere for module in separate_experts(model).values())
    make_exportable(model)
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_model_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    model = mixture(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with_separate_experts(model)
    state = stock_state(model)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    with quiet():
        model.save_pretrained(tmp_path, state_dict=state)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(again, IDS), logits(model, IDS), rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(1, 5), st.data(), st.integers(1, 9), st.booleans())
def test_any_number_of_experts_and_tokens(experts: int, data: Any, tokens: int, everywhere: bool) -> None:
    chosen = data.draw(st.integers(1, experts))
    model = mixture("mixtral", num_local_experts=experts, num_experts_per_tok=chosen, num_hidden_layers=1)
    stacked = copy.deepcopy(model.model.layers[0].mlp.experts)
    with_separate_experts(model)
    ((_, separate),) = separate_experts(model).items()
    states = torch.randn(tokens, 16)
    # a router of any kind: some experts get no token, some all
    index = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
    index[: data.draw(st.integers(0, tokens))] = torch.arange(chosen)
    weights = torch.rand(tokens, chosen)
    separate.everywhere = range(experts) if everywhere else ()
    with torch.inference_mode():
        torch.testing.assert_close(separate(states, index, weights), stacked(states, index, weights), rtol=1e-4, atol=1e-5)
        separate.all_tokens = True
        torch.testing.assert_close(separate(states, index, weights), stacked(states, index, weights), rtol=1e-4, atol=1e-5)


def test_tokens_are_counted_and_rare_experts_are_named() -> None:
    model, seen = mixture("mixtral"), {}
    handles = [
        module.register_forward_hook(lambda _, given, output, name=name: seen.setdefault(name, []).append(output[2].flatten()))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    logits(model, IDS)
    for handle in handles:
        handle.remove()
    with_separate_experts(model)
    counts = tokens_routed(model, [{"input_ids": IDS[:1]}, {"input_ids": IDS[1:]}], lambda model, features: model(**features)).tokens
    for name, found in counts.items():
        expected = torch.cat(seen[name.replace("experts", "gate")])
        assert found == [int((expected == expert).sum()) for expert in range(4)]
        assert sum(found) == 2 * IDS.numel()
    floor = sorted(count for found in counts.values() for count in found)[2] + 1
    few = rare(counts, floor)
    assert all(counts[name][expert] < floor for name, experts in few.items() for expert in experts)
    assert sum(map(len, few.values())) >= 3
    (line,) = rare_warning(counts, floor)
    assert f"of 8 experts saw fewer than {floor} calibration tokens" in line
    assert rare_warning(counts, 0) == []


def test_each_expert_is_observed_on_its_own_tokens_and_a_rare_one_on_all() -> None:
    model = with_separate_experts(mixture("mixtral", num_hidden_layers=1))
    ((path, module),) = separate_experts(model).items()
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: given.append((inputs[0], inputs[1])))
    layers = {f"{path}.gate_up_proj.{expert}": module.gate_up_proj[expert] for expert in range(4)}

    def observe() -> dict[str, float]:
        given.clear()
        found = collect(model, layers, [{"input_ids": IDS}], lambda model, features: model(**features), Histogram)
        return {name: found.of(name).largest for name in layers}

    own = observe()
    ((states, chosen),) = given
    for expert, name in enumerate(layers):
        assert own[name] == pytest.approx(float(states[(chosen == expert).any(dim=1)].abs().max()))
    module.everywhere = (1,)
    wide = observe()
    handle.remove()
    names = list(layers)
    assert wide[names[1]] == pytest.approx(float(states.abs().max()))
    assert all(wide[name] == own[name] for name in (names[0], *names[2:]))
