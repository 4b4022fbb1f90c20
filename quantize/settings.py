"""The settings of the stage `quantize`: its recipe keys, their validation, and values derived from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from foundation.core.config import Config
from foundation.core.engines import ENGINES
from foundation.schemes.table import DEFAULT_SCHEME, SCHEMES, Scheme, schemes_with
from foundation.stage.stage import ModelStage, is_model
from quantize.choices import METHODS, Answers, GroupRange, Method, Qat, Rounding, Switch, calibrators, default_calibrator

if TYPE_CHECKING:
    from foundation.stage.context import Context
    from quantize.group_scales import Groups


class Calibration(Config):
    """How activation ranges are calibrated."""

    method: Literal["auto", Method] | None = None
    """percentile: clip the tail; mse: minimize the squared error of rounding plus clipping; entropy: minimize the KL divergence of the
    histogram; minmax: no clipping; moving_average: moving average of the largest value of each batch; auto: try all, keep the one closest
    to float on selection rows, or the default if none is closer than it beyond chance. Absent, the default: minmax for fp8 and for w8a8
    with smoothing, percentile for w8a8 without; the other schemes do not calibrate ranges."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training rows to calibrate on."""
    answers: Answers | None = None
    """For text-generation: lets the model write part of these rows, so that it is calibrated on what it reads when it answers."""
    expert_tokens: Annotated[int, Field(ge=0, le=10**9)] = 256
    """For mixtures: least number of calibration tokens that an expert is calibrated on. An expert that the router sends fewer is calibrated
    on all tokens of its layer."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """Share of |x| that is not clipped, in percent; only for `percentile`."""


class SmoothQuant(Config):
    """SmoothQuant: scales down outlier channels of the activations."""

    alpha: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Migration strength: how much of the quantization difficulty moves from activations to weights. auto: the value with the least output
    error for each group of layers."""
    prescale: bool = True
    """Whether the engine multiplies an input by the smoothing factors if no norm or layer before it can absorb them."""


