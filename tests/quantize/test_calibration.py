"""Calibrators against naive references that keep all the data, and what hooks count."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes.scales import SMALLEST_SCALE
from quantize.calibration import (
    BINS,
    ENTROPY_BINS,
    ENTROPY_LEVELS,
    Histogram,
    clipped_share,
    collect,
    divergences,
    entropy_threshold,
    input_scale,
    minmax_threshold,
    moving_average_threshold,
    mse_threshold,
    noise,
    percentile_threshold,
    signal,
    threshold,
)
from quantize.choices import METHODS, Method

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
@settings(max_examples=20, deadline=None)
def test_minmax_is_the_largest_magnitude_exactly(x: np.ndarray) -> None:
    assert minmax_threshold(histogram(x)) == float(np.abs(x).max())


@given(ARRAYS, st.floats(51, 100))
@settings(max_examples=30, deadline=None)
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


@pytest.mark.whole
def test_mse_clips_what_is_rare_and_keeps_what_is_common() -> None:
    assert mse_threshold(histogram(sample("uniform"))) == pytest.approx(3, rel=0.02)
    assert mse_threshold(histogram(sample("normal"))) < float(np.abs(sample("normal")).max())
    rare = np.concatenate([np.random.default_rng(0).standard_normal(1_000_000), [60]])
    assert mse_threshold(histogram(rare)) < 20


def naive_divergence(counts: np.ndarray, bins: int) -> float:
    """Spreads the first bins over 128 levels and back, and compares with what was there, the rest moved into the last bin."""
    level = np.array([k * ENTROPY_LEVELS // bins for k in range(bins)])
    total, used = np.zeros(ENTROPY_LEVELS), np.zeros(ENTROPY_LEVELS)
    for k in range(bins):
        total[level[k]] += counts[k]
        used[level[k]] += counts[k] > 0
    coarse = np.array([total[level[k]] / used[level[k]] if counts[k] > 0 else 0 for k in range(bins)])
    fine = counts[:bins].copy()
    fine[-1] += counts[bins:].sum()
    return float(scipy.stats.entropy(fine, coarse)) if coarse.sum() else math.inf


@pytest.mark.whole
@given(st.integers(ENTROPY_LEVELS, 260), st.integers(0, 2**31), st.floats(0, 1))
@settings(max_examples=12)
def test_divergences_are_those_of_the_written_out_method(bins: int, seed: int, full: float) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(1, 1000, bins) * (random.random(bins) < full) * 1.0
    counts[-1] = 1
    found = divergences(torch.from_numpy(counts)).numpy()
    expected = np.array([naive_divergence(counts, candidate) for candidate in range(ENTROPY_LEVELS, bins + 1)])
    assert np.array_equal(np.isfinite(expected), np.isfinite(found))
    np.testing.assert_allclose(found[np.isfinite(expected)], expected[np.isfinite(expected)], atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_takes_the_threshold_of_least_divergence(shape: str) -> None:
    found = histogram(sample(shape))
    counts, width = found.counts.numpy().reshape(ENTROPY_BINS, -1).sum(1).astype(float), found.range / ENTROPY_BINS
    counts = counts[: int(found.largest / width) + 1]
    counts[0] = counts[1]
    chosen = round(min(entropy_threshold(found), len(counts) * width) / width) if entropy_threshold(found) < found.largest else len(counts)
    others = np.random.default_rng(0).integers(ENTROPY_LEVELS, len(counts) + 1, 40)
    assert naive_divergence(counts, chosen) <= min(naive_divergence(counts, other) for other in others) + 1e-9


def test_of_equal_divergences_the_widest_is_taken() -> None:
    apart = np.repeat([130.5, 2047.5], [1000, 5]) / 2048  # both bins alone in their levels, or the far one moved into the other: 0
    assert naive_divergence(np.bincount([130] * 1000 + [2047] * 5).astype(float), 131) == pytest.approx(0, abs=1e-12)
    assert entropy_threshold(histogram(apart)) == histogram(apart).largest


def test_zeros_do_not_move_the_entropy_threshold() -> None:
    x = sample("gelu")[sample("gelu") > 0.01]
    assert entropy_threshold(histogram(x)) == entropy_threshold(histogram(x, np.zeros(10**6)))


@pytest.mark.whole
@given(st.lists(ARRAYS, min_size=1, max_size=8))
@settings(max_examples=20)
def test_the_moving_average_is_that_of_the_largest_of_each_batch(arrays: list[np.ndarray]) -> None:
    average = float(np.abs(arrays[0]).max())
    for array in arrays[1:]:
        average = 0.9 * average + 0.1 * float(np.abs(array).max())
    assert moving_average_threshold(histogram(*arrays)) == pytest.approx(average, rel=1e-9)
    assert moving_average_threshold(histogram(*arrays)) <= minmax_threshold(histogram(*arrays)) * (1 + 1e-9)


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


@pytest.mark.whole
@given(st.lists(ARRAYS, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_and_batches_change_nothing(arrays: list[np.ndarray], random) -> None:
    shuffled = random.sample(arrays, len(arrays))
    first, second, whole = histogram(*arrays), histogram(*shuffled), histogram(np.concatenate(arrays))
    for other in (second, whole):
        assert (first.range, first.largest) == (other.range, other.largest)
        assert torch.equal(first.counts, other.counts)


@given(ARRAYS)
@settings(max_examples=20, deadline=None)
def test_every_value_is_counted_in_its_bin(x: np.ndarray) -> None:
    found = histogram(x)
    expected = np.bincount((np.abs(x).astype(np.float64) / found.width).astype(int), minlength=BINS)
    assert np.array_equal(found.counts.numpy(), expected)
    assert found.total == len(x)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_batches_give_the_same_threshold(method: Method, shape: str) -> None:
    batches = np.array_split(sample(shape), 7)
    first, second = (threshold(histogram(*batches), method, 99.9) for _ in range(2))
    assert 0 < first == second <= float(np.abs(sample(shape)).max())


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
@pytest.mark.parametrize("method", METHODS)
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
    observed = collect(block, layers_of(block), [{"x": x} for x in xs], send, Histogram)
    assert observed.group == {"query": "query", "key": "query", "value": "query", "out": "out"}
    assert observed.of("key") is observed.of("query")
    assert observed.of("query").total == 9 * 4


def test_equal_tensors_that_are_not_the_same_have_histograms_of_their_own() -> None:
    block = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    observed = collect(block, layers_of(block), [{"x": torch.ones(1, 4)}], lambda m, f: (m["a"](f["x"].clone()), m["b"](f["x"])), Histogram)
    assert observed.group == {"a": "a", "b": "b"}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 3))
def test_layers_share_a_histogram_exactly_if_they_read_the_same_tensor(reads: list[int], count: int) -> None:
    """In any order, against the numbers of the tensors; one is freed and made anew between any two reads."""
    layers = {f"l{number}": nn.Linear(2, 2) for number in range(len(reads))}
    batches = [{"x": torch.full((1, 2), float(number + 1))} for number in range(count)]

    def read(model: nn.Module, features: Mapping[str, Tensor]) -> None:
        tensors = [features["x"] * (number + 1) for number in range(4)]
        for layer, number in zip(layers.values(), reads, strict=True):
            layer(tensors[number])
            torch.relu(tensors[number] + 1)

    observed = collect(nn.ModuleDict(layers), layers, batches, read, Histogram)
    first = {number: f"l{reads.index(number)}" for number in reads}
    assert observed.group == {name: first[number] for name, number in zip(layers, reads, strict=True)}
    assert all(observed.of(f"l{place}").total == 2 * count for place in range(len(reads)))


def test_a_later_tensor_at_the_address_of_a_freed_one_is_another() -> None:
    layers, ids = {f"l{number}": nn.Linear(2, 2) for number in range(20)}, []

    def read(model: nn.Module, features: Mapping[str, Tensor]) -> None:
        for layer in layers.values():
            x = features["x"] * 1
            ids.append(id(x))
            layer(x)
            del x

    observed = collect(nn.ModuleDict(layers), layers, [{"x": torch.ones(1, 2)}], read, Histogram)
    assert len(set(ids)) < len(ids)  # else the test shows nothing
    assert observed.group == {name: name for name in layers}


def test_inputs_are_divided_by_what_smooths_them() -> None:
    block, x, factor = Block(), torch.tensor([[8.0, -6, 4, 1]]), torch.tensor([8.0, 2, 4, 0.5])
    smooth = dict.fromkeys(("query", "key", "value"), factor)
    observed = collect(block, layers_of(block), [{"x": x}], send, Histogram, smooth)
    assert observed.of("key").largest == 3
    assert observed.of("out").largest == collect(block, layers_of(block), [{"x": x}], send, Histogram).of("out").largest


def test_a_layer_that_runs_twice_sees_both_inputs() -> None:
    block = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def twice(model: nn.Module, features) -> object:
        for x in (features["x"], 10 * features["x"]):
            model["a"](x)  # type: ignore[index]
            model["b"](x)  # type: ignore[index]
        return None

    observed = collect(block, layers_of(block), [{"x": torch.ones(1, 4)}], twice, Histogram)
    assert observed.of("b").largest == 10
    assert observed.of("b").total == 8


def test_padding_is_not_counted() -> None:
    block, x = Block(), torch.randn(2, 3, 4)
    x[0, 2], x[1, 1:] = 1000, -1000
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    observed = collect(block, layers_of(block), [{"x": x, "attention_mask": mask}], send, Histogram)
    assert observed.of("query").total == 3 * 4
    assert observed.of("query").largest < 10
    assert observed.of("out").total == 3 * 4


def test_inputs_without_positions_are_counted_whole() -> None:
    block, mask = Block(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    observed = collect(block, layers_of(block), [{"x": torch.randn(2, 4), "attention_mask": mask}], send, Histogram)
    assert observed.of("query").total == 8


def test_observing_leaves_no_hooks_and_changes_no_output() -> None:
    block, x = Block(), torch.randn(2, 3, 4)
    before = block(x)
    collect(block, layers_of(block), [{"x": x}] * 3, send, Histogram)
    assert torch.equal(block(x), before)
    assert not any(layer._forward_pre_hooks for layer in layers_of(block).values())


def test_an_input_of_nan_names_its_layer_and_leaves_no_hooks() -> None:
    block = Block()
    block.query.bias.data[0] = float("nan")
    with pytest.raises(InputError, match=r"^out: .*NaN"):
        collect(block, layers_of(block), [{"x": torch.randn(2, 3, 4)}], send, Histogram)
    assert not any(layer._forward_pre_hooks for layer in layers_of(block).values())
