"""AWQ: the search against the paper's loop, and what it leaves of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Scales
from foundation.schemes.scales import Grid
from quantize.awq import ALPHAS, activation_factor, awq, choose, describe
from quantize.calibration import Observed
from quantize.folding import find_folds, groups
from quantize.group_scales import Groups, full_grid, searched_grid
from quantize.moments import Moments, output_errors


def rows_of(seed: int, rows: int, inputs: int) -> Tensor:
    """Returns inputs some channels of which are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) * (1.5 * torch.randn(inputs, generator=generator)).exp()


def moments_of(x: Tensor) -> Moments:
    moments = Moments()
    moments.add(x)
    return moments


def on_grid(grid: Grid, group_size: int, weight: Tensor) -> Tensor:
    return Int4Scales(grid.scale, group_size, grid.zero_point).on_grid(weight)


def naive_alpha(x: Tensor, weights: list[Tensor], group_size: int, symmetric: bool) -> float:
    """Tries every exponent on the rows themselves."""
    best = (torch.inf, 0.0)
    for step in range(21):
        power = x.abs().mean(0) ** (step / 20)
        factor = power / (power.max() * power.min()).sqrt()
        error = 0.0
        for weight in weights:
            rounded = on_grid(full_grid(weight * factor, group_size, symmetric=symmetric), group_size, weight * factor)
            error += float(((x / factor).double() @ rounded.double().T - x.double() @ weight.double().T).square().sum())
        best = min(best, (error, step / 20))
    return best[1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_exponent_is_that_of_the_loop(seed: int, symmetric: bool) -> None:
    x, weights = rows_of(seed, 200, 24), [torch.randn(n, 24, generator=torch.Generator().manual_seed(n)) for n in (6, 10)]
    alpha, factor, grids, errors = choose(weights, moments_of(x), Groups(8, symmetric, "outputs"))
    assert alpha == naive_alpha(x, weights, 8, symmetric) > 0
    torch.testing.assert_close(factor, activation_factor(x.abs().mean(0), alpha), rtol=1e-4, atol=0)
    assert errors["error"] < 0.9 * errors["error_before"]
    assert [grid.scale.shape for grid in grids] == [(6, 3), (10, 3)]
    assert all((grid.zero_point is None) == symmetric for grid in grids)


@pytest.mark.whole
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 12), st.integers(1, 8), st.integers(1, 30), st.booleans())
@settings(max_examples=12, deadline=None)
def test_the_error_is_never_above_that_of_the_nearest(
    seed: int, outputs: int, inputs: int, group_size: int, rows: int, symmetric: bool
) -> None:
    x, weight = rows_of(seed, rows, inputs), torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed + 1))
    hessian = moments_of(x).hessian_II
    _, factor, [grid], errors = choose([weight], moments_of(x), Groups(group_size, symmetric, "outputs"))
    rounded = on_grid(grid, group_size, weight * factor) / factor
    nearest = on_grid(searched_grid(weight, group_size, None, symmetric=symmetric), group_size, weight)
    found, before, power = (float(output_errors(weight, other, hessian).sum()) for other in (rounded, nearest, torch.zeros_like(weight)))
    assert found <= before
    assert errors["error"] == pytest.approx(found / power if power else 0.0, rel=1e-6)
    assert errors["error_before"] == pytest.approx(before / power if power else 0.0, rel=1e-6)


def test_factors_are_centred_and_channels_without_input_stay() -> None:
    factor = activation_factor(torch.tensor([4.0, 1.0, 0.25]), 0.5)
    torch.testing.assert_close(factor, torch.tensor([2.0, 1.0, 0.5]))
    assert activation_factor(torch.tensor([0.0, 3.0]), 1.0).isfinite().all()
    assert activation_factor(torch.tensor([0.0, 3.0]), 0.0).tolist() == [1, 1]


def llama() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()
    for name, parameter in model.named_parameters():
        parameter.data *= torch.exp(torch.randn(parameter.shape)) if "layernorm" in name else 3
    return model


def send(model: nn.Module, features: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(**features, use_cache=False).logits
    return logits


def batches() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield {"input_ids": torch.randint(0, 50, (8, 12), generator=generator)}


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_llama_computes_the_same_and_its_layers_err_less(symmetric: bool) -> None:
    model = llama()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "layers" in name}
    folds = find_folds(model, next(batches()), send)
    assert "model.layers.0.self_attn.v_proj" in {fold.producer for fold in folds if fold.blocked is None}
    units = groups(layers, folds, seen_by(layers, model))
    before, original = send(model, next(batches())), copy.deepcopy(model)
    scales, figures = awq(model, layers, units, batches, send, Groups(16, symmetric, "outputs"))
    after = send(model, next(batches()))
    assert torch.allclose(after, before, atol=1e-4 * float(before.detach().abs().max()))
    assert scales.keys() == layers.keys()
    producers = {figure["into"] for figure in figures if figure["into"]}
    assert {"model.layers.0.input_layernorm", "model.layers.0.mlp.up_proj"} <= producers
    assert all(figure["error"] <= figure["error_before"] for figure in figures)
    assert sum(figure["error"] for figure in figures) < 0.9 * sum(figure["error_before"] for figure in figures)
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, original.model.layers[0].input_layernorm.weight)
    assert f"{len(producers)} groups folded" in describe(figures)
    for name, layer in layers.items():  # also of a producer that was divided after its scales were chosen
        assert scales[name].weight_scale.shape == (layer.out_features, -(-layer.in_features // 16))
        steps = layer.weight.detach() / scales[name].expanded(layer.in_features) + scales[name].zero(layer.in_features)
        assert 6.9 < steps.abs().max() < (14.1 if symmetric else 23.1)  # half of (7 + 8) + 8 steps around the zero point at most is cut


def seen_by(layers: Mapping[str, nn.Linear], model: nn.Module) -> Observed[Moments]:
    from quantize.calibration import collect

    return collect(model, layers, batches(), send, Moments)


def test_exponents_go_from_nothing_to_all() -> None:
    assert (ALPHAS[0], ALPHAS[-1], len(ALPHAS)) == (0.0, 1.0, 21)
