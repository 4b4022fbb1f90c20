"""Linear layers whose weights stay in their files: views of memory-mapped files (`foundation.artifacts.shards`), in the dtype of the file.

    y[:, a:b] = x @ float32(W[a:b]).T + b[a:b]        for as many outputs at a time as fit into `WORK_BYTES`

Changes made while quantizing a large model are not written to the weight but stored next to it and applied to the rows in use: smoothing
factors for inputs and outputs, and the grid that weights are rounded to. A float32 weight is used directly, without a copy.

Shape suffixes: I inputs, O outputs, H channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from foundation.schemes.fp8 import Fp8Scales
from foundation.schemes.int4 import Int4Scales
from foundation.schemes.int8 import DynamicScales, LayerScales
from foundation.schemes.int8_weights import WeightScales

WORK_BYTES = 16 * 2**20
"""Float32 weights to hold at a time in a product, in bytes."""
ROUND_BYTES = 2 * 2**20
"""The same for rounding, which creates about ten tensors of that size."""
AnyScales = LayerScales | DynamicScales | WeightScales | Int4Scales | Fp8Scales
S = TypeVar("S", bound=AnyScales)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: StoredLinear) -> Tensor:
    """Returns `x @ weight.T + bias` for a stored weight.

    A separate function, so that torch function modes can intercept it like `torch.nn.functional.linear`; `quantize.folding` relies on that.
    """
    if has_torch_function((x, weight)):
        result: Tensor = handle_torch_function(linear, (x, weight), x, weight, bias, layer)
        return result
    if layer.held is not None or layer.is_plain:
        return functional.linear(x, weight if layer.held is None else layer.held, bias)
    y = x.new_empty(*x.shape[:-1], layer.out_features)
    for start, stop in layer.parts():
        y[..., start:stop] = functional.linear(x, layer.rows(start, stop), None if bias is None else bias[start:stop])
    return y


class StoredLinear(nn.Linear):
    """A linear layer whose weight stays in its file, in its stored float dtype.

    Factors for inputs and outputs, and the grid that the weights are rounded to, are stored separately and applied to the rows in use.

    Args:
        weight_OI: The stored weight, of any float dtype; for a `Conv1D` a transposed view of it.
        bias_O: float32, or None.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__(weight_OI.shape[1], weight_OI.shape[0], bias_O is not None, device="meta")
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        if bias_O is not None:
            self.bias = nn.Parameter(bias_O, requires_grad=False)
        self.grid: AnyScales | None = None
        self.held: Tensor | None = None
        """All rows, float32 [O, I], while `held` keeps them."""
        self._factors: list[tuple[str, Tensor]] = []
        self._loaded = False

    @property
    def is_plain(self) -> bool:
        """Whether the weight can be used directly: contiguous float32, without factors or grid."""
        return self.weight.dtype == torch.float32 and self.weight.is_contiguous() and not self._factors and self.grid is None

    def load(self) -> None:
        """Copies the weight into memory as float32, for callers that change it in place."""
        self.weight.data = torch.cat([self.rows(start, stop) for start, stop in self.parts()])
        self._factors, self._loaded = [], True

    def store(self, weight_OI: Tensor, grid: AnyScales) -> None:
        """Replaces the weight with a stored one that is on `grid`, up to the rounding of its stored dtype."""
        self.weight.data, self.grid, self._factors, self._loaded = weight_OI, grid, [], False

    def divide_outputs(self, factor_O: Tensor) -> None:
        """Divides the output of the layer, including the bias, by a factor float32 `[O]`."""
        if self._loaded:
            self.weight.data = self.weight.data / factor_O[:, None]
        else:
            self._factors.append(("outputs", factor_O))
        if self.bias is not None:
            self.bias.data = self.bias.data / factor_O

    def multiply_inputs(self, factor_I: Tensor) -> None:
        """Multiplies the input of the layer by a factor float32 `[I]`."""
        if self._loaded:
            self.weight.data = self.weight.data * factor_I
        else:
            self._factors.append(("inputs", factor_I))

    def parts(self, work_bytes: int = WORK_BYTES) -> list[tuple[int, int]]:
        """Splits the outputs into ranges (start, stop) whose float32 weights take at most `work_bytes`, but at least one output each."""
        step = max(1, work_bytes // (4 * max(1, self.in_features)))
        return [(start, min(start + step, self.out_features)) for start in range(0, self.out_features, step)]

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns the weights of outputs start to stop, contiguous float32 `[stop - start, I]`; read-only."""
        if self.is_plain:
            return self.weight.detach()[start:stop]
        rows_OI = torch.empty(stop - start, self.in_features).copy_(self.weight.detach()[start:stop])
        for side, factor in self._factors:
            if side == "inputs":
                rows_OI *= factor
            else:
                rows_OI /= factor[start:stop, None]
        return rows_OI if self.grid is None else rows_of(self.grid, start, stop).on_grid(rows_OI)

    def part(self, start: int, stop: int) -> nn.Linear:
        """Returns a float32 layer with only the outputs start to stop."""
        part = nn.Linear(self.in_features, stop - start, self.bias is not None, device="meta")
        part.weight = nn.Parameter(self.rows(start, stop), requires_grad=False)
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias.detach()[start:stop], requires_grad=False)
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output [..., O] for an input float32 [..., I]."""
        return linear(x, self.weight, self.bias, self)


@contextmanager
def held(module: nn.Module, most_bytes: int) -> Iterator[None]:
    """Keeps the float32 rows of the stored layers of a module in memory while it is open, if all of them fit into so many bytes.

    For a pass over many batches, each of which would make them from the file again. The layers must not change meanwhile.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, StoredLinear)]
    try:
        if 4 * sum(layer.weight.numel() for layer in layers) <= most_bytes:
            for layer in layers:
                layer.held = torch.cat([layer.rows(start, stop) for start, stop in layer.parts()])
        yield
    finally:
        for layer in layers:
            layer.held = None


class StoredEmbedding(nn.Embedding):
    """An embedding whose table stays in its file; looked-up entries are converted to float32."""

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of ids, float32 [..., H]."""
        return functional.embedding(ids, self.weight, self.padding_idx).float()


def rows_of(scales: S, start: int, stop: int) -> S:
    """Returns the scales of the outputs start to stop of a layer."""
    if isinstance(scales, Int4Scales):
        return type(scales).of_grid(scales.grid.rows(start, stop), scales.group_size)
    return dataclasses.replace(scales, weight_scale=scales.weight_scale[start:stop])


@dataclass(frozen=True)
class WeightParts:
    """Iterates over the weights of layers as float32 matrices of a few outputs each, recomputed on every pass."""

    layers: Sequence[nn.Linear]

    def __iter__(self) -> Iterator[Tensor]:
        for layer in self.layers:
            if isinstance(layer, StoredLinear):
                yield from (layer.rows(start, stop) for start, stop in layer.parts(ROUND_BYTES))
            else:
                yield layer.weight.detach()
