"""Each method against its definition written out, on whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foundation.models.architecture.structure import Structure
from foundation.training.supervised import supervised
from foundation.training.train import Batch
from prune.activation import activation, block_influence
from prune.fisher import fisher
from prune.gates import gated
from prune.hook_points import HookPoints
from prune.magnitude import magnitude
from prune.methods import Scoring, scores_of
from prune.scores import by_activation, by_gradient, by_magnitude, comparable
from prune.slices import component_slices
from prune.taylor import taylor

KEY = "stages.prune"
GENERATES = ("gpt2", "llama", "mixtral")


def batch_of(kind: str, features: dict[str, Tensor]) -> Batch:
    rows = len(next(iter(features.values())))
    labels = torch.arange(rows) % 2
    if kind in GENERATES:
        labels = features["input_ids"].roll(-1, dims=1)[:, :-1].int()
    return Batch(features, labels, np.arange(rows), 0, 1)


def task_of(kind: str) -> Any:
    return "image-classification" if kind == "vit" else "text-generation" if kind in GENERATES else "text-classification"


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
def test_magnitude_is_the_norm_of_the_group(structures: int, widths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slices = [torch.randn(structures, width, generator=generator) for width in widths]
    expected = [math.sqrt(sum(float(value) ** 2 for piece in slices for value in piece[row])) for row in range(structures)]
    np.testing.assert_allclose(magnitude(slices).numpy(), expected, rtol=1e-5)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_taylor_and_fisher_are_means_over_rows(rows: int, structures: int, seed: int) -> None:
    gradients = torch.randn(rows, structures, generator=torch.Generator().manual_seed(seed))
    for structure in range(structures):
        values = [float(gradients[row, structure]) for row in range(rows)]
        assert float(taylor(gradients)[structure]) == pytest.approx(sum(map(abs, values)) / rows, rel=1e-5)
        assert float(fisher(gradients)[structure]) == pytest.approx(sum(value**2 for value in values) / rows / 2, rel=1e-5)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_activation_is_the_mean_square_of_what_is_said(tokens: int, structures: int, width: int, seed: int) -> None:
    x = torch.randn(tokens, structures, width, generator=torch.Generator().manual_seed(seed))
    for structure in range(structures):
        expected = sum(float(x[token, structure, number]) ** 2 for token in range(tokens) for number in range(width)) / tokens
        assert float(activation(x)[structure]) == pytest.approx(expected, rel=1e-5)


def test_a_block_that_turns_nothing_says_nothing() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert float(block_influence(x, 3 * x)) == pytest.approx(0, abs=1e-9)
    assert float(block_influence(x, -x)) == pytest.approx(2)
    expected = sum(1 - float(a @ b) / float(a.norm() * b.norm()) for a, b in zip(x, x.roll(1, 1), strict=True)) / 5
    assert float(block_influence(x, x.roll(1, 1))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_slices_of_a_structure_are_its_weights(kind: str, make_model: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    names = {
        "bert": ("bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.output.dense", 4, 16),
        "gpt2": ("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj", 4, 16),
        "llama": ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj", 8, 24),
    }
    query, output, width, total = names[kind]
    slices = component_slices(structure, weights, 1, "heads")
    for group in range(total // width):
        found = sum(float(piece[group].square().sum()) for piece in slices)
        rows = slice(group * width, (group + 1) * width)
        expected = float(weights[f"{query}.weight"][rows].square().sum()) + float(weights[f"{output}.weight"][:, rows].square().sum())
        if kind == "bert":
            for what in ("key", "value"):
                expected += float(weights[f"{query.replace('query', what)}.weight"][rows].square().sum())
            expected += sum(
                float(weights[f"{query.replace('query', what)}.bias"][rows].square().sum()) for what in ("query", "key", "value")
            )
        elif kind == "gpt2":
            for part in (1, 2):
                expected += float(weights[f"{query}.weight"][16 * part + group * width :][:width].square().sum())
            expected += sum(float(weights[f"{query}.bias"][16 * part + group * width :][:width].square().sum()) for part in range(3))
        else:
            for what in ("k_proj", "v_proj"):
                expected += float(weights[f"{query.replace('q_proj', what)}.weight"][group * 4 : group * 4 + 4].square().sum())
        assert found == pytest.approx(expected, rel=1e-5)


def naive_gradients(kind: str, model: Any, structure: Structure, batch: Batch) -> Iterator[dict[Any, list[float]]]:
    """Written out: for one row at a time, sum of w * dL/dw over the columns that read each head and each neuron."""
    model.requires_grad_(True)
    for row in range(len(batch.indices)):
        one = Batch({name: value[row : row + 1] for name, value in batch.features.items()}, batch.labels[row : row + 1], np.arange(1), 0, 1)
        model.zero_grad()
        sum(part.sum() for part in supervised(task_of(kind))(model, one).values()).backward()
        found: dict[Any, list[float]] = {}
        for block, attention in enumerate(structure.attentions):
            readers = {"heads": (attention.output, attention.group * attention.head_dim)}
            down = [name for name, axis in structure.ffn[block] if axis == 1 and name.endswith(".weight")]
            if down:
                readers["ffn"] = (down[0].removesuffix(".weight"), 1)
            for what, (name, width) in readers.items():
                weight = model.get_submodule(name).weight
                product = (weight * weight.grad).detach().sum(dim=0)
                found[block, what] = [float(product[start : start + width].sum()) for start in range(0, len(product), width)]
        yield found
    model.zero_grad()


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "vit", "llama"])
def test_gates_give_what_weights_times_gradients_give(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure, batch = Structure.of(model, KEY), batch_of(kind, make_features(kind))
    rows = list(naive_gradients(kind, model, structure, batch))
    for method, reduce in ((taylor, abs), (fisher, lambda value: value**2 / 2)):
        found = by_gradient(method, model, structure, lambda: [batch], supervised(task_of(kind)), hidden=False)
        assert found.keys() == rows[0].keys()
        for where, score in found.items():
            expected = [sum(reduce(row[where][unit]) for row in rows) / len(rows) for unit in range(len(score))]
            np.testing.assert_allclose(score.numpy(), expected, rtol=2e-3, atol=1e-7)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["bert", "llama", "mixtral"])
def test_gates_of_channels_and_experts_are_factors(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    """The gradient is that of the loss when the gate is moved a little, in both directions."""
    model = make_model(kind)
    structure, batch = Structure.of(model, KEY), batch_of(kind, make_features(kind, rows=1))
    objective = supervised(task_of(kind))
    hooks: list[Any] = [(1, "experts")] if kind == "mixtral" else ["hidden", (1, "ffn")]  # a channel may send a token to other experts

    def loss(where: Any = None, unit: int = 0, step: float = 0.0) -> float:
        with gated(model, structure, hidden=True) as start, torch.no_grad():
            gates = start(1)
            objective(model, batch)  # opens the gates
            if where is not None:
                gates.values[where][0, unit] += step
            return float(sum(part.sum() for part in objective(model, batch).values()))

    with gated(model, structure, hidden=True) as start:
        gates = start(1)
        gradients = gates.gradients(torch.stack(list(objective(model, batch).values())).sum(dim=0))
    for where in hooks:
        for unit in range(0, gradients[where].shape[1], 3):
            slope = (loss(where, unit, 0.05) - loss(where, unit, -0.05)) / 0.1
            assert float(gradients[where][0, unit]) == pytest.approx(slope, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("kind", ["bert", "vit", "llama"])
def test_activations_are_those_of_tokens_that_are_no_padding(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure, batch = Structure.of(model, KEY), batch_of(kind, make_features(kind))
    seen: dict[str, Tensor] = {}
    attention = structure.attentions[2]
    model.get_submodule(attention.output).register_forward_pre_hook(lambda module, args: seen.update(heads=args[0]))
    block = model.get_submodule(f"{structure.stacks[0].prefix}.2")
    block.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output[0] if isinstance(output, tuple) else output))
    found = by_activation(model, structure, lambda: [batch])
    mask = batch.features.get("attention_mask", torch.ones(seen["x"].shape[:2]))
    width = attention.group * attention.head_dim
    tokens = [(row, place) for row in range(mask.shape[0]) for place in range(mask.shape[1]) if mask[row, place]]
    for group in range(attention.key_value_heads):
        squares = [float(seen["heads"][row, place, group * width : (group + 1) * width].square().sum()) for row, place in tokens]
        assert float(found.components[2, "heads"][group]) == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-4)
    cosines = [float(torch.cosine_similarity(seen["x"][row, place], seen["y"][row, place], dim=0)) for row, place in tokens]
    assert float(found.layers[2]) == pytest.approx(1 - sum(cosines) / len(cosines), rel=1e-3)
    assert found.hidden.shape == (structure.sizes.hidden,)


def test_an_expert_says_what_it_adds_to_the_block(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model("mixtral")
    structure, batch = Structure.of(model, KEY), batch_of("mixtral", make_features("mixtral"))
    seen: list[Any] = []
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    score = by_activation(model, structure, lambda: [batch]).components[1, "experts"]
    (states, chosen, weights), output = seen[0]
    total = torch.zeros_like(output)
    experts.requires_grad_(False)
    for expert in range(4):
        gate, up = experts.gate_up_proj[expert].chunk(2)
        added = (torch.nn.functional.silu(states @ gate.T) * (states @ up.T)) @ experts.down_proj[expert].T
        share = torch.where(chosen == expert, weights, torch.zeros_like(weights)).sum(dim=1, keepdim=True)
        total += share * added
        assert float(score[expert]) == pytest.approx(float((share * added).square().sum(dim=1).mean().sqrt()), rel=1e-4)
    torch.testing.assert_close(total, output, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "mixtral"])
@pytest.mark.parametrize("method", ["magnitude", "taylor", "fisher", "activation"])
def test_everything_gets_a_score_and_the_model_stays_as_it_is(
    kind: str, method: Any, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure, batch = Structure.of(model, KEY), batch_of(kind, make_features(kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = scores_of(method, Scoring(model, structure, lambda: [batch], supervised(task_of(kind)), hidden=True))
    expected = {(block, what) for block in range(3) for what in ("heads", "ffn" if kind == "bert" else "experts")}
    assert scores.components.keys() >= expected
    assert all(bool((score >= 0).all()) for score in scores.components.values())
    assert scores.layers.shape == (3,)
    assert scores.hidden.shape == (structure.sizes.hidden,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    if method in ("magnitude", "activation"):
        assert all(float(score.mean()) == pytest.approx(1, rel=1e-4) for part, score in scores.components.items() if part in expected)


def test_no_large_weight_decides_about_channels(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    before = by_magnitude(model, structure).hidden
    model.bert.embeddings.word_embeddings.weight.data *= 1000
    torch.testing.assert_close(by_magnitude(model, structure).hidden, before, rtol=1e-4, atol=1e-6)
    assert comparable(by_magnitude(model, structure)).components[0, "ffn"].mean() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("method", ["magnitude", "taylor", "fisher", "activation"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_what_nobody_reads_scores_nothing(
    kind: str, method: Any, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    hooks, attention = HookPoints.of(model, structure), structure.attentions[0]
    width = attention.group * attention.head_dim
    with torch.no_grad():
        model.get_submodule(hooks.heads[0]).weight[:, width : 2 * width] = 0
        model.get_submodule(hooks.ffn[2]).weight[:, [3, 7]] = 0
    batch = batch_of(kind, make_features(kind))
    scores = scores_of(method, Scoring(model, structure, lambda: iter([batch]), supervised(task_of(kind)), False))
    assert [unit for unit, score in enumerate(scores.components[0, "heads"].tolist()) if score == 0] == [1]
    assert [unit for unit, score in enumerate(scores.components[2, "ffn"].tolist()) if score == 0] == [3, 7]
    assert float(scores.components[1, "ffn"].min()) > 0
