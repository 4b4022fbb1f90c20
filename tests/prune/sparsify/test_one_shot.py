"""Wanda and SparseGPT against loops, and what a layer sees when those before it are pruned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import blocks_of
from foundation.training.kept_zeros import block_linears
from prune.forward_order import in_forward_order, products, squares
from prune.sparsify.one_shot import zero_weights
from prune.sparsify.patterns import NM, Blocks, Pattern, Unstructured, mask
from prune.sparsify.sparsegpt import DAMPING, STRETCH, sparsegpt
from prune.sparsify.wanda import wanda

pytestmark = pytest.mark.whole

KEY = "stages.sparsify"


def problem(seed: int, outputs: int, inputs: int, tokens: int = 60) -> tuple[Tensor, Tensor]:
    """Returns a weight and correlated inputs of very different sizes, float32."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) + torch.eye(inputs)
    x_NI = torch.randn(tokens, inputs, generator=generator) @ mixing * torch.randn(inputs, generator=generator).exp()
    return torch.randn(outputs, inputs, generator=generator), x_NI


def naive_sparsegpt(
    weight_OI: Tensor, hessian_II: Tensor, pattern: Pattern, sparsity: float, together: int, held_OI: Tensor | None = None
) -> np.ndarray:
    """Optimal Brain Surgeon, with the inverse of the Hessian of the inputs that are left made anew for each input."""
    weight, matrix = weight_OI.double().numpy().copy(), hessian_II.numpy().copy()
    held = np.zeros(weight.shape, bool) if held_OI is None else held_OI.numpy()
    diagonal = np.diagonal(matrix).copy()
    weight[:, diagonal == 0] = 0
    diagonal[diagonal == 0] = 1
    np.fill_diagonal(matrix, diagonal + DAMPING * diagonal.mean())
    inputs = weight.shape[1]
    inverses = [np.linalg.inv(matrix[j:, j:]) for j in range(inputs)]
    for start in range(0, inputs, together):
        stop = min(start + together, inputs)
        costs = np.stack([np.abs(weight[:, j]) / np.sqrt(inverses[j][0, 0]) for j in range(start, stop)], axis=1)
        costs[held[:, start:stop]] = 0
        kept = mask(torch.from_numpy(costs), pattern, sparsity).numpy() & ~held[:, start:stop]
        for j in range(start, stop):
            for output in np.flatnonzero(~kept[:, j - start]):
                weight[output, j:] -= weight[output, j] / inverses[j][0, 0] * inverses[j][0]
                weight[output, j] = 0
    return weight


@settings(max_examples=20)
@given(
    st.integers(0, 999),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([(Unstructured(), STRETCH), (NM(2, 4), 4), (NM(1, 3), 3), (Blocks(2, 3), STRETCH // 3 * 3)]),
    st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
)
def test_sparsegpt_is_the_loop(
    seed: int, outputs: int, inputs: int, pattern: tuple[Pattern, int], sparsity: float, unfed: bool, holds: bool
) -> None:
    weight_OI, x_NI = problem(seed, outputs, inputs)
    if unfed:
        x_NI[:, seed % inputs] = 0
    held_OI = torch.rand(weight_OI.shape, generator=torch.Generator().manual_seed(seed)) < 0.3 if holds else None
    if held_OI is not None:
        weight_OI[held_OI] = 0
    hessian_II = products(x_NI.double())
    found = sparsegpt(weight_OI.double(), hessian_II.clone(), pattern[0], sparsity, held_OI=held_OI)
    expected = naive_sparsegpt(weight_OI, hessian_II, pattern[0], sparsity, pattern[1], held_OI)
    np.testing.assert_array_equal(found.numpy() == 0, expected == 0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.first(1)
@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), NM(1, 3), Blocks(2, 50), Blocks(2, 200)], ids=str)
def test_sparsegpt_over_more_than_one_stretch(pattern: Pattern) -> None:
    inputs = 2 * STRETCH + 5
    weight_OI, x_NI = problem(1, 4, inputs, 2 * inputs)
    hessian_II = products(x_NI.double())
    together = {Unstructured(): STRETCH, NM(2, 4): 4, NM(1, 3): 3, Blocks(2, 50): 100, Blocks(2, 200): 200}[pattern]
    found = sparsegpt(weight_OI.double(), hessian_II.clone(), pattern, 0.5).numpy()
    np.testing.assert_allclose(found, naive_sparsegpt(weight_OI, hessian_II, pattern, 0.5, together), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4)], ids=str)
