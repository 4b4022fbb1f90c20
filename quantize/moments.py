"""Moments: second moments and mean magnitudes of a layer's inputs, in memory independent of the number of rows.

    H = 1/N sum_n x_n x_n^T  [I, I]        m = 1/N sum_n |x_n|  [I]

With d = W - Q(W), H gives the exact squared output error over the calibration rows, independently for each row o of W:

    1/N sum_n ||x_n W^T - x_n Q(W)^T||^2 = sum_o d_o H d_o^T

so `gptq`, `adaround` and `awq` need only H (and m). Both sums are accumulated in float32 while the model runs. All layers share one pass if
their moments fit into `MOST_BYTES`; otherwise each group of layers that fits takes a pass, and its moments are freed before the next one.

Which network computes the inputs is up to the caller: for AWQ the float one, for rounding the one rounded so far (`rounding`).

Tensor names carry their shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantize.calibration import Observed, collect

MOST_BYTES = 4 * 2**30


@dataclass
class Moments:
    """The sums over all rows so far."""

    product_II: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Sum of x x^T, float32 [I, I], on the device of the rows; empty before the first row."""
    magnitude_I: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Sum of |x|, float32 [I]."""
    total: int = 0
    """Number of rows so far."""

    def add(self, x_NI: Tensor) -> None:
        """Adds rows, float [N, I]; raises ValueError if a value is NaN or infinite."""
        if not len(x_NI):
            return
        x_NI = x_NI.detach().float()
        magnitude_I = x_NI.abs().sum(dim=0)
        if not bool(magnitude_I.isfinite().all()):
            raise ValueError("NaN or infinite value")
        if not self.total:
            self.product_II, self.magnitude_I = x_NI.new_zeros(x_NI.shape[1], x_NI.shape[1]), x_NI.new_zeros(x_NI.shape[1])
        self.product_II += x_NI.T @ x_NI
        self.magnitude_I += magnitude_I
        self.total += len(x_NI)

    @property
    def hessian_II(self) -> Tensor:
        """H, float32 [I, I]."""
        return self.product_II / max(1, self.total)

    @property
    def mean_I(self) -> Tensor:
        """m, float32 [I]."""
        return self.magnitude_I / max(1, self.total)

    def divided(self, factor_I: Tensor) -> Moments:
        """Returns the moments of x / factor, for a positive factor float32 [I]."""
        return Moments(self.product_II / factor_I / factor_I[:, None], self.magnitude_I / factor_I, self.total)


def output_errors(weight_OI: Tensor, rounded_OI: Tensor, hessian_II: Tensor) -> Tensor:
    """Returns the mean squared error of each output, float64 [O]: d H d^T for each row d of the difference.

    Args:
        weight_OI: float32.
        rounded_OI: float32.
        hessian_II: float32.
    """
    difference_OI = (weight_OI - rounded_OI).double()
    return ((difference_OI @ hessian_II.double()) * difference_OI).sum(dim=1)


def in_groups(units: Sequence[Sequence[str]], layers: Mapping[str, nn.Linear], most_bytes: int) -> list[list[str]]:
    """Splits layers, in order, into groups whose moments fit into memory together.

    Args:
        units: Layers that read the same tensor; they stay in one group.
        layers: The layers by name.
        most_bytes: Memory limit; a unit that exceeds it by itself forms its own group.

    Returns:
        The names of each group's layers.
    """
    groups: list[list[str]] = []
    used = most_bytes
    for unit in units:
        size = 4 * max(layers[name].in_features for name in unit) ** 2
        if used + size > most_bytes:
            groups.append([])
            used = 0
        groups[-1] += unit
        used += size
    return groups


def observe(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    units: Sequence[Sequence[str]],
    batches: Callable[[], Iterable[Mapping[str, Tensor]]],
    forward: Callable[[nn.Module, Mapping[str, Tensor]], object],
    smooth: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[list[str], Observed[Moments]]]:
    """Yields the layers group by group with the moments of their inputs; each group takes one pass over the rows.

    Args:
        model: The model; may be changed between groups as long as it computes the same.
        layers: The layers by name.
        units: Layers that read the same tensor; every layer is in one unit.
        batches: Starts a pass over the calibration rows.
        forward: Runs the model on a batch.
        smooth: Smoothing factors by layer, float32 [I], by which inputs are divided first.
    """
    for names in in_groups(units, layers, MOST_BYTES):
        yield names, collect(model, {name: layers[name] for name in names}, batches(), forward, Moments, smooth)
