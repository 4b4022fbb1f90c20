"""Calibration: computes one scale per activation tensor, in memory that does not depend on the number of rows.

Each observed tensor has a histogram of |x| with a fixed number of equal bins over [0, range), where range is a power of two. A larger value
doubles the range until it fits, merging neighbouring bins in pairs. Bin edges stay bin edges, so the same values give the same histogram in
any order and any batching. A calibration method derives the clipping threshold t from the histogram; the scale is s = t / 127.

    minmax          t = max |x|
    moving_average  t = a of the last batch;   a <- 0.9 a + 0.1 max |x| over the batch, a of the first batch being its max |x|
    percentile      t = smallest bin edge with at least p percent of all |x| at or below it
    mse             t = argmin  sum_k n_k * mean of (x - Q_s(x))^2 over bin k,   Q_s(x) = min(rint(x / s), 127) * s
    entropy         t = argmin  KL(P_t || Q_t),   P_t: |x| with everything beyond t moved into the last bin below t,
                    Q_t: the |x| below t, averaged over the non-empty bins of each of 128 equal levels

mse minimizes the total quantization noise, rounding plus clipping (Banner et al. 2019, https://arxiv.org/abs/1810.05723, here by search
instead of a fitted distribution). The n_k values of a bin are taken as spread evenly over it, so bins may be wider than s. With u = x / s
the integral has a closed form:

    G(u) = integral from 0 to u of (v - min(rint(v), 127))^2 dv = k / 12 + (u - k)^3 / 3,   k = min(rint(u), 127)

entropy is the method of TensorRT (Migacz, "8-bit inference with TensorRT", GTC 2017) on 2048 bins. The count of the first bin is replaced
by the spread of the second, because many zeros carry no information about the range. With c_k values in bin k, S_l values in the n_l
non-empty bins of level l, r values beyond t and m the last bin below t, the divergence has a closed form over prefix sums (T all values, A
= T - r):

    KL = [sum_(k<m) c_k log c_k + (c_m + r) log(c_m + r) - sum_l S_l log(S_l / n_l) - r log(S_m / n_m)] / T - log T + log A

and is infinite if r > 0 and c_m = 0. Ties go to the largest threshold.

The moving average depends on the order of the batches (Krishnamoorthi 2018, https://arxiv.org/abs/1806.08342, section 3.1.2, which averages
over training steps); a momentum of 0.9 suits the 16 batches of 512 rows. The other methods do not depend on the order.

Limitation: the sign is ignored, as codes are symmetric; using the extra code -128 gains nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.inputs.padding import real_rows
from foundation.schemes.int8 import ACTIVATION_HIGH
from foundation.schemes.int8_convolution import channel_axis
from foundation.schemes.scales import SMALLEST_SCALE, Layer
from quantize.choices import Method

BINS = 8192
SMALLEST_RANGE = SMALLEST_SCALE * 128
MSE_CANDIDATES = 1000  # thresholds in a geometric sequence, 0.6 % apart
MSE_SMALLEST = 1 / 256  # smallest candidate, relative to the largest |x|
MOMENTUM = 0.9  # weight of the previous value in the moving average
ENTROPY_BINS = 2048
ENTROPY_LEVELS = 128


class InputFigures(TypedDict, total=False):
    """The quantization figures of a layer's inputs; empty where it leaves them in float, or each token finds its scale."""

    input_scale: float
    clipped: float
    """Share of the inputs on calibration rows."""
    input_sqnr_db: float | None
    selection_max_abs: float | None
    """Largest input on selection rows; None where none reaches the layer."""
    selection_clipped: float | None


class LayerFigures(InputFigures):
    """The quantization figures of a layer."""

    name: str
    max_abs: float | None
    """Largest input on calibration rows."""
    weight_sqnr_db: float | None