class MixedPrecision(Config):
    """Mixed precision: keeps the most sensitive layers in float."""

    max_drop: Annotated[float, Field(ge=0, le=1)] = 0.005
    """Largest loss on selection rows (`quantize.budget`), as a fraction; as few layers as possible stay float to meet it."""
    max_float: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Largest share of layers that may stay float."""


class AutoRound(Config):
    """AutoRound: how long the rounding of a block is learned."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = 200
    """Steps of a block; a step moves every offset by at most 1 / steps, with a linear decay to 0."""
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Calibration rows of a step."""


class LearnedRotation(Config):
    """Learned rotations: for how long, and how fast."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Steps of Cayley SGD; each takes a batch."""
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Calibration rows of a step."""
    learning_rate: Annotated[float, Field(gt=0, le=3)] = 0.02
    """Radians by which the first step turns each rotation, in the mean of squares over its planes, with a linear decay to 0."""


class QuantizeSettings(ModelStage):
    """Quantizes the linear layers and convolutions of the blocks to true int8, or the linear layers to int4 or FP8."""

    NAME: ClassVar[str] = "quantize"

    mode: Literal["ptq", "qat", "auto"] = "ptq"
    """ptq: post-training quantization; qat: ptq, then quantization-aware training in int8; auto: try ptq, smoothing and bias correction,
    mixed precision, qat, and qat with distillation in this order, and stop at the first that loses at most `goals.max_drop` on selection
    rows."""
    qat: Qat = Qat()
    """Settings of quantization-aware training."""
    teacher: Annotated[str, Field(min_length=1)] = "input"
    """The teacher for qat: input (the model before quantization), baseline, or the id of an earlier stage."""
    scheme: Scheme = DEFAULT_SCHEME
    """w8a8: int8 weights per output channel, static int8 activations per tensor; w8a8-dynamic: int8 activations per token, with scales
    computed at run time; w8a16: int8 weights per output channel, float activations, for language models; w4a16: int4 weights in
    groups of inputs, float activations; w4a8-block: the same weights, int8 activations with a scale per group, computed at run time, for
    language models in onnxruntime_decoder; fp8: E4M3 weights per output channel, static E4M3 activations."""
    group_size: Literal[16, 32, 64, 128, 256] = 128
    """Inputs that share a weight scale, for w4a16 and w4a8-block; the last group of a layer may be shorter."""
    symmetric: bool = True
    """Whether the codes of int4 weights are symmetric around 0. false: each group has a zero point too, so that its 16 codes
    span its smallest to its largest weight; for half a byte more per group, and not in TensorRT."""
    group_scales: Literal["float", "two_level", "k_quant"] = "float"
    """How the scales of groups are stored, for w4a16 and w4a8-block; weights are rounded to what is stored. float: a float32 number each.
    two_level: an integer of 6 bits times a number that 8 groups (a super-block) share; their products are float16 numbers, and every engine
    computes with them. k_quant, with symmetric: false: each group also has an offset in place of its zero point, again 6 bits times a
    shared number, as in llama.cpp's Q4_K. Offsets need not be multiples of the scale, so that the error is smaller, but a weight of 0 does
    not stay 0; for torch, openvino_genai and GGUF files."""
    group_range: Literal["auto"] | GroupRange = "auto"
    """How the range of a group of int4 weights is chosen, which its codes span. minmax: from the smallest to the largest weight; weights:
    the range, clipped or not, with the least squared error of the weights; outputs: with the least squared error of the outputs on the
    calibration rows, which large inputs dominate; auto: outputs."""
    rounding: Rounding = "nearest"
    """How weights are rounded. gptq: later weights compensate the rounding error of earlier ones; adaround: learns whether to round each
    weight up or down (slow); both minimize the error of a layer's outputs on the calibration rows. autoround: learns offsets of the weights
    and the ranges of their groups by the output of a whole encoder or decoder layer (`quantize.rounding.autoround`; slow)."""
    autoround: AutoRound = AutoRound()
    """Settings of `rounding: autoround`."""
    awq: bool = False
    """Activation-aware weight quantization, for int4 weights: channels with large activations get finer weights, and scales are chosen by
    the error of the outputs."""
    calibration: Calibration = Calibration()
    """How activation ranges are calibrated."""
    smoothquant: Annotated[
        Annotated[bool, Tag("bool")] | Annotated[SmoothQuant, Tag("SmoothQuant")],
        Discriminator(lambda given: "SmoothQuant" if isinstance(given, Mapping | SmoothQuant) else "bool"),
    ] = True
    """Whether to scale down outlier channels of int8 activations and scale up the weights that read them (SmoothQuant); a map sets its
    options."""
    rotation: Literal["none", "hadamard", "learned"] = "none"
    """Whether to rotate the residual stream and the values of attention before anything is smoothed or rounded, so that no channel is much
    larger than the others. hadamard: by randomized Hadamard matrices, folded into the weights (QuaRot, SpinQuant); exact in float, and the
    checkpoint stays a stock one. For models with a norm at the beginning of each branch (Llama, Qwen, Mistral, Gemma, GPT-2, ViT); others
    are refused before anything runs. A tied head becomes a matrix of its own. learned: the same, then turned by gradient descent on the
    calibration rows to where rounding changes the answers least (SpinQuant; slow, in memory, not for mixtures of experts)."""
    learned_rotation: LearnedRotation = LearnedRotation()
    """Settings of `rotation: learned`."""
    equalization: bool = False
    """Whether to equalize the weight ranges of two linear layers that only attention or a ReLU separates (cross-layer equalization)."""
    bias_correction: bool = False
    """Whether to subtract the mean error of a layer's outputs against the float model from its bias, layer after layer; reverted if that
    moves the model further from float on selection rows."""
    sensitivity: bool = False
    """Whether to measure how sensitive each layer is to quantization, for the report."""
    mixed_precision: MixedPrecision | None = None
    """If given, the most sensitive layers stay float."""
    attention: Switch = False
    """Whether the attention products Q K^T and P V are int8 too, for w8a8. auto: those that hardly increase the distance from float on
    selection rows, as far as these can show it; in total at most a quarter of what the linear layers cost (`quantize.products`)."""
    residual: Switch = False
    """Whether the tensor added to the output of an int8 layer is rounded to int8 too, for w8a8, as TensorRT requires; auto: as for
    `attention`."""
    convolutions: Switch = "auto"
    """Whether convolutions are int8 too, for w8a8. auto: those in the blocks of a model without attention (ResNet, ConvNeXt); in a
    Transformer they stay float, as does a convolution that reads the image (`quantize.convolutions`)."""
    embeddings: bool = False
    """Whether the embeddings and the head of a language model get int8 rows, a scale for each token (`foundation.schemes.tables`).
    Activations stay as they are; a small model reads up to half of its bytes there for every token. Beside w8a8 OpenVINO makes tables
    float again when it reads the model, so that only its file is smaller."""
    exclude: tuple[str, ...] = ()
    """Layers that stay float, as patterns of module names with `*`; each pattern must match a layer."""
    weight_bits: Literal["auto", 7, 8] = "auto"
    """Bits of an int8 weight. auto: 8, but 7 for a CPU without VNNI or AMX whose int8 kernels, which saturate with 8, an engine may use."""
    stream: Literal["auto"] | bool = "auto"
    """Whether to quantize a language model one decoder layer at a time, from file to file, instead of in memory (`quantize.streaming`).
    auto: if its float32 weights would take more than half of the available memory, or if it has 8 layers or more and `rounding` is not
    nearest: in memory every layer takes a pass of the whole model then."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        row = SCHEMES[self.scheme]
        if self.mode != "ptq" and not row.trainable:
            raise ValueError(f"mode: {self.mode} trains in {schemes_with(lambda row: row.trainable)} alone; scheme {self.scheme} takes ptq")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; give input, baseline or the id of an earlier stage")
        if self.mode == "ptq" and self.teacher != "input":
            raise ValueError(f"teacher: {self.teacher} given, but mode: ptq does not train; give mode: qat or auto, or remove teacher")
        if self.mode == "qat" and self.teacher != "input" and not self.qat.distill:
            raise ValueError(f"teacher: {self.teacher} given, but qat.distill: false learns from the labels alone; remove one of them")
        if self.mode == "qat" and self.rounding != "nearest":
            raise ValueError(f"rounding: {self.rounding} is for mode ptq; qat trains the weights: remove rounding")
        if self.rounding != "autoround" and self.autoround != AutoRound():
            raise ValueError(f"autoround: given, but rounding: {self.rounding} does not read it; give rounding: autoround, or remove it")
        if self.rotation != "learned" and self.learned_rotation != LearnedRotation():
            unread = f"learned_rotation: given, but rotation: {self.rotation} does not read it"
            raise ValueError(f"{unread}; give rotation: learned, or remove it")
        if self.rounding != "nearest" and not row.integer:
            raise ValueError(f"rounding: {self.rounding} is for integer weights; scheme {self.scheme} takes nearest")
        if (self.attention or self.residual) and not row.sites:
            named = schemes_with(lambda row: row.sites)
            raise ValueError(f"attention, residual: int8 products and sums go with scheme {named}; {self.scheme} leaves them in float")
        if self.convolutions is True and row.convolutions is None:
            named = schemes_with(lambda row: row.convolutions is not None)
            raise ValueError(
                f"convolutions: int8 convolutions go with scheme {named}; {self.scheme} leaves them in float: give auto or false"
            )
        if self.awq and not row.grouped:
            named = schemes_with(lambda row: row.grouped)
            raise ValueError(f"awq: for scheme {named} alone; {self.scheme} has smoothquant, or needs none")
        if self.group_range != "auto" and not row.grouped:
            named = schemes_with(lambda row: row.grouped)
            raise ValueError(f"group_range: for scheme {named} alone; weights of {self.scheme} have no groups: remove it")
        if self.group_scales != "float" and not row.grouped:
            named = schemes_with(lambda row: row.grouped)
            raise ValueError(f"group_scales: for scheme {named} alone; weights of {self.scheme} have no groups: remove it")
        if self.group_scales == "k_quant" and self.symmetric:
            raise ValueError("group_scales: k_quant gives each group an offset; give symmetric: false, or group_scales: two_level")
        if self.awq and self.group_range not in ("auto", "outputs"):
            raise ValueError(f"group_range: {self.group_range} given, but awq chooses ranges by the outputs; remove one of them")
        if not self.symmetric and not row.zero_points:
            named = schemes_with(lambda row: row.zero_points)
            raise ValueError(f"symmetric: false gives zero points to the weights of scheme {named}; weights of {self.scheme} have none")
        if self.weight_bits != "auto" and not row.choose_bits:
            raise ValueError(f"weight_bits: for int8 weights; weights of scheme {self.scheme} have {row.weight_bits}")
        method, methods = self.calibration.method, calibrators(self.scheme) or METHODS
        if method not in (None, "auto", *methods):
            raise ValueError(f"calibration.method: {method} counts the equal steps of int8; {self.scheme} takes {', '.join(methods)}")
        return self

    @property
    def scans(self) -> bool:
        """Whether the sensitivity of each layer is measured."""
        return self.sensitivity or self.mixed_precision is not None

    @property
    def compares(self) -> bool:
        """Whether some choice compares the quantized model with the float one."""
        return self.calibration.method == "auto" or self.bias_correction or self.scans or "auto" in (self.attention, self.residual)

    def bits(self, context: Context) -> int:
        """Returns the bits of a weight with `auto` resolved."""
        row = SCHEMES[self.scheme]
        if not row.choose_bits:
            return row.weight_bits
        if self.weight_bits != "auto":
            return self.weight_bits
        floats = row.activations == "dynamic" and all(ENGINES[engine].float_tokens for engine in context.target.engines)
        from foundation.schemes.int8 import weight_bits

        return 8 if floats else weight_bits(context.target.device)

    @property
    def smoothing(self) -> SmoothQuant | None:
        """The smoothing options; None for no smoothing."""
        if not SCHEMES[self.scheme].smoothed:
            return None
        return SmoothQuant() if self.smoothquant is True else self.smoothquant or None

    @property
    def range_by(self) -> GroupRange:
        """What the range of a group is chosen by, with `auto` resolved; weights for a scheme without groups."""
        if self.group_range != "auto":
            return self.group_range
        return "outputs" if SCHEMES[self.scheme].grouped else "weights"

    @property
    def groups(self) -> Groups:
        """How the groups of int4 weights get their grids."""
        from quantize.group_scales import Groups

        return Groups(self.group_size, self.symmetric, self.range_by, self.group_scales)

    @property
    def learns_of_rows(self) -> bool:
        """Whether ranges, smoothing or weights are chosen by the calibration rows."""
        return bool(calibrators(self.scheme)) or self.smoothing is not None or self.learns_weights

    @property
    def learns_weights(self) -> bool:
        """Whether weights are rounded or rotated, or their scales chosen, by errors on the calibration rows."""
        return self.awq or self.rounding != "nearest" or self.range_by == "outputs" or self.rotation == "learned"

    @property
    def calibrator(self) -> Method | Literal["auto"] | None:
        """The calibration method for input ranges; None for a scheme without calibrated ranges."""
        return (self.calibration.method or self.default_method) if calibrators(self.scheme) else None

    @property
    def default_method(self) -> Method:
        """The calibration method if none is given; `auto` departs from it only for one that is nearer to float beyond chance."""
        smoothed = self.smoothing is not None and self.smoothing.prescale
        return "minmax" if smoothed else default_calibrator(self.scheme)
