"""Reads the layers of a TensorRT engine: from the JSON of its inspector, or from the list in the builder's log.

It says what each GEMM of the ONNX graph multiplies, and which attentions run as one kernel. The types of tensors count; where the inspector
does not tell them ("N/A due to dynamic shapes"), the name of a kernel does (`..._i8i8_i8i32_f32_...`: int8, added up as int32).

    TensorRT 8.6 to 10   "Format/Datatype": "Row major Int8 format", "Half(64,1:8,...)" or "Half"; "Bindings" are names
    TensorRT 11, RTX     "Datatype" or "DataType": "Int8", with the format in a field of its own; "I/O Tensors"

It needs only the standard library and is copied next to `build_plans.py` in a GPU model repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

FLOATS = {"float": "fp32", "fp32": "fp32", "half": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
POINTWISE = "kgen"
FUSED = "mha"
"""Part of the names of layers that run an attention as a whole, such as `_gemm_mha_v2_myl0_7`; TensorRT calls their kind pointwise."""
ATTENTION = "/attention"
"""How names of attention nodes begin after the module; their products would be `/qk` and `/pv`."""
_LISTED = re.compile(
    r"^Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], (?:Constants: \[(.*?)\], )?Outputs: \[.*?\], "
    r"TacticName: (.*?), StreamId: (.*)$",
    re.M,
)
_ORIGIN = re.compile(r"\[ONNX Layer: ([^\]|]*?)(?: \|[^\]]*)?\]")
"""The name of a node, without the functions that the parser adds after it for a node inside of one."""
_DATATYPE = re.compile(r"Datatype: (\w+)")
UNTOLD = "n/a"
"""How what an inspector says of a tensor begins where its type depends on shapes that are not bound."""
_MULTIPLIED = re.compile(r"_(i8|f16|bf16|tf32|f32)(?:i32|f32|f16)_(?:i8|i32|f16|bf16|f32)_")
"""In the name of a kernel: the type of the factors and of their sum, after the types of its tensors and before the type of its scales."""
_WORDS = (("imma", "int8"), ("int8", "int8"), ("bf16", "bf16"), ("hmma", "fp16"), ("h16816", "fp16"), ("h1688", "fp16"), ("sgemm", "fp32"))
"""Parts of the names of other kernels, and what they multiply."""
_KERNEL_TYPES = {"i8": "int8", "f16": "fp16", "bf16": "bf16", "tf32": "tf32", "f32": "fp32"}


@dataclass(frozen=True)
class Layer:
    """One layer of a compiled engine, as the library lists it."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    """Data types of its inputs, as the library names them, in lower case."""
    constants: tuple[str, ...]
    """Data types of its weights and other constants."""
    nodes: tuple[str, ...]
    """ONNX nodes that were fused into it."""
    tactic: str
    """Name of the kernel; "__myelin_CASK_STUB" if it is chosen later, on the GPU."""


def listed_layers(log: str) -> tuple[Layer, ...]:
    """Reads the layers of a compiled engine from the builder's verbose log."""
    found = []
    for name, kind, inputs, constants, tactic, rest in _LISTED.findall(log):
        types = [tuple(value.lower() for value in _DATATYPE.findall(part)) for part in (inputs, constants)]
        found.append(Layer(name, kind, types[0], types[1], tuple(_ORIGIN.findall(rest)), tactic))
    return tuple(found)


def inspected_layers(information: str) -> tuple[Layer, ...]:
    """Reads the layers from the JSON of the engine inspector (`ProfilingVerbosity.DETAILED`)."""
    return tuple(_inspected(layer) for layer in json.loads(information)["Layers"] if isinstance(layer, dict))


