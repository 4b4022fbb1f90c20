"""Cross-layer equalization: ranges after it, the function it keeps, and the layers it leaves alone."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.models.checkpoint import load
from foundation.models.forward import forward, linears
from foundation.stage.context import Context
from quantize.equalization import LARGEST, SMALLEST, equalization_factor, equalize
from quantize.folding import find_folds
from quantize.quantize import Quantize

ACTIVATIONS = {"relu": nn.ReLU, "identity": nn.Identity, "gelu": nn.GELU}


def chain(activation: str, widths: tuple[int, ...], seed: int, spread: float) -> nn.Sequential:
    """Linear layers whose channels differ in size by random factors, an activation between each two."""
    generator, layers = torch.Generator().manual_seed(seed), []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        layer.weight.data = torch.randn(outputs, inputs, generator=generator)
        layer.weight.data *= torch.exp(spread * torch.randn(outputs, 1, generator=generator))
        layer.bias.data = torch.randn(outputs, generator=generator)
        layers += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1]).eval()


def run(model: nn.Sequential) -> list[dict[str, object]]:
    x = {"x": torch.ones(2, model[0].in_features)}
    folds = find_folds(model, x, lambda model, features: model(features["x"]))
    return equalize(model, {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}, folds)


def ranges(model: nn.Sequential, first: str, second: str) -> tuple[Tensor, Tensor]:
    weights = (model.get_submodule(name).weight.detach().abs() for name in (first, second))
    rows, columns = weights
    return rows.amax(1), columns.amax(0)


@settings(max_examples=15)
@given(st.sampled_from(["relu", "identity"]), st.lists(st.integers(1, 9), min_size=3, max_size=5), st.integers(0, 99), st.floats(0, 2))
def test_ranges_are_equal_and_the_function_is_kept(activation: str, widths: list[int], seed: int, spread: float) -> None:
    model = chain(activation, tuple(widths), seed, spread)
    x = torch.randn(20, widths[0], generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        before = model(x)
    pairs = run(model)
    assert [(pair["first"], pair["second"]) for pair in pairs] == [(str(2 * i), [str(2 * i + 2)]) for i in range(len(widths) - 2)]
    for pair in pairs:
        rows, columns = ranges(model, str(pair["first"]), pair["second"][0])  # type: ignore[index]
        assert torch.allclose(rows, columns, rtol=0.01)
    with torch.inference_mode():
        assert (model(x) - before).abs().max() <= 1e-5 * before.abs().max().clamp(min=1)


def test_one_pair_gets_the_geometric_mean_of_its_ranges() -> None:
    model = chain("relu", (5, 4, 3), 0, 1.0)
    rows, columns = ranges(model, "0", "2")
    [pair] = run(model)
    expected = (rows * columns).sqrt()
    assert all(torch.allclose(found, expected) for found in ranges(model, "0", "2"))
    assert pair["spread_before"] == pytest.approx(float(columns.max() / columns.min()))
    assert pair["spread"] == pytest.approx(float(expected.max() / expected.min()), rel=1e-5)


def test_gelu_is_never_crossed() -> None:
    model = chain("gelu", (5, 4, 3), 0, 1.0)
    before = copy.deepcopy(model.state_dict())
    assert run(model) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


VALUES = st.floats(2.0**-60, 2.0**60, width=32) | st.just(0.0)


@given(VALUES, VALUES)
def test_the_factor_is_that_of_the_paper(first: float, second: float) -> None:
    found = float(equalization_factor(torch.tensor([first]), torch.tensor([second])))
    expected = 1.0 if first == 0 or second == 0 else min(max((first * second) ** 0.5 / second, SMALLEST), LARGEST)
    assert found == pytest.approx(expected, rel=1e-5)


def test_dead_channels_are_left_alone() -> None:
    model = chain("relu", (5, 4, 3), 0, 1.0)
    model[0].weight.data[1] = 0
    model[2].weight.data[:, 2] = 0
    [pair] = run(model)
    assert torch.isfinite(model[0].weight).all()
    assert 1 <= float(str(pair["spread"])) < float("inf")


def test_value_and_attention_output_of_a_bert_are_a_pair(bert, context: Context, tmp_path) -> None:
    model, ids = load(bert.path), torch.randint(5, 20, (2, 6), generator=torch.Generator().manual_seed(0))
    layers = {name: layer for name, layer in linears(model).items() if "encoder" in name}
    with torch.inference_mode():
        before = forward(model, {"input_ids": ids})
        pairs = equalize(model, layers, find_folds(model, {"input_ids": ids}, forward))
        after = forward(model, {"input_ids": ids})
    assert [pair["first"] for pair in pairs] == [f"bert.encoder.layer.{i}.attention.self.value" for i in range(2)]
    assert all(pair["spread"] != pair["spread_before"] for pair in pairs)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    (tmp_path / "out").mkdir()
    figures = Quantize(id="quantize", smoothquant=False, equalization=True).run(bert, context, tmp_path / "out")
    assert [pair["first"] for pair in figures["equalization"]] == [pair["first"] for pair in pairs]
