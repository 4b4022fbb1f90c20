"""Calibration: from streams of activations to one scale each, in memory that does not depend on the number of rows.

Every observed tensor has a histogram of |x|: a fixed number of equal bins over [0, range), where range is a power of two. A larger value
doubles the range, which merges neighbouring bins in pairs, until it fits. Edges of bins stay edges, so the same values give the same
histogram in whatever order and batches they come. From the histogram comes the clipping threshold t; the scale is s = t / 127.

    min-max      t = max |x|
    percentile   t = smallest edge with at least p percent of all |x| at or below it
    mse          t = argmin  sum_k n_k * mean of (x - Q_s(x))^2 over bin k,   Q_s(x) = min(rint(x / s), 127) * s

The last is the noise that quantization adds, rounding and clipping together (Banner et al. 2019, https://arxiv.org/abs/1810.05723, here
by search instead of a fitted distribution). The n_k values of a bin count as spread evenly over it, so that bins may be wider than s.
With u = x / s the integral has a closed form:

    G(u) = integral from 0 to u of (v - min(rint(v), 127))^2 dv = k / 12 + (u - k)^3 / 3,   k = min(rint(u), 127)

Left out: the sign (codes are symmetric; the code -128 as one of its own gains nothing), and entropy calibration, which is made for
distributions with a long tail that does not matter; here single large values do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from compress.errors import InputError
from compress.int8 import ACTIVATION_HIGH, SMALLEST_SCALE

BINS = 8192
SMALLEST_RANGE = SMALLEST_SCALE * 128
MSE_CANDIDATES = 1000  # thresholds in equal ratios of 0.6 %
MSE_SMALLEST = 1 / 256  # of the largest |x|
Method = Literal["minmax", "percentile", "mse"]


@dataclass
class Histogram:
    """Counts of |x| in equal bins over [0, range); the range doubles when a value does not fit."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    """int64 [BINS]."""
    range: float = 0.0
    """Upper edge of the last bin, a power of two; 0 before the first value."""
    largest: float = 0.0
    """Largest |x| seen, exactly."""

    @property
    def total(self) -> int:
        """Number of values seen."""
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
            raise ValueError("a value is NaN or infinite")
        self.largest = max(self.largest, largest)
        self._widen(largest)
        # Exact: a product by a power of two. bincount counts in int64, where histc would stop at 2^24.
        self.counts += torch.bincount((magnitude * (BINS / self.range)).int(), minlength=BINS).cpu()

    def _widen(self, largest: float) -> None:
        if self.range == 0.0:
            self.range = SMALLEST_RANGE
        while self.range <= largest:
            merged = self.counts.view(-1, 2).sum(dim=1)
            self.counts = torch.cat([merged, torch.zeros_like(merged)])
            self.range *= 2

    def edges(self) -> Tensor:
        """Returns the edges of the bins, from 0 to the range, float64 [BINS + 1]."""
        return torch.arange(BINS + 1, dtype=torch.float64) * self.width


def minmax_threshold(histogram: Histogram) -> float:
    """Returns the largest |x|: nothing is clipped."""
    return histogram.largest


def percentile_threshold(histogram: Histogram, percentile: float) -> float:
    """Returns the smallest edge with at least `percentile` (0 to 100) percent of the values at or below it; the largest |x| at most."""
    # 99.99 / 100 * 10000 is a little above 9999 in float64, which must not ask for the next value.
    needed = max(1, math.ceil(percentile / 100 * histogram.total - 1e-6))
    position = int(torch.searchsorted(histogram.counts.cumsum(0), needed))
    return min((position + 1) * histogram.width, histogram.largest)


def mse_threshold(histogram: Histogram) -> float:
    """Returns the threshold of least noise among `MSE_CANDIDATES` in equal ratios, the largest |x| being the last."""
    if histogram.largest == 0:
        return 0.0
    candidates = [histogram.largest * math.pow(MSE_SMALLEST, 1 - i / (MSE_CANDIDATES - 1)) for i in range(MSE_CANDIDATES)]
    errors = [noise(histogram, limit / ACTIVATION_HIGH) for limit in candidates]
    return candidates[errors.index(min(errors))]


def noise(histogram: Histogram, scale: float) -> float:
    """Returns the sum of squared errors of quantizing the values of a histogram by `scale`, each bin spread evenly."""
    u = histogram.edges() / scale
    k = torch.round(u).clamp(max=ACTIVATION_HIGH)
    integral = (k / 12 + (u - k) ** 3 / 3).diff() * scale**3
    return float(integral @ histogram.counts.double()) / histogram.width


def signal(histogram: Histogram) -> float:
    """Returns the sum of squares of the values of a histogram, each bin spread evenly."""
    return float((histogram.edges() ** 3 / 3).diff() @ histogram.counts.double()) / histogram.width


def clipped_share(histogram: Histogram, scale: float) -> float:
    """Returns the share of values beyond the largest code of `scale`, to within one bin."""
    first = math.ceil((ACTIVATION_HIGH + 0.5) * scale / histogram.width) if histogram.total else BINS
    return int(histogram.counts[min(first, BINS) :].sum()) / max(1, histogram.total)


def threshold(histogram: Histogram, method: Method, percentile: float) -> float:
    """Returns the clipping threshold of a histogram by the named method; `percentile` is for that method alone."""
    match method:
        case "minmax":
            return minmax_threshold(histogram)
        case "percentile":
            return percentile_threshold(histogram, percentile)
        case "mse":
            return mse_threshold(histogram)


def input_scale(limit: float) -> Tensor:
    """Returns the scale that maps `limit` to the code 127, float32 []; 1 for a tensor that was always zero."""
    return torch.tensor(1.0 if limit == 0 else max(limit / ACTIVATION_HIGH, SMALLEST_SCALE), dtype=torch.float32)


@dataclass(frozen=True)
class Observed:
    """What calibration saw at the inputs of the observed layers."""

    histograms: Mapping[str, Histogram]
    """By group: the name of the first layer that reads the tensor."""
    group: Mapping[str, str]
    """Group of each layer that was reached; layers that read the same tensor share one, and so one scale."""

    def of(self, layer: str) -> Histogram:
        """Returns the histogram of a layer's input."""
        return self.histograms[self.group[layer]]


