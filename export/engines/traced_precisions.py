"""Precisions of the layers of a model that OpenVINO converted from a torch trace, read off its runtime models."""

from __future__ import annotations

from collections.abc import Sequence

import openvino

from export.engines.openvino import PRECISIONS, RuntimeLayer

ROOT = "__module.model."
"""Prefix of the names in the trace."""
INTEGERS = ("i8", "u8")
INT8_WEIGHTS = "w8a16"
"""Int8 weights, multiplied in float."""
ATTENTION_PRODUCTS = ("qk", "pv")


def traced_precisions(gemms: Sequence[str], compiled: Sequence[openvino.CompiledModel], head: str, exact: bool) -> dict[str, str]:
    """Returns the precision of each GEMM node of the ONNX graph of the same model; int8 where both sides of the product are integers.

    Args:
        gemms: Names of the nodes; the last one gives the logits.
        compiled: The compiled models that the layers are in.
        head: Name of the node that gives the logits in the trace.
        exact: Whether the engine leaves float inputs as they are, and does not quantize tokens by itself.
    """
    layers = [RuntimeLayer(node) for model in compiled for node in model.get_runtime_model().get_ops()]
    layers = [layer for layer in layers if layer.is_gemm or layer.is_fused]
    found = {gemm: _layer(gemm, layers) for gemm in gemms}
    if gemms and found[gemms[-1]] is None:  # the product that gives the logits goes by the name of the output
        found[gemms[-1]] = next((layer for layer in layers if layer.comes_from(head)), None)
    told = {gemm: _precision(layer, exact) for gemm, layer in found.items() if layer is not None}
    # a product after a smoothed input loses its name; what those are is known where all without a name run alike
    lost = (layer for layer in layers if layer.is_product and layer not in found.values() and not layer.belongs_to(ROOT))
    rest = {_precision(layer, exact) for layer in lost}
    if len(rest) == 1:
        told |= dict.fromkeys((gemm for gemm, layer in found.items() if layer is None), rest.pop())
    return {gemm: precision for gemm, precision in told.items() if precision is not None}


def _layer(gemm: str, layers: Sequence[RuntimeLayer]) -> RuntimeLayer | None:
    """Returns the layer that a GEMM node of the ONNX graph became, by the path of its module; None where no layer has its name."""
    module, _, product = gemm.rpartition("/")
    of_attention = product in ATTENTION_PRODUCTS
    return next((layer for layer in layers if layer.is_product != of_attention and layer.belongs_to(f"{ROOT}{module}/")), None)


def _precision(layer: RuntimeLayer, exact: bool) -> str | None:
    """Returns the precision of a layer's product.

    Args:
        layer: The layer.
        exact: Whether the engine leaves float inputs as they are. Where it may quantize tokens by itself, a layer with int8 weights and a
            float input does not show what it multiplies: None.
    """
    first, second = layer.types[:2]
    if second not in INTEGERS:
        return PRECISIONS.get(second, second)
    if first in INTEGERS:
        return PRECISIONS["i8"]
    return INT8_WEIGHTS if exact else None
