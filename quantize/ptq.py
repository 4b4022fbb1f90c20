"""Post-training quantization: static W8A8, calibrated on real training rows.

Weights per output channel, activations per tensor, both symmetric (`compress.int8`). The activation threshold comes from `calibration`;
the weight scale of a channel is the one of least squared error among a few clipped ones:

    s_o = argmin over c in (0.8 ... 1.0) of  sum_i (W_oi - Q(W_oi; c * max_i |W_oi| / L))^2

Every linear layer inside the repeated blocks of the encoder becomes int8; embeddings, pooler and head stay float, as do LayerNorm,
softmax, GELU and the residual stream. Left out: bias correction (adding the mean output error of a layer to its bias), whose
effect on a fine-tuned MiniLM with weights of 7 bits was within the noise, and choosing the calibrator by itself.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.artifact import Artifact
from compress.errors import InputError, nearest
from compress.int8 import (
    SMALLEST_SCALE,
    LayerScales,
    levels,
    on_grid,
    save_quantization,
    weight_bits,
    weight_scale,
)
from compress.preprocess import Row
from compress.stage import Config, Context, Stage
from quantize.calibration import Method, Observed, clipped_share, collect, input_scale, noise, signal, threshold

BATCH_SIZE = 32
FEW_ROWS = 64
SELECTION_ROWS = 256
BEYOND = 1.5  # the largest of a few hundred rows varies by less
HEAD = "head"  # pooler and classifier: outside the repeated blocks, computed for one token, and what they round nothing evens out
CLIPS = 21


class Calibration(Config):
    """How the range of the activations is found."""

    method: Method = "percentile"
    """percentile: clip the tail; mse: least squared error of rounding and clipping together; minmax: clip nothing."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training rows to observe."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """Share of |x| that is not clipped, in percent; for `percentile` alone."""


class Quantize(Stage):
    """Makes the linear layers of the encoder true int8."""

    NAME: ClassVar[str] = "quantize"

    mode: Literal["ptq"] = "ptq"
    """ptq: calibrate and round, without training."""
    scheme: Literal["w8a8"] = "w8a8"
    """w8a8: int8 weights per output channel, int8 activations per tensor, static."""
    calibration: Calibration = Calibration()
    """How the range of the activations is found."""
    exclude: tuple[str, ...] = ()
    """Layers that stay float, as patterns of module names with `*`; a pattern has to match a layer."""
    weight_bits: Literal["auto", 7, 8] = "auto"
    """Bits of a weight. auto: 8, but 7 for a CPU without VNNI or AMX, whose int8 kernels saturate with 8."""

    def depends(self, context: Context) -> Any:
        """The bits that `auto` stands for depend on the processor."""
        return {"weight_bits": self.bits(context)}

    def bits(self, context: Context) -> int:
        """Returns the bits of a weight with `auto` resolved."""
        return weight_bits(context.target.device) if self.weight_bits == "auto" else self.weight_bits

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the quantized checkpoint.

        Returns:
            `scheme`, `weight_bits`, `calibrator`, `rows`, `warnings`, `float_layers`, and `layers`: for each its input scale, the largest
            input of calibration and of selection, the share of inputs clipped and the signal-to-noise ratios of its codes (dB).

        Raises:
            InputError: A pattern of `exclude` matches nothing, no layer is left to quantize, or an input holds NaN or infinity.
        """
        from compress.model import linears, load

        model, warnings = load(parent.path), []
        key = f"stages.{self.id or self.NAME}.exclude"
        chosen, kept = choose_layers(model, linears(model), self.exclude, key)
        rows = context.data.calibration(self.calibration.rows, context.seed).rows
        if len(rows) < FEW_ROWS:
            warnings.append(f"{len(rows)} calibration rows; {FEW_ROWS} or more are needed to trust the ranges")
        observed = self._observe(model, parent.path, chosen, rows, context)
        chosen, unreached = divide(chosen, observed)
        if unreached:
            kept |= dict.fromkeys(unreached, "not reached by the calibration rows")
            warnings.append(f"{len(unreached)} layers are reached by no calibration row and stay float: {_some(unreached)}")
        if not chosen:
            raise InputError(f"{key}: the calibration rows reach none of the layers to quantize, such as {_some(unreached)}")
        bits = self.bits(context)
        scales = {name: self._scales(observed, name, layer.weight.detach(), bits) for name, layer in chosen.items()}
        figures = [layer_figures(name, chosen[name].weight.detach(), scales[name], observed) for name in chosen]
        warnings += self._compare_with_selection(model, parent.path, chosen, figures, context)
        context.progress.log(f"  {len(chosen)} layers in int8, weights of {bits} bits, {len(kept)} layers in float, {len(rows)} rows")
        for warning in warnings:
            context.progress.warn(f"{self.id or self.NAME}: {warning}")
        for name, layer in chosen.items():
            layer.weight.data = on_grid(layer.weight.detach(), scales[name].weight_scale, levels(bits))
        write_checkpoint(model, parent.path, out, scales, kept)
        settings = {"scheme": self.scheme, "weight_bits": bits, "calibrator": self.calibration.method, "rows": len(rows)}
        return {**settings, "float_layers": kept, "warnings": warnings, "layers": figures}

    def _observe(
        self, model: nn.Module, checkpoint: Path, layers: Mapping[str, nn.Linear], rows: Sequence[Row], context: Context
    ) -> Observed:
        from compress.model import forward

        with context.progress.bar(f"{self.id or self.NAME}: observing", len(rows)) as advance:
            return collect(model, layers, feature_batches(checkpoint, rows, context), forward, advance)

    def _scales(self, observed: Observed, name: str, weight_OI: Tensor, bits: int) -> LayerScales:
        limit = threshold(observed.of(name), self.calibration.method, self.calibration.percentile)
        return LayerScales(mse_weight_scale(weight_OI, levels(bits)), input_scale(limit), bits)

    def _compare_with_selection(
        self, model: nn.Module, checkpoint: Path, layers: Mapping[str, nn.Linear], figures: list[dict[str, Any]], context: Context
    ) -> list[str]:
        """Adds the largest input on selection rows to the figures; returns a warning where it is far beyond that of calibration."""
        rows = context.data.selection.rows[:SELECTION_ROWS]
        if not rows:
            return []
        other = self._observe(model, checkpoint, layers, rows, context)
        for figure in figures:
            figure["selection_max_abs"] = other.of(figure["name"]).largest if figure["name"] in other.group else None
        beyond = [figure["name"] for figure in figures if (figure["selection_max_abs"] or 0) > BEYOND * figure["max_abs"]]
        if not beyond:
            return []
        return [
            f"the calibration rows do not cover the data: on selection rows the inputs of {len(beyond)} layers reach more than {BEYOND} "
            f"times as far, first {beyond[0]}; raise calibration.rows"
        ]


def choose_layers(
    model: nn.Module, linears: Mapping[str, nn.Linear], exclude: tuple[str, ...], key: str
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Divides the linear layers into those that become int8 and those that stay float.

    Args:
        model: The model; its repeated blocks are found as the entries of `nn.ModuleList`s.
        linears: Its linear layers by name.
        exclude: Patterns of names that stay float.
        key: Key path of `exclude`, for messages.

    Returns:
        The layers to quantize, and for each other one the reason.

    Raises:
        InputError: A pattern matches nothing, or nothing is left.
    """
    unused = [pattern for pattern in exclude if not _matching(pattern, linears)]
    if unused:
        named = f"layers are named like {_some(list(linears))}"
        raise InputError(*(f"{key}: {pattern!r} matches no layer; {named}{nearest(pattern, linears)}" for pattern in unused))
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    kept = {name: HEAD for name in linears if not name.startswith(blocks)}
    kept |= {name: f"excluded by {pattern!r}" for pattern in exclude for name in _matching(pattern, linears)}
    chosen = {name: layer for name, layer in linears.items() if name not in kept}
    if not chosen:
        raise InputError(f"{key}: no layer is left to quantize; the model has {len(linears)} linear layers, such as {_some(list(linears))}")
    return chosen, kept


