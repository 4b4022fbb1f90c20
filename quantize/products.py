"""Int8 attention products and residual additions ("sites"): calibrates and chooses them.

Queries, keys, values and residuals are observed in histograms on the calibration rows in the float model, padding excluded. They use the
same calibration method as the linear layers. The scale of the attention probabilities is a constant
(`foundation.schemes.attention_products`).

The recipe switches sites on or off; with `auto`, `quantize.site_choice` chooses.

Not supported: additions to the output of a convolution; smoothing of queries and keys; sharing the scale of a residual with a layer that
reads the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.progress import Progress
from foundation.measure.closeness import floor_of
from foundation.models.inputs.padding import real_rows
from foundation.schemes.attention_products import PROBABILITY_SCALE, Int8Attention, Kind, ProductScales, attend, attention_modules
from foundation.schemes.scales import Layer, Scales
from foundation.schemes.sites import Sites, placed
from quantize.calibration import Histogram, clipped_share, input_scale, noise, signal
from quantize.choices import Switch
from quantize.sensitivity import SCAN_ROWS, Sensitivity
from quantize.site_choice import Choice, distances_with, passes, sensitivities, switch_on
from quantize.trial import Trial

Forward = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
Feed = Callable[[str], Iterator[dict[str, Tensor]]]
"""Starts a pass over the calibration rows with a progress bar of that label; no bar if it is empty."""
TRACED_ROWS = 4
SAME = 1e-3
"""Largest difference, relative to the largest logit, between two float implementations of the same attention."""


@dataclass(frozen=True)
class Ranges:
    """The histograms of all sites."""

    products: Mapping[str, tuple[Histogram, Histogram]]
    """Histograms of the left and right factor, by site."""
    residuals: Mapping[str, Histogram]
    """Keyed by site."""

    def of(self, site: str) -> tuple[Histogram, ...]:
        """Returns the histograms of a site's tensors."""
        return self.products[site] if site in self.products else (self.residuals[site],)


@dataclass(frozen=True)
class SiteSettings:
    """Recipe settings and calibration results of the sites."""

    attention: Switch
    """Whether attention products become int8."""
    residual: Switch
    """Whether residuals become int8; at least one of both switches is not False."""
    limit: Callable[[Histogram], float]
    """The calibration method: returns the clipping threshold of a histogram."""
    scan: bool
    """Whether to measure the sensitivity of every site."""
    stage: str
    """Id of the stage, for messages and progress bars."""


def add_sites(
    model: nn.Module,
    scales: Mapping[str, Scales],
    settings: SiteSettings,
    feed: Feed,
    forward: Forward,
    trial: Trial | None,
    progress: Progress,
) -> tuple[Sites, dict[str, object], list[Sensitivity]]:
    """Finds the sites of a model whose linear layers have scales already, and chooses which of them are int8.

    Args:
        model: The float model; not changed.
        scales: Scales of its int8 layers, by module path.
        settings: Which sites to look for, and how to calibrate them.
        feed: Starts a pass over the calibration rows.
        forward: Runs the model on a batch.
        trial: The float model's logits; needed for `auto` and for a scan.
        progress: Log and progress bars.

    Returns:
        The chosen sites, the figures of all sites, and rows for the sensitivity scan.

    Raises:
        InputError: The model has no such sites, its attention cannot be int8, or a tensor holds NaN or infinity.
    """
    attention, residual, name = settings.attention, settings.residual, settings.stage
    if attention:
        check_attention(model, {key: value[:TRACED_ROWS] for key, value in next(feed("")).items()}, forward, f"stages.{name}.attention")
    linear = [layer for layer in scales if isinstance(model.get_submodule(layer), nn.Linear)]
    ranges = observe(model, linear, feed(f"{name}: observing attention"), forward, attention=bool(attention), residual=bool(residual))
    if residual and not ranges.residuals:
        raise InputError(
            f"stages.{name}.residual", f"no addition follows an int8 linear layer of this {type(model).__name__}", remedy="give false"
        )
    sites = sites_of(ranges, settings.limit)
    always = [site for found, switch in ((sites.products, attention), (sites.residuals, residual)) if switch is True for site in found]
    choice, rows = None, list[Sensitivity]()
    if settings.scan or "auto" in (attention, residual):
        assert trial is not None
        few, floats = trial.fewer(SCAN_ROWS), {layer: cast(Layer, model.get_submodule(layer)) for layer in scales}
        with progress.bar(f"{name}: attention and residuals", passes(sites.names, always)) as advance:
            distances, floor = distances_with(few, floats, scales, sites, advance), floor_of(few.context.task, few.answers)
            choice = switch_on(sites.names, always, distances, floor, few.groups)
        rows = sensitivities(choice, distances_with(few, {}, {}, sites, lambda _: None)) if settings.scan else rows
    chosen = sites if choice is None else sites.only(choice.on)
    figures: dict[str, object] = {
        "int8_products": f"{len(chosen.products)} of {len(sites.products)}",
        "int8_residuals": f"{len(chosen.residuals)} of {len(sites.residuals)}",
        "sites": site_figures(sites, ranges, choice, chosen.names),
    }
    if choice is not None:
        costs = {"layers": choice.layers, "before": choice.before, "after": choice.after, "bound": choice.bound}
        low, high = choice.interval
        limits = [low, high] if len(few.rows) > 1 else None
        figures["sites_choice"] = {"measure": few.measure, "rows": len(few.rows), **costs, "added_interval": limits}
        told = f"{choice.after - choice.before:.2g} (95 % {low:.2g} to {high:.2g}), at most {choice.bound:.2g} allowed"
        progress.log(f"  attention and residuals add {few.measure} {told}, on {len(few.rows)} rows")
    progress.log(f"  also in int8: {figures['int8_products']} attention products, {figures['int8_residuals']} residuals")
    return chosen, figures, rows


