"""Calibrators against naive references that keep all the data, and what hooks count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from compress.errors import InputError
from compress.int8 import SMALLEST_SCALE
from quantize.calibration import (
    BINS,
    Histogram,
    clipped_share,
    collect,
    input_scale,
    minmax_threshold,
    mse_threshold,
    noise,
    percentile_threshold,
    signal,
    threshold,
)

FLOATS = st.floats(min_value=-(2.0**120), max_value=2.0**120, width=32)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=FLOATS)
SHAPES = {
    "normal": lambda random: random.standard_normal(20_000),
    "long tail": lambda random: random.standard_t(2.5, 20_000),
    "outliers": lambda random: np.concatenate([random.standard_normal(20_000), 60 + random.standard_normal(20)]),
    "uniform": lambda random: random.uniform(-3, 3, 20_000),
    "gelu": lambda random: np.maximum(random.standard_normal(20_000), 0) ** 2,
}


def histogram(*arrays: np.ndarray) -> Histogram:
    found = Histogram()
    for array in arrays:
        found.add(torch.from_numpy(np.asarray(array, np.float32)))
    return found


def brute_noise(x: np.ndarray, limit: float) -> float:
    scale = limit / 127
    return float(np.sum((np.clip(np.rint(x / scale), -128, 127) * scale - x) ** 2))


def sample(shape: str, seed: int = 0) -> np.ndarray:
    values: np.ndarray = SHAPES[shape](np.random.default_rng(seed)).astype(np.float32)
    return values


@given(ARRAYS)
@settings(max_examples=40, deadline=None)
def test_minmax_is_the_largest_magnitude_exactly(x: np.ndarray) -> None:
    assert minmax_threshold(histogram(x)) == float(np.abs(x).max())


@given(ARRAYS, st.floats(51, 100))
@settings(max_examples=60, deadline=None)
def test_percentile_is_right_to_one_bin(x: np.ndarray, percentile: float) -> None:
    found = histogram(x)
    rank = max(1, math.ceil(percentile / 100 * len(x) - 1e-6))
    exact = float(np.sort(np.abs(x))[rank - 1])
    limit = percentile_threshold(found, percentile)
    assert exact <= limit <= exact + found.width


def test_percentile_counts_without_rounding_errors() -> None:
    x = np.arange(1, 10_001, dtype=np.float32)
    assert 9999 <= percentile_threshold(histogram(x), 99.99) < 10_000 + 2
    assert percentile_threshold(histogram(x), 100) == 10_000
    assert percentile_threshold(histogram(np.concatenate([np.zeros(99), [5]])), 99) <= 8 / BINS


@pytest.mark.parametrize("shape", SHAPES)
def test_mse_is_as_good_as_a_search_over_all_the_data(shape: str) -> None:
    x = sample(shape)
    largest = float(np.abs(x).max())
    best = min(brute_noise(x, limit) for limit in np.geomspace(largest / 200, largest, 300))
    assert brute_noise(x, mse_threshold(histogram(x))) <= 1.01 * best


def test_mse_clips_what_is_rare_and_keeps_what_is_common() -> None:
    assert mse_threshold(histogram(sample("uniform"))) == pytest.approx(3, rel=0.02)
    assert mse_threshold(histogram(sample("normal"))) < float(np.abs(sample("normal")).max())
    rare = np.concatenate([np.random.default_rng(0).standard_normal(1_000_000), [60]])
    assert mse_threshold(histogram(rare)) < 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_noise_and_signal_are_those_of_the_data(shape: str, share: float) -> None:
    x = sample(shape)
    limit, found = share * float(np.abs(x).max()), histogram(x)
    assert noise(found, limit / 127) == pytest.approx(brute_noise(x.astype(np.float64), limit), rel=0.03)
    assert signal(found) == pytest.approx(float(np.sum(x.astype(np.float64) ** 2)), rel=1e-3)


def test_the_clipped_share_is_right_to_one_bin() -> None:
    found = histogram(np.arange(1, 1001, dtype=np.float32))
    assert clipped_share(found, 500 / 127.5) == pytest.approx(0.5, abs=0.002)
    assert clipped_share(found, 1001 / 127) == 0
    assert clipped_share(Histogram(), 1.0) == 0


@given(st.lists(ARRAYS, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_order_and_batches_change_nothing(arrays: list[np.ndarray], random) -> None:
    shuffled = random.sample(arrays, len(arrays))
    first, second, whole = histogram(*arrays), histogram(*shuffled), histogram(np.concatenate(arrays))
    for other in (second, whole):
        assert (first.range, first.largest) == (other.range, other.largest)
        assert torch.equal(first.counts, other.counts)


@given(ARRAYS)
@settings(max_examples=40, deadline=None)
def test_every_value_is_counted_in_its_bin(x: np.ndarray) -> None:
    found = histogram(x)
    expected = np.bincount((np.abs(x).astype(np.float64) / found.width).astype(int), minlength=BINS)
    assert np.array_equal(found.counts.numpy(), expected)
    assert found.total == len(x)


def test_memory_does_not_grow_with_the_data_nor_with_its_range() -> None:
    found = Histogram()
    for exponent in range(-140, 120, 7):
        found.add(torch.rand(500) * 2.0**exponent)
        assert (found.counts.shape, found.counts.dtype) == ((BINS,), torch.int64)
    assert found.total == 500 * len(range(-140, 120, 7))


def test_counts_do_not_stop_at_the_precision_of_float32() -> None:
    found = Histogram()
    found.counts[0] = 2**24
    found.range = 1.0
    found.add(torch.full((3,), 1e-6))
    assert found.counts[0] == 2**24 + 3


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 3.4e38])
@pytest.mark.parametrize("method", ["minmax", "percentile", "mse"])
def test_every_method_gives_a_scale_for_extreme_values(method, value: float) -> None:
    scale = input_scale(threshold(histogram(np.full(10, value)), method, 99.9))
    assert scale.dtype == torch.float32
    assert scale.shape == ()
    assert SMALLEST_SCALE <= scale.item() < float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_without_a_bin_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        histogram([1.0, bad])


class Block(nn.Module):
    """Attention-like: three layers read one tensor, the fourth another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.query(x) + self.key(x) + self.value(x))
        return y


