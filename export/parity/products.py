"""Parity of the sites besides the linear layers: does an engine quantize and multiply there what torch does?

As in `export.parity.parity`, on the engine's own tensors: for a product Y = A B of attention A and B, their codes q_A and q_B, and Y; for a
residual r and its codes.

    q = clamp(rint(x / s), -128, 127)                as `foundation.schemes.int8` computes it from the same x, but within 1e-3 of a rounding
    boundary rint(Y / (s_A * s_B)) = q_A @ q_B                exactly, from the engine's own codes

Where a multiplication by a constant follows the product, Y is taken after it: with the product itself as an output, OpenVINO's dynamic
mode returns it multiplied by s_A * s_B twice (seen on ViT), though what it computes from there is right. The inputs of the linear layers
have to be probed together with the sites: else ONNX Runtime moves the rounding of the layer that reads P V to the product itself, and P V
is seen rounded. A residual whose codes a linear layer reads too is compared there.

Left out: that the engine computes these in int8 when nobody looks at the tensors in between; `export.share` counts what its graph says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from export.parity.parity import LayerParity, compare_codes
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array

RESIDUAL_CODES = ".residual.quantized"


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor and its codes, by their names in the graph."""

    input: str
    codes: str
    scale: NDArray[np.float32]
    """float32 []."""


@dataclass(frozen=True)
class QuantizedSite:
    """A site of a Q/DQ graph."""

    site: str
    operands: tuple[QuantizedTensor, ...]
    """Inputs: A and B of a product, or the residual."""
    output: str | None = None
    """Output: Y of a product, or Y times a constant."""
    factor: float = 1.0
    """That constant."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all its tensors."""
        names = [name for operand in self.operands for name in (operand.input, operand.codes)]
        return (*names, *([] if self.output is None else [self.output]))


def quantized_sites(model: Graph) -> list[QuantizedSite]:
    """Returns the sites of a Q/DQ model of `export.graph.qdq`, in graph order."""
    graph = model.load().graph
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for tensor in node.input:
            readers.setdefault(tensor, []).append(node)
    producer = {output: node for node in graph.node for output in node.output}
    constant = {tensor.name: tensor for tensor in graph.initializer}

    def codes_of(tensor: str) -> QuantizedTensor | None:
        source = producer.get(tensor)
        if source is None or source.op_type != "DequantizeLinear" or source.input[0] in constant:
            return None
        quantizes = producer[source.input[0]]
        scale = np.array(numpy_helper.to_array(constant[quantizes.input[1]]), np.float32)
        return QuantizedTensor(quantizes.input[0], quantizes.output[0], scale)

    sites = []
    for node in graph.node:
        found = [codes for codes in map(codes_of, node.input) if codes is not None]
        if node.op_type == "MatMul" and len(found) == 2:
            sites.append(QuantizedSite(node.name, tuple(found), *_scaled(node.output[0], readers, constant)))
        elif node.op_type == "Add" and len(found) == 1 and found[0].codes.endswith(RESIDUAL_CODES):
            sites.append(QuantizedSite(f"{found[0].codes.removesuffix(RESIDUAL_CODES)}/residual", tuple(found)))
    return sites


def _scaled(output: str, readers: Mapping[str, Sequence[onnx.NodeProto]], constant: Mapping[str, onnx.TensorProto]) -> tuple[str, float]:
    """Returns the tensor that a product is read at, and its factor."""
    follower = readers[output][0]
    factors = [constant[tensor] for tensor in follower.input if tensor in constant]
    if len(readers[output]) == 1 and follower.op_type == "Mul" and factors and not factors[0].dims:
        return follower.output[0], float(numpy_helper.to_array(factors[0]))
    return output, 1.0


def compare_site(site: QuantizedSite, tensors: Mapping[str, Array]) -> LayerParity:
    """Compares one site on the tensors that an engine was probed for."""
    compared = [compare_codes(tensors[operand.input], tensors[operand.codes], operand.scale) for operand in site.operands]
    codes = sum(tensors[operand.codes].size for operand in site.operands)
    different, allowed = (sum(counts) for counts in zip(*compared, strict=True))
    if site.output is None:
        return LayerParity(site.site, codes, different, allowed, 0, 0)
    left, right = (tensors[operand.codes].astype(np.float64) for operand in site.operands)
    y, sums = tensors[site.output].astype(np.float64), left @ right
    scale = site.factor * float(np.prod([operand.scale.astype(np.float64) for operand in site.operands]))
    # an engine that multiplies in float rounds by some 2^-24 of the sizes that it adds up
    wrong = np.abs(y / scale - sums) > 2.0**-22 * (np.abs(left) @ np.abs(right))
    return LayerParity(site.site, codes, different, allowed, sums.size, int((wrong & (np.rint(y / scale) != sums)).sum()))


def compare_sites(sites: Sequence[QuantizedSite], tensors: Mapping[str, Array]) -> list[LayerParity]:
    """Compares every site on the tensors that an engine was probed for."""
    return [compare_site(site, tensors) for site in sites]