def gemm_precisions(layers: Sequence[Layer], gemms: Sequence[str]) -> dict[str, str]:
    """Returns the precision of each GEMM node of the ONNX graph, judged by the operands of the layers it was compiled into.

    A GEMM counts as int8 if in every such layer one input and a second operand (weights or another input) are int8. Otherwise it has the
    type of the layer's first float input. Where a layer does not tell the types of its inputs, or the type of weights next to int8, it has
    what the name of its kernel says.
    Nodes that no layer names, or whose layers tell neither, are absent from the result.
    """
    found: dict[str, str] = {}
    for gemm in gemms:
        made = [layer for layer in layers if gemm in layer.nodes]
        # The generated pointwise kernel after an int8 GEMM also names the GEMM's node, because it applies the scales; skip it.
        made = [layer for layer in made if layer.kind != POINTWISE or FUSED in layer.name] or made
        precisions = {precision for layer in made if (precision := _precision(layer)) is not None}
        if precisions:
            found[gemm] = min(precisions - {"int8"}, default="int8")
    return found


def with_products(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the layers with the names of both products, `/qk` and `/pv`, in place of the name of an attention node."""
    return tuple(replace(layer, nodes=tuple(name for node in layer.nodes for name in _products(node))) for layer in layers)


def fused_attentions(layers: Sequence[Layer], products: Sequence[str]) -> int:
    """Returns how many attentions run as one layer.

    Args:
        layers: The layers of an engine, attention nodes replaced (`with_products`).
        products: Names of the nodes `/pv`, one for each attention of the graph.
    """
    whole = {node for layer in layers if FUSED in layer.name for node in layer.nodes}
    return sum(product in whole for product in products)


def float_precision(layers: Sequence[Layer]) -> str | None:
    """Returns the narrowest float type that a layer reads, fp16, bf16 or fp32; None where no layer tells a type."""
    told = {FLOATS[name] for layer in layers for name in layer.inputs + layer.constants if name in FLOATS}
    return next((name for name in ("fp16", "bf16", "fp32") if name in told), None)


def kernel_precision(tactic: str) -> str | None:
    """Returns the types that a kernel multiplies, read off its name; None where the name does not show them."""
    found = _MULTIPLIED.search(tactic)
    if found:
        return _KERNEL_TYPES[found.group(1)]
    return next((precision for word, precision in _WORDS if word in tactic.lower()), None)


def _products(node: str) -> tuple[str, ...]:
    module, found, run = node.rpartition(ATTENTION)
    return (f"{module}/qk{run}", f"{module}/pv{run}") if found and (not run or run.startswith(".")) else (node,)


def _inspected(layer: Mapping[str, Any]) -> Layer:
    types = [tuple(_datatype(tensor) for tensor in layer.get(key, ())) for key in ("Inputs", "Constants")]
    nodes = tuple(_ORIGIN.findall(str(layer.get("Metadata", ""))))
    weights = layer.get("Weights")  # of a convolution; TensorRT 10 lists no weights of matrix products
    told = (str(weights["Type"]).lower(),) if isinstance(weights, Mapping) and "Type" in weights else ()
    return Layer(str(layer["Name"]), str(layer.get("LayerType", "")), types[0], types[1] + told, nodes, str(layer.get("TacticName", "")))


def _datatype(tensor: Mapping[str, Any]) -> str:
    """Returns the type of a tensor: "Datatype": "Int8" (TensorRT 11), or "Format/Datatype": "Row major Int8 format" or "Half(64,1:8,...)"
    (TensorRT 10); `UNTOLD` where the inspector does not tell it."""
    told = next((tensor[key] for key in ("Datatype", "DataType", "Format/Datatype") if tensor.get(key)), "")
    text = str(told).lower()
    if text.startswith(UNTOLD):
        return UNTOLD
    return next((word for word in re.split(r"[\s(]+", text) if word == "int8" or word in FLOATS), text)


def _precision(layer: Layer) -> str | None:
    operands = layer.inputs + layer.constants
    if "int8" in layer.inputs and operands.count("int8") >= 2:
        return "int8"
    if UNTOLD in layer.inputs or ("int8" in layer.inputs and not layer.constants):  # TensorRT 10 does not list weights
        named = kernel_precision(layer.tactic)
        if named is not None:
            return named
    return next((FLOATS[name] for name in layer.inputs if name in FLOATS), None)
