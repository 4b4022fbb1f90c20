"""AutoRound against its objective in autograd, and by the error of a block's output.

python -m pytest tests/quantize/rounding/test_autoround.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.schemes.int4 import HIGH, LOW, Int4Scales, expand, group_range, group_scale
from foundation.schemes.int8 import LayerScales, weight_scale
from foundation.schemes.int8_weights import WeightScales
from quantize.group_scales import Groups
from quantize.rounding.autoround import LOOKS, GivenLinear, Iterate, Learned, Options, Sample, Start, autoround, draw
from quantize.rounding.blockwise import start_of, with_grid
from quantize.rounding.rounding import IntegerScales

pytestmark = pytest.mark.whole

GROUP = 4


class Net(nn.Module):
    """Two layers around a ReLU, the first one with inputs that no group size divides."""

    def __init__(self, seed: int, inputs: int = 10, hidden: int = 7, outputs: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.3
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def layers_of(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_children() if isinstance(layer, nn.Linear)}


def scales_of(scheme: str, weight_OI: Tensor, name: str = "up") -> IntegerScales:
    match scheme:
        case "w8a8":
            smooth_I = torch.linspace(0.5, 2, weight_OI.shape[1], dtype=weight_OI.dtype) if name == "up" else None
            smoothed_OI = weight_OI if smooth_I is None else weight_OI * smooth_I
            return LayerScales(weight_scale(smoothed_OI, 7), torch.tensor(0.05), 7, smooth_I)
        case "w8a16":
            return WeightScales(30 * weight_scale(weight_OI, 127))
        case "zero points":
            scale_OG, zero_OG = group_range(weight_OI, GROUP)[:2]
            return Int4Scales(1.5 * scale_OG, GROUP, zero_OG)
        case "two_level" | "k_quant":
            return Int4Scales.of_grid(Groups(GROUP, False, "minmax", scheme).grid(0.6 * weight_OI), GROUP)  # the largest are clipped
    return Int4Scales(0.8 * group_scale(weight_OI, GROUP), GROUP)  # the largest are clipped


def batches(seed: int, inputs: int = 10, count: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator, dtype=dtype)
    return [torch.randn(2, 6, inputs, generator=generator, dtype=dtype) @ mixed for _ in range(count)]


def samples_of(net: nn.Module, given: Sequence[Tensor]) -> list[Sample]:
    return [Sample(partial(net, x), net(x), {}) for x in given]


def run(
    net: nn.Module, scales: Mapping[str, IntegerScales], given: Sequence[Tensor], options: Options
) -> tuple[dict[str, Learned], float, float]:
    layers = layers_of(net)
    starts = {name: start_of(layer.weight.detach(), scales[name]) for name, layer in layers.items()}
    return autoround(net, layers, starts, samples_of(net, given), options)


def through(values: Tensor) -> Tensor:
    """Rounds, with the gradient of the identity."""
    return values + (values.round() - values).detach()


def multiple(value_OG: Tensor, shared_OS: Tensor | None, smallest: int) -> Tensor:
    """Rounds to multiples of the numbers of super-blocks, with the gradient of the identity."""
    if shared_OS is None:
        return value_OG
    shared_OG = shared_OS.repeat_interleave(8, dim=1)[:, : value_OG.shape[1]]
    return value_OG + ((value_OG / shared_OG).round().clamp(smallest, 63) * shared_OG - value_OG).detach()


def of_group(values_OG: Tensor, start: Start) -> Tensor:
    return values_OG.repeat_interleave(start.group_size, dim=1)[:, : start.weight_OI.shape[1]]


def naive(net: Net, starts: Mapping[str, Start], given: Sequence[Tensor], options: Options) -> tuple[dict[str, Tensor], list[float]]:
    """The definition, written out for every weight and differentiated by torch; returns the best weights, and the error of each look."""
    v = {name: torch.zeros_like(start.weight_OI).requires_grad_() for name, start in starts.items()}
    alpha, beta = ({name: torch.ones_like(start.grid.scale).requires_grad_() for name, start in starts.items()} for _ in range(2))

    def rounded(name: str) -> Tensor:
        start = starts[name]
        n, p, s0, w = start.low, start.high, start.grid.scale, start.weight_OI
        if start.grid.offset is not None:
            low, high = -alpha[name] * start.grid.offset, beta[name] * ((p - n) * s0 - start.grid.offset)
            s, m = multiple((high - low) / (p - n), start.grid.super_scale, 1), multiple(-low, start.grid.super_offset, 0)
            s, m = of_group(s, start), of_group(m, start)
            return s * through((w + m) / s + v[name]).clamp(0, p - n) - m
        if start.grid.zero_point is None:
            s, z = s0 * alpha[name], torch.zeros_like(s0)
        else:
            low, high = alpha[name] * s0 * (n - start.grid.zero_point), beta[name] * s0 * (p - start.grid.zero_point)
            s = multiple((high - low) / (p - n), start.grid.super_scale, 1)
            z = n - low / s
            z = z + (z.round().clamp(n, p) - z).detach()
        s, z = of_group(s, start), of_group(z, start)
        q = (through(w / s + v[name]) + z).clamp(n, p)
        found = s * (q - z)
        return found if start.smooth_I is None else found / start.smooth_I

    def error(x: Tensor) -> Tensor:
        y = torch.relu(x @ rounded("up").T + net.up.bias) @ rounded("down").T
        return (y - net(x)).square().sum()

    order = draw([Sample(partial(net, x), net(x), {"x": x}) for x in given], options)
    errors, best = [], {}
    for step in range(options.steps + 1):
        if step in [options.steps * look // LOOKS for look in range(LOOKS + 1)]:
            whole = float(torch.stack([error(x).detach() for x in given]).sum())
            if not errors or whole < min(errors):
                best = {name: rounded(name).detach() for name in starts}
            errors.append(whole)
        if step == options.steps:
            break
        loss = torch.stack([error(sample.features["x"]) for sample in next(order)]).sum()
        for kind, centre in ((v, 0), (alpha, 1), (beta, 1)):
            for name, values in kind.items():
                (gradient,) = torch.autograd.grad(loss, [values], retain_graph=True, allow_unused=True)
                if gradient is not None:
                    moved = values - (1 - step / options.steps) / options.steps * gradient.sign()
                    kind[name] = moved.clamp(centre - 0.5, centre + 0.5).detach().requires_grad_()
    return best, errors


@pytest.mark.first(1)
@pytest.mark.parametrize("scheme", ["w4a16", "zero points", "two_level", "k_quant", "w8a8", "w8a16"])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_those_of_the_written_out_objective(scheme: str, seed: int) -> None:
    net, given, options = Net(seed), batches(seed), Options(20, 4, 3)
    scales = {name: scales_of(scheme, layer.weight.detach(), name) for name, layer in layers_of(net).items()}
    starts = {name: start_of(layer.weight.detach(), scales[name]) for name, layer in layers_of(net).items()}
    found, nearest, error = run(net, scales, given, options)
    expected, errors = naive(net, starts, given, options)
    for name, learned in found.items():
        torch.testing.assert_close(learned.weight(starts[name]), expected[name], rtol=1e-9, atol=1e-12)
    assert nearest == pytest.approx(errors[0])
    assert error == pytest.approx(min(errors))
    assert error < nearest


@pytest.mark.parametrize("scheme", ["w4a16", "zero points", "two_level", "k_quant", "w8a16"])
def test_the_result_is_what_the_checkpoint_stores(scheme: str) -> None:
    """Codes come back from the weight and the learned scales, which are those of the scheme."""
    net = Net(2).float()
    scales = {name: scales_of(scheme, layer.weight.detach(), name) for name, layer in layers_of(net).items()}
    found, nearest, error = run(net, scales, [x.float() for x in batches(2)], Options(30, 8, 0))
    weights = {}
    for name, layer in layers_of(net).items():
        start, learned = start_of(layer.weight.detach(), scales[name]), with_grid(scales[name], found[name].grid)
        weights[name] = learned.on_grid(found[name].weight(start))
        torch.testing.assert_close(weights[name], found[name].weight(start), rtol=1e-6, atol=0)
        assert learned.problem(weights[name]) is None
        assert type(learned) is type(scales[name])
    assert error < nearest
    y = [nn.functional.linear(torch.relu(nn.functional.linear(x.float(), weights["up"], net.up.bias)), weights["down"]) for x in batches(2)]
    again = sum(float((one - net(x.float())).square().sum()) for one, x in zip(y, batches(2), strict=True))
    assert again == pytest.approx(error, rel=1e-3)


def weights(kind: str, seed: int, outputs: int, inputs: int) -> Tensor:
    weight_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "a group of zeros":
            weight_OI[:, :GROUP] = 0
        case "a constant group":
            weight_OI[:, :GROUP] = -0.7
        case "one sign":
            weight_OI = weight_OI.abs()
        case "half zeros":
            weight_OI *= torch.rand(outputs, inputs, generator=torch.Generator().manual_seed(seed)) < 0.5
        case "tiny":
            weight_OI *= 1e-30
    return weight_OI


KINDS = ["normal", "a group of zeros", "a constant group", "one sign", "half zeros", "tiny"]


@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 10),
    st.sampled_from(KINDS),
    st.sampled_from(["w4a16", "zero points", "two_level", "k_quant", "w8a16"]),
)
@settings(max_examples=40, deadline=None)
def test_no_block_ends_up_worse_and_all_codes_are_in_range(seed: int, outputs: int, inputs: int, kind: str, scheme: str) -> None:
    layer = nn.Linear(inputs, outputs).requires_grad_(False)
    layer.weight.data = weights(kind, seed, outputs, inputs)
    net, scales = nn.ModuleDict({"up": layer}), {"up": scales_of(scheme, layer.weight.detach())}
    given, start = batches(seed, inputs, 3, torch.float32), start_of(layer.weight.detach(), scales["up"])
    samples = [Sample(lambda x=x: net["up"](x), layer(x), {}) for x in given]  # type: ignore[misc]
    found, nearest, error = autoround(net, {"up": layer}, {"up": start}, samples, Options(12, 4, seed))
    assert net["up"] is layer
    grid, code_OI = found["up"].grid, found["up"].codes_OI.int()
    if grid.offset is not None:
        code_OI = code_OI + LOW
    zero_OI = 0 if grid.zero_point is None else expand(grid.zero_point, GROUP, inputs).int()
    assert (code_OI + zero_OI >= start.low).all()
    assert (code_OI + zero_OI <= start.high).all()
    assert grid.zero_point is None or ((grid.zero_point >= LOW) & (grid.zero_point <= HIGH)).all()
    assert (grid.scale > 0).all()
    assert grid.offset is not None or (code_OI[layer.weight == 0] == 0).all()
    learned = with_grid(scales["up"], grid)

    def error_of(weight_OI: Tensor) -> float:
        return sum(float(((x.double() @ (weight_OI - layer.weight).double().T) ** 2).sum()) for x in given)

    assert error <= nearest
    assert error_of(learned.on_grid(found["up"].weight(start))) <= error_of(scales["up"].on_grid(layer.weight)) * (1 + 1e-4) + 1e-12


def test_the_first_iterate_is_rounding_to_nearest() -> None:
    for scheme in ("w4a16", "zero points", "w8a16"):
        weight_OI = Net(4).up.weight.detach().float()
        scales = scales_of(scheme, weight_OI)
        start = start_of(weight_OI, scales)
        assert torch.equal(Iterate(start).learned().weight(start), scales.on_grid(weight_OI))
        assert torch.equal(Iterate(start).weight(), scales.on_grid(weight_OI))
        assert all(torch.equal(ours, given) for ours, given in zip(Iterate(start).grid(), start.grid, strict=True) if ours is not None)


def test_the_same_seed_gives_the_same_codes_and_another_one_other_batches() -> None:
    net, given = Net(5), batches(5)
    scales = {name: scales_of("zero points", layer.weight.detach(), name) for name, layer in layers_of(net).items()}
    found = [run(net, scales, given, Options(20, 2, seed))[0] for seed in (0, 0, 1)]
    torch.rand(3)
    for name in scales:
        assert torch.equal(found[0][name].codes_OI, found[1][name].codes_OI)
        assert torch.equal(found[0][name].grid.scale, found[1][name].grid.scale)
    assert any(not torch.equal(found[0][name].grid.scale, found[2][name].grid.scale) for name in scales)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_all_samples_are_drawn_before_one_comes_again(count: int, rows: int, batch_size: int, seed: int) -> None:
    samples = [Sample(partial(torch.zeros, 1), torch.zeros(rows, 1), {"index": torch.tensor(index)}) for index in range(count)]
    steps = list(islice(draw(samples, Options(1, batch_size, seed)), 12))
    for step in steps:
        assert len(step) == min(count, -(-batch_size // rows))
    order = [int(sample.features["index"]) for step in steps for sample in step]
    for start in range(0, len(order) - count + 1, count):
        assert sorted(order[start : start + count]) == list(range(count))


def test_padding_does_not_count() -> None:
    target, mask = torch.zeros(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    output = torch.ones(2, 3, 4) + 9 * (mask == 0)[:, :, None]
    sample = Sample(lambda: output, target, {"attention_mask": mask})
    assert float(sample.error()) == 3 * 4
    assert float(Sample(lambda: output, output, {"attention_mask": mask}).power()) == 3 * 4


def test_a_layer_that_never_runs_rounds_to_nearest() -> None:
    net = Net(6)
    net.idle = nn.Linear(3, 2).double().requires_grad_(False)
    scales = {name: scales_of("w4a16", layer.weight.detach(), name) for name, layer in layers_of(net).items()}
    found, _, _ = run(net, scales, batches(6), Options(10, 4, 0))
    start = start_of(net.idle.weight.detach(), scales["idle"])
    assert torch.equal(found["idle"].codes_OI, Iterate(start).learned().codes_OI)


def test_nothing_to_learn_ends_at_once() -> None:
    """Weights on their grid have no error."""
    net, given = Net(7), batches(7)
    scales = {}
    for name, layer in layers_of(net).items():
        scales[name] = scales_of("w4a16", layer.weight.detach(), name)
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    found, nearest, error = run(net, scales, given, Options(10**5, 4, 0))
    assert (nearest, error) == (0, 0)
    for name, layer in layers_of(net).items():
        assert torch.equal(found[name].weight(start_of(layer.weight.detach(), scales[name])), layer.weight)


def test_layers_come_back_after_a_failure() -> None:
    net = Net(8)
    layers = layers_of(net)
    starts = {name: start_of(layer.weight.detach(), scales_of("w4a16", layer.weight.detach(), name)) for name, layer in layers.items()}

    def broken() -> Tensor:
        assert isinstance(net.up, GivenLinear)
        raise RuntimeError("no power")

    with pytest.raises(RuntimeError, match="no power"):
        autoround(net, layers, starts, [Sample(broken, torch.zeros(1, 1), {})], Options(3, 1, 0))
    assert layers_of(net) == layers
