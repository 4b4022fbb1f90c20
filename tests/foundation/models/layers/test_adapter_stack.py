"""Adapters on one model: against each row computed alone with written-out matrices, against peft's mixed batches, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.adapter_files import ADAPTERS_JSON, ADAPTERS_TENSORS, adapter_names, apply_adapters, read_adapters, write_adapters
from foundation.models.checkpoint import load_float
from foundation.models.layers.adapter_stack import Adapter, Change, added_size, merge, put, stacks
from foundation.standalone.preprocess import ADAPTER_IDS
from tests.export import sentiment
from tests.problems import raises_problem

INPUTS, MIDDLE, OUTPUTS = 5, 4, 3


class Small(nn.Module):
    """Two layers on the tokens of a row, and one on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(INPUTS, MIDDLE), nn.Linear(MIDDLE, MIDDLE, bias=False), nn.Linear(MIDDLE, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).mean(dim=1))


SIZES = {"first": (MIDDLE, INPUTS), "second": (MIDDLE, MIDDLE), "head": (OUTPUTS, MIDDLE)}


def drawn(random: np.random.Generator, ranks: dict[str, int], biases: set[str]) -> dict[str, Change]:
    def matrix(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32))

    return {
        name: Change(matrix(rank, SIZES[name][1]), matrix(SIZES[name][0], rank), matrix(SIZES[name][0]) if name in biases else None)
        for name, rank in ranks.items()
    }


def alone(model: Small, adapter: Adapter, row: Tensor) -> Tensor:
    """The answer to one row, token by token, with W + B A and b + c written out."""

    def layer(name: str, x: Tensor) -> Tensor:
        own: Any = getattr(model, name)
        change = adapter.get(name)
        weight, bias = own.weight, own.bias if own.bias is not None else torch.zeros(len(own.weight))
        if change is not None:
            weight = weight + sum((torch.outer(change.up[:, r], change.down[r]) for r in range(change.rank)), torch.zeros_like(weight))
            bias = bias + (0 if change.bias is None else change.bias)
        return torch.stack([(weight[o] * x).sum() + bias[o] for o in range(len(weight))])

    states = [layer("second", layer("first", token).tanh()) for token in row]
    return layer("head", torch.stack(states).mean(dim=0))


RANKS = st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(0, 3), max_size=3)


@given(
    ranks=st.lists(RANKS, min_size=1, max_size=4),
    biases=st.sets(st.sampled_from(["first", "head"])),
    rows=st.integers(1, 6),
    tokens=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_every_row_is_answered_by_its_adapter(ranks: list[dict[str, int]], biases: set[str], rows: int, tokens: int, seed: int) -> None:
    random, model = np.random.default_rng(seed), Small().eval()
    adapters = [drawn(random, own, biases) for own in ranks]
    x = torch.from_numpy(random.standard_normal((rows, tokens, INPUTS), np.float32))
    chosen = random.integers(0, len(adapters), rows)
    with torch.no_grad():
        expected = torch.stack([alone(model, adapters[number], row) for number, row in zip(chosen, x, strict=True)])
        put(model, adapters)
        ids = torch.from_numpy(chosen)[:, None].expand(-1, tokens)
        found = model(x, **{ADAPTER_IDS: ids})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for row in range(rows):  # whatever stands beside it in the batch
            torch.testing.assert_close(model(x[row : row + 1], **{ADAPTER_IDS: ids[row : row + 1]})[0], found[row], rtol=1e-4, atol=1e-5)


def test_a_merged_model_answers_like_its_adapter() -> None:
    random, model = np.random.default_rng(0), Small().eval()
    adapters = [drawn(random, {"first": 2, "head": 1}, {"head"}), drawn(random, {"second": 3}, set())]
    x = torch.from_numpy(random.standard_normal((4, 3, INPUTS), np.float32))
    merged = []
    for adapter in adapters:
        one = Small()
        one.load_state_dict(model.state_dict())
        merge(one, adapter)
        merged.append(one(x))
    put(model, adapters)
    for number, expected in enumerate(merged):
        torch.testing.assert_close(model(x, **{ADAPTER_IDS: torch.full((4, 3), number)}), expected, rtol=0, atol=1e-5)
    assert (merged[0] - merged[1]).abs().max() > 0.1
    assert sorted(stacks(model)) == ["first", "head", "second"]
    assert added_size(model, 7) == (2 * 9 + 1 * 7 + 3 * 8 + 2 * OUTPUTS, (2 * 9 + 1 * 7 + 3 * 8) * 7)


def test_peft_answers_a_mixed_batch_with_the_same_logits() -> None:
    from peft import LoraConfig, get_peft_model

    base: Any = load_float(sentiment.checkpoint())
    layers = [["query", "value"], ["query", "dense"], ["key"]]  # adapters on different layers
    theirs: Any = None
    names, adapters = ("one", "two", "three"), []
    for name, targets, rank in zip(names, layers, (1, 2, 3), strict=True):
        config = LoraConfig(r=rank, lora_alpha=5, target_modules=targets, init_lora_weights=False)
        if theirs is None:
            theirs = get_peft_model(base, config, adapter_name=name)
        else:
            theirs.add_adapter(name, config)
    for name in names:
        found = {}
        for path, module in base.named_modules():
            if name in getattr(module, "lora_A", {}):
                scaled = module.lora_B[name].weight.detach() * module.scaling[name]
                found[path] = Change(module.lora_A[name].weight.detach().clone(), scaled)
        adapters.append(found)
    ids = torch.arange(24).reshape(6, 4).remainder(20)
    mask, chosen = torch.ones_like(ids), [0, 2, 1, 1, 0, 2]
    ours: Any = load_float(sentiment.checkpoint())
    put(ours, adapters)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids, attention_mask=mask, adapter_names=[names[number] for number in chosen]).logits
        named = torch.tensor(chosen)[:, None].expand(-1, 4)
        found = ours(input_ids=ids, attention_mask=mask, **{ADAPTER_IDS: named}).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        other = ours(input_ids=ids, attention_mask=mask, **{ADAPTER_IDS: (named + 1) % 3}).logits
    assert (other - expected).abs().min() > 1e-4