def divide(layers: Mapping[str, nn.Linear], observed: Observed) -> tuple[dict[str, nn.Linear], list[str]]:
    """Returns the layers that calibration reached, and the names of the others."""
    reached = {name: layer for name, layer in layers.items() if name in observed.group and observed.of(name).total}
    return reached, [name for name in layers if name not in reached]


def feature_batches(checkpoint: Path, rows: Sequence[Row], context: Context) -> Iterator[dict[str, Tensor]]:
    """Yields rows batch by batch as the model takes them."""
    from compress.data import preprocessor

    processor = preprocessor(checkpoint, context.task, context.max_length, context.target)
    for _, features in processor.batches(rows, BATCH_SIZE):
        yield {name: torch.from_numpy(value) for name, value in features.items()}


def mse_weight_scale(weight_OI: Tensor, largest: int) -> Tensor:
    """Returns the scale of each output channel with the least squared rounding error, float32 [O].

    Args:
        weight_OI: float32 [O, I].
        largest: Largest code, 127 or 63.
    """
    full_O = weight_scale(weight_OI, largest)
    best_O = full_O
    error_O = _squared_error(weight_OI, full_O, largest)
    for clip in torch.linspace(0.8, 1.0, CLIPS)[:-1].tolist():
        scale_O = (full_O * clip).clamp(min=SMALLEST_SCALE)
        candidate_O = _squared_error(weight_OI, scale_O, largest)
        better_O = candidate_O < error_O
        best_O, error_O = torch.where(better_O, scale_O, best_O), torch.where(better_O, candidate_O, error_O)
    return best_O


def layer_figures(name: str, weight_OI: Tensor, scales: LayerScales, observed: Observed) -> dict[str, Any]:
    """Returns what quantization does to one layer, for the report."""
    histogram, scale = observed.of(name), float(scales.input_scale)
    error = float(_squared_error(weight_OI, scales.weight_scale, levels(scales.weight_bits)).sum())
    return {
        "name": name,
        "input_scale": scale,
        "max_abs": histogram.largest,
        "clipped": clipped_share(histogram, scale),
        "input_sqnr_db": _decibels(signal(histogram), noise(histogram, scale)),
        "weight_sqnr_db": _decibels(float(weight_OI.double().square().sum()), error),
    }


def write_checkpoint(model: nn.Module, source: Path, out: Path, scales: Mapping[str, LayerScales], kept: Mapping[str, str]) -> None:
    """Writes a quantized checkpoint: grid weights in a stock Transformers folder, scales beside them."""
    from compress.model import save

    save(model, source, out, f"Quantized to int8 (w8a8) after training: {len(scales)} linear layers; load it with compress.model.load")
    save_quantization(out, scales, kept)


def _squared_error(weight_OI: Tensor, scale_O: Tensor, largest: int) -> Tensor:
    return (on_grid(weight_OI, scale_O, largest) - weight_OI).square().sum(dim=1)


def _decibels(power: float, error: float) -> float | None:
    return None if power <= 0 or error <= 0 else round(10 * math.log10(power / error), 2)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3])
