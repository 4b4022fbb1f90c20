"""Quantization-aware training with a true-int8 forward pass: training computes with the same integers as serving.

Each selected linear layer quantizes its input x and weight W, multiplies the codes exactly and rescales once (`compress.schemes.int8`):

    v = x / s                      s: s_x of the tensor for x, s_w[o] of the output channel for W
    q = clamp(rint(v), -Q_N, Q_P)  Q_N, Q_P = 128, 127 for x; L, L with L = 127 (8 bits) or 63 (7 bits) for W
    y = float32(q_x @ q_w.T) * (s_x * s_w) + b

The backward pass uses the straight-through estimator (https://arxiv.org/abs/1308.3432): with x^ = s_x q_x, W^ = s_w q_w, g the gradient of
y

    dx = 1[-Q_N < v < Q_P] * (g @ W^),   dW = 1[-L < v < L] * (g.T @ x^)        both products in bfloat16 under autocast
    ds = 1 / sqrt(I * Q_P) * sum of dx^ * slope,   dx^ = g @ W^ for s_x, g.T @ x^ for s_w
    slope = q outside,  q - v inside     lsq:  Esser et al. 2020, https://arxiv.org/abs/1902.08153, eq. 3 and section 2.2
    slope = q outside,  0 inside         pact: Choi et al. 2018, https://arxiv.org/abs/1805.06085, section 3, for both signs, alpha = s Q_P

A value that rounds to Q_P but is below it counts as inside and gets a gradient; a value at or beyond Q_P counts as outside, as in LSQ.
Codes cannot distinguish the two, but the slope can: inside its magnitude is at most 1/2, outside it is Q_P or -Q_N. Only codes (int8) and
slope are saved for the backward pass. The slope of lsq has the dtype of the products (3 bytes per value in total with bfloat16), that of
pact is int8 (2 bytes in total). No float copy of x or W is saved.

A scale is learned relative to its calibrated value, s = s_0 * (1 + k p), starting at p = 0. AdamW changes p by about the learning rate per
step, whatever the gradient's magnitude, so s changes by k times that fraction of s_0 in every layer: k is how much faster scales learn than
weights. Layers that read the same tensor share one s_x, as an exported graph quantizes that tensor once.

    loss = (1 - a) * task loss + a * T^2 KL(softmax(t / T) || softmax(z / T))       t: logits of the model before quantization

(Hinton et al. 2015, https://arxiv.org/abs/1503.02531; regression: a * (z - t)^2; generation: means over the tokens of a block), or the
losses named in `loss` or `losses` (`compress.training.distilled`). Not supported: PACT's L2 penalty on alpha (scales start calibrated and
move little); PACT for weights (their scales then stay fixed); gradient estimators other than straight-through.

Convolutions are trained in the same way (`qat_convolution`).

Tensor names carry their shapes: N rows (tokens), I inputs, O outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from compress.core.tasks import TASKS
from compress.machine.device import computing_device
from compress.measure.closeness import distance, place
from compress.measure.metrics import primary
from compress.measure.predictions import compared
from compress.models.origin import Origin, same_shape
from compress.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, LayerScales, int8_linear, int8_matmul, levels
from compress.schemes.int8_convolution import CONVOLUTIONS
from compress.stage.context import Context
from compress.stage.distillation import Distillation, DistillationSettings, SettingKeys
from compress.training.distilled import attention_as_before, distillation_objective
from compress.training.selection import EVALUATION_BATCH, selection_metric
from compress.training.supervised import supervised
from compress.training.train import Batch, History, Objective, TrainConfig, Training, train
from quantize.qat_convolution import QatConvolution
from quantize.straight_through import Int8Arithmetic, Scale, codes_and_slope, only_inside

if TYPE_CHECKING:
    from compress.standalone.preprocess import Preprocessor

Learned = Literal["lsq", "pact", "fixed"]
Select = Callable[[nn.Module], float] | None


class Qat(DistillationSettings):
    """Settings of quantization-aware training."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 1
    """Passes over the train split; 0.5 is half a pass."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Peak learning rate: 1e-6 for an encoder that is close to float after calibration, up to its finetuning rate if much accuracy was
    lost."""
    scale_learning_rate: Annotated[float, Field(gt=0, le=10_000)] = 10
    """How many times faster scales learn than weights: a step changes a scale by about this times the learning rate, as a fraction."""
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rows per step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows in memory at once, if a whole batch does not fit."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the steps over which the learning rate rises from 0."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate decays to 0 after the warm-up; constant: no decay."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Decoupled weight decay of weight matrices; biases, norms and scales are not decayed."""
    scales: Learned = "lsq"
    """lsq: learn all scales from rounding and clipping errors; pact: learn input scales from clipping errors only; fixed: learn none."""
    soft_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the soft targets in the loss; the labels get the rest. 1 trains only to reproduce the model before quantization. Unused
    with `loss` or `losses`."""
    dropout: bool = False
    """Whether to use dropout. Its noise is much larger than the rounding error that the training adapts to."""
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the selection split; absent: once per epoch."""
    keep: Literal["best", "last"] = "best"
    """Which weights and scales to keep: the best on the selection split, including those before training, or the last. Best is closest to
    the teacher's logits if there is a teacher, else best by the metric."""


