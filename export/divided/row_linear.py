"""A row-parallel linear layer: each rank has some inputs, and the ranks add up their products.

    w8a8           sum of int32 sums, exact          y = float32(sum_r q_x,r @ q_w,r.T) * (s_x * s_w) + b
    w8a8-dynamic   the same, after the largest s_n   s_n = max_r s_n,r        the scale of a token covers all of its inputs
    other schemes  sum of float32 products           y = sum_r x_r @ W_r.T + b

Integers are added before they are rescaled, so that an int8 layer gives the bits of the undivided one; floats differ by the order of
additions. An int32 takes as many bytes as a float32 would.

The bias is added after the sum, by every rank, which then has the whole output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from export.divided.ranks import Ranks
from foundation.schemes.fp8 import STORED, Fp8Linear, fp8_matmul
from foundation.schemes.int8 import ACTIVATION_HIGH, DynamicInt8Linear, Int8Linear, check_finite, int8_matmul, quantize, token_scale
from foundation.schemes.weight_only import WeightOnlyLinear


class RowLinear(nn.Module):
    """A layer that is divided along its inputs.

    Args:
        layer: What this rank holds of it, with the whole bias; `nn.Linear` or a quantized layer.
        ranks: The ranks that hold the rest.
    """

    def __init__(self, layer: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Returns the whole output [..., O] for the inputs [..., I / N] of this rank, in the dtype of the input.

        Raises:
            InputError: The input of a quantized layer holds NaN or infinity; the message names the layer.
        """
        match self.layer:
            case Int8Linear():
                return self._int8(self.layer, x)
            case DynamicInt8Linear():
                return self._dynamic(self.layer, x)
            case Fp8Linear():
                return self._fp8(self.layer, x)
            case nn.Linear() | WeightOnlyLinear():
                return self._floating(self.layer, x)
        raise TypeError(f"no such layer: {type(self.layer).__name__}")

    def _int8(self, layer: Int8Linear, x: Tensor) -> Tensor:
        check_finite(layer.name, x)
        sums_NO = self.ranks.sum(int8_matmul(layer.codes(x.float()).reshape(-1, layer.in_features), layer.weight))
        return layer.finished(sums_NO.float() * (layer.input_scale * layer.weight_scale), x)

    def _dynamic(self, layer: DynamicInt8Linear, x: Tensor) -> Tensor:
        check_finite(layer.name, x)
        x_NI = layer.divided(x.float()).reshape(-1, layer.in_features)
        scale_N1 = self.ranks.largest(token_scale(x_NI))
        sums_NO = self.ranks.sum(int8_matmul(quantize(x_NI, scale_N1, -ACTIVATION_HIGH, ACTIVATION_HIGH), layer.weight))
        return layer.finished(sums_NO.float() * scale_N1 * layer.weight_scale, x)

    def _fp8(self, layer: Fp8Linear, x: Tensor) -> Tensor:
        check_finite(layer.name, x)
        products_NO = fp8_matmul(layer.codes(x.float()).reshape(-1, layer.in_features), layer.weight.view(STORED))
        return layer.finished(self.ranks.sum(products_NO) * (layer.input_scale * layer.weight_scale), x)

    def _floating(self, layer: nn.Linear | WeightOnlyLinear, x: Tensor) -> Tensor:
        weight_OI: Any = (
            layer.weight if isinstance(layer, nn.Linear) else layer.dequantized() if layer.cached_OI is None else layer.cached_OI
        )
        y = self.ranks.sum(nn.functional.linear(x, weight_OI.to(x.dtype)).float())
        return (y if layer.bias is None else y + layer.bias.float()).to(x.dtype)

    def extra_repr(self) -> str:
        """Describes the layer in a printed model."""
        return "divided along its inputs"


def with_rows(model: nn.Module, names: list[str], ranks: Ranks) -> None:
    """Replaces the layers of these names, which a rank holds a part of, by layers that add up over the ranks, in place."""
    for name in names:
        model.set_submodule(name, RowLinear(model.get_submodule(name), ranks))