def test_the_error_falls_from_magnitude_to_wanda_to_sparsegpt(pattern: Pattern) -> None:
    errors = np.zeros(3)
    for seed in range(5):
        weight_OI, x_NI = problem(seed, 16, 32, 200)
        found = [
            weight_OI * mask(weight_OI.abs(), pattern, 0.5),
            weight_OI * mask(wanda(weight_OI, squares(x_NI)), pattern, 0.5, by_output=True),
            sparsegpt(weight_OI, products(x_NI), pattern, 0.5),
        ]
        errors += [float((x_NI @ (weight_OI - sparse_OI).T).square().sum()) for sparse_OI in found]
    assert errors[0] > 1.2 * errors[1] > 1.2**2 * errors[2]


def test_inputs_that_are_always_zero_are_no_trouble() -> None:
    weight_OI, x_NI = problem(3, 3, 8)
    x_NI[:, 2] = 0
    found = sparsegpt(weight_OI, products(x_NI), Unstructured(), 0.5)
    assert bool(found.isfinite().all())
    assert not mask(wanda(weight_OI, squares(x_NI)), Unstructured(), 0.25, by_output=True)[:, 2].any()


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 9))
def test_wanda_is_the_loop(seed: int, outputs: int, inputs: int) -> None:
    weight_OI, x_NI = problem(seed, outputs, inputs, 7)
    found = wanda(weight_OI, squares(x_NI))
    for o in range(outputs):
        for i in range(inputs):
            expected = abs(float(weight_OI[o, i])) * sum(float(value) ** 2 for value in x_NI[:, i]) ** 0.5
            assert float(found[o, i]) == pytest.approx(expected, rel=1e-5)


def test_one_output_with_large_weights_keeps_no_more_than_its_share(
    make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model("bert")
    layers = block_linears(model)
    name = next(iter(layers))
    layers[name].weight.data[0] *= 100
    zero_weights("wanda", model, layers, Unstructured(), 0.5, lambda: [make_features("bert")], KEY)
    assert [(row != 0).sum() for row in layers[name].weight] == [8] * 16


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "vit", "llama"])
def test_each_layer_is_seen_as_it_is_when_all_before_it_are_changed(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    """Written out: after every change the whole model runs again, and what the next layer reads is summed up."""
    model, plain = make_model(kind), make_model(kind)
    layers, batches = block_linears(model), [make_features(kind, rows=2, length=5 + seed, seed=seed) for seed in range(2)]
    order: list[str] = []
    found: dict[str, Tensor] = {}

    def change(name: str, sums: Tensor) -> None:
        order.append(name)
        found[name] = sums
        layers[name].weight.data *= 0.5

    advanced: list[int] = []
    assert in_forward_order(model, layers, batches, products, change, KEY, advanced.append) == []
    assert sum(advanced) == len(layers) == len(order)
    assert not any("forward" in vars(block) for block in blocks_of(model, KEY).values())
    others = block_linears(plain)
    for name in order:
        expected = torch.zeros((), dtype=torch.float64)
        for features in batches:
            seen: list[Tensor] = []
            handle = others[name].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            with torch.inference_mode():
                plain(**features)
            handle.remove()
            x = seen[0]
            x_NI = x[features["attention_mask"].bool()] if "attention_mask" in features else x.reshape(-1, x.shape[-1])
            expected = expected + products(x_NI)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
        together = [other for other in order if found[other].shape == found[name].shape and torch.equal(found[other], found[name])]
        if name == together[-1]:  # queries, keys and values have seen the same
            for other in together:
                others[other].weight.data *= 0.5
    with torch.inference_mode():
        assert torch.equal(model(**batches[0]).logits, plain(**batches[0]).logits)


def test_layers_that_nothing_reaches_and_inputs_that_are_not_finite(
    make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model("bert")
    model.bert.encoder.layer[1].spare = torch.nn.Linear(16, 16)
    layers = block_linears(model)
    before = layers["bert.encoder.layer.1.spare"].weight.clone()
    unreached = zero_weights("sparsegpt", model, layers, Unstructured(), 0.5, lambda: [make_features("bert")], KEY)
    assert unreached == ["bert.encoder.layer.1.spare"]
    assert torch.equal(layers[unreached[0]].weight, before)
    model.bert.embeddings.word_embeddings.weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match=r"layer\.0\.attention.*: the calibration rows .* NaN or infinite"):
        zero_weights("wanda", model, layers, Unstructured(), 0.5, lambda: [make_features("bert")], KEY)