def observe(
    model: nn.Module, layers: Sequence[str], batches: Iterable[Mapping[str, Tensor]], forward: Forward, *, attention: bool, residual: bool
) -> Ranges:
    """Observes the tensors that sites would quantize while the model runs on batches.

    Args:
        model: The float model.
        layers: The int8 layers; a residual is an addition to the output of one of them.
        batches: Features of each batch; `attention_mask`, if present, is [n, L].
        forward: Runs the model on the features of a batch.
        attention: Whether to observe products.
        residual: Whether to observe residuals.

    Returns:
        Histograms of the sites that ran.

    Raises:
        InputError: A tensor holds NaN or infinity; names the site.
    """
    batch: dict[str, Tensor] = {}
    products = {name: _AttentionObserver(name, batch) for name in attention_modules(model)} if attention else {}
    residuals = {name: _ResidualObserver(f"{name}/residual", batch) for name in layers} if residual else {}
    with torch.no_grad(), placed(model, products, residuals):
        for features in batches:
            batch.clear()
            batch.update(features)
            forward(model, features)
    pairs = {f"{name}/{kind}": pair for name, observer in products.items() for kind, pair in observer.histograms.items()}
    return Ranges(
        {site: pair for site, pair in pairs.items() if pair[0].total},
        {observer.name: observer.histogram for observer in residuals.values() if observer.histogram.total},
    )


class _AttentionObserver(nn.Module):
    """Float attention that adds the factors of its products to histograms."""

    def __init__(self, name: str, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name, self.batch = name, batch
        self.histograms: dict[Kind, tuple[Histogram, Histogram]] = {"qk": (Histogram(), Histogram()), "pv": (Histogram(), Histogram())}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Returns the output [B, S, H, D]."""
        return attend(query, key, value, mask, scaling, self._multiply)

    def _multiply(self, kind: Kind, a: Tensor, b: Tensor) -> Tensor:
        right = b if kind == "qk" else b.mT  # [B, H, S, D] either way
        for histogram, x in zip(self.histograms[kind], (a, right), strict=True):
            _add(f"{self.name}/{kind}", histogram, x.transpose(1, 2).flatten(2), self.batch)
        return a @ b.mT


class _ResidualObserver(nn.Module):
    """Adds residuals to a histogram and passes them through."""

    def __init__(self, name: str, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name, self.batch, self.histogram = name, batch, Histogram()

    def forward(self, residual: Tensor) -> Tensor:
        """Returns the residual."""
        _add(self.name, self.histogram, residual, self.batch)
        return residual


def _add(site: str, histogram: Histogram, x: Tensor, features: Mapping[str, Tensor]) -> None:
    try:
        histogram.add(real_rows(x, features))
    except ValueError as error:
        raise InputError(site, f"{error} in a tensor of this site on the calibration rows", remedy="check the model") from error


def check_attention(model: nn.Module, features: Mapping[str, Tensor], forward: Forward, key: str) -> None:
    """Checks that our attention implementation, in float, computes the same as the model's own.

    Args:
        model: The float model.
        features: A few rows.
        forward: Runs the model on them.
        key: Key path of the setting, for error messages.

    Raises:
        InputError: The model does not call attention through Transformers' registry, or its logits differ with our attention in float.
    """
    kind, modules = type(model).__name__, attention_modules(model)
    if not modules:
        raise InputError(
            key, f"{kind} does not call attention through Transformers' registry, so its products cannot be int8", remedy="give false"
        )
    with torch.no_grad():
        expected = real_rows(forward(model, features), features)
        with placed(model, {name: Int8Attention(name, None, None) for name in modules}, {}):
            found = real_rows(forward(model, features), features)
    if not torch.allclose(found, expected, atol=SAME * float(expected.abs().max()), rtol=0):
        raise InputError(
            key, f"the attention of {kind} is more than softmax(Q K^T * scaling + mask) V, the form that int8 supports", remedy="give false"
        )


def sites_of(ranges: Ranges, limit: Callable[[Histogram], float]) -> Sites:
    """Returns the scales of all observed sites.

    Args:
        ranges: The result of `observe`.
        limit: The calibration method: returns the clipping threshold of a histogram.
    """
    products = {
        site: ProductScales(
            torch.tensor(PROBABILITY_SCALE) if site.endswith("/pv") else input_scale(limit(left)), input_scale(limit(right))
        )
        for site, (left, right) in ranges.products.items()
    }
    return Sites(products, {site: input_scale(limit(histogram)) for site, histogram in ranges.residuals.items()})


def site_figures(sites: Sites, ranges: Ranges, choice: Choice | None, on: Collection[str]) -> list[dict[str, object]]:
    """Returns the figures of every site for the report: whether it is int8, the distance it adds, and its tensors."""
    scales: dict[str, tuple[Tensor, ...]] = {site: (found.left, found.right) for site, found in sites.products.items()}
    scales |= {site: (scale,) for site, scale in sites.residuals.items()}
    return [
        {
            "name": site,
            "int8": site in on,
            "added": None if choice is None else choice.added[site],
            "tensors": [_figures(histogram, float(scale)) for histogram, scale in zip(ranges.of(site), scales[site], strict=True)],
        }
        for site in sites.names
    ]


def _figures(histogram: Histogram, scale: float) -> dict[str, object]:
    power, error = signal(histogram), noise(histogram, scale)
    decibels = None if not histogram.largest or power <= 0 or error <= 0 else round(10 * math.log10(power / error), 2)
    return {"scale": scale, "max_abs": histogram.largest, "clipped": clipped_share(histogram, scale), "sqnr_db": decibels}
