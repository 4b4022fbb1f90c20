"""What a decoder reads from memory for each token: the weights that it multiplies, and the keys and values of the tokens before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8}
"""Bits of a number; the few scales of an int8 cache are not counted."""
LOOK_UPS = ("Gather", "ShapeOf")
BETWEEN = ("Convert", "Multiply", "Reshape")
"""What stands between stored integers and the product that reads them."""


def reads_per_token(model: Path, float_precision: str, cache_precision: str) -> dict[str, int]:
    """Returns `weight_bytes` and `cache_bytes_per_token` of a model.

    A table of which only rows are looked up (the embeddings, unless the head is tied to them) is not read as a whole and not counted.

    Args:
        model: The xml of `export.generation.genai_folder`.
        float_precision: What the engine computes in: float weights are kept in it.
        cache_precision: What keys and values are kept in.
    """
    graph = openvino.Core().read_model(model)
    bits = sum(
        _bits(node, BITS[float_precision]) for node in graph.get_ops() if node.get_type_name() == "Constant" and _is_multiplied(node)
    )
    values = 0
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            values += heads.get_length() * size.get_length()
    return {"weight_bytes": bits // 8, "cache_bytes_per_token": values * BITS[cache_precision] // 8}


def _bits(constant: Any, float_bits: int) -> int:
    kind, count = constant.get_element_type(), 1
    for size in constant.get_output_shape(0):
        count *= size
    return count * (float_bits if kind.is_real() else kind.bitwidth)


def _is_multiplied(node: Any) -> bool:
    """Whether anything but a look-up reads a constant."""
    readers = [target.get_node() for value in node.outputs() for target in value.get_target_inputs()]
    kinds = [
        (_is_multiplied(reader) if reader.get_type_name() in BETWEEN else reader.get_type_name() not in LOOK_UPS) for reader in readers
    ]
    return any(kinds)
