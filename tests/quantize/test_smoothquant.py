"""SmoothQuant against the paper's formula, its search against an exhaustive one, and models with planted outliers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.measure.closeness import distance
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward, linears
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import Int8Linear
from foundation.stage.context import Context
from quantize.calibration import Observed, collect
from quantize.folding import UNFOLDED, Fold, find_folds, groups
from quantize.ptq import choose_layers, feature_batches
from quantize.quantize import Quantize
from quantize.smoothquant import (
    ALPHAS,
    LARGEST,
    PRESCALE_GAIN,
    SAMPLE_ROWS,
    SMALLEST,
    Channels,
    describe,
    output_error,
    smooth,
    smoothing_factor,
)
from tests.quantize import outliers

pytestmark = pytest.mark.whole


def logits(folder: Path, context: Context) -> np.ndarray:
    processor = Checkpoint(folder).preprocessor(context.task, context.max_length, context.target)
    return predict(load(folder), processor, context.data.evaluation.rows, 16)


def quantized(checkpoint: Path, context: Context, out: Path, **settings: Any) -> tuple[float, dict[str, Any]]:
    """Returns the KL divergence of the quantized model from the float one, and the figures of the stage."""
    out.mkdir()
    settings = {"weight_bits": 8, "calibration": {"method": "minmax"}, **settings}
    figures = Quantize(id="quantize", **settings).run(Artifact(checkpoint, {}), context, out)
    return distance(context.task, logits(checkpoint, context), logits(out, context)), figures


Plant = Callable[[Path, Path], Path]


@pytest.fixture(params=["vit", "bert"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Context]:
    """A checkpoint, the same with outliers that folding can reach, and their context."""
    plant: Plant = {"vit": outliers.planted_vit, "bert": outliers.planted_values_bert}[request.param]
    source = request.getfixturevalue(f"tiny_{request.param}")
    return source, plant(source, tmp_path / "planted"), request.getfixturevalue({"vit": "image_context", "bert": "context"}[request.param])


def test_planted_outliers_break_minmax_and_smoothing_recovers(planted: tuple[Path, Path, Context], tmp_path: Path) -> None:
    source, hard, context = planted
    assert np.abs(logits(hard, context) - logits(source, context)).max() <= 1e-4 * np.abs(logits(source, context)).max()
    easy, _ = quantized(source, context, tmp_path / "easy")
    broken, _ = quantized(hard, context, tmp_path / "broken", smoothquant=False)
    recovered, figures = quantized(hard, context, tmp_path / "recovered", smoothquant={"prescale": False})
    assert broken > 10 * easy
    assert recovered < 2 * easy
    assert all(group["alpha"] is None for group in figures["smoothquant"] if group["into"] is None)
    assert not any(scales.input_smooth is not None for scales in load_quantization(tmp_path / "recovered")[0].values())


@pytest.mark.slow
def test_what_nothing_can_absorb_is_multiplied_in_the_engine(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    hard = outliers.planted_post_norm_bert(tiny_bert, tmp_path / "hard")
    assert np.abs(logits(hard, context) - logits(tiny_bert, context)).max() <= 1e-4 * np.abs(logits(tiny_bert, context)).max()
    easy, _ = quantized(tiny_bert, context, tmp_path / "easy", smoothquant=False)
    broken, _ = quantized(hard, context, tmp_path / "broken", smoothquant=False)
    folded, figures = quantized(hard, context, tmp_path / "folded", smoothquant={"prescale": False})
    # A channel that is always large makes the rounding of its weights a constant error: that part is for the biases.
    recovered, _ = quantized(hard, context, tmp_path / "recovered", smoothquant=True, bias_correction=True)
    assert min(broken, folded) > 10 * easy
    assert recovered < 0.3 * min(broken, folded)
    left = {group["layers"][0]: group["reason"] for group in figures["smoothquant"] if group["into"] is None}
    layer = "bert.encoder.layer.0"
    assert left[f"{layer}.intermediate.dense"] == f"{layer}.attention.output.LayerNorm: add reads it"
    assert left[f"{layer}.output.dense"] == UNFOLDED
    scales = load_quantization(tmp_path / "recovered")[0]
    smooths = [scales[f"bert.encoder.layer.1.attention.self.{name}"].input_smooth for name in ("query", "key", "value")]
    assert len({None if vector is None else vector.numpy().tobytes() for vector in smooths}) == 1
    vector = scales[f"{layer}.intermediate.dense"].input_smooth
    assert vector is not None
    assert set(vector.topk(len(outliers.CHANNELS)).indices.tolist()) == set(outliers.CHANNELS)


def test_the_float_weights_of_a_smoothed_checkpoint_mean_the_same(tiny_bert: Path, context: Context, tmp_path: Path) -> None:
    import transformers

    quantized(tiny_bert, context, tmp_path / "out", smoothquant={"alpha": 0.5})
    ids = torch.randint(5, 20, (2, 8), generator=torch.Generator().manual_seed(0))
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    integer = load(tmp_path / "out")
    assert sum(isinstance(module, Int8Linear) and module.input_smooth is not None for module in integer.modules()) == 10
    with torch.inference_mode():
        expected, found = forward(load(tiny_bert), {"input_ids": ids}), forward(stock, {"input_ids": ids})
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()


@settings(max_examples=7, deadline=None)
@given(st.one_of(st.floats(0, 1), st.just("auto")), st.sampled_from([7, 8]))
def test_smoothing_leaves_the_float_function_as_it_was(tiny_vit: Path, image_context_rows: Any, alpha: float, bits: int) -> None:
    model, features = load(tiny_vit), image_context_rows
    layers = choose_layers(model, linears(model), (), "exclude")[0]
    folds, observed = find_folds(model, features, forward), collect(model, layers, [features], forward, Channels)
    with torch.inference_mode():
        before = forward(model, features)
        _, figures = smooth(model, layers, folds, observed, bits, alpha, False)
        after = forward(model, features)
    assert any(group["alpha"] is not None for group in figures)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.fixture(scope="module")
def image_context_rows(tiny_vit: Path) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))}


VALUES = st.floats(2.0**-60, 2.0**60, width=32) | st.just(0.0)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=20), st.floats(0, 1))
def test_the_factor_is_that_of_the_paper(ranges: list[tuple[float, float]], alpha: float) -> None:
    inputs, weights = (torch.tensor(column, dtype=torch.float32) for column in zip(*ranges, strict=True))
    for (x, w), found in zip(ranges, smoothing_factor(inputs, weights, alpha).tolist(), strict=True):
        expected = 1.0 if x == 0 or w == 0 else min(max(x**alpha / w ** (1 - alpha), SMALLEST), LARGEST)
        assert found == pytest.approx(expected, rel=1e-4)


def test_half_of_the_difficulty_makes_both_ranges_equal() -> None:
    x, w = torch.tensor([1.0, 50.0, 0.1]), torch.tensor([0.5, 0.02, 3.0])
    factor = smoothing_factor(x, w, 0.5)
    assert torch.allclose(x / factor, w * factor)


@pytest.mark.parametrize("bits", [8, 7])
def test_the_error_is_that_of_the_written_out_product(bits: int) -> None:
    generator, largest = torch.Generator().manual_seed(0), {8: 127, 7: 63}[bits]
    x, weights = torch.randn(6, 5, generator=generator), [torch.randn(4, 5, generator=generator), torch.randn(3, 5, generator=generator)]
    factor = torch.rand(5, generator=generator) + 0.5
    x[2], x[4] = 0.0, 30 * x[4]  # no output, and larger outputs than any other
    input_scale = float((x / factor).abs().max()) / 127
    errors, powers = [0.0] * len(x), [0.0] * len(x)
    for weight in weights:
        for number, row in enumerate(x):
            for output in weight:
                exact = float(row @ output)
                step = float((output * factor).abs().max()) / largest
                codes = [
                    (round(float(a / s) / input_scale), round(float(b * s) / step)) for a, b, s in zip(row, output, factor, strict=True)
                ]
                errors[number] += (sum(a * b for a, b in codes) * input_scale * step - exact) ** 2
                powers[number] += exact**2
    typical = sorted(power for power in powers if power)[2]
    expected = sum(error / max(power, typical) for error, power in zip(errors, powers, strict=True)) / len(x)
    assert output_error(x, weights, factor, bits) == pytest.approx(expected, rel=1e-3)
    assert output_error(torch.zeros(2, 5), weights, factor, bits) == 0


def test_a_huge_token_does_not_decide_alone() -> None:
    """The first of 64 tokens is a thousand times as large in one channel, as in decoders: the others are to be rounded well too."""
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(32, 16, bias=False), torch.randn(64, 32, generator=generator)
    layer.weight.data = torch.randn(16, 32, generator=generator)
    x[:, 7] *= 0.05
    x[0, 7] = 1000.0
    vectors, _ = smooth(nn.ModuleDict({"a": layer}), {"a": layer}, [], observed_of(x), 8, "auto", True)
    scaled = x / vectors["a"]
    scale, exact = float(scaled.abs().max()) / 127, x @ layer.weight.detach().T
    weight = layer.weight.detach() * vectors["a"]
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    found = (scaled / scale).round() * scale @ ((weight / step).round() * step).T
    others = (found - exact)[1:].square().sum() / exact[1:].square().sum()
    assert others < 0.05


def observed_of(*rows: Tensor, names: tuple[str, ...] = ("a",)) -> Observed[Channels]:
    channels = Channels()
    for row in rows:
        channels.add(row)
    return Observed({names[0]: channels}, dict.fromkeys(names, names[0]))


def test_the_search_finds_the_best_of_the_grid() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(16, 8), torch.randn(200, 16, generator=generator)
    x[:, 3] *= 40
    model = nn.ModuleDict({"a": layer})
    vectors, [figure] = smooth(model, {"a": layer}, [], observed_of(x), 8, "auto", True)
    ranges = x.abs().amax(0), layer.weight.detach().abs().amax(0)
    errors = {alpha: output_error(x, [layer.weight.detach()], smoothing_factor(*ranges, alpha), 8) for alpha in ALPHAS}
    assert figure["alpha"] == min(errors, key=errors.__getitem__)
    assert figure["error"] == min(errors.values()) < figure["error_before"] / PRESCALE_GAIN
    assert torch.equal(vectors["a"], smoothing_factor(*ranges, figure["alpha"]))
    assert (figure["into"], figure["layers"], figure["reason"]) == ("input", ["a"], UNFOLDED)


def test_what_gains_little_is_not_multiplied() -> None:
    layer, x = nn.Linear(64, 64), torch.rand(200, 64) + 1  # so many that no luck of rounding halves the error
    layer.weight.data.uniform_(0.9, 1)
    vectors, [figure] = smooth(nn.ModuleDict({"a": layer}), {"a": layer}, [], observed_of(x), 8, "auto", True)
    assert (vectors, figure["alpha"], figure["into"]) == ({}, None, None)
    assert figure["error"] == figure["error_before"]
    vectors, [figure] = smooth(nn.ModuleDict({"a": layer}), {"a": layer}, [], observed_of(x), 8, 0.5, True)
    assert (list(vectors), figure["alpha"]) == (["a"], 0.5)


def test_groups_are_those_of_a_fold_else_of_a_tensor() -> None:
    layers = {name: nn.Linear(2, 2) for name in "abcde"}
    channels = {name: Channels() for name in "abd"}
    for entry in channels.values():
        entry.add(torch.ones(1, 2))
    observed = Observed({**channels, "e": Channels()}, {"a": "a", "b": "b", "c": "b", "d": "d", "e": "e"})
    folds = [Fold("norm", ("b", "c", "head"), None), Fold("sum", ("d",), "add reads it")]
    found = groups(layers, folds, observed)
    assert [(group.layers, group.fold, group.reason) for group in found] == [
        (("a",), None, UNFOLDED),
        (("b", "c"), folds[0], None),
        (("d",), None, "sum: add reads it"),
    ]


def test_a_fold_takes_every_reader_along() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "a": nn.Linear(4, 3), "head": nn.Linear(4, 2)})
    model["norm"].bias.data.uniform_(-1, 1)
    before, x = copy.deepcopy(model), torch.randn(50, 4) * torch.tensor([1.0, 1, 30, 1])
    smooth(model, {"a": model["a"]}, [Fold("norm", ("a", "head"), None)], observed_of(x), 8, 0.7, False)
    factor = smoothing_factor(x.abs().amax(0), before["a"].weight.detach().abs().amax(0), 0.7)
    for name in ("a", "head"):
        assert torch.allclose(model[name].weight, before[name].weight * factor)
        assert torch.allclose(model[name](model["norm"](x)), before[name](before["norm"](x)), atol=1e-5)
    assert torch.allclose(model["norm"].bias, before["norm"].bias / factor)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6), st.integers(0, 100))
@settings(max_examples=15)
def test_the_sample_does_not_depend_on_the_batches(sizes: list[int], seed: int) -> None:
    x, one = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed)), Channels()
    several = observed_of(*x.split(sizes)).of("a")
    one.add(x)
    assert torch.equal(several.largest_I, one.largest_I)
    assert torch.equal(several.sample_NI, one.sample_NI)
    if len(x):
        stride = len(x) // len(one.sample_NI) if len(x) % len(one.sample_NI) == 0 else -(-len(x) // len(one.sample_NI))
        assert torch.equal(one.sample_NI, x[::stride])
        assert len(one.sample_NI) == len(x) if len(x) <= SAMPLE_ROWS else SAMPLE_ROWS / 2 <= len(one.sample_NI) <= SAMPLE_ROWS
        assert torch.equal(one.largest_I, x.abs().amax(0))


def test_an_input_of_nan_names_its_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"^0: .*NaN or infinite"):
        collect(model, {"0": model[0]}, [{"x": torch.tensor([[1.0, float("inf")]])}], lambda m, f: m(f["x"]), Channels)


def test_the_log_says_what_was_done(bert: Artifact, context: Context, told, tmp_path: Path) -> None:
    _, figures = quantized(bert.path, context, tmp_path / "out", smoothquant={"prescale": False, "alpha": 0.5})
    assert len(figures["smoothquant"]) == 8
    line = "2 groups folded, 0 multiplied at the input, 6 not smoothed (6 cannot be folded: "
    assert describe(figures["smoothquant"]).startswith(line)
    assert any(line in told_line for told_line in told.lines)


def test_smoothing_is_the_same_every_time(bert: Artifact, context: Context, tmp_path: Path) -> None:
    first, second = (quantized(bert.path, context, tmp_path / name, smoothquant=True) for name in "ab")
    assert first == second
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert (tmp_path / "a" / "quantization.safetensors").read_bytes() == (tmp_path / "b" / "quantization.safetensors").read_bytes()


@pytest.mark.slow
def test_evaluation_rows_are_never_looked_at(bert: Artifact, context: Context, tmp_path: Path) -> None:
    hidden = replace(context, data=replace(context.data, evaluation=None))  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    settings = {"smoothquant": True, "equalization": True, "bias_correction": True, "calibration": {"method": "auto", "rows": 64}}
    figures = Quantize(id="quantize", **settings).run(bert, hidden, tmp_path / "out")
    assert figures["calibrators"]["rows"] == 40
    assert len(list(feature_batches(bert.path, context.data.selection.rows, context, ""))) > 0
