"""Experts that are modules of their own: NLLB-MoE runs those that its router chooses, and graphs hold the same sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import NllbMoeConfig, SwitchTransformersConfig

from export.graph.experts import make_exportable
from foundation.models.architecture.shapes import auto_class
from foundation.models.layers.listed_experts import with_listed_experts
from foundation.models.layers.routed import experts_of, on_all_tokens
from quantize.experts import tokens_routed

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


def asked(seed: int, rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, answers = (torch.randint(3, 40, (rows, length), generator=generator) for length in (11, 5))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": answers}


@pytest.mark.parametrize("config", [nllb(moe_token_dropout=0.2), switch(), switch(expert_capacity=1)], ids=["nllb", "switch", "capacity"])
@pytest.mark.parametrize("seed", SEEDS)
def test_listed_experts_are_the_same_model_under_the_same_names(config: Any, seed: int) -> None:
    model, inputs = drawn(config, seed), asked(seed)
    other = copy.deepcopy(model)
    with_listed_experts(other)
    assert set(other.state_dict()) == set(model.state_dict())
    assert len(experts_of(other)) == 4
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(other(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
        with on_all_tokens(other):
            torch.testing.assert_close(other(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
    read: list[int] = []
    first: Any = next(iter(experts_of(other).values()))
    first.expert_4.register_forward_hook(lambda module, given, answer: read.append(given[0].numel() // 16))
    with torch.no_grad(), on_all_tokens(other):
        other(**inputs)
    assert read == [22]


@pytest.mark.parametrize("seed", SEEDS)
def test_dropped_answers_are_drawn_in_training(seed: int) -> None:
    layer = layers(drawn(nllb(moe_token_dropout=0.5), seed))[0]
    other = copy.deepcopy(layer)
    with_listed_experts(other)
    states = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(seed))
    found = []
    for one in (layer.train(), other.train()):
        torch.manual_seed(seed)
        found.append(one(states))
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[1], other.eval()(states))


@pytest.mark.parametrize("capacity", [1, 2, 30])
def test_tokens_are_counted_as_the_router_sends_them(capacity: int) -> None:
    """Switch Transformers has room for so many tokens of a row in each expert; the others are dropped."""
    model, batches = drawn(switch(expert_capacity=capacity)), [asked(seed) for seed in range(3)]
    expected = {name: [0] * 5 for name, module in model.named_modules() if name.endswith("mlp.experts")}
    dropped = dict.fromkeys(expected, 0)

    def naive(name: str) -> Any:
        def hook(module: Any, given: Any, answer: Any) -> None:
            for row in answer[2].argmax(dim=-1).tolist():
                room = [capacity] * 5
                for expert in row:
                    expected[name][expert] += room[expert] > 0
                    dropped[name] += room[expert] <= 0
                    room[expert] -= 1

        return hook

    for name in expected:
        model.get_submodule(name.replace("experts", "router")).register_forward_hook(naive(name))
    with_listed_experts(model)
    found = tokens_routed(model, batches, lambda model, features: model(**features))
    assert found.tokens == expected
    assert found.dropped == {name: number for name, number in dropped.items() if number}
    assert bool(found.dropped) == (capacity < 30)
    assert found.figures.keys() == ({"experts", "dropped_tokens"} if capacity < 30 else {"experts"})


@pytest.mark.parametrize("config", [nllb(moe_token_dropout=0.2), switch(), switch(expert_capacity=1)], ids=["nllb", "switch", "capacity"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_form_of_graphs_gives_the_same_logits(config: Any, seed: int) -> None:
    model = drawn(config, seed)
    inputs = asked(seed)
    other = copy.deepcopy(model)
    make_exportable(other)
    with torch.no_grad():
        torch.testing.assert_close(other(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    read: list[int] = []
    expert = layers(other)[0].experts.expert_3
    expert.register_forward_hook(lambda module, given, answer: read.append(given[0].numel() // 16))
    with torch.no_grad():
        other(**inputs)
    assert read == [22], read  # every token of the encoder
