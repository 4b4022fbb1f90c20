"""Training in int8: integers against a naive loop, gradients against written-out surrogates, and tiny models end to end."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from compress.artifact import Artifact
from compress.data import preprocessor
from compress.distilled import Distilled, soft_target_loss
from compress.errors import InputError
from compress.evaluate import predict
from compress.int8 import (
    SMALLEST_SCALE,
    Int8Linear,
    LayerScales,
    int8_linear,
    levels,
    on_grid,
    quantize,
    weight_scale,
)
from compress.model import forward, linears, load, save
from compress.quantization import apply_quantization, save_quantization
from compress.splits import Split
from compress.stage import Context
from compress.train import Batch, TrainConfig, parameter_groups, train
from quantize.qat import (
    Int8Function,
    Qat,
    QatLinear,
    Scale,
    codes_and_slope,
    extract,
    insert,
    learn,
    only_inside,
)

LOW, HIGH = -128, 127


class Problem(NamedTuple):
    """Arguments of `Int8Function`, and the gradient of its output."""

    x_NI: Tensor
    weight_OI: Tensor
    input_scale: Tensor
    weight_scale_O: Tensor
    bias_O: Tensor
    largest: int
    gradient_NO: Tensor


def problem(rows: int, inputs: int, outputs: int, bits: int = 8, seed: int = 0) -> Problem:
    """Draws values of which about one in ten is clipped, at either end."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    scale_O = (0.8 + torch.rand(outputs, generator=generator)) * 1.2 / levels(bits)
    bias, gradient = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    return Problem(x, weight, torch.tensor(1.6 / HIGH), scale_O, bias, levels(bits), gradient)


def int8(
    x: Tensor,
    weight_OI: Tensor,
    input_scale: Tensor,
    weight_scale_O: Tensor,
    bias_O: Tensor | None,
    largest: int = 127,
    pact: bool = False,
    products: torch.dtype = torch.float32,
) -> Tensor:
    return Int8Function.apply(x, weight_OI, input_scale, weight_scale_O, bias_O, largest, pact, products)


