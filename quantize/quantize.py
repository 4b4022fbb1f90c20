"""The stage `quantize`: from a float checkpoint to one whose linear layers multiply integers, or read int4 or FP8 weights.

A run is a list of steps (`steps`): choose the layers, shift what is hard to quantize to where it is easy, observe the inputs, choose the
scales, round the weights, correct the biases, add attention and residuals, write weights on their grids with the scales beside them
(`compress.schemes.checkpoint`). A model too large for that is quantized block by block (`streaming`).

Every choice is made on calibration and selection rows. Left out: quantizing a quantized checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Discriminator, Field, Tag, model_validator

from compress.artifacts.artifact import Artifact
from compress.core.config import Config
from compress.measure.closeness import TRIAL_ROWS
from compress.models.origin import same_shape
from compress.schemes.checkpoint import Scheme
from compress.schemes.int8 import LayerScales, weight_bits
from compress.schemes.sites import save_sites
from compress.stage.context import Context
from compress.stage.stage import ModelStage, is_model
from compress.training.distilled import check_taught
from quantize.budget import Budget
from quantize.calibration import METHODS, Histogram, Method, collect
from quantize.escalation import Quantized, budget_of, escalate
from quantize.products import Switch
from quantize.ptq import (
    SELECTION_ROWS,
    UNREACHED,
    choose_layers,
    compare_ranges,
    divide,
    feature_batches,
    range_warnings,
    write_checkpoint,
)
from quantize.qat import Qat, asked_by, learn
from quantize.rounding import Method as Rounding
from quantize.schemes import (
    CALIBRATORS,
    DEFAULT_CALIBRATOR,
    HIGHEST,
    INTEGER,
    NUMBERS,
    SMOOTHED,
    choose_scales,
    layer_figures,
    round_weights,
)
from quantize.sensitivity import SCAN_ROWS
from quantize.steps import Steps
from quantize.streaming import check_streamed, quantize_streamed, worth_streaming
from quantize.trial import Trial

if TYPE_CHECKING:
    from compress.data.splits import Data

PASSES_PER_SCAN = 150  # of an encoder with 36 layers
PASSES_PER_SITES = 50  # of an encoder of 6 blocks: 12 products, 12 residuals


class Calibration(Config):
    """How the range of the activations is found."""

    method: Literal["auto", Method] | None = None
    """percentile: clip the tail; mse: least squared error of rounding and clipping together; entropy: least divergence of the histogram;
    minmax: clip nothing; moving_average: the usual largest value of a batch; auto: try all, keep the closest on selection rows. Absent:
    minmax for fp8 and for w8a8 with smoothing, percentile for w8a8 without; the other schemes have no range to find."""
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


class Quantize(ModelStage):
    """Makes the linear layers of the blocks true int8, or int4 or FP8."""

    VERSION: ClassVar[int] = 3
    NAME: ClassVar[str] = "quantize"

    mode: Literal["ptq", "qat", "auto"] = "ptq"
    """ptq: calibrate and round, without training; qat: then train in int8; auto: try ptq, smoothing and bias correction, mixed precision,
    qat and qat with distillation, and stop at the first that loses no more than `goals.max_drop` on selection rows."""
    qat: Qat = Qat()
    """How a quantized model is trained."""
    teacher: Annotated[str, Field(min_length=1)] = "input"
    """Who teaches it then: input (the model before quantization), baseline, or the id of an earlier stage."""
    scheme: Scheme = "w8a8"
    """w8a8: int8 weights per output channel, int8 activations per tensor, static; w8a8-dynamic: activations per token, at run time;
    w4a16: int4 weights in groups of inputs, float activations; fp8: E4M3 weights per output channel, E4M3 activations, static."""
    group_size: Literal[16, 32, 64, 128, 256] = 128
    """Inputs that share a scale, for w4a16; the last group of a layer may be shorter."""
    rounding: Rounding = "nearest"
    """How weights become integers. gptq: they make up for each other's error; adaround: down or up is learned for each (slow); both by
    the error of a layer's outputs on the calibration rows."""
    awq: bool = False
    """Whether channels with large activations get finer int4 weights, for w4a16, and the scales are chosen by the error of the outputs."""
    calibration: Calibration = Calibration()
    """How the range of the activations is found."""
    smoothquant: Annotated[
        Annotated[bool, Tag("bool")] | Annotated[SmoothQuant, Tag("SmoothQuant")],
        Discriminator(lambda given: "SmoothQuant" if isinstance(given, Mapping | SmoothQuant) else "bool"),
    ] = True
    """Whether to make large channels of int8 activations smaller and the weights that read them larger; a map to say how."""
    equalization: bool = False
    """Whether to equalize the ranges of two linear layers that only attention or a ReLU stands between."""
    bias_correction: bool = False
    """Whether to put the mean error of a layer's outputs into its bias; undone where that takes selection rows further from float."""
    sensitivity: bool = False
    """Whether to measure what each layer costs in int8, and show it in the report."""
    mixed_precision: MixedPrecision | None = None
    """Where given: layers that cost too much stay float."""
    attention: Switch = False
    """Whether the products of attention, Q K^T and P V, are int8 too, for w8a8. auto: each one that adds next to nothing to the distance
    from float on selection rows; all of them together at most a quarter of what the linear layers cost (`quantize.products`)."""
    residual: Switch = False
    """Whether what is added to the output of an int8 layer is rounded to int8, for w8a8, as TensorRT asks for; auto: as for `attention`."""
    exclude: tuple[str, ...] = ()
    """Layers that stay float, as patterns of module names with `*`; a pattern has to match a layer."""
    weight_bits: Literal["auto", 7, 8] = "auto"
    """Bits of an int8 weight. auto: 8, but 7 for a CPU without VNNI or AMX, whose int8 kernels saturate with 8."""
    stream: Literal["auto"] | bool = "auto"
    """Whether a language model is quantized a decoder layer at a time, from file to file, instead of in memory (`quantize.streaming`).
    auto: where its float32 weights would take more than half of the memory that is available."""

    @model_validator(mode="after")
    def _consistent(self) -> Quantize:
        if self.mode != "ptq" and self.scheme != "w8a8":
            raise ValueError(f"mode: {self.mode} trains in w8a8 alone; scheme {self.scheme} takes ptq")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; input, baseline or the id of an earlier stage is allowed")
        if self.mode == "ptq" and self.teacher != "input":
            raise ValueError(f"teacher: {self.teacher} given, and mode: ptq trains nothing; give mode: qat or auto, or leave it out")
        if self.mode == "qat" and self.teacher != "input" and not self.qat.distill:
            raise ValueError(f"teacher: {self.teacher} given, and qat.distill: false learns from the labels alone; leave one of them out")
        if self.mode == "qat" and self.rounding != "nearest":
            raise ValueError(f"rounding: {self.rounding} is for mode ptq; qat learns the weights themselves")
        if self.rounding != "nearest" and self.scheme not in INTEGER:
            raise ValueError(f"rounding: {self.rounding} is for integer weights; scheme {self.scheme} takes nearest")
        if (self.attention or self.residual) and self.scheme != "w8a8":
            raise ValueError(f"attention, residual: int8 products and sums go with scheme w8a8; {self.scheme} leaves them in float")
        if self.awq and self.scheme != "w4a16":
            raise ValueError(f"awq: for scheme w4a16 alone; {self.scheme} has smoothquant, or needs none")
        if self.weight_bits != "auto" and self.scheme not in SMOOTHED:
            raise ValueError(f"weight_bits: for int8 weights; those of scheme {self.scheme} have {'4' if self.scheme == 'w4a16' else '8'}")
        method, methods = self.calibration.method, CALIBRATORS.get(self.scheme, METHODS)
        if method not in (None, "auto", *methods):
            raise ValueError(f"calibration.method: {method} counts the equal steps of int8; {self.scheme} takes {', '.join(methods)}")
        return self

    def depends(self, context: Context) -> Any:
        """The bits that `auto` stands for depend on the processor, and the mode `auto` on the goal."""
        goal = {"max_drop": budget_of(context)} if self.mode == "auto" else {}
        return {"weight_bits": self.bits(context), **goal}

    def bits(self, context: Context) -> int:
        """Returns the bits of a weight with `auto` resolved."""
        if self.scheme not in SMOOTHED:
            return 4 if self.scheme == "w4a16" else 8
        return weight_bits(context.target.device) if self.weight_bits == "auto" else self.weight_bits

    def work(self, macs: int, data: Data) -> float:
        """A forward pass over calibration rows for ranges, one for smoothing, a dozen for biases; over selection rows for each trial;
        a forward and twice as much backward for each row of training."""
        rows, selection = min(self.calibration.rows, len(data.train)), len(data.selection)
        learned = {"nearest": 0, "gptq": 3, "adaround": 30}[self.rounding] + 3 * self.awq
        passes = 1 + (self.smoothing is not None) + learned + 12 * self.bias_correction + bool(self.attention or self.residual)
        trials = (1 + len(METHODS)) * (self.calibration.method == "auto") + 2 * self.bias_correction
        scanned = SCAN_ROWS * PASSES_PER_SCAN * (self.sensitivity or self.mixed_precision is not None)
        scanned += SCAN_ROWS * PASSES_PER_SITES * ("auto" in (self.attention, self.residual))
        trained = 3.0 * self.qat.epochs * len(data.train) * (self.mode != "ptq")
        return float(macs) * (rows * passes + min(selection, SELECTION_ROWS) + min(selection, TRIAL_ROWS) * trials + scanned + trained)

    @property
    def smoothing(self) -> SmoothQuant | None:
        """How to smooth; None for not at all."""
        if self.scheme not in SMOOTHED:
            return None
        return SmoothQuant() if self.smoothquant is True else self.smoothquant or None

    @property
    def calibrator(self) -> Method | Literal["auto"] | None:
        """How the range of the inputs is found; None for a scheme that needs none."""
        if self.scheme not in CALIBRATORS:
            return None
        smoothed = self.smoothing is not None and self.smoothing.prescale
        return self.calibration.method or ("minmax" if smoothed else DEFAULT_CALIBRATOR[self.scheme])

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out whether a model that is to be streamed can be, and whether losses that train it fit."""
        if self.stream is True:
            check_streamed(self, config, context)
        if self.mode != "ptq" and teacher is not None:
            name = self.id or self.NAME
            check_taught(self.qat, asked_by(name), config, teacher, same_shape(config, teacher), context)

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the quantized checkpoint.

        Returns:
            `scheme`, `weight_bits`, `calibrator`, `rows`, `warnings`, `float_layers`, and `layers`: for each its input scale, the largest
            input of calibration and of selection, the share of inputs clipped and the signal-to-noise ratios of its codes (dB). Where
            asked for: `calibrators` (every attempt of auto and its distance), `equalization`, `smoothquant`, `bias_correction`,
            `sensitivity`, `mixed_precision`, `qat`, `sites` (products and residuals, whether they are int8, what each adds, its tensors),
            `sites_choice`, `awq`, `rounding` (the method and the errors of each layer's outputs), and `attempts` of the mode auto.

        Raises:
            InputError: A pattern of `exclude` matches nothing, no layer is left to quantize, an input holds NaN or infinity, or training
                failed.
        """
        if self.stream is True or (self.stream == "auto" and worth_streaming(self, parent.path, context)):
            figures, kept, warnings = quantize_streamed(self, parent.path, out, context)
        else:
            made = escalate(self, parent, context) if self.mode == "auto" else self.quantize(parent, context)
            figures, kept, warnings = made.figures, made.kept, made.warnings
            write_checkpoint(made.model, parent.path, out, made.scales, kept, f"{NUMBERS[self.scheme]} ({self.scheme})")
            if made.sites.names:
                save_sites(out, made.sites)
        for warning in warnings:
            context.progress.warn(f"{self.id or self.NAME}: {warning}")
        settings = {"mode": self.mode, "scheme": self.scheme, "weight_bits": self.bits(context)}
        settings |= {"group_size": self.group_size} if self.scheme == "w4a16" else {}
        return {**settings, **figures, "float_layers": kept, "warnings": warnings}

    def quantize(self, parent: Artifact, context: Context) -> Quantized:
        """Quantizes the model of `parent` in memory, by the mode ptq or qat; see `run`."""
        from compress.models.checkpoint import load
        from compress.models.forward import forward, linears

        name, model = self.id or self.NAME, load(parent.path)
        layers, kept = choose_layers(model, linears(model), self.exclude, f"stages.{name}.exclude")
        rows, bits = context.data.calibration(self.calibration.rows, context.seed).rows, self.bits(context)
        feed = partial(feature_batches, parent.path, rows, context)
        scanned = self.sensitivity or self.mixed_precision is not None
        undecided = self.calibration.method == "auto" or self.bias_correction or scanned or "auto" in (self.attention, self.residual)
        trial = Trial.prepare(model, parent.path, rows, context) if undecided else None
        budget = Budget.prepare(model, parent.path, rows, context) if self.mixed_precision else None

        steps = Steps(self, name, model, feed, bits, context, trial, budget)
        smoothed, shifted = steps.shift(layers)
        observed = collect(model, layers, feed(f"{name}: observing"), forward, Histogram, smoothed)
        layers, unreached = divide(layers, observed, f"stages.{name}.exclude")
        kept |= dict.fromkeys(unreached, UNREACHED)
        weights, scaled = steps.weights(layers, smoothed, observed)
        choose = partial(choose_scales, self.scheme, weights, smoothed, observed, bits, self.group_size, self.calibration.percentile)
        calibrator, attempts = steps.calibrator(choose, layers)
        scales = choose(calibrator)
        rounded, rounding = steps.rounded(layers, scales, observed)
        figures = [layer_figures(layer, layers[layer], rounded[layer], scales[layer], observed) for layer in layers]
        uncorrected = copy.deepcopy(model) if self.mode == "qat" and self.bias_correction else None  # a teacher has biases for floats
        corrected = steps.correct(layers, rounded, scales, observed)
        scan = steps.scan(layers, rounded, scales)
        layers, back, mixed = steps.mix(layers, rounded, scales, scan)
        kept |= back
        scales = {layer: scales[layer] for layer in layers}

        warnings = range_warnings(rows, unreached)
        selection = context.data.selection.rows[:SELECTION_ROWS]
        if selection and self.scheme in HIGHEST:
            batches = feature_batches(parent.path, selection, context, f"{name}: checking")
            warnings += compare_ranges(figures, collect(model, layers, batches, forward, Histogram, smoothed), HIGHEST[self.scheme])
        numbers = f"{len(layers)} layers in {NUMBERS[self.scheme]}, weights of {bits} bits"
        context.progress.log(f"  {numbers}, {len(kept)} layers in float, {len(rows)} rows")
        trained: dict[str, Any] = {}
        if self.mode == "qat":
            # Whatever it is called, the model that came in teaches as it is now: smoothing has scaled its values, which losses may look at.
            teacher = context.teacher.path if context.teacher and context.teacher.path != parent.path else uncorrected
            learned, history = learn(model, cast("Mapping[str, LayerScales]", scales), self.qat, context, parent.path, name, teacher)
            scales = dict(learned)
            looks = {"selection": history.selection, "best_step": history.best_step}
            trained = {"qat": {"losses": history.losses, **looks, "steps": history.steps}}
        else:
            round_weights(layers, rounded, scales)
        sites, added = steps.sites(scales, calibrator, scan)
        settings = {"calibrator": calibrator, "rows": len(rows)}
        found = {**attempts, **shifted, **scaled, **rounding, **corrected, **scan, **mixed, **trained, **added}
        return Quantized(model, scales, kept, {**settings, **found, "layers": figures}, warnings, sites)
