"""Counts the bytes that a decoder reads from memory for each token: the weights that it multiplies, and the keys and values of the tokens
before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import openvino

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8}
"""Bits of a number; the few scales of an int8 cache are not counted."""
ROUNDING = "FakeQuantize"
"""Operations that round the input of a static int8 layer."""
LOOK_UPS = ("Gather", "ShapeOf")
BETWEEN = ("Convert", "Subtract", "Multiply", "Reshape")
"""Operations between stored integers and the product that reads them."""


def reads_per_token(model: Path, float_precision: str, cache_precision: str) -> dict[str, int]:
    """Returns `weight_bytes` and `cache_bytes_per_token` of a model.

    A table that is only looked up by row (the embeddings, unless the head is tied to them) is not read as a whole and not counted.

    Args:
        model: The xml of `export.generation.genai_folder`.
        float_precision: What the engine computes in: float weights are kept in it.
        cache_precision: What keys and values are kept in.
    """
    graph = openvino.Core().read_model(model)
    nodes = graph.get_ops()
    is_static = any(node.get_type_name() == ROUNDING for node in nodes)
    bits = sum(_bits(node, BITS[float_precision], is_static) for node in nodes if node.get_type_name() == "Constant")
    values = 0
    for node in nodes:
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            values += heads.get_length() * size.get_length()
    return {"weight_bytes": bits // 8, "cache_bytes_per_token": values * BITS[cache_precision] // 8}


def _bits(constant: openvino.Node, float_bits: int, is_static: bool) -> int:
    """Returns the bits of a constant that are read for each token.

    Args:
        constant: The node.
        float_bits: Bits of a float weight.
        is_static: Whether the graph has static int8 layers: OpenVINO makes integers that meet a float input float again then.
    """
    readers = [node for node in _readers(constant) if node.get_type_name() not in LOOK_UPS]
    if not readers:
        return 0
    kind, count = constant.get_element_type(), math.prod(constant.get_output_shape(0))
    rounded = any(node.input_value(0).get_node().get_type_name() == ROUNDING for node in readers)
    kept = not kind.is_real() and (rounded or not is_static)
    return int(count) * (kind.bitwidth if kept else float_bits)


def _readers(node: openvino.Node) -> Iterator[openvino.Node]:
    """Yields the readers of a constant, skipping the operations between stored integers and their product."""
    for reader in (target.get_node() for value in node.outputs() for target in value.get_target_inputs()):
        if reader.get_type_name() in BETWEEN:
            yield from _readers(reader)
        else:
            yield reader
