"""The integers of a quantized checkpoint in the graph of `export.generation.cached_graph`: codes as constants, next to their scales.

    weights int8      Constant(i8 [O, I]) -> Convert -> Multiply(scale [O, 1])
    weights int4      Constant(i4 [O, G, g]) -> Convert -> Multiply(scale [O, G, 1]) -> Reshape [O, I]
    with zero points  Constant(u4 [O, G, g]) -> Convert -> Subtract(Constant(u4 [O, G, 1]) -> Convert) -> Multiply -> Reshape
    with offsets      Constant(u4 [O, G, g]) -> Convert -> Subtract(offset / scale, float32 [O, G, 1]) -> Multiply -> Reshape
    static w8a8       Multiply of the input by 1 / s -> Round -> FakeQuantize, 256 levels from -128 to 127, out from -128 s to 127 s
    smoothed inputs   Multiply of the input by 1 / v
    tables int8       Constant(i8 [V, D]) -> Convert -> Multiply(scale [V, 1]), read by the look-up of embeddings and by the head

OpenVINO keeps such constants as integers: it multiplies i8 by i8 where the input is a FakeQuantize, and reads weights in i8, i4 or u4 where
the input is float. Where the last group of an int4 layer is shorter, all its groups are cut to the largest width that divides both.

FakeQuantize alone would round otherwise than torch: OpenVINO computes rint(x * a + b) with a = 255 / (high - low), b = -low * a in float32.
With b at 128 the sum is 1.5e-5 coarse, and for some scales b is 128.00002, which lifts values just below a boundary. In a small
Qwen2-MoE that turned one code in 200,000, and through attention moved the logits of a third of all tokens. Behind Round the input is an
integer and the sum is exact. OpenVINO runs Multiply, Round and FakeQuantize as one node.

Beside static int8 layers OpenVINO makes tables float again when it compiles the model: only the file is smaller.

Left out: int8 products of attention and residual additions (the attention of the cached graph is float), and FP8, which OpenVINO does not
multiply on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import openvino
import torch
from openvino import opset15 as ops
from torch import Tensor

from foundation.core.arrays import Array
from foundation.schemes.int4 import LOW, Int4Scales
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, DynamicScales, LayerScales
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from foundation.schemes.tables import on_table_grid, table_codes


def insert_codes(graph: openvino.Model, layers: Mapping[str, Scales]) -> None:
    """Lets linear layers of a graph read codes and scales instead of float weights, in place.

    Args:
        graph: What `cached_graph` returned for the model with its weights on the grids of `layers`.
        layers: Scales by module path.

    Raises:
        ValueError: A layer is not in the graph exactly once, or its weights are on another grid.
    """
    products, inputs = weight_products(graph), _Inputs()
    for name, scales in layers.items():
        if name not in products:
            raise ValueError(f"{name}: no product with a constant weight in the graph")
        _insert(products[name], name, scales, inputs)
    graph.validate_nodes_and_infer_types()


def insert_tables(graph: openvino.Model, tables: Mapping[str, Tensor]) -> None:
    """Lets embeddings and head read codes and row scales instead of float tables, in place.

    Args:
        graph: What `cached_graph` returned for the model with its tables on the grids of their scales.
        tables: Row scales, float32 [V], by module path (`foundation.schemes.tables`).

    Raises:
        ValueError: The table of a scale is not in the graph.
    """
    for name, scale_V in tables.items():
        found = table_constants(graph, scale_V)
        if not found:
            raise ValueError(f"{name}: no table of the graph is on the grid of its scales")
        for node in found:  # one, or where the trace has copied a tied table two
            codes_VD = table_codes(torch.from_numpy(np.array(node.data, np.float32)), scale_V)
            weight = _multiplied(_constant(codes_VD.numpy()), scale_V[:, None])
            weight.set_friendly_name(f"{name}.weight")
            for reader in list(node.output(0).get_target_inputs()):
                reader.replace_source_output(weight.output(0))
    graph.validate_nodes_and_infer_types()


def table_constants(graph: openvino.Model, scale_V: Tensor) -> list[openvino.Node]:
    """Returns the constants of a graph that are tables on the grid of these scales."""
    return [node for node in graph.get_ops() if node.get_type_name() == "Constant" and _holds_table(node, scale_V)]


def _holds_table(node: openvino.Node, scale_V: Tensor) -> bool:
    """Whether a constant is a table on the grid of these scales."""
    shape = list(node.get_output_shape(0))
    if len(shape) != 2 or shape[0] != len(scale_V) or not node.get_element_type().is_real():
        return False
    table_VD = torch.from_numpy(np.array(node.data, np.float32))
    return torch.allclose(on_table_grid(table_VD, scale_V), table_VD, rtol=1e-5, atol=0)


def weight_products(graph: openvino.Model) -> dict[str, openvino.Node]:
    """Returns the MatMul nodes that read a constant [O, I], by the path of their module; the head has none and is left out."""
    return {
        module_of(node.get_friendly_name()): node
        for node in graph.get_ops()
        if node.get_type_name() == "MatMul" and node.input_value(1).get_node().get_type_name() == "Constant"
    }


def module_of(node: str) -> str:
    """Returns the path of the module that a node of the trace belongs to: the trace names it `__module.model.<path>/aten::...`."""
    return node.partition("/")[0].removeprefix("__module.model.")


def _insert(product: openvino.Node, name: str, scales: Scales, inputs: _Inputs) -> None:
    attributes, constant = product.get_attributes(), product.input_value(1).get_node()
    assert attributes["transpose_b"], f"{name}: the trace gives weights as [O, I]"
    weight_OI = torch.from_numpy(np.array(constant.data, np.float32))
    if not torch.allclose(scales.on_grid(weight_OI), weight_OI, rtol=1e-5, atol=0):
        raise ValueError(f"{name}: weights of the graph are not on the grid of their scales: make it from this checkpoint")
    codes_OI = scales.codes(weight_OI)
    if isinstance(scales, Int4Scales):
        weight = int4_weight(codes_OI, scales)
    else:
        assert isinstance(scales, LayerScales | DynamicScales | WeightScales), type(scales)
        weight = _multiplied(_constant(codes_OI.numpy()), scales.weight_scale[:, None])
        if not isinstance(scales, WeightScales):
            product.input(0).replace_source_output(inputs.of(product.input_value(0), scales))
    weight.set_friendly_name(f"{name}.weight")
    product.input(1).replace_source_output(weight.output(0))


class _Inputs:
    """Rounded inputs of quantized layers; layers that read one tensor with one scale share its rounding."""

    def __init__(self) -> None:
        self._cache: dict[tuple[object, ...], openvino.Output] = {}

    def of(self, value: openvino.Output, scales: LayerScales | DynamicScales) -> openvino.Output:
        """Returns the input of a layer, divided by its smoothing vector if it has one, and rounded where its scale is fixed."""
        source: tuple[object, ...] = value.get_node().get_friendly_name(), value.get_index()
        smooth, step = scales.input_smooth, scales.input_scale if isinstance(scales, LayerScales) else None
        if smooth is not None:
            factor_I = smooth.reciprocal().numpy()
            source = *source, factor_I.tobytes()
            value = self._once(source, lambda: ops.multiply(value, _constant(factor_I)))
        return value if step is None else self._once((*source, step.item()), lambda: rounded(value, step.item()))

    def _once(self, key: tuple[object, ...], make: Callable[[], openvino.Node]) -> openvino.Output:
        if key not in self._cache:
            self._cache[key] = make().output(0)
        return self._cache[key]


def rounded(value: openvino.Output, step: float) -> openvino.Node:
    """Returns a float32 tensor rounded to static int8 codes times `step`, with the codes of `foundation.schemes.int8.quantize`.

    x * (1 / s) may differ from the x / s of torch in the last place of float32; nothing coarser comes between.

    Args:
        value: Output of a node, of any shape.
        step: Input scale s, a float32 number.
    """
    codes = ops.round(ops.multiply(value, _constant(1 / np.float32(step))), "half_to_even")
    low, high = (_constant(np.float32(code)) for code in (ACTIVATION_LOW, ACTIVATION_HIGH))
    lowest, highest = (_constant(np.float32(code * step)) for code in (ACTIVATION_LOW, ACTIVATION_HIGH))
    return ops.fake_quantize(codes, low, high, lowest, highest, ACTIVATION_HIGH - ACTIVATION_LOW + 1)


def int4_weight(codes_OI: Tensor, scales: Int4Scales) -> openvino.Node:
    """Returns the weight float32 [O, I] of int4 codes in groups of equal width."""
    outputs, inputs = codes_OI.shape
    width = math.gcd(scales.group_size, inputs)
    scale_OG1, zero_OI = scales.expanded(inputs)[:, ::width, None], scales.zero(inputs)
    codes_OGg = codes_OI.reshape(outputs, -1, width)
    offset_OI = scales.offset(inputs)
    if offset_OI is not None:  # as real zero points, which its kernels take too
        steps_OG1 = offset_OI[:, ::width, None] / scale_OG1
        steps = ops.subtract(ops.convert(_packed(codes_OGg - LOW, openvino.Type.u4), np.float32), _constant(steps_OG1.numpy()))
        grouped = ops.multiply(steps, _constant(scale_OG1.numpy()))
    elif isinstance(zero_OI, int):
        grouped = _multiplied(_packed(codes_OGg, openvino.Type.i4), scale_OG1)
    else:  # as u4, whose zero points OpenVINO's kernels take
        zero_OG1 = zero_OI[:, ::width, None]
        codes, zero_point = (_packed(array - LOW, openvino.Type.u4) for array in (codes_OGg, zero_OG1))
        grouped = _multiplied(codes, scale_OG1, zero_point)
    return ops.reshape(grouped, ops.constant([outputs, inputs], dtype=np.int64), special_zero=False)


def _packed(codes: Tensor, kind: openvino.Type) -> openvino.Node:
    """Returns a constant of 4-bit numbers: two a byte, the first in the low half."""
    flat = np.pad(codes.numpy().reshape(-1), (0, codes.numel() % 2))
    pairs = flat.reshape(-1, 2).view(np.uint8) & 0xF
    packed = np.ascontiguousarray(pairs[:, 0] | (pairs[:, 1] << 4))
    tensor = openvino.Tensor(packed, openvino.Shape(list(codes.shape)), kind)
    return ops.constant(tensor, shared_memory=False)  # shared, it would point at memory that is freed


def _multiplied(codes: openvino.Node, scale: Tensor, zero_point: openvino.Node | None = None) -> openvino.Node:
    steps = ops.convert(codes, np.float32)
    if zero_point is not None:
        steps = ops.subtract(steps, ops.convert(zero_point, np.float32))
    return ops.multiply(steps, _constant(scale.numpy()))


def _constant(array: Array | np.generic) -> openvino.Node:
    return ops.constant(np.ascontiguousarray(array), shared_memory=False)
