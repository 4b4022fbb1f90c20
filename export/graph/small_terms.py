"""Traces a model and optimizes its graph, and keeps the small terms that guard divisions and logarithms.

The optimizer of `torch.onnx.export` (onnxscript 0.7.2) removes `x + c` where c is at most 1e-8, and `x * c` where c is 1 to five digits.
It takes them for 0 and 1. `log(p + 1e-9)` of a probability of 0 is then minus infinity, and a row of zeros divided by its length + 1e-8
is NaN. Its patterns match scalars alone. So such a constant becomes a vector of one element first, with which every tensor gives the same
numbers.

Left as it is: a term of a tensor of rank 0 or of an unknown rank, which a vector could give another rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn

NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""The operators whose constants are protected, and the constant that changes nothing."""
NEAR = 1e-4
"""Constants as near to the neutral one are protected: more than the optimizer takes for equal (1e-8 of 0, 1e-5 of 1)."""


def traced(model: nn.Module, example: tuple[Tensor, ...], **settings: Any) -> onnx.ModelProto:
    """Returns the optimized graph of a model.

    Args:
        model: The model.
        example: Its inputs.
        settings: Of `torch.onnx.export`, but for `dynamo`, `optimize` and `verbose`.

    Raises:
        OnnxExporterError: It cannot be traced.
    """
    program = torch.onnx.export(model, example, dynamo=True, optimize=False, verbose=False, **settings)
    assert program is not None
    InlinePass()(program.model)
    fold_constants(program.model)  # constants of other types become those that the patterns compare
    protect(program.model)
    program.optimize()
    return program.model_proto


def protect(model: ir.Model) -> int:
    """Makes vectors of one element of the scalars that the optimizer would take for 0 or 1, in place; returns how many."""
    found = 0
    for node in list(model.graph):
        neutral = NEUTRAL.get(node.op_type)
        if neutral is None or node.domain not in ("", "ai.onnx"):
            continue
        for index, (one, other) in enumerate(zip(node.inputs, reversed(node.inputs), strict=True)):
            number = _scalar(one)
            rank = None if other is None or other.shape is None else len(other.shape)
            if number is None or not rank or number == neutral or abs(float(number) - neutral) > NEAR:
                continue
            found += 1
            constant = ir.node("Constant", [], {"value": ir.tensor(number.reshape(1))})
            model.graph.insert_before(node, constant)
            node.replace_input_with(index, constant.outputs[0])
    return found


def _scalar(value: ir.Value | None) -> np.ndarray | None:
    """Returns a floating-point constant of rank 0; None for others."""
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    if constant is None or constant.shape.rank() != 0:
        return None
    array = constant.numpy()
    return array if np.issubdtype(array.dtype, np.floating) else None