class Int8Function(torch.autograd.Function):
    """y = x @ W.T + b in int8, with the straight-through gradients of the module docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        input_scale: Tensor,
        weight_scale_O: Tensor,
        bias_O: Tensor | None,
        fixed: Int8Arithmetic,
    ) -> Tensor:
        """Returns the output `[..., O]`, in the dtype of the backward products.

        Args:
            ctx: The autograd context.
            x: Float `[..., I]`, finite.
            weight_OI: float32 `[O, I]`.
            input_scale: float32 `[]`, positive.
            weight_scale_O: float32 `[O]`, positive.
            bias_O: float32 `[O]`, or None.
            fixed: The arguments without a gradient.
        """
        largest, pact, products = fixed.largest, fixed.pact, fixed.products
        outputs, inputs = weight_OI.shape
        learned_x, learned_w = ctx.needs_input_grad[2] and not pact, ctx.needs_input_grad[3]
        x_NI = x.reshape(-1, inputs)
        codes_NI, slope_NI = codes_and_slope(x_NI, input_scale, ACTIVATION_LOW, ACTIVATION_HIGH, products if learned_x else None)
        codes_OI, slope_OI = codes_and_slope(weight_OI, weight_scale_O[:, None], -largest, largest, products if learned_w else None)
        ctx.save_for_backward(codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O)
        ctx.shape, ctx.type, ctx.products, ctx.largest = x.shape, x.dtype, products, largest
        y_NO = int8_matmul(codes_NI, codes_OI).float().mul_(input_scale * weight_scale_O)
        if bias_O is not None:
            y_NO += bias_O
        return y_NO.reshape(*x.shape[:-1], outputs).to(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments of `forward`."""
        codes_NI, slope_NI, codes_OI, slope_OI, input_scale, weight_scale_O = ctx.saved_tensors
        (outputs, inputs), needs = codes_OI.shape, ctx.needs_input_grad
        # torch accumulates bfloat16 sums in float32 and rounds once, so no sum below needs a float32 copy
        g_NO = gradient.reshape(-1, outputs).to(ctx.products)
        grad_x = grad_W = grad_input_scale = grad_weight_scale = None
        if needs[0] or needs[2]:
            grad_NI = g_NO @ (codes_OI.float() * weight_scale_O[:, None]).to(ctx.products)
            slope_NI = slope_NI.to(ctx.products)
            if needs[2]:
                grad_input_scale = (grad_NI * slope_NI).sum().float() / math.sqrt(inputs * ACTIVATION_HIGH)
            grad_x = only_inside(grad_NI, slope_NI, -1, 1).reshape(ctx.shape).to(ctx.type)
        if needs[1] or needs[3]:
            grad_OI = (g_NO.T @ codes_NI.to(ctx.products)).float().mul_(input_scale)  # codes are exact in bfloat16, s_x * q is not
            slope_OI = slope_OI.float()
            if needs[3]:
                grad_weight_scale = (grad_OI * slope_OI).sum(dim=1) / math.sqrt(inputs * ctx.largest)
            grad_W = only_inside(grad_OI, slope_OI, -1, 1)
        grad_bias = g_NO.sum(dim=0).float() if needs[4] else None
        return grad_x, grad_W, grad_input_scale, grad_weight_scale, grad_bias, None


