"""What a product of integer blocks (MatMulNBits) of ONNX Runtime multiplies, read off what it computes.

`accuracy_level` asks for a precision: 1 for inputs in float, 4 for inputs rounded to int8. ONNX Runtime follows it only where this
processor has such a kernel for so many bits and such blocks, and does not say. A product of one output shows it: with weights of 1,

    x = (127, 1/4, 0, ...)        give 127.25 in float, and 127 where x is rounded to int8 with the scale 127 / 127 = 1
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from export.stored_weights import BLOCKS, attribute

if TYPE_CHECKING:
    import onnx

LARGE, SMALL = 127.0, 0.25
OPSET, MICROSOFT, IR = 21, "com.microsoft", 10
ATTRIBUTES = ("bits", "block_size", "accuracy_level")


@cache
def rounds_inputs(bits: int, block: int, level: int) -> bool:
    """Returns whether a product rounds its inputs to int8 on this processor.

    Args:
        bits: Bits of a code, 4 or 8.
        block: Inputs that share a scale.
        level: The attribute `accuracy_level`.
    """
    middle = 1 << (bits - 1)
    codes = np.full(block, middle + 1, np.uint8)  # 1 above the zero point, with a scale of 1
    stored = codes if bits == 8 else codes[0::2] | (codes[1::2] << 4)
    constants = {"codes": stored.reshape(1, 1, -1), "scale": np.ones((1, 1), np.float32)}
    node = helper.make_node(
        BLOCKS, ["x", *constants], ["y"], domain=MICROSOFT, N=1, K=block, bits=bits, block_size=block, accuracy_level=level
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, block])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)], ir_version=IR)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.zeros((1, block), np.float32)
    x[0, :2] = LARGE, SMALL
    found = float(session.run(None, {"x": x})[0].item())
    if not min(abs(found - LARGE), abs(found - LARGE - SMALL)) < SMALL / 4:
        asked = f"a product of {bits} bits in blocks of {block} at accuracy_level {level}"
        raise ValueError(f"{asked} gives {found}; {LARGE} or {LARGE + SMALL} is expected")
    return abs(found - LARGE) < SMALL / 4


def reported(nodes: Iterable[onnx.NodeProto]) -> dict[str, str]:
    """Returns in words what the products of integer blocks of a graph multiply.

    Args:
        nodes: Nodes of the graph as a session optimized it.
    """
    kinds = dict.fromkeys(tuple(attribute(node, name) for name in ATTRIBUTES) for node in nodes if node.op_type == BLOCKS)
    return {
        f"products of {bits}-bit codes in blocks of {block}": f"accuracy_level {level}, inputs in "
        + ("int8" if rounds_inputs(bits, block, level) else "float32")
        for bits, block, level in kinds
    }
