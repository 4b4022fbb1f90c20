"""The stage `quantize`: from a float checkpoint to one whose encoder multiplies integers.

A run is a list of steps, each in a file of its own: choose the layers (`ptq`), shift what is hard to quantize to where it is easy
(`equalization`, `smoothquant`), observe the inputs (`calibration`), choose the scales (`ptq`; between calibrators by `trial`), correct the
biases (`bias_correction`), write weights on their grids with the scales beside them (`compress.int8`).

Every choice is made on calibration and selection rows. Left out: quantizing a quantized checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag
from torch import Tensor, nn

from compress.artifact import Artifact
from compress.errors import InputError
from compress.int8 import LayerScales, weight_bits
from compress.stage import Config, Context, Stage
from quantize.bias_correction import correct_biases
from quantize.budget import Budget
from quantize.calibration import METHODS, Histogram, Method, Observed, collect
from quantize.equalization import equalize
from quantize.escalation import Quantized, budget_of, escalate
from quantize.folding import find_folds
from quantize.mixed_precision import choose as choose_floats
from quantize.ptq import (
    SELECTION_ROWS,
    UNREACHED,
    choose_layers,
    choose_scales,
    compare_ranges,
    divide,
    feature_batches,
    layer_figures,
    range_warnings,
    round_weights,
    weight_scales,
    write_checkpoint,
)
from quantize.qat import Qat, learn
from quantize.sensitivity import SCAN_ROWS, Part, passes, quantized_part, summary
from quantize.sensitivity import scan as scan_layers
from quantize.smoothquant import Channels, describe, smooth
from quantize.trial import TRIAL_ROWS, Trial, in_int8

if TYPE_CHECKING:
    from compress.data import Data

TRACED_ROWS = 4
PASSES_PER_SCAN = 150  # of an encoder with 36 layers
Feed = Callable[[str], Iterator[dict[str, Tensor]]]
"""Starts a pass over the calibration rows and shows a bar of that label; none for an empty one."""


class Calibration(Config):
    """How the range of the activations is found."""

    method: Literal["auto", Method] = "percentile"
    """percentile: clip the tail; mse: least squared error of rounding and clipping together; entropy: least divergence of the histogram;
    minmax: clip nothing; moving_average: the usual largest value of a batch; auto: try all, keep the closest on selection rows."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training rows to observe."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """Share of |x| that is not clipped, in percent; for `percentile` alone."""


class SmoothQuant(Config):
    """How large channels of the activations are made smaller."""

    alpha: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """How much of the difficulty goes from activations to weights; auto: per group of layers, by the error of its outputs."""
    prescale: bool = True
    """Whether an input that no norm or layer before it can smooth is multiplied in the engine, before it is quantized."""