@dataclass
class Histogram:
    """Counts of |x| in equal bins over [0, range); the range doubles if a value does not fit."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    """int64 [BINS]."""
    range: float = 0.0
    """Upper edge of the last bin, a power of two; 0 before the first value."""
    largest: float = 0.0
    """The exact largest |x|."""
    average: float = 0.0
    """Moving average of the largest |x| of each added tensor."""

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    @property
    def width(self) -> float:
        """Width of a bin."""
        return self.range / BINS

    def add(self, x: Tensor) -> None:
        """Counts the values of a float tensor of any shape, on any device.

        Raises:
            ValueError: A value is NaN or infinite.
        """
        if not x.numel():
            return
        magnitude = x.detach().abs().reshape(-1).float()
        largest = float(magnitude.max())
        if not math.isfinite(largest):
            raise ValueError("NaN or infinite value")
        self.average = MOMENTUM * self.average + (1 - MOMENTUM) * largest if self.range else largest
        self.largest = max(self.largest, largest)
        self._widen(largest)
        # Exact, as the factor is a power of two. bincount counts in int64; histc counts in float32 and stops at 2^24.
        self.counts += torch.bincount((magnitude * (BINS / self.range)).int(), minlength=BINS).cpu()

    def _widen(self, largest: float) -> None:
        if self.range == 0.0:
            self.range = SMALLEST_RANGE
        while self.range <= largest:
            merged = self.counts.view(-1, 2).sum(dim=1)
            self.counts = torch.cat([merged, torch.zeros_like(merged)])
            self.range *= 2

    def edges(self) -> Tensor:
        """Returns the bin edges from 0 to the range, float64 [BINS + 1]."""
        return torch.arange(BINS + 1, dtype=torch.float64) * self.width


def minmax_threshold(histogram: Histogram) -> float:
    """Returns the largest |x|, so that nothing is clipped."""
    return histogram.largest


def moving_average_threshold(histogram: Histogram) -> float:
    """Returns the moving average of the largest |x| per batch; a single outlier batch has a weight of 0.1."""
    return histogram.average


def percentile_threshold(histogram: Histogram, percentile: float) -> float:
    """Returns the smallest bin edge with at least `percentile` (0 to 100) percent of the values at or below it, at most the largest |x|."""
    # In float64, 99.99 / 100 * 10000 is slightly above 9999; without the tolerance one more value would be required.
    needed = max(1, math.ceil(percentile / 100 * histogram.total - 1e-6))
    position = int(torch.searchsorted(histogram.counts.cumsum(0), needed))
    return min((position + 1) * histogram.width, histogram.largest)


def mse_threshold(histogram: Histogram) -> float:
    """Returns the threshold with the least noise among `MSE_CANDIDATES` in a geometric sequence up to the largest |x|."""
    if histogram.largest == 0:
        return 0.0
    candidates = [histogram.largest * math.pow(MSE_SMALLEST, 1 - i / (MSE_CANDIDATES - 1)) for i in range(MSE_CANDIDATES)]
    errors = [noise(histogram, limit / ACTIVATION_HIGH) for limit in candidates]
    return candidates[errors.index(min(errors))]


def entropy_threshold(histogram: Histogram) -> float:
    """Returns the threshold with the least divergence between the values and their 128 levels: an edge of the `ENTROPY_BINS` bins."""
    width = histogram.range / ENTROPY_BINS
    used = min(ENTROPY_BINS, int(histogram.largest / width) + 1) if width else 0
    if used < ENTROPY_LEVELS:  # values near the smallest range: fewer bins than levels, so clipping gains nothing
        return histogram.largest
    counts_B = histogram.counts.view(ENTROPY_BINS, -1).sum(dim=1)[:used].double()
    counts_B[0] = counts_B[1]
    divergence_C = divergences(counts_B)
    least = (divergence_C <= divergence_C.min() + 1e-12).nonzero()  # equal up to rounding
    return min((ENTROPY_LEVELS + int(least[-1])) * width, histogram.largest)


def divergences(counts_B: Tensor) -> Tensor:
    """Returns the divergence for each threshold: the upper edges of bins 127, 128, ... B - 1, so the first 128, 129, ... B bins.

    Args:
        counts_B: Number of values per bin, float64 [B]; B >= 128.

    Returns:
        float64 [B - 127].
    """
    bins_C = torch.arange(ENTROPY_LEVELS, len(counts_B) + 1)
    first_CL = -(-torch.arange(ENTROPY_LEVELS + 1) * bins_C[:, None] // ENTROPY_LEVELS)  # first bin of each level and the end, rounded up
    sum_CL = _prefix(counts_B)[first_CL].diff(dim=1)
    level_CL = sum_CL / _prefix(counts_B > 0)[first_CL].diff(dim=1).clamp(min=1)
    inside_C, last_C = sum_CL.sum(dim=1), counts_B[bins_C - 1]
    beyond_C = counts_B.sum() - inside_C
    own_C = _prefix(torch.xlogy(counts_B, counts_B))[bins_C - 1] + torch.xlogy(last_C + beyond_C, last_C + beyond_C)
    coarse_C = torch.xlogy(sum_CL, level_CL).sum(dim=1) + torch.xlogy(beyond_C, level_CL[:, -1])
    total = inside_C + beyond_C
    divergence_C = (own_C - coarse_C) / total - total.log() + inside_C.log()
    return torch.where((beyond_C > 0) & (last_C == 0), torch.inf, divergence_C)


def _prefix(values_B: Tensor) -> Tensor:
    """Returns the sums of the first 0, 1, ... B values, float64 [B + 1]."""
    return nn.functional.pad(values_B.double().cumsum(0), (1, 0))


def noise(histogram: Histogram, scale: float) -> float:
    """Returns the sum of squared quantization errors of a histogram's values for `scale`, with values spread evenly over each bin."""
    u = histogram.edges() / scale
    k = torch.round(u).clamp(max=ACTIVATION_HIGH)
    integral = (k / 12 + (u - k) ** 3 / 3).diff() * scale**3
    return float(integral @ histogram.counts.double()) / histogram.width


