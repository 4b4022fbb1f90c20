"""AutoRound: learns offsets of weights before rounding, and the range of each group, by the error of a block's output.

Cheng et al. 2023, https://arxiv.org/abs/2309.05516. A block is a decoder or encoder layer with all its linear layers. Codes lie from n to
p. A group starts with the grid (s0, z0):

    l = alpha s0 (n - z0),   h = beta s0 (p - z0)        the ends of its range
    s = (h - l) / (p - n),   z = rint(n - l / s)         without zero points: s = alpha s0, z = 0
    d = clamp(rint(w / s + v), n - z, p - z)             the weight becomes s d
    min over v, alpha, beta   || block(x^; s d) - block(x; w) ||^2

v lies within 1/2 of 0, alpha and beta within 1/2 of 1; a step is

    v <- v - r sign(dL / dv),   alpha and beta alike,    r from 1 / steps down to 0, linearly

Two-level scales and offsets (`foundation.schemes.two_level`) stay multiples of the numbers that their super-blocks start with: s and the
offset m = -l are rounded to them. With offsets z = n + m / s is real, and d = clamp(rint((w + m) / s + v), 0, p - n) - m / s.

Rounding passes gradients on as if it were not there (straight-through), and clamping where it clamps nothing. With the gradient g of a
weight, A = sum g (d - [inside] w / s) and C = sum of g over the clamped weights of a group:

    dL / dv ~ [inside] g,   dL / dbeta ~ (p - z0) (A - C l / s),   dL / dalpha ~ (n - z0) ((p - n) C - A + C l / s)

up to positive factors, which a sign ignores; without zero points dL / dalpha ~ A. x are the inputs of the float block, x^ the inputs that
the rounded blocks before give, so that a block compensates their errors too.

Deviations: the paper starts with the smallest and largest weight of a group and only shrinks this range; here it starts with the range that
`group_scales` chose, and may widen it. The paper keeps the iterate with the least error of a batch; here it is the one with the least error
over all calibration rows among `LOOKS` + 1, the first of which is rounding to nearest: no block ends up worse than that. A weight of 0
stays 0: an offset of 1/2 is rounded to even.

Left out: rounded activations inside the loss.

Tensor names carry their shapes: I inputs, O outputs, G groups, g inputs of a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foundation.measure.closeness import replaced
from foundation.models.inputs.padding import real_rows
from foundation.schemes.int4 import expand, grouped
from foundation.schemes.scales import SMALLEST_SCALE, Grid
from foundation.schemes.two_level import LARGEST, integers, of_groups

LOOKS = 5
"""Iterates whose error over all rows is computed, evenly spaced, the last among them; besides the first."""


@dataclass(frozen=True)
class Options:
    """How rounding is learned."""

    steps: int
    batch_size: int
    """Rows of a step."""
    seed: int


@dataclass(frozen=True)
class Start:
    """The weight of a layer, and the grid that its learning starts with."""

    weight_OI: Tensor
    """float32, any smoothing put in."""
    grid: Grid
    """Scales float32 [O, G], zero points int8 [O, G] or offsets float32 [O, G] or neither, numbers of super-blocks or none."""
    group_size: int
    """Inputs that share a scale; the last group may be shorter."""
    low: int
    """Smallest code."""
    high: int
    """Largest code."""
    smooth_I: Tensor | None = None
    """The input is divided by it, float32."""


@dataclass(frozen=True)
class Learned:
    """The rounding of a layer."""

    codes_OI: Tensor
    """Codes less their zero points, or with offsets less the smallest code, int8."""
    grid: Grid

    def weight(self, start: Start) -> Tensor:
        """Returns the weight that these codes stand for, float32 [O, I], with smoothing undone."""
        inputs = self.codes_OI.shape[1]
        scale_OI = expand(self.grid.scale, start.group_size, inputs)
        weight_OI = self.codes_OI.float() * scale_OI
        if self.grid.offset is not None:
            weight_OI = weight_OI - expand(self.grid.offset, start.group_size, inputs)
        return weight_OI if start.smooth_I is None else weight_OI / start.smooth_I


@dataclass(frozen=True)
class Sample:
    """A batch of calibration rows at the input of a block."""

    run: Callable[[], Tensor]
    """Returns the output of the block with the weights that its layers have at the time."""
    target: Tensor
    """Output of the float block, float32, in the shape of the output; its first dimension counts rows."""
    features: Mapping[str, Tensor]
    """Features of the rows; where `attention_mask` marks padding, the output does not count."""

    def error(self) -> Tensor:
        """Returns the squared error of the output, float32 []."""
        return real_rows(self.run() - self.target, self.features).square().sum()

    def power(self) -> Tensor:
        """Returns the sum of squares of the target, float32 []."""
        return real_rows(self.target, self.features).square().sum()


class GivenLinear(nn.Module):
    """A linear layer that multiplies by a weight which changes from call to call."""

    weight: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input [..., I]."""
        return functional.linear(x, self.weight, self.bias)


