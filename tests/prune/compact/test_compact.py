"""Compaction removes what zeros have disconnected; the small model answers as the one with the zeros does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.compact.compact import Compact
from prune.compact.disconnected import Disconnected, _folded, disconnect
from prune.compact.order import with_neurons_in_order
from prune.hook_points import HookPoints
from prune.surgery import KeptUnits, shrink
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

KEY = "stages.compact"
KINDS = ("bert", "distilbert", "gpt2", "vit", "llama")
DRAWS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = ("weights", "one left", "nothing left", "readers", "writers", "values", "blocks")


def mask(weight_OI: Tensor, shape: str, random: torch.Generator) -> Tensor:
    """Returns a mask of random zeros of some shape, also extreme ones, bool `[O, I]`."""
    outputs, inputs = weight_OI.shape
    if shape == "weights":
        return torch.rand(weight_OI.shape, generator=random) < 0.2
    if shape == "one left":
        one = torch.zeros(weight_OI.numel(), dtype=torch.bool)
        one[int(torch.randint(weight_OI.numel(), (), generator=random))] = True
        return one.reshape(weight_OI.shape)
    if shape == "nothing left":
        return torch.zeros(weight_OI.shape, dtype=torch.bool)
    if shape == "readers":
        return (torch.rand(inputs, generator=random) < 0.4).expand(outputs, inputs)
    if shape == "blocks":
        few = torch.rand(-(-outputs // 4), -(-inputs // 4), generator=random) < 0.3
        return few.repeat_interleave(4, 0)[:outputs].repeat_interleave(4, 1)[:, :inputs]
    return (torch.rand(outputs, generator=random) < 0.4)[:, None].expand(outputs, inputs)  # writers


def with_zeros(model: nn.Module, shapes: list[str], seed: int) -> nn.Module:
    """Zeros weights of every linear layer of the blocks, by a shape drawn for each layer."""
    random = torch.Generator().manual_seed(seed)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    with torch.no_grad():
        for number, layer in enumerate(module for module in blocks.modules() if isinstance(module, nn.Linear)):
            layer.weight.mul_(mask(layer.weight, shapes[number % len(shapes)], random))
    return model


def compacted(model: nn.Module, features: dict[str, Tensor]) -> tuple[nn.Module, Disconnected]:
    large = copy.deepcopy(model)
    structure = Structure.of(large, KEY)
    found = disconnect(large, structure, features)
    return shrink(large, structure, with_neurons_in_order(large, structure, found.kept(structure)), KEY), found


def assert_equal(small: nn.Module, large: nn.Module, features: dict[str, Tensor]) -> None:
    with torch.no_grad():
        expected, found = (model(**features).logits for model in (large, small))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
@DRAWS
@given(shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_outputs_are_the_masked_models(kind: str, shapes: list[str], seed: int, make_model: Any, make_features: Any) -> None:
    model = with_zeros(make_model(kind), shapes, seed)
    small, _ = compacted(model, make_features(kind, seed=seed))
    assert_equal(small, model, make_features(kind, rows=4, length=7, seed=seed + 1))  # rows that were not looked at


@pytest.mark.parametrize("kind", KINDS)
def test_what_nothing_reads_or_writes_is_removed(kind: str, make_model: Any, make_features: Any) -> None:
    """Written out by name of the places: neuron 1 is not read, 2 not written, head 0 not read, head 2 without values."""
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    hooks, gated = HookPoints.of(model, structure), kind == "llama"
    attention, size = structure.attentions[1], structure.attentions[1].head_dim * structure.attentions[1].group
    value, place = attention.parts["value"]
    with torch.no_grad():
        model.get_submodule(hooks.ffn[1]).weight[:, 1] = 0
        for name, axis in structure.ffn[1]:
            if axis == 0 and name.endswith(".weight"):
                model.get_parameter(name)[2] = 0
                break  # of a gated FFN one of two is enough: it has no bias
        model.get_submodule(attention.output).weight[:, :size] = 0
        start = place * attention.size("value") + 2 * attention.head_dim if value != attention.output else 0
        model.get_submodule(value).weight[start : start + attention.head_dim] = 0
    small, found = compacted(model, make_features(kind))
    sizes = Structure.of(small, KEY).sizes
    assert [sizes.ffn[block] for block in range(3)] == [24, 22, 24]
    assert [sizes.key_value_heads[block] for block in range(3)] == [structure.sizes.key_value_heads[0]] * 1 + [
        structure.sizes.key_value_heads[1] - 2,
        structure.sizes.key_value_heads[2],
    ]
    assert (found.count("unread", "ffn"), found.count("constant", "ffn")) == (1, 1)
    assert (found.count("unread", "heads"), found.count("constant", "heads")) == (1, 1)
    assert gated or not bool((model.get_submodule(hooks.ffn[1]).bias == small.get_submodule(hooks.ffn[1]).bias).all())
    assert_equal(small, model, make_features(kind, rows=4, seed=3))


def test_a_neuron_behind_an_open_gate_stays(make_model: Any, make_features: Any) -> None:
    """act(g(x)) * b_up is 0 wherever a ReLU is, which a few rows do not tell."""
    model = make_model("llama", mlp_bias=True, hidden_act="relu")
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        layer.up_proj.weight[3] = 0
        layer.gate_proj.bias[3] = -100.0  # closed on all rows that are looked at
        layer.gate_proj.weight[3] *= 1e-3
    assert compacted(model, make_features("llama"))[1].count("constant", "ffn") == 0
    with torch.no_grad():
        layer.up_proj.bias[3] = 0
    assert compacted(model, make_features("llama"))[1].count("constant", "ffn") == 1


def test_a_constant_without_a_bias_to_go_to_stays() -> None:
    reader, low_I = nn.Linear(4, 3, bias=False), torch.tensor([0.0, 0.0, 1.0, 0.0])
    candidates_S = torch.tensor([True, True])
    assert _folded(reader, candidates_S, low_I, low_I).tolist() == [True, False]
    biased = nn.Linear(4, 3)
    expected_O = biased.bias.detach() + biased.weight.detach()[:, 2]
    with torch.no_grad():
        assert _folded(biased, candidates_S, low_I, low_I).tolist() == [True, True]
        assert _folded(biased, candidates_S, low_I, low_I + torch.tensor([0, 0, 0, 1e-3])).tolist() == [True, False]
    torch.testing.assert_close(biased.bias.detach(), expected_O)


def test_an_empty_model_keeps_one_unit_of_each_kind(make_model: Any, make_features: Any) -> None:
    model = with_zeros(make_model("bert"), ["nothing left"], 0)
    small, found = compacted(model, make_features("bert"))
    sizes = Structure.of(small, KEY).sizes
    assert (sizes.heads, sizes.ffn) == ((1, 1, 1), (1, 1, 1))
    assert (found.count("unread", "heads"), found.count("unread", "ffn")) == (12, 72)
    assert_equal(small, model, make_features("bert", seed=5))


def test_neurons_with_equal_zeros_come_together(make_model: Any) -> None:
    model = make_model("bert", hidden_size=64, num_attention_heads=4)
    structure = Structure.of(model, KEY)
    ffn = model.bert.encoder.layer[0]
    with torch.no_grad():
        ffn.intermediate.dense.weight[0::2, :32] = 0
        ffn.intermediate.dense.weight[1::2, 32:] = 0
        ffn.output.dense.weight[:32, 0::3] = 0
    kept = with_neurons_in_order(model, structure, KeptUnits.everything(structure.sizes))
    assert sorted(kept.ffn[0]) == list(range(24))
    assert list(kept.ffn[1]) == list(range(24))
    kinds = [(neuron % 2, neuron % 3 == 0) for neuron in kept.ffn[0]]
    assert sum(one != other for one, other in itertools.pairwise(kinds)) == 3  # four kinds, each in one piece
    small = shrink(model, structure, kept, KEY)
    features = {"input_ids": torch.randint(5, 20, (2, 6))}
    assert_equal(small, model, features)


def sparse_checkpoint(folder: Path, checkpoint: Callable[..., Path]) -> Path:
    model = with_zeros(load(checkpoint("bert")), ["readers", "writers", "weights"], 3)
    folder.mkdir()
    save(model, checkpoint("bert"), folder, "zeros")
    return folder


def test_the_stage(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    source, out, stage = sparse_checkpoint(tmp_path / "sparse", checkpoint), tmp_path / "out", Compact(id="compact")
    context = make_context()
    stage.check(Checkpoint(source).config, None, context)
    out.mkdir()
    figures: Any = stage.run(Artifact(source, {"id": "sparsify", "digest": "0" * 64}), context, out)
    large, small = load(source), load(out)
    removed = {what: sum(figures[reason][what] for reason in ("unread", "constant")) for what in ("heads", "neurons")}
    before, after = figures["before"], figures["after"]
    assert removed["neurons"] == sum(before["ffn"]) - sum(after["ffn"]) > 0
    assert removed["heads"] == sum(before["heads"]) - sum(after["heads"])
    assert figures["parameters"]["after"] == sum(weight.numel() for weight in small.parameters())
    assert figures["zeros"]["before"] > figures["zeros"]["after"]
    assert 0 <= figures["difference"] < 1e-5
    features = {"input_ids": torch.randint(5, 20, (3, 8)), "attention_mask": torch.ones(3, 8, dtype=torch.int64)}
    assert_equal(small, large, features)


def test_outputs_that_would_change_are_refused(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(model: nn.Module, structure: Structure, kept: KeptUnits) -> KeptUnits:
        return replace(kept, ffn=[list(block)[:2] for block in kept.ffn])

    monkeypatch.setattr("prune.compact.order.with_neurons_in_order", too_few)
    (tmp_path / "out").mkdir()
    with raises_problem(KEY, "outputs"):
        Compact(id="compact").run(Artifact(checkpoint("bert"), {"id": "model", "digest": "0" * 64}), make_context(), tmp_path / "out")
