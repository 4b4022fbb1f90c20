"""Experts that are modules of their own: NLLB-MoE runs those that its router chooses, and graphs hold the same sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig, SwitchTransformersConfig

from foundation.models.architecture.shapes import auto_class
from foundation.models.layers.listed_experts import in_graph

SIZES = {"vocab_size": 40, "d_model": 16, "num_experts": 5, "expert_capacity": 3, "pad_token_id": 0}
SEEDS = range(4)


def nllb(**changes: Any) -> NllbMoeConfig:
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in SIDE.items()}
    return NllbMoeConfig(**{**SIZES, **sides, "moe_token_dropout": 0.0, **changes})


SIDE = {"layers": 2, "ffn_dim": 24, "attention_heads": 2, "sparse_step": 1}


def switch(**changes: Any) -> SwitchTransformersConfig:
    sizes = {"d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    return SwitchTransformersConfig(**{**SIZES, **sizes, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, **changes})


def drawn(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class("text-to-text", config).from_config(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.3)
    return model


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("SparseMLP")]


def naive_nllb(layer: Any, states_bLD: Tensor, padding: Tensor | None = None) -> Tensor:
    """Every token by itself: the answers of its experts, each by its weight."""
    states_ND = states_bLD.reshape(-1, states_bLD.shape[-1])
    _, gates_NE, _ = layer.router(states_ND, padding)
    rows = []
    for state, gates in zip(states_ND, gates_NE, strict=True):
        chosen = [number for number in range(len(gates)) if gates[number] != 0]
        assert len(chosen) <= 2, chosen
        answers = [gates[number] * layer.experts[f"expert_{number}"](state[None])[0] for number in chosen]
        rows.append(torch.stack(answers).sum(dim=0) if answers else torch.zeros_like(state))
    return torch.stack(rows).reshape(states_bLD.shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (3, 20)])
@pytest.mark.parametrize("prioritized", [False, True])
def test_nllb_moe_runs_the_experts_of_its_router(seed: int, shape: tuple[int, int], prioritized: bool) -> None:
    model = drawn(nllb(batch_prioritized_routing=prioritized, moe_eval_capacity_token_fraction=0.5), seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers(model):
        states = torch.randn(*shape, 16, generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(layer(states), naive_nllb(layer, states), atol=1e-5, rtol=1e-5)


def test_the_scale_of_dropped_tokens() -> None:
    model = drawn(nllb(moe_token_dropout=0.25, moe_eval_capacity_token_fraction=1.0))
    layer, states = layers(model)[0], torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(layer(states), 0.75 * naive_nllb(layer, states), atol=1e-5, rtol=1e-5)


def test_every_chosen_expert_learns() -> None:
    layer, states = layers(drawn(nllb()).train())[0], torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1))
    _, gates_NE, _ = layer.router(states.reshape(-1, 16))
    layer(states).square().sum().backward()
    for number in range(SIZES["num_experts"]):
        moved = bool(layer.experts[f"expert_{number}"].fc1.weight.grad.abs().sum() > 0)
        assert moved == bool((gates_NE[:, number] != 0).any()), number


@pytest.mark.parametrize("config", [nllb(moe_token_dropout=0.2), switch(), switch(expert_capacity=1)], ids=["nllb", "switch", "capacity"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_form_of_graphs_gives_the_same_logits(config: Any, seed: int) -> None:
    model = drawn(config, seed)
    generator = torch.Generator().manual_seed(seed)
    ids, answers = (torch.randint(3, 40, (2, length), generator=generator) for length in (11, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": answers}
    other = copy.deepcopy(model)
    in_graph(other)
    with torch.no_grad():
        torch.testing.assert_close(other(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    read: list[int] = []
    expert = layers(other)[0].experts["expert_3"]
    expert.register_forward_hook(lambda module, given, answer: read.append(given[0].numel() // 16))
    with torch.no_grad():
        other(**inputs)
    assert read == [22], read  # every token of the encoder