class Iterate:
    """The offsets and ranges of a layer, as learned so far."""

    def __init__(self, start: Start) -> None:
        self._start, self._weight_OGg = start, grouped(start.weight_OI, start.group_size)
        self._offset_OGg = torch.zeros_like(self._weight_OGg)
        self._lower_OG, self._upper_OG = torch.ones_like(start.grid.scale), torch.ones_like(start.grid.scale)
        self._zero = start.grid.zero_point if start.grid.offset is None else start.low + start.grid.offset / start.grid.scale
        """What 0 is on the scale of the codes, a real number with offsets; None where it is 0."""

    def grid(self) -> Grid:
        """Returns scales, and zero points or offsets."""
        start, low, high = self._start.grid, self._start.low, self._start.high
        if self._zero is None:
            return start._replace(scale=_multiple(start.scale * self._lower_OG, start.super_scale, smallest=1))
        if start.offset is not None:
            offset_OG = self._lower_OG * start.offset
            width_OG = offset_OG + self._upper_OG * ((high - low) * start.scale - start.offset)
            scale_OG = _multiple(width_OG / (high - low), start.super_scale, smallest=1)
            return start._replace(scale=scale_OG, offset=_multiple(offset_OG, start.super_offset, smallest=0))
        low_OG, high_OG = self._ends(self._zero)
        scale_OG = _multiple(start.scale * ((high_OG - low_OG) / (high - low)), start.super_scale, smallest=1)
        zero_OG = (low - start.scale * low_OG / scale_OG).round().clamp(low, high).to(torch.int8)
        return start._replace(scale=scale_OG, zero_point=zero_OG)

    def learned(self) -> Learned:
        """Returns codes and grid."""
        grid = self.grid()
        code_OGg, _ = self._codes(grid)
        return Learned(self._cut(code_OGg).to(torch.int8), grid)

    def weight(self) -> Tensor:
        """Returns the rounded weight, float32 [O, I], with smoothing still in."""
        grid = self.grid()
        weight_OGg = self._codes(grid)[0] * grid.scale[:, :, None]
        return self._cut(weight_OGg if grid.offset is None else weight_OGg - grid.offset[:, :, None])

    def step(self, gradient_OI: Tensor, rate: float) -> None:
        """Moves offsets and ranges by a step against the gradient of the rounded weight, in place."""
        start, grid = self._start, self.grid()
        code_OGg, inside_OGg = self._codes(grid)
        gradient_OGg = grouped(gradient_OI, start.group_size)
        within_OGg = gradient_OGg * inside_OGg
        steps_OGg = code_OGg if grid.offset is None else code_OGg - (grid.offset / grid.scale)[:, :, None]
        of_scale_OG = (gradient_OGg * steps_OGg - within_OGg * self._weight_OGg / grid.scale[:, :, None]).sum(dim=2)
        if self._zero is None:
            self._lower_OG = _moved(self._lower_OG, of_scale_OG, rate, 1)
        else:
            zero_OG = self._zero
            clamped_OG = (gradient_OGg - within_OGg).sum(dim=2)
            low_OG = start.grid.scale * self._ends(zero_OG)[0] if grid.offset is None else -grid.offset
            of_range_OG = of_scale_OG - clamped_OG * low_OG / grid.scale
            of_lower_OG = (start.low - zero_OG) * ((start.high - start.low) * clamped_OG - of_range_OG)
            self._lower_OG = _moved(self._lower_OG, of_lower_OG, rate, 1)
            self._upper_OG = _moved(self._upper_OG, (start.high - zero_OG) * of_range_OG, rate, 1)
        self._offset_OGg = _moved(self._offset_OGg, within_OGg, rate, 0)

    def _ends(self, zero_OG: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the ends of the ranges in units of the scales at the start."""
        return self._lower_OG * (self._start.low - zero_OG), self._upper_OG * (self._start.high - zero_OG)

    def _codes(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns codes less zero points, or with offsets less the smallest code, float [O, G, g]; and whether nothing clamps them."""
        if grid.offset is not None:
            exact_OGg = ((self._weight_OGg + grid.offset[:, :, None]) / grid.scale[:, :, None] + self._offset_OGg).round()
            code_OGg = exact_OGg.clamp(0, self._start.high - self._start.low)
            return code_OGg, code_OGg == exact_OGg
        exact_OGg = (self._weight_OGg / grid.scale[:, :, None] + self._offset_OGg).round()
        zero_OG1 = 0 if grid.zero_point is None else grid.zero_point[:, :, None]
        code_OGg = exact_OGg.clamp(min=self._start.low - zero_OG1).clamp(max=self._start.high - zero_OG1)
        return code_OGg, code_OGg == exact_OGg

    def _cut(self, values_OGg: Tensor) -> Tensor:
        return values_OGg.flatten(1)[:, : self._start.weight_OI.shape[1]]


def _multiple(value_OG: Tensor, shared_OS: Tensor | None, smallest: int) -> Tensor:
    """Returns positive scales, or the multiples of the numbers of super-blocks next to scales or offsets."""
    if shared_OS is None:
        return value_OG.clamp(min=SMALLEST_SCALE)
    return integers(value_OG, shared_OS).clamp(smallest, LARGEST) * of_groups(shared_OS, value_OG.shape[1])


def autoround(
    model: nn.Module, layers: Mapping[str, nn.Linear], starts: Mapping[str, Start], samples: Sequence[Sample], options: Options
) -> tuple[dict[str, Learned], float, float]:
    """Learns the rounding of the layers of a block.

    Args:
        model: The model that `samples` run; the layers are replaced in it meanwhile.
        layers: The linear layers to round, by their path in the model.
        starts: Weight and grid of each.
        samples: The calibration rows.
        options: Steps, rows of a step, seed.

    Returns:
        The rounding by layer, and the squared errors of the block's output over all rows: with rounding to nearest, and with the result.
    """
    iterates = {name: Iterate(starts[name]) for name in layers}
    best, nearest, least = {}, 0.0, float("inf")
    given = {name: GivenLinear(layer) for name, layer in layers.items()}
    with replaced(model, given):
        drawn = draw(samples, options)
        for step in range(options.steps + 1):
            if step in {options.steps * look // LOOKS for look in range(LOOKS + 1)}:
                with torch.no_grad():
                    _put(given, starts, {name: iterate.weight() for name, iterate in iterates.items()})
                    error = sum(float(sample.error()) for sample in samples)
                nearest = nearest if step else error
                if error < least:
                    best, least = {name: iterate.learned() for name, iterate in iterates.items()}, error
            if step == options.steps or not nearest:
                break
            gradients = _gradients(given, starts, iterates, next(drawn))
            for name, gradient_OI in gradients.items():
                iterates[name].step(gradient_OI, (1 - step / options.steps) / options.steps)
    return best, nearest, least


def draw(samples: Sequence[Sample], options: Options) -> Iterator[list[Sample]]:
    """Yields the samples of each step: at least `batch_size` rows, if there are so many; all samples once before one comes again."""
    generator, left = torch.Generator().manual_seed(options.seed), deque[Sample]()
    while True:
        step: list[Sample] = []
        while sum(len(sample.target) for sample in step) < options.batch_size and len(step) < len(samples):
            if not left:
                left.extend(samples[index] for index in torch.randperm(len(samples), generator=generator).tolist())
            step.append(left.popleft())
        yield step


def _gradients(
    given: Mapping[str, GivenLinear], starts: Mapping[str, Start], iterates: Mapping[str, Iterate], samples: Iterable[Sample]
) -> dict[str, Tensor]:
    """Returns the gradient of the squared error with respect to each rounded weight; none for a layer that did not run."""
    weights = {name: iterate.weight().requires_grad_() for name, iterate in iterates.items()}
    with torch.enable_grad():
        for sample in samples:
            _put(given, starts, weights)
            sample.error().backward()  # type: ignore[no-untyped-call]
    return {name: weight_OI.grad for name, weight_OI in weights.items() if weight_OI.grad is not None}


def _put(given: Mapping[str, GivenLinear], starts: Mapping[str, Start], weights: Mapping[str, Tensor]) -> None:
    for name, layer in given.items():
        smooth_I = starts[name].smooth_I
        layer.weight = weights[name] if smooth_I is None else weights[name] / smooth_I


def _moved(values: Tensor, gradient: Tensor, rate: float, centre: int) -> Tensor:
    """Returns values after a signed step, within 1/2 of their centre."""
    return (values - rate * gradient.sign()).clamp(centre - 0.5, centre + 0.5)
