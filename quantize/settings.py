"""What a recipe says of the stage `quantize`: its typed keys, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from compress.core.config import Config
from compress.schemes.int8 import weight_bits
from compress.schemes.table import DEFAULT_SCHEME, SCHEMES, Scheme, schemes_with
from compress.stage.context import Context
from compress.stage.stage import ModelStage, is_model
from quantize.calibration import METHODS, Method
from quantize.products import Switch
from quantize.qat import Qat
from quantize.rounding import Method as Rounding
from quantize.schemes import calibrators, default_calibrator


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


class QuantizeSettings(ModelStage):
    """Makes the linear layers of the blocks true int8, or int4 or FP8."""

    NAME: ClassVar[str] = "quantize"

    mode: Literal["ptq", "qat", "auto"] = "ptq"
    """ptq: calibrate and round, without training; qat: then train in int8; auto: try ptq, smoothing and bias correction, mixed precision,
    qat and qat with distillation, and stop at the first that loses no more than `goals.max_drop` on selection rows."""
    qat: Qat = Qat()
    """How a quantized model is trained."""
    teacher: Annotated[str, Field(min_length=1)] = "input"
    """Who teaches it then: input (the model before quantization), baseline, or the id of an earlier stage."""
    scheme: Scheme = DEFAULT_SCHEME
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
    def _consistent(self) -> Self:
        row = SCHEMES[self.scheme]
        if self.mode != "ptq" and not row.trainable:
            raise ValueError(f"mode: {self.mode} trains in {schemes_with(lambda row: row.trainable)} alone; scheme {self.scheme} takes ptq")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; input, baseline or the id of an earlier stage is allowed")
        if self.mode == "ptq" and self.teacher != "input":
            raise ValueError(f"teacher: {self.teacher} given, and mode: ptq trains nothing; give mode: qat or auto, or leave it out")
        if self.mode == "qat" and self.teacher != "input" and not self.qat.distill:
            raise ValueError(f"teacher: {self.teacher} given, and qat.distill: false learns from the labels alone; leave one of them out")
        if self.mode == "qat" and self.rounding != "nearest":
            raise ValueError(f"rounding: {self.rounding} is for mode ptq; qat learns the weights themselves")
        if self.rounding != "nearest" and not row.integer:
            raise ValueError(f"rounding: {self.rounding} is for integer weights; scheme {self.scheme} takes nearest")
        if (self.attention or self.residual) and not row.sites:
            named = schemes_with(lambda row: row.sites)
            raise ValueError(f"attention, residual: int8 products and sums go with scheme {named}; {self.scheme} leaves them in float")
        if self.awq and not row.grouped:
            named = schemes_with(lambda row: row.grouped)
            raise ValueError(f"awq: for scheme {named} alone; {self.scheme} has smoothquant, or needs none")
        if self.weight_bits != "auto" and not row.choose_bits:
            raise ValueError(f"weight_bits: for int8 weights; those of scheme {self.scheme} have {row.weight_bits}")
        method, methods = self.calibration.method, calibrators(self.scheme) or METHODS
        if method not in (None, "auto", *methods):
            raise ValueError(f"calibration.method: {method} counts the equal steps of int8; {self.scheme} takes {', '.join(methods)}")
        return self

    @property
    def title(self) -> str:
        """The id of the stage, for messages and bars."""
        return self.id or self.NAME

    @property
    def scans(self) -> bool:
        """Whether the cost of each layer is measured."""
        return self.sensitivity or self.mixed_precision is not None

    @property
    def compares(self) -> bool:
        """Whether a choice compares quantized forms of the model with the float one."""
        return self.calibration.method == "auto" or self.bias_correction or self.scans or "auto" in (self.attention, self.residual)

    def bits(self, context: Context) -> int:
        """Returns the bits of a weight with `auto` resolved."""
        row = SCHEMES[self.scheme]
        if not row.choose_bits:
            return row.weight_bits
        return weight_bits(context.target.device) if self.weight_bits == "auto" else self.weight_bits

    @property
    def smoothing(self) -> SmoothQuant | None:
        """How to smooth; None for not at all."""
        if not SCHEMES[self.scheme].smoothed:
            return None
        return SmoothQuant() if self.smoothquant is True else self.smoothquant or None

    @property
    def calibrator(self) -> Method | Literal["auto"] | None:
        """How the range of the inputs is found; None for a scheme that needs none."""
        if not calibrators(self.scheme):
            return None
        smoothed = self.smoothing is not None and self.smoothing.prescale
        return self.calibration.method or ("minmax" if smoothed else default_calibrator(self.scheme))