class QatLinear(nn.Linear):
    """A trainable linear layer with int8 arithmetic; in evaluation mode exactly `Int8Linear`.

    Args:
        name: Module path, for error messages.
        linear: The layer whose parameters it takes over.
        start: The initial scales.
        input_scale: Scale of the input; shared by layers that read the same tensor.
        weight_scale: Scale of each output channel.
        pact: Whether the input scale gets the gradient of PACT.
    """

    smooth: Tensor | None

    def __init__(self, name: str, linear: nn.Linear, start: LayerScales, input_scale: Scale, weight_scale: Scale, pact: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.name, self.bits, self.pact = name, start.weight_bits, pact
        self.input_scale, self.weight_scale = input_scale, weight_scale
        self.register_buffer("smooth", start.input_smooth)

    def scales(self) -> LayerScales:
        """Returns the current scales."""
        return LayerScales(self.weight_scale().detach(), self.input_scale().detach(), self.bits, self.smooth)

    def floating(self) -> nn.Linear:
        """Returns a plain linear layer with the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output `[..., O]` for an input `[..., I]`, in the autocast dtype if autocast is on and the layer is in training mode,
        else in the dtype of the input; without a gradient in evaluation mode.

        Raises:
            InputError: The input holds NaN or infinity; names the layer.
        """
        # Int8Linear raises if a value is not finite. The sum is a cheap first check: it may also overflow for large finite values.
        if not self.training or not torch.isfinite(x.detach().sum()):
            with torch.no_grad():
                evaluated: Tensor = int8_linear(self.name, self, self.scales())(x)
            if not self.training:
                return evaluated
        kind = x.device.type
        products = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        smoothed, weight_OI = (x, self.weight) if self.smooth is None else (x.float() * self.smooth.reciprocal(), self.weight * self.smooth)
        y: Tensor = Int8Function.apply(  # type: ignore[no-untyped-call]
            smoothed, weight_OI, self.input_scale(), self.weight_scale(), self.bias, Int8Arithmetic(levels(self.bits), self.pact, products)
        )
        return y if torch.is_autocast_enabled(kind) else y.to(x.dtype)


TRAINED = (QatLinear, QatConvolution)


def insert(
    model: nn.Module, scales: Mapping[str, LayerScales], group: Mapping[str, str], learned: Learned = "lsq", rate: float = 1.0
) -> None:
    """Replaces layers by `QatLinear` and `QatConvolution`, in place.

    Layers that read the same tensor (query, key and value) share one learned input scale. Whether they do is observed while the model runs
    (`calibration.collect`); equal initial scales do not show it.

    Args:
        model: A float model.
        scales: Initial scales, by module path; equal within a group.
        group: The group of each layer: layers that read the same tensor.
        learned: Which scales are trained, and how.
        rate: How many times faster scales learn than weights.
    """
    shared: dict[str, Scale] = {}
    for name, start in scales.items():
        layer: Any = model.get_submodule(name)
        device, tensor = layer.weight.device, group[name]
        if tensor not in shared:
            shared[tensor] = Scale(start.input_scale, rate, learned != "fixed").to(device)
        input_scale, weight_scale = shared[tensor], Scale(start.weight_scale, rate, learned == "lsq").to(device)
        assert float(input_scale.start) == float(start.input_scale), f"{name} and {tensor} read one tensor with two scales"
        pact = learned == "pact"
        trained: nn.Module
        if isinstance(layer, CONVOLUTIONS):
            trained = QatConvolution(name, layer, start, input_scale, weight_scale, pact)
        else:
            assert isinstance(layer, nn.Linear), f"{name} is {type(layer).__name__}"
            trained = QatLinear(name, layer, start, input_scale, weight_scale, pact)
        place(model, name, trained.to(device).train(layer.training))


def extract(model: nn.Module) -> dict[str, LayerScales]:
    """Replaces every layer of `insert` by a float layer with weights rounded to their grid, in place.

    Returns:
        The learned scales by module path; together with the weights they make a quantized checkpoint.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TRAINED)}
    scales = {name: layer.scales() for name, layer in layers.items()}
    for name, layer in layers.items():
        floating: Any = layer.floating()
        floating.weight.data = scales[name].on_grid(layer.weight.detach())
        place(model, name, floating.train(layer.training))
    return scales


def setting_keys(stage: str) -> SettingKeys:
    """Returns the recipe keys of the training settings and the teacher, given the id of the stage."""
    return SettingKeys(stage, f"stages.{stage}.qat", f"stages.{stage}.teacher")


def learn(
    model: nn.Module,
    scales: Mapping[str, LayerScales],
    group: Mapping[str, str],
    settings: Qat,
    context: Context,
    checkpoint: Path,
    label: str,
    teacher: Path | nn.Module | None = None,
) -> tuple[dict[str, LayerScales], History]:
    """Trains a float model in int8, in place; leaves it on the CPU in evaluation mode, with weights on the grids of the returned scales.

    Args:
        model: A loaded float checkpoint.
        scales: Initial scales by module path, from calibration.
        group: The group of each layer: layers that read the same tensor.
        settings: The training settings.
        context: Data, seed, progress, folder for training checkpoints.
        checkpoint: Folder of the model, for its tokenizer or image processor.
        label: Id of the stage, for progress bars and messages.
        teacher: Checkpoint of the teacher, or a loaded model with the same preprocessing; None for the incoming model itself.

    Returns:
        The learned scales by module path, and the history of the training.

    Raises:
        InputError: There are no rows, the input of a layer holds NaN or infinity, or the loss or a gradient became NaN or infinite.
    """
    from compress.models.checkpoint import load

    model.to(computing_device())
    folder = teacher if isinstance(teacher, Path) else checkpoint
    prepared, theirs = (context.preprocessor(of) for of in (checkpoint, folder))
    taught_by: nn.Module | None = None
    if settings.distill:
        given = load(teacher) if isinstance(teacher, Path) else teacher
        taught_by = (copy.deepcopy(model) if given is None else given).to(computing_device())
    select, higher_is_better = _selection(taught_by, context, prepared, theirs)
    with attention_as_before(model):
        objective = supervised(context.task)
        if taught_by is not None:
            part = Origin.of_config(model.config) if same_shape(model.config, taught_by.config) else None
            distillation = Distillation(settings, setting_keys(label), model, checkpoint, prepared, taught_by, theirs, part)
            objective = distillation_objective(distillation, context).to(computing_device())
        insert(model, scales, group, settings.scales, settings.scale_learning_rate)
        training = Training.of(
            context,
            prepared,
            TrainConfig.of(settings, look_first=True),
            label,
            select=select,
            higher_is_better=higher_is_better,
            depends=settings.model_dump(mode="json"),
        )
        history = train(model, objective if settings.dropout else WithoutDropout(objective), training)
    return extract(model.cpu()), history


def _selection(teacher: nn.Module | None, context: Context, prepared: Preprocessor, theirs: Preprocessor) -> tuple[Select, bool]:
    """Returns the function that scores weights on selection rows, and whether higher is better.

    With a teacher the score is the distance to its logits (`compress.measure.closeness`), which separates candidates on a few hundred rows
    where labels cannot. Without a teacher, and for text generation, it is the primary metric.
    """
    rows = context.data.selection.rows
    if teacher is None or TASKS[context.task].answer == "tokens" or not rows:
        return selection_metric(context, prepared), primary(context.task).higher_is_better
    before = compared(teacher, theirs, rows, EVALUATION_BATCH)
    return lambda now: distance(context.task, before, compared(now, prepared, rows, EVALUATION_BATCH)), False


class WithoutDropout(nn.Module):
    """An objective that keeps the model in evaluation mode, except its int8 layers.

    Args:
        objective: The wrapped objective.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the loss terms by name, float32 `[b]` each."""
        for module in model.modules():
            module.training = isinstance(module, TRAINED)
        return self.objective(model, batch)