def gradients(case: Problem, pact: bool = False, products: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradients of x, W, the input scale, the weight scales and the bias."""
    leaves = [value.clone().requires_grad_() for value in case[:5]]
    int8(*leaves, case.largest, pact, products).backward(case.gradient_NO)
    found = [leaf.grad for leaf in leaves]
    assert all(value is not None for value in found)
    return found  # type: ignore[return-value]


def slope_of(v: float, low: int, high: int, pact: bool) -> float:
    """Equation 3 of LSQ, and what PACT has in its place."""
    if v <= low:
        return low
    if v >= high:
        return high
    return 0.0 if pact else -v + float(np.rint(v))


def written_out(case: Problem, pact: bool) -> list[np.ndarray]:
    """The gradients, one element at a time in float64; v and the codes are those of float32."""
    x, weight, gradient = (value.double().numpy() for value in (case.x_NI, case.weight_OI, case.gradient_NO))
    v_x, v_w = (case.x_NI / case.input_scale).numpy(), (case.weight_OI / case.weight_scale_O[:, None]).numpy()
    s_x, s_w = float(case.input_scale), case.weight_scale_O.double().numpy()
    x_hat = s_x * np.clip(np.rint(v_x), LOW, HIGH).astype(np.float64)
    weight_hat = s_w[:, None] * np.clip(np.rint(v_w), -case.largest, case.largest).astype(np.float64)
    d_x, d_weight, d_s_x, d_s_w = np.zeros_like(x), np.zeros_like(weight), 0.0, np.zeros_like(s_w)
    for n in range(x.shape[0]):
        for i in range(x.shape[1]):
            through = sum(gradient[n, o] * weight_hat[o, i] for o in range(len(weight)))
            d_x[n, i] = through if LOW < v_x[n, i] < HIGH else 0.0
            d_s_x += through * slope_of(float(v_x[n, i]), LOW, HIGH, pact) / math.sqrt(x.shape[1] * HIGH)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            through = sum(gradient[n, o] * x_hat[n, i] for n in range(len(x)))
            d_weight[o, i] = through if -case.largest < v_w[o, i] < case.largest else 0.0
            d_s_w[o] += through * slope_of(float(v_w[o, i]), -case.largest, case.largest, False) / math.sqrt(x.shape[1] * case.largest)
    return [d_x, d_weight, np.array(d_s_x), d_s_w, gradient.sum(axis=0)]


def assert_close(found: list[Tensor], expected: list[Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        b = np.asarray(b, np.float64)
        assert a.shape == b.shape
        size = float(np.sqrt(np.mean(b**2))) if b.size else 0.0
        np.testing.assert_allclose(a.numpy(), b, rtol=tolerance, atol=tolerance * (size + 1e-3))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 40),
    size=st.sampled_from([1, 100, 1e6]),
    seed=st.integers(0, 99),
)
def test_accumulators_are_those_of_a_naive_loop(n: int, inputs: int, outputs: int, size: float, seed: int) -> None:
    """Scales of 1 leave the int32 sums as they are; float32 holds those of so few inputs exactly."""
    random = np.random.default_rng(seed)
    x, weight = (random.normal(0, size, shape).astype(np.float32) for shape in ((n, inputs), (outputs, inputs)))
    y = int8(torch.from_numpy(x), torch.from_numpy(weight), torch.tensor(1.0), torch.ones(outputs), None)
    q_x, q_w = np.clip(np.rint(x), LOW, HIGH).astype(np.int64), np.clip(np.rint(weight), -127, 127).astype(np.int64)
    expected = np.zeros((n, outputs), np.int64)
    for i in range(inputs):
        expected += q_x[:, i, None] * q_w[None, :, i]
    assert y.dtype == torch.float32
    assert np.array_equal(y.numpy(), expected)


@pytest.mark.parametrize("value", [1e9, -1e9])
@pytest.mark.parametrize("inputs", [1, 31, 33, 1025])
def test_saturated_codes_never_wrap(value: float, inputs: int) -> None:
    x, weight = torch.full((2, inputs), value), torch.full((3, inputs), -1e9)
    y = int8(x, weight, torch.tensor(1.0), torch.ones(3), None)
    assert torch.equal(y, torch.full((2, 3), float((HIGH if value > 0 else LOW) * -127 * inputs)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 6), st.integers(1, 9), st.integers(1, 6), st.sampled_from([7, 8]), st.booleans(), st.integers(0, 99))
def test_gradients_are_those_written_out(rows: int, inputs: int, outputs: int, bits: int, pact: bool, seed: int) -> None:
    case = problem(rows, inputs, outputs, bits, seed)
    assert_close(gradients(case, pact), written_out(case, pact))


@pytest.mark.parametrize("bits", [7, 8])
def test_gradients_are_finite_differences_of_the_surrogate(bits: int) -> None:
    """Straight-through means: the distance of rounding stands still. x^ = s * (clip(x / s) + distance) is then piecewise smooth."""
    case = problem(7, 11, 5, bits)
    limits = [(LOW, HIGH), (-case.largest, case.largest)]

    def clipped(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
        return (values / scale).clamp(low, high)

    columns = [case.input_scale, case.weight_scale_O[:, None]]
    distances = []
    for values, scale, (low, high) in zip(case[:2], columns, limits, strict=True):
        v = clipped(values, scale, low, high)
        distances.append((torch.round(v) - v).double())

    def loss(x: Tensor, weight: Tensor, s_x: Tensor, s_w: Tensor, bias: Tensor) -> float:
        x_hat = s_x * (clipped(x, s_x, *limits[0]) + distances[0])
        weight_hat = s_w[:, None] * (clipped(weight, s_w[:, None], *limits[1]) + distances[1])
        return float(((x_hat @ weight_hat.T + bias) * case.gradient_NO).sum())

    arguments = [value.double() for value in case[:5]]
    differences = []
    for argument in arguments:
        flat, difference = argument.view(-1), torch.zeros(argument.numel(), dtype=torch.float64)
        for i in range(len(flat)):
            before, h = flat[i].item(), 1e-7
            flat[i] = before + h
            above = loss(*arguments)  # type: ignore[arg-type]
            flat[i] = before - h
            difference[i] = (above - loss(*arguments)) / (2 * h)  # type: ignore[arg-type]
            flat[i] = before
        differences.append(difference.view(argument.shape))
    differences[2] /= math.sqrt(11 * HIGH)
    differences[3] /= math.sqrt(11 * case.largest)
    for values, scale, (low, high) in zip(case[:2], columns, limits, strict=True):  # so that both pieces are seen, and no kink
        v = values / scale
        assert (v < low).any()
        assert (v > high).any()
        assert torch.minimum((v - low).abs(), (v - high).abs()).min() > 1e-3
    assert_close(gradients(case), [value.numpy() for value in differences], 2e-4)


@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-63, 63)])
@pytest.mark.parametrize("lsq", [None, torch.float32, torch.bfloat16])
def test_only_values_at_or_beyond_a_limit_are_outside(low: int, high: int, lsq: torch.dtype | None) -> None:
    v = torch.tensor(
        [0.0, 0.5, 1.5, -2.5, high - 0.6, high - 0.5, high - 0.3, high, high + 0.3, high + 9, low + 0.4, low, low - 0.2, low - 70]
    )
    inside = torch.tensor([True] * 7 + [False] * 3 + [True] + [False] * 3)
    for scale in (1.0, 0.25):  # powers of two: v comes back exactly
        codes, slope = codes_and_slope(v * scale, torch.tensor(scale), low, high, lsq)
        assert torch.equal(codes, quantize(v * scale, torch.tensor(scale), low, high))
        assert codes[6] == codes[7] == high  # one is inside, one is outside: codes cannot tell
        assert torch.equal(only_inside(torch.ones(len(v)), slope.float(), -1, 1).bool(), inside)
        assert slope.dtype == (torch.int8 if lsq is None else lsq)
        expected = torch.tensor([slope_of(float(value), low, high, lsq is None) for value in v])
        torch.testing.assert_close(slope.float(), expected, rtol=0, atol=2e-3 if lsq == torch.bfloat16 else 1e-5)


def test_products_in_bfloat16_have_the_same_integers_and_close_gradients() -> None:
    case = problem(64, 48, 40)
    exact, expected = int8(*case[:6]), gradients(case)
    y = int8(*case[:6], products=torch.bfloat16)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
    found = gradients(case._replace(gradient_NO=case.gradient_NO.bfloat16()), products=torch.bfloat16)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize(("pact", "most"), [(False, 3), (True, 2)])
def test_what_is_kept_for_backward_is_small(pact: bool, most: int) -> None:
    """Codes and slopes, and no more than that for a value; with PACT weights have no learned scale."""
    case, kept = problem(64, 48, 40), []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    leaves = [value.clone().requires_grad_(not (pact and i == 3)) for i, value in enumerate(case[:5])]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        int8(*leaves, 127, pact, torch.bfloat16)
    scales = 4 * (1 + 40)
    assert sum(value.numel() * value.element_size() for value in kept) == most * (64 + 40) * 48 + scales


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    case = problem(4, 3, 2)
    x = case.x_NI.clone().requires_grad_()
    int8(x, *case[1:4], None).backward(case.gradient_NO)
    assert_close([x.grad], [written_out(case, False)[0]])  # type: ignore[list-item]


def a_linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias)


def scales_of(linear: nn.Linear, input_scale: float = 0.02, bits: int = 8) -> LayerScales:
    return LayerScales(0.9 * weight_scale(linear.weight.detach(), levels(bits)), torch.tensor(input_scale), bits)


def inserted(linear: nn.Linear, scales: LayerScales, **settings: Any) -> tuple[nn.Sequential, QatLinear]:
    model = nn.Sequential(linear)
    insert(model, {"0": scales}, **settings)
    layer = model[0]
    assert isinstance(layer, QatLinear)
    return model, layer


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 33), (1, 33), (2, 3, 33)])
def test_evaluation_and_training_give_the_bits_of_int8_linear(bits: int, bias: bool, shape: tuple[int, ...]) -> None:
    linear = a_linear(33, 5, bias)
    scales = scales_of(linear, bits=bits)
    codes = quantize(linear.weight.detach(), scales.weight_scale[:, None], -levels(bits), levels(bits))
    expected = Int8Linear("layer", codes, scales, None if linear.bias is None else linear.bias.detach())
    _, layer = inserted(linear, scales)
    for x in (2 * torch.randn(shape), torch.randn(shape).bfloat16()):
        with torch.no_grad():
            assert torch.equal(layer.train()(x), expected(x))
        assert torch.equal(layer.eval()(x), expected(x))
        assert layer(x).dtype == x.dtype
    assert torch.equal(layer.scales().weight_scale, scales.weight_scale)
    assert torch.equal(layer.scales().input_scale, scales.input_scale)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_no_number_names_the_layer(value: float, training: bool) -> None:
    model, _ = inserted(a_linear(4, 3), LayerScales(torch.ones(3), torch.tensor(1.0), 8))
    x = torch.ones(5, 4)
    x[2, 1] = value
    with pytest.raises(InputError, match="0: the input of this quantized layer holds NaN or infinity"):
        model.train(training)(x)


def test_large_inputs_are_numbers_although_their_sum_is_not() -> None:
    model, _ = inserted(a_linear(4, 3), LayerScales(torch.ones(3), torch.tensor(1.0), 8))
    assert model.train()(torch.full((5, 4), 3e38)).isfinite().all()


def test_a_scale_learns_relative_to_its_start_and_stays_positive() -> None:
    scale = Scale(torch.tensor([0.02, 3.0]), 10.0, learned=True)
    assert torch.equal(scale(), torch.tensor([0.02, 3.0]))
    scale().sum().backward()
    assert scale.change.grad is not None
    torch.testing.assert_close(scale.change.grad, torch.tensor([0.2, 30.0]))
    with torch.no_grad():
        scale.change.copy_(torch.tensor([0.001, -1.0]))
    assert scale().tolist() == [pytest.approx(0.0202), SMALLEST_SCALE]


def test_scales_have_no_weight_decay_and_weights_keep_their_names() -> None:
    model, layer = inserted(a_linear(4, 3), scales_of(a_linear(4, 3)))
    decay = {id(parameter): group["weight_decay"] for group in parameter_groups(model, 0.1) for parameter in group["params"]}
    assert decay[id(layer.weight)] == 0.1
    assert layer.bias is not None
    assert all(decay[id(value)] == 0 for value in (layer.bias, layer.input_scale.change, layer.weight_scale.change))
    assert {"0.weight", "0.bias"} <= set(model.state_dict())


@pytest.mark.parametrize(("learned", "wanted"), [("lsq", (True, True)), ("pact", (True, False)), ("fixed", (False, False))])
def test_a_mode_learns_the_scales_it_says(learned: Any, wanted: tuple[bool, bool]) -> None:
    model, layer = inserted(a_linear(40, 3), scales_of(a_linear(40, 3)), learned=learned)
    model.train()(4 * torch.randn(8, 40)).square().sum().backward()
    for scale, learns in zip((layer.input_scale, layer.weight_scale), wanted, strict=True):
        assert (scale.change.grad is not None and bool(scale.change.grad.any())) == learns
    assert layer.weight.grad is not None


def start_of(folder: Path, context: Context, bits: int = 8) -> tuple[nn.Module, dict[str, LayerScales]]:
    """A model and scales that clip nothing, from one batch."""
    model, largest = load(folder), {}
    chosen = {name: layer for name, layer in linears(model).items() if ".encoder." in name}
    for name, layer in chosen.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: largest.update({name: args[0].abs().max()}))
    forward(model, features(folder, context, 32))
    for layer in chosen.values():
        layer._forward_pre_hooks.clear()
    return model, {
        name: LayerScales(weight_scale(layer.weight.detach(), levels(bits)), largest[name].detach() / HIGH, bits)
        for name, layer in chosen.items()
    }


def features(folder: Path, context: Context, num: int) -> dict[str, Tensor]:
    prepared = preprocessor(folder, context.task, context.max_length, context.target)
    return {name: torch.from_numpy(value) for name, value in prepared.encode(context.data.train.rows[:num], 24).items()}


@pytest.mark.parametrize("bits", [8, 7])
def test_extracted_layers_are_a_quantized_checkpoint(bert: Artifact, context: Context, tmp_path: Path, bits: int) -> None:
    model, scales = start_of(bert.path, context, bits)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    insert(model, scales, rate=10)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, Scale):  # as if they had learned
            layer.change.data.uniform_(-0.02, 0.02, generator=generator)
    expected = forward(model.eval(), features(bert.path, context, 16))
    learned = extract(model)
    assert list(learned) == list(scales)
    assert not any(isinstance(module, QatLinear) for module in model.modules())
    assert set(model.state_dict()) == set(before)
    for name, value in model.state_dict().items():
        layer_name = name.removesuffix(".weight")
        if layer_name not in learned:
            assert torch.equal(value, before[name]), name
            continue
        assert not torch.equal(learned[layer_name].weight_scale, scales[layer_name].weight_scale)
        assert learned[layer_name].weight_bits == bits
        assert torch.equal(value, on_grid(before[name], learned[layer_name].weight_scale, levels(bits)))
    save(model, bert.path, tmp_path, "Trained")
    save_quantization(tmp_path, learned, {})
    apply_quantization(model, tmp_path)
    assert torch.equal(forward(model, features(bert.path, context, 16)), expected)
    assert torch.equal(forward(load(tmp_path), features(bert.path, context, 16)), expected)


def test_layers_that_read_one_tensor_share_what_they_learn(bert: Artifact, context: Context) -> None:
    model, scales = start_of(bert.path, context)
    insert(model, scales)
    for block in range(2):
        shared = {
            id(layer.input_scale)
            for name, layer in model.named_modules()
            if f"{block}.attention.self." in name and isinstance(layer, QatLinear)
        }
        assert len(shared) == 1
    assert len({id(layer.input_scale) for layer in model.modules() if isinstance(layer, QatLinear)}) == 8


@pytest.mark.parametrize("learned", ["lsq", "pact", "fixed"])
@pytest.mark.parametrize("distill", [True, False])
def test_training_lowers_the_loss(bert: Artifact, context: Context, learned: Any, distill: bool) -> None:
    model, scales = start_of(bert.path, context)
    narrow = {name: LayerScales(old.weight_scale, 0.3 * old.input_scale, 8) for name, old in scales.items()}
    train_split = Split(context.data.train.rows, np.array(["good" in row.split() for row in context.data.train.rows], np.int64))
    learnable = replace(context, data=replace(context.data, train=train_split))
    settings = Qat(epochs=6, learning_rate=3e-3, scale_learning_rate=10, scales=learned, distill=distill, keep="last")
    found, history = learn(model, narrow, settings, learnable, bert.path, "quantize")
    part, factor = ("teacher", 0.5) if distill else ("cross_entropy", 0.9)
    assert history.losses[-1][part] < factor * history.losses[0][part]
    assert set(history.losses[0]) == {"epoch", "cross_entropy", "loss"} | ({"teacher"} if distill else set())
    assert [look["step"] for look in history.selection] == list(range(0, 43, 7))
    assert not model.training
    inputs_moved = [not torch.equal(new.input_scale, narrow[name].input_scale) for name, new in found.items()]
    weights_moved = [not torch.equal(new.weight_scale, narrow[name].weight_scale) for name, new in found.items()]
    assert any(inputs_moved) == (learned != "fixed")
    assert all(inputs_moved) or learned != "lsq"  # pact learns from what is clipped, of what the answer depends on
    assert all(weights_moved) == any(weights_moved) == (learned == "lsq")
    query, key = (found[f"bert.encoder.layer.0.attention.self.{name}"] for name in ("query", "key"))
    assert torch.equal(query.input_scale, key.input_scale)


def test_weights_before_the_training_are_kept_where_they_are_nearest(bert: Artifact, context: Context) -> None:
    """A learning rate that ruins the model: what is left is what calibration gave."""
    model, scales = start_of(bert.path, context)
    found, history = learn(model, scales, Qat(epochs=1, learning_rate=0.5), context, bert.path, "quantize")
    assert history.best_step == 0
    assert history.selection[0]["value"] < history.selection[-1]["value"]
    assert all(torch.equal(found[name].input_scale, start.input_scale) for name, start in scales.items())


@pytest.mark.parametrize("distill", [True, False])
def test_weights_are_chosen_by_distance_from_the_teacher_or_by_labels(bert: Artifact, context: Context, distill: bool) -> None:
    model, scales = start_of(bert.path, context)
    floating = copy.deepcopy(model)
    _, history = learn(model, scales, Qat(epochs=1, distill=distill, learning_rate=1e-4, keep="last"), context, bert.path, "quantize")
    prepared = preprocessor(bert.path, context.task, context.max_length, context.target)
    rows, labels = context.data.selection.rows, context.data.selection.labels
    before, after = (predict(one, prepared, rows, 8) for one in (floating, model))
    if distill:
        p, q = (torch.log_softmax(torch.from_numpy(logits).double(), dim=1) for logits in (before, after))
        expected = float((p.exp() * (p - q)).sum(dim=1).mean())
        # what is written in float32 is nearly what was trained
        assert history.selection[-1]["value"] == pytest.approx(expected, rel=0.5, abs=2e-3)
        assert not history.higher_is_better
    else:
        assert history.higher_is_better
        assert history.selection[-1]["value"] == pytest.approx((after.argmax(1) == labels).mean(), abs=0.1)


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_is_on_where_it_is_asked_for(bert: Artifact, context: Context, dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[type, bool]] = set()
    forward = QatLinear.forward

    def watching(layer: QatLinear, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.update((type(module), module.training) for module in watched.modules())
        return forward(layer, x)

    watched, scales = start_of(bert.path, context)
    monkeypatch.setattr(QatLinear, "forward", watching)
    learn(watched, scales, Qat(epochs=0.1, dropout=dropout), context, bert.path, "quantize")
    assert (QatLinear, True) in seen
    assert (QatLinear, False) not in seen
    assert ((torch.nn.Dropout, True) in seen) == dropout


@pytest.mark.parametrize("start", [0.2, 5.0])
def test_lsq_finds_the_scale_of_least_squared_error(start: float) -> None:
    """The gradient by rounding and clipping is the derivative of the noise of a smooth distribution, and nothing else."""
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    candidates = torch.linspace(0.5, 6.0, 200) / 15
    errors = [float((quantize(x, s, -15, 15) * s - x).square().mean()) for s in candidates]
    best = float(candidates[int(np.argmin(errors))])
    scale = learned_scale(x, start * best, pact=False)
    assert scale == pytest.approx(best, rel=0.1)


def test_pact_widens_a_scale_until_nothing_is_clipped() -> None:
    x = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    assert learned_scale(x, 0.1, pact=True) == pytest.approx(float(x.abs().max()) / 15, rel=0.1)
    assert learned_scale(x, 1.0, pact=True) == 1.0  # where nothing is clipped there is no gradient


def learned_scale(x: Tensor, start: float, pact: bool) -> float:
    """The scale of 31 levels that gradient descent on the squared error of rounding ends at."""
    scale = Scale(torch.tensor(start), 4.0, learned=True)
    optimizer = torch.optim.Adam(scale.parameters(), lr=0.05)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 400)
        s = scale()
        codes, slope = codes_and_slope(x, s.detach(), -15, 15, None if pact else torch.float32)
        error = codes * s.detach() - x
        optimizer.zero_grad()
        s.backward((2 * error * slope).mean())
        optimizer.step()
    return float(scale().detach())


def test_the_soft_loss_is_the_divergence_written_out() -> None:
    logits, target = torch.randn(5, 3), 3 * torch.randn(5, 3)
    expected = []
    for z, t in zip(logits.double().numpy(), target.double().numpy(), strict=True):
        p, q = (np.exp(values / 2.5) / np.exp(values / 2.5).sum() for values in (t, z))
        expected.append(2.5**2 * float((p * np.log(p / q)).sum()))
    np.testing.assert_allclose(soft_target_loss(logits, target, 2.5).numpy(), expected, rtol=1e-4)
    assert soft_target_loss(target, target, 2.5).abs().max() < 1e-6


class Answers(nn.Module):
    """A model that answers what it is told, and counts how often it is asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.given, self.asked = nn.Parameter(logits), 0

    def forward(self, rows: Tensor) -> Any:
        self.asked += 1
        return SimpleNamespace(logits=self.given[rows])


def batch_of(rows: list[int], labels: Tensor) -> Batch:
    return Batch({"rows": torch.tensor(rows)}, labels[rows], np.array(rows), 0, 10)


def test_the_teacher_is_asked_once_a_row() -> None:
    teacher, student = Answers(torch.randn(6, 2)), Answers(torch.randn(6, 2))
    objective, labels = Distilled(teacher, "text-classification", 6, 2, 2.0, 0.75), torch.tensor([0, 1, 1, 0, 1, 0])
    for rows, asked in (([0, 1, 2], 1), ([3, 1], 2), ([2, 0], 2), ([5], 3), ([4], 4), ([5, 4, 3, 2, 1, 0], 4)):
        parts = objective(student, batch_of(rows, labels))
        assert teacher.asked == asked
        hard = nn.functional.cross_entropy(student.given[rows], labels[rows], reduction="none")
        torch.testing.assert_close(parts["cross_entropy"], 0.25 * hard)
        torch.testing.assert_close(parts["teacher"], 0.75 * soft_target_loss(student.given[rows], teacher.given[rows], 2.0))
    sum(part.sum() for part in parts.values()).backward()
    assert student.given.grad is not None
    assert teacher.given.grad is None
    assert not list(objective.parameters())
    assert list(objective.state_dict()) == ["logits"]


def test_logits_that_do_not_fit_are_computed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.distilled.CACHE_BYTES", 6 * 2 * 4 - 1)
    teacher, student, labels = Answers(torch.randn(6, 2)), Answers(torch.randn(6, 2)), torch.zeros(6, dtype=torch.int64)
    objective = Distilled(teacher, "text-classification", 6, 2, 2.0, 0.5)
    for asked in (1, 2):
        objective(student, batch_of([0, 1], labels))
        assert teacher.asked == asked
    assert not objective.state_dict()


def test_regression_learns_the_values_of_the_teacher() -> None:
    teacher, student, labels = Answers(torch.randn(6, 1)), Answers(torch.randn(6, 1)), torch.randn(6)
    parts = Distilled(teacher, "text-regression", 6, 1, 2.0, 0.75)(student, batch_of([4, 2], labels))
    value, target = student.given[[4, 2], 0], teacher.given[[4, 2], 0]
    torch.testing.assert_close(parts["squared_error"], 0.25 * (value - labels[[4, 2]]) ** 2)
    torch.testing.assert_close(parts["teacher"], 0.75 * (value - target) ** 2)


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [3, 9])
def test_a_killed_training_continues_to_equal_bits(bert: Artifact, context: Context, tmp_path: Path, at: int) -> None:
    class Dies(Distilled):
        def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            if batch.step == at:
                raise Killed
            return super().forward(model, batch)

    def run(kind: type[Distilled], scratch: str) -> tuple[nn.Module, Distilled]:
        model, scales = start_of(bert.path, context)
        objective = kind(load(bert.path), context.task, 48, 2, 2.0, 0.9)
        insert(model, scales, rate=10)
        rows, labels = context.data.train.rows[:48], context.data.train.labels[:48]
        prepared = preprocessor(bert.path, context.task, context.max_length, context.target)
        config = TrainConfig(epochs=2, learning_rate=1e-3, batch_size=8, checkpoint_seconds=0, keep="last")
        train(model, objective, rows, labels, prepared, config, 0, tmp_path / scratch, context.progress)
        return model, objective

    whole, expected = run(Distilled, "whole")
    with pytest.raises(Killed):
        run(Dies, "killed")
    resumed, objective = run(Distilled, "killed")
    assert f"continued after step {at} of 12" in "".join(context.progress.lines)  # type: ignore[attr-defined]
    assert expected.logits is not None
    assert not expected.logits.isnan().any()
    assert torch.equal(objective.logits, expected.logits)  # type: ignore[arg-type]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("learned", ["lsq", "fixed"])
def test_a_smoothed_layer_trains_as_the_product_it_stands_for(learned: Any) -> None:
    linear = a_linear(6, 4)
    smooth = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0, 8.0])  # powers of two: products are exact
    plain = a_linear(6, 4)
    with torch.no_grad():
        plain.weight *= smooth
    scales = scales_of(plain)
    _, expected = inserted(plain, scales, learned=learned)
    model, layer = inserted(linear, replace(scales, input_smooth=smooth), learned=learned)
    x = torch.randn(9, 6)
    assert torch.equal(layer(x), expected(x / smooth))
    layer(x).square().sum().backward()
    expected(x / smooth).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected.weight.grad * smooth)
    y = layer.eval()(x)
    found = extract(model)["0"]
    assert found.input_smooth is not None
    assert torch.equal(int8_linear("0", model[0], found)(x), y)  # type: ignore[arg-type]
    assert layer.train()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("key", "value"), [("epochs", 0), ("scales", "pakt"), ("soft_weight", 1.1), ("temperature", 0), ("lr", 1e-5)])
def test_settings_out_of_range_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=key):
        Qat(**{key: value})