def signal(histogram: Histogram) -> float:
    """Returns the sum of squares of a histogram's values, with values spread evenly over each bin."""
    return float((histogram.edges() ** 3 / 3).diff() @ histogram.counts.double()) / histogram.width


def clipped_share(histogram: Histogram, scale: float, highest: int = ACTIVATION_HIGH) -> float:
    """Returns the share of values clipped at the code `highest` of `scale`, accurate to one bin."""
    first = math.ceil((highest + 0.5) * scale / histogram.width) if histogram.total else BINS
    return int(histogram.counts[min(first, BINS) :].sum()) / max(1, histogram.total)


def threshold(histogram: Histogram, method: Method, percentile: float) -> float:
    """Returns the clipping threshold of a histogram by the named method; `percentile` is used only by the method of that name."""
    match method:
        case "minmax":
            return minmax_threshold(histogram)
        case "moving_average":
            return moving_average_threshold(histogram)
        case "percentile":
            return percentile_threshold(histogram, percentile)
        case "mse":
            return mse_threshold(histogram)
        case "entropy":
            return entropy_threshold(histogram)


def input_scale(limit: float, highest: int = ACTIVATION_HIGH) -> Tensor:
    """Returns the scale that maps `limit` to the code `highest`, float32 []; 1 if the tensor was always zero."""
    return torch.tensor(1.0 if limit == 0 else max(limit / highest, SMALLEST_SCALE), dtype=torch.float32)


class Statistic(Protocol):
    """A running statistic over a stream of tensors, in memory that does not depend on their number."""

    @property
    def total(self) -> int:
        """Number of values or rows so far."""

    def add(self, x: Tensor) -> None:
        """Adds a tensor, float [N, I]; raises ValueError if it holds NaN or infinity."""


S = TypeVar("S", bound=Statistic)


@dataclass(frozen=True)
class Observed(Generic[S]):
    """Statistics of the inputs of the observed layers."""

    statistics: Mapping[str, S]
    """Keyed by group; a group is named after the first layer that reads the tensor."""
    group: Mapping[str, str]
    """Group of each layer that ran, in execution order; layers that read the same tensor share a group, and so a scale."""

    def of(self, layer: str) -> S:
        """Returns the statistic of a layer's input."""
        return self.statistics[self.group[layer]]


def collect(
    model: nn.Module,
    layers: Mapping[str, Layer],
    batches: Iterable[Mapping[str, Tensor]],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
    make: Callable[[], S],
    smooth: Mapping[str, Tensor] | None = None,
) -> Observed[S]:
    """Observes the inputs of layers while the model runs on batches.

    Positions that `attention_mask` marks as padding are excluded: the engine quantizes them too, but no prediction depends on them.

    Args:
        model: The float model.
        layers: The layers to observe, by name.
        batches: Features of each batch; `attention_mask`, if present, is [n, L].
        forward: Runs the model on the features of a batch.
        make: Creates the statistic of a group, such as `Histogram`.
        smooth: Smoothing factors by layer, float32 [I], by which inputs are divided first; equal for layers that read the same tensor.

    Returns:
        A statistic for each group; a layer that never ran has none.

    Raises:
        InputError: An input holds NaN or infinity; names the layer.
    """
    observer = _Observer(make, smooth or {})
    handles = [layer.register_forward_pre_hook(observer.hook(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for features in batches:
                observer.start_batch(features)
                forward(model, features)
    finally:
        for handle in handles:
            handle.remove()
    return Observed(observer.statistics, observer.group)


class _Observer(Generic[S]):
    def __init__(self, make: Callable[[], S], smooth: Mapping[str, Tensor]) -> None:
        self.statistics: dict[str, S] = {}
        self.group: dict[str, str] = {}
        self._make, self._smooth = make, smooth
        self._features: Mapping[str, Tensor] = {}
        self._read: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def start_batch(self, features: Mapping[str, Tensor]) -> None:
        self._features, self._read = features, {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Readers of one tensor (query, key and value) get the same object. A weak reference frees its memory as soon as the model does;
            # a later tensor could have the same id
            known, first = self._read.get(id(x), (None, name))
            seen = known is not None and known() is x
            group = self.group.setdefault(name, first if seen else name)
            if seen and group == first:
                return
            self._read[id(x)] = weakref.ref(x), group
            x_NI = real_rows(x, self._features, channel_axis(module))
            self._add(group, name, x_NI / self._smooth[name] if name in self._smooth else x_NI)

        return observe

    def _add(self, group: str, name: str, x_NI: Tensor) -> None:
        if group not in self.statistics:
            self.statistics[group] = self._make()
        try:
            self.statistics[group].add(x_NI)
        except ValueError as error:
            raise InputError(name, f"{error} in the input of this layer on the calibration rows", remedy="check the model") from error