def test_files_hold_what_was_written(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    adapters = {"b": drawn(random, {"first": 2, "head": 0}, {"head"}), "a": drawn(random, {"second": 1}, set()), "plain": {}}
    write_adapters(tmp_path, adapters)
    assert adapter_names(tmp_path) == ("b", "a", "plain")  # in the order of their numbers
    assert adapter_names(tmp_path / "elsewhere") == ()
    for name, adapter in read_adapters(tmp_path).items():
        assert list(adapter) == list(adapters[name])
        for layer, change in adapter.items():
            wanted = adapters[name][layer]
            assert torch.equal(change.down, wanted.down)
            assert torch.equal(change.up, wanted.up)
            assert (change.bias is None) == (wanted.bias is None)


@pytest.mark.parametrize("damage", ["json", "schema", "missing", "name", "nan", "tensors"])
def test_damaged_files_are_one_clear_line(damage: str, tmp_path: Path) -> None:
    write_adapters(tmp_path, {"a": drawn(np.random.default_rng(1), {"second": 1}, set())})
    file, tensors = tmp_path / ADAPTERS_JSON, tmp_path / ADAPTERS_TENSORS
    text = file.read_text()
    if damage == "json":
        file.write_text(text[:-9])
    elif damage == "schema":
        file.write_text(text.replace('"schema": 1', '"schema": 2'))
    elif damage == "name":
        file.write_text(text.replace('"a"', '"../a"'))
    elif damage == "missing":
        tensors.unlink()
    elif damage == "nan":
        stored = load_file(tensors)
        save_file({name: value * float("nan") for name, value in stored.items()}, tensors)
    else:
        save_file({"other": torch.zeros(1)}, tensors)
    with pytest.raises(InputError) as caught:
        read_adapters(tmp_path)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("layer", "down", "up", "part"),
    [
        ("third", (1, INPUTS), (MIDDLE, 1), "no such linear layer"),
        ("first", (1, 9), (MIDDLE, 1), "inputs"),
        ("first", (2, INPUTS), (MIDDLE, 1), "inputs"),
    ],
)
def test_adapters_of_another_model_are_refused(layer: str, down: tuple[int, int], up: tuple[int, int], part: str) -> None:
    with raises_problem(f"adapter of {layer}", part):
        put(Small(), [{layer: Change(torch.zeros(*down), torch.zeros(*up))}])


def test_without_a_choice_nothing_answers() -> None:
    model = Small()
    put(model, [drawn(np.random.default_rng(0), {"first": 1}, set()), {}])
    with raises_problem("the model", "no adapter given", "2"):
        model(torch.zeros(2, 3, INPUTS))


def test_a_layer_that_reads_other_rows_is_refused() -> None:
    class Folded(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(-1, 1, INPUTS))

    model = Folded()
    put(model, [drawn(np.random.default_rng(0), {"first": 1}, set())])
    with raises_problem("layer first", "6", "2", "lora.layers"):
        model(torch.zeros(2, 3, INPUTS), **{ADAPTER_IDS: torch.zeros(2, 3, dtype=torch.long)})


def test_a_checkpoint_without_adapters_stays_as_it_is(tmp_path: Path) -> None:
    model = Small()
    apply_adapters(model, tmp_path)
    assert not stacks(model)
    assert added_size(model, 7) == (0, 0)