class MixedPrecision(Config):
    """Which layers go back to float."""

    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.005
    """What may be lost on selection rows (`quantize.budget`), as a fraction; the fewest layers with which no more is lost stay float."""
    max_float: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Largest share of the layers that may stay float."""


class Quantize(Stage):
    """Makes the linear layers of the encoder true int8."""

    NAME: ClassVar[str] = "quantize"

    mode: Literal["ptq", "qat", "auto"] = "ptq"
    """ptq: calibrate and round, without training; qat: then train in int8; auto: try ptq, smoothing and bias correction, mixed precision,
    qat and qat with distillation, and stop at the first that loses no more than `goals.max_drop` on selection rows."""
    qat: Qat = Qat()
    """How a quantized model is trained."""
    scheme: Literal["w8a8"] = "w8a8"
    """w8a8: int8 weights per output channel, int8 activations per tensor, static."""
    calibration: Calibration = Calibration()
    """How the range of the activations is found."""
    smoothquant: Annotated[
        Annotated[bool, Tag("bool")] | Annotated[SmoothQuant, Tag("SmoothQuant")],
        Discriminator(lambda given: "SmoothQuant" if isinstance(given, Mapping | SmoothQuant) else "bool"),
    ] = True
    """Whether to make large channels of the activations smaller and the weights that read them larger; a map to say how."""
    equalization: bool = False
    """Whether to equalize the ranges of two linear layers that only attention or a ReLU stands between."""
    bias_correction: bool = False
    """Whether to put the mean error of a layer's outputs into its bias; undone where that takes selection rows further from float."""
    sensitivity: bool = False
    """Whether to measure what each layer costs in int8, and show it in the report."""
    mixed_precision: MixedPrecision | None = None
    """Where given: layers that cost too much stay float."""
    exclude: tuple[str, ...] = ()
    """Layers that stay float, as patterns of module names with `*`; a pattern has to match a layer."""
    weight_bits: Literal["auto", 7, 8] = "auto"
    """Bits of a weight. auto: 8, but 7 for a CPU without VNNI or AMX, whose int8 kernels saturate with 8."""

    def depends(self, context: Context) -> Any:
        """The bits that `auto` stands for depend on the processor, and the mode `auto` on the goal."""
        goal = {"max_drop": budget_of(context)} if self.mode == "auto" else {}
        return {"weight_bits": self.bits(context), **goal}

    def bits(self, context: Context) -> int:
        """Returns the bits of a weight with `auto` resolved."""
        return weight_bits(context.target.device) if self.weight_bits == "auto" else self.weight_bits

    def work(self, macs: int, data: Data) -> float:
        """A forward pass over calibration rows for ranges, one for smoothing, a dozen for biases; over selection rows for each trial;
        a forward and twice as much backward for each row of training."""
        rows, selection = min(self.calibration.rows, len(data.train)), len(data.selection)
        passes = 1 + (self.smoothing is not None) + 12 * self.bias_correction
        trials = (1 + len(METHODS)) * (self.calibration.method == "auto") + 2 * self.bias_correction
        scanned = SCAN_ROWS * PASSES_PER_SCAN * (self.sensitivity or self.mixed_precision is not None)
        trained = 3.0 * self.qat.epochs * len(data.train) * (self.mode != "ptq")
        return float(macs) * (rows * passes + min(selection, SELECTION_ROWS) + min(selection, TRIAL_ROWS) * trials + scanned + trained)

    @property
    def smoothing(self) -> SmoothQuant | None:
        """How to smooth; None for not at all."""
        return SmoothQuant() if self.smoothquant is True else self.smoothquant or None

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the quantized checkpoint.

        Returns:
            `scheme`, `weight_bits`, `calibrator`, `rows`, `warnings`, `float_layers`, and `layers`: for each its input scale, the largest
            input of calibration and of selection, the share of inputs clipped and the signal-to-noise ratios of its codes (dB). Where
            asked for: `calibrators` (every attempt of auto and its distance), `equalization`, `smoothquant`, `bias_correction`,
            `sensitivity`, `mixed_precision`, `qat`, and `attempts` of the mode auto.

        Raises:
            InputError: A pattern of `exclude` matches nothing, no layer is left to quantize, an input holds NaN or infinity, or training
                failed.
        """
        made = escalate(self, parent, context) if self.mode == "auto" else self.quantize(parent, context)
        for warning in made.warnings:
            context.progress.warn(f"{self.id or self.NAME}: {warning}")
        write_checkpoint(made.model, parent.path, out, made.scales, made.kept)
        settings = {"mode": self.mode, "scheme": self.scheme, "weight_bits": self.bits(context)}
        return {**settings, **made.figures, "float_layers": made.kept, "warnings": made.warnings}

    def quantize(self, parent: Artifact, context: Context) -> Quantized:
        """Quantizes the model of `parent` in memory, by the mode ptq or qat; see `run`."""
        from compress.model import forward, linears, load

        name, model = self.id or self.NAME, load(parent.path)
        layers, kept = choose_layers(model, linears(model), self.exclude, f"stages.{name}.exclude")
        rows, bits = context.data.calibration(self.calibration.rows, context.seed).rows, self.bits(context)
        feed = partial(feature_batches, parent.path, rows, context)
        scanned = self.sensitivity or self.mixed_precision is not None
        undecided = self.calibration.method == "auto" or self.bias_correction or scanned
        trial = Trial.prepare(model, parent.path, rows, context) if undecided else None
        budget = Budget.prepare(model, parent.path, rows, context) if self.mixed_precision else None

        smooth, shifted = self._shift(model, layers, feed, bits, context)
        observed = collect(model, layers, feed(f"{name}: observing"), forward, Histogram, smooth)
        layers, unreached = divide(layers, observed, f"stages.{name}.exclude")
        kept |= dict.fromkeys(unreached, UNREACHED)
        choose = partial(choose_scales, weight_scales(layers, bits, smooth), smooth, observed, bits, self.calibration.percentile)
        calibrator, attempts = self._calibrator(choose, layers, trial, context)
        scales = choose(calibrator)
        figures = [layer_figures(layer, layers[layer].weight.detach(), scales[layer], observed) for layer in layers]
        corrected = self._correct(model, layers, scales, observed, feed, trial, context)
        scan = self._scan(layers, scales, trial, context) if scanned else {}
        layers, back, mixed = self._mix(model, layers, scales, scan, budget, context)
        kept |= back
        scales = {layer: scales[layer] for layer in layers}

        warnings = range_warnings(rows, unreached)
        selection = context.data.selection.rows[:SELECTION_ROWS]
        if selection:
            batches = feature_batches(parent.path, selection, context, f"{name}: checking")
            warnings += compare_ranges(figures, collect(model, layers, batches, forward, Histogram, smooth))
        context.progress.log(f"  {len(layers)} layers in int8, weights of {bits} bits, {len(kept)} layers in float, {len(rows)} rows")
        trained: dict[str, Any] = {}
        if self.mode == "qat":
            scales, history = learn(model, scales, self.qat, context, parent.path, name)
            trained = {"qat": {"losses": history.losses, "selection": history.selection, "steps": history.steps}}
        else:
            round_weights(layers, scales)
        settings = {"calibrator": calibrator, "rows": len(rows)}
        return Quantized(
            model, scales, kept, {**settings, **attempts, **shifted, **corrected, **scan, **mixed, **trained, "layers": figures}, warnings
        )

    def _scan(
        self, layers: Mapping[str, nn.Linear], scales: Mapping[str, LayerScales], trial: Trial | None, context: Context
    ) -> dict[str, Any]:
        """Returns what every layer costs in int8, the costliest first."""
        assert trial is not None
        few = trial.fewer(SCAN_ROWS)

        def measure(names: Collection[str], part: Part) -> float:
            return few.distance_of({name: quantized_part(name, layers[name], scales[name], part) for name in names})

        with context.progress.bar(f"{self.id or self.NAME}: sensitivity", passes(list(layers))) as advance:
            found = scan_layers(list(layers), measure, advance)
        context.progress.log(f"  most sensitive: {', '.join(layer.name for layer in found[:3])}")
        return {"sensitivity": summary(found, few.measure, len(few.rows))}

    def _mix(
        self,
        model: nn.Module,
        layers: dict[str, nn.Linear],
        scales: Mapping[str, LayerScales],
        scan: Mapping[str, Any],
        budget: Budget | None,
        context: Context,
    ) -> tuple[dict[str, nn.Linear], dict[str, str], dict[str, Any]]:
        """Returns the layers that stay int8, the others with the reason, and the figures of the choice."""
        if self.mixed_precision is None:
            return layers, {}, {}
        assert budget is not None
        ranking = [layer["name"] for layer in scan["sensitivity"]["layers"]]

        def loss(names: Collection[str]) -> float:
            with in_int8(model, {name: layers[name] for name in names}, scales):
                return budget.loss(model)

        limit = self.mixed_precision.max_drop
        choice = choose_floats(ranking, loss, limit, int(self.mixed_precision.max_float * len(ranking)))
        kept = [name for name in ranking if name not in choice.floating]
        if not kept:
            raise InputError(f"stages.{self.id or self.NAME}.mixed_precision: no layer is left in int8; raise max_drop ({limit:g} given)")
        context.progress.log(
            f"  mixed precision: {len(choice.floating)} layers back in float; {choice.before:.4f} lost without, {choice.loss:.4f} with"
        )
        reasons = dict.fromkeys(choice.floating, f"mixed precision: {budget.measure} has to stay within {limit:g}")
        figures = {
            "measure": budget.measure,
            "before": choice.before,
            "after": choice.loss,
            "met": choice.met,
            "floating": list(choice.floating),
        }
        return {name: layer for name, layer in layers.items() if name in kept}, reasons, {"mixed_precision": figures}

    def _shift(
        self, model: nn.Module, layers: Mapping[str, nn.Linear], feed: Feed, bits: int, context: Context
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Equalizes and smooths the float model; returns what inputs have to be divided by, and the figures of both."""
        from compress.model import forward

        smoothing, name = self.smoothing, self.id or self.NAME
        if not self.equalization and smoothing is None:
            return {}, {}
        vectors: dict[str, Tensor] = {}
        figures: dict[str, Any] = {}
        folds = find_folds(model, {key: value[:TRACED_ROWS] for key, value in next(feed("")).items()}, forward)
        if self.equalization:
            figures["equalization"] = equalize(model, layers, folds)
            context.progress.log(f"  equalization: {len(figures['equalization'])} pairs of layers")
        if smoothing is not None:
            channels = collect(model, layers, feed(f"{name}: smoothing"), forward, Channels)
            vectors, figures["smoothquant"] = smooth(model, layers, folds, channels, bits, smoothing.alpha, smoothing.prescale)
            context.progress.log(f"  smoothquant: {describe(figures['smoothquant'])}")
        return vectors, figures

    def _calibrator(
        self,
        choose: Callable[[Method], dict[str, LayerScales]],
        layers: Mapping[str, nn.Linear],
        trial: Trial | None,
        context: Context,
    ) -> tuple[Method, dict[str, Any]]:
        """Returns the calibrator to use, and what `auto` tried."""
        if self.calibration.method != "auto":
            return self.calibration.method, {}
        assert trial is not None
        distances = {
            method: trial.distance(layers, choose(method))
            for method in context.progress.track(METHODS, f"{self.id or self.NAME}: calibrators")
        }
        best = min(METHODS, key=distances.__getitem__)
        context.progress.log(f"  calibrator: {best}, with {trial.measure} {distances[best]:.2g} to float on {len(trial.rows)} rows")
        return best, {"calibrators": {"measure": trial.measure, "rows": len(trial.rows), "distances": distances}}

    def _correct(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        scales: Mapping[str, LayerScales],
        observed: Observed[Histogram],
        feed: Feed,
        trial: Trial | None,
        context: Context,
    ) -> dict[str, Any]:
        """Corrects the biases where asked to, and undoes it where that was no good; returns the figures."""
        from compress.model import forward

        if not self.bias_correction:
            return {}
        assert trial is not None
        name = self.id or self.NAME
        biases = {layer: layers[layer].bias.data for layer in layers if layers[layer].bias is not None}
        before = trial.distance(layers, scales)
        each = partial(context.progress.track, label=f"{name}: correcting biases")
        moved = correct_biases(model, layers, scales, observed.group, partial(feed, ""), forward, each)
        after = trial.distance(layers, scales)
        if after > before:
            context.progress.warn(f"{name}: bias correction takes {trial.measure} to float from {before:.2g} to {after:.2g}; undone")
            for layer, bias_O in biases.items():
                layers[layer].bias.data = bias_O
        figures = {"measure": trial.measure, "rows": len(trial.rows), "before": before, "after": after, "kept": after <= before}
        return {"bias_correction": {**figures, "shifts": moved}}