def layers_of(block: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}


def send(model: nn.Module, features) -> object:
    return model(features["x"])


def test_layers_that_read_the_same_tensor_share_a_histogram() -> None:
    block, xs = Block(), [torch.randn(2, 3, 4), torch.randn(1, 3, 4)]
    observed = collect(block, layers_of(block), [{"x": x} for x in xs], send)
    assert observed.group == {"query": "query", "key": "query", "value": "query", "out": "out"}
    assert observed.of("key") is observed.of("query")
    assert observed.of("query").total == 9 * 4


def test_equal_tensors_that_are_not_the_same_have_histograms_of_their_own() -> None:
    block = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    observed = collect(block, layers_of(block), [{"x": torch.ones(1, 4)}], lambda m, f: (m["a"](f["x"].clone()), m["b"](f["x"])))
    assert observed.group == {"a": "a", "b": "b"}


def test_a_layer_that_runs_twice_sees_both_inputs() -> None:
    block = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def twice(model: nn.Module, features) -> object:
        for x in (features["x"], 10 * features["x"]):
            model["a"](x)  # type: ignore[index]
            model["b"](x)  # type: ignore[index]
        return None

    observed = collect(block, layers_of(block), [{"x": torch.ones(1, 4)}], twice)
    assert observed.of("b").largest == 10
    assert observed.of("b").total == 8


def test_padding_is_not_counted() -> None:
    block, x = Block(), torch.randn(2, 3, 4)
    x[0, 2], x[1, 1:] = 1000, -1000
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    observed = collect(block, layers_of(block), [{"x": x, "attention_mask": mask}], send)
    assert observed.of("query").total == 3 * 4
    assert observed.of("query").largest < 10
    assert observed.of("out").total == 3 * 4


def test_inputs_without_positions_are_counted_whole() -> None:
    block, mask = Block(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    observed = collect(block, layers_of(block), [{"x": torch.randn(2, 4), "attention_mask": mask}], send)
    assert observed.of("query").total == 8


def test_observing_leaves_no_hooks_and_changes_no_output() -> None:
    block, x, steps = Block(), torch.randn(2, 3, 4), []
    before = block(x)
    collect(block, layers_of(block), [{"x": x}] * 3, send, steps.append)
    assert torch.equal(block(x), before)
    assert steps == [2, 2, 2]
    assert not any(layer._forward_pre_hooks for layer in layers_of(block).values())


def test_an_input_of_nan_names_its_layer_and_leaves_no_hooks() -> None:
    block = Block()
    block.query.bias.data[0] = float("nan")
    with pytest.raises(InputError, match=r"^out: .*NaN"):
        collect(block, layers_of(block), [{"x": torch.randn(2, 3, 4)}], send)
    assert not any(layer._forward_pre_hooks for layer in layers_of(block).values())