def collect(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[Mapping[str, Tensor]],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
    progress: Callable[[int], None] = lambda n: None,
) -> Observed:
    """Observes the inputs of linear layers while batches go through the model.

    Positions that `attention_mask` calls padding are left out: the engine quantizes them too, but no answer depends on them.

    Args:
        model: The float model.
        layers: The layers to observe, by name.
        batches: Features of each batch; `attention_mask`, where there is one, is [n, L].
        forward: Sends the features of a batch through the model.
        progress: Called after each batch with its number of rows.

    Returns:
        Histograms; a layer that no batch reached has none.

    Raises:
        InputError: An input holds NaN or infinity; names the layer.
    """
    observer = _Observer()
    handles = [layer.register_forward_pre_hook(observer.hook(name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            for features in batches:
                mask = features.get("attention_mask")
                observer.start_batch(None if mask is None else mask.bool())
                forward(model, features)
                progress(len(next(iter(features.values()))))
    finally:
        for handle in handles:
            handle.remove()
    return Observed(observer.histograms, observer.group)


class _Observer:
    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.group: dict[str, str] = {}
        self._mask: Tensor | None = None
        self._tensor: Tensor | None = None
        self._name = ""

    def start_batch(self, mask: Tensor | None) -> None:
        self._mask, self._tensor = mask, None

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def observe(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Query, key and value read the same tensor one after the other: the object itself tells.
            group = self.group.setdefault(name, self._name if x is self._tensor else name)
            if x is self._tensor and group == self._name:
                return
            self._tensor, self._name = x, group
            self._count(group, name, self._real(x))

        return observe

    def _real(self, x: Tensor) -> Tensor:
        if self._mask is not None and x.dim() == 3 and x.shape[:2] == self._mask.shape:
            return x[self._mask]
        return x.reshape(-1, x.shape[-1])

    def _count(self, group: str, name: str, x_NI: Tensor) -> None:
        try:
            self.histograms.setdefault(group, Histogram()).add(x_NI)
        except ValueError as error:
            raise InputError(f"{name}: the calibration rows give this layer an input of which {error}; check the model") from error
