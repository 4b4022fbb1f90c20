"""Zeros that a model keeps in training, and those that it may fill."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from foundation.models.layers.expert_parallel import stacked_where_listed
from foundation.training.kept_zeros import NOTE, ZeroMasks, block_linears, keep_zeros
from tests.foundation.training.processes import expert_processes


def model_of(noted: bool) -> Any:
    """Returns two blocks of a linear layer, and a head; a third of all weights is 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = nn.Module()
        model.blocks, model.head = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))]), nn.Linear(6, 3)
        model.config = SimpleNamespace(**({NOTE: True} if noted else {}))
    for layer in (model.blocks[0], model.blocks[1][0], model.head):
        layer.weight.data.view(-1)[::3] = 0
    return model


def steps(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    masks = ZeroMasks(model)
    for _ in range(5):
        for part in x.split(4):  # gradients are added up over micro-batches
            y = torch.tanh(model.blocks[1](torch.tanh(model.blocks[0](part))))
            (model.head(y).square().sum() + y.sum()).backward()
        masks.apply()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_zeros_in_the_blocks_stay_and_all_else_learns() -> None:
    model, before = model_of(True), model_of(True)
    steps(model)
    assert list(block_linears(model)) == ["blocks.0", "blocks.1.0"]
    for name in ("blocks.0", "blocks.1.0"):
        now, then = (some.get_submodule(name).weight.detach() for some in (model, before))
        assert torch.equal(now == 0, then == 0)
        assert bool((now[then != 0] != then[then != 0]).all())
    assert not bool((model.head.weight == 0).any())  # outside of the blocks


def test_zeros_are_filled_without_the_note() -> None:
    model = model_of(False)
    steps(model)
    assert not bool((model.blocks[0].weight == 0).any())


def test_the_note_is_in_the_checkpoint_and_what_is_made_of_it(tmp_path: Path) -> None:
    import transformers

    from foundation.models.architecture.blocks import with_layers

    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    )
    keep_zeros(model)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert getattr(config, NOTE) is True
    assert getattr(with_layers(config, [0]), NOTE) is True


def test_zeros_of_experts_stay_where_processes_spread_them() -> None:
    model = expert_processes.model("nllb-moe")
    keep_zeros(model)
    with stacked_where_listed(model, spreads=True):
        (name, weight), *_ = [(name, weight) for name, weight in model.named_parameters() if name.endswith("experts.fc1_weight")]
        bias = model.get_parameter(name.replace("weight", "bias"))
        weight.data[1, 2], bias.data[1] = 0.0, 0.0
        masks = ZeroMasks(model)
        for each in (weight, bias):
            each.grad = torch.ones_like(each)
        masks.apply()
        assert weight.grad is not None
        assert torch.equal(weight.grad != 0, weight != 0)
        assert bias.grad is not None
        assert bool((bias.grad == 1).all())
