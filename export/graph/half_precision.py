"""Converts a float32 or Q/DQ graph to a strongly typed half-precision graph: float16 or bfloat16, with islands of float32.

TensorRT 11 has no precision flags: a tensor has the type that the graph gives it. This file writes that graph. Every float32 operation
runs in 16 bits, unless a rule of `RULES` makes it an island; a tensor that is produced in one type and read in another gets one Cast for
all its readers. Weights are stored in the type they are read in. Inputs and outputs keep their types, so that logits stay float32.

    float16: |x| <= 65504, 11 bits of significand      bfloat16: |x| <= 3.4e38, 8 bits

| rule         | island                                                | otherwise                                                        |
| ------------ | ----------------------------------------------------- | ---------------------------------------------------------------- |
| `types`      | operations that ONNX does not define for 16 bits      | the graph is invalid                                             |
| `codes`      | QuantizeLinear and DequantizeLinear                   | scales are rounded to 11 bits, and those below 6e-8 are 0        |
| `statistics` | normalizations, means and sums                        | sums over the hidden axis lose the small terms                   |
| `softmax`    | Softmax, LogSoftmax                                   | its exponentials below 6e-8 are 0, and their sum is rounded      |
| `powers`     | Pow, Exp, Log, Sqrt, Reciprocal, x * x                | a square overflows at 256 and an epsilon of 1e-8 is 0            |
| `indices`    | values that are rounded to an integer in the end      | T5 looks up another distance                                     |
| `gelu`       | Gelu and Erf of values whose cube is out of range     | the tanh form has a cube, which is infinite at 40                |
| `range`      | readers and writers of values above `SHARE` * largest | infinities                                                       |
| `sums`       | products whose sum of |a| |b| is above that           | a kernel that adds up in 16 bits overflows, though the sum fits  |
| `bridge`     | an operation whose neighbours are all islands         | two casts for one operation, and an epsilon that is lost         |

`range`, `sums` and `gelu` use the ranges that `export.graph.ranges` measured on calibration rows. Before that, `clamp_masks` replaces the
values of masks (-inf, -3.4e38) by `MASKED`: it is finite in 16 bits, and its exponential is still 0.

Sums of integer products need no island: they are added up as int32.

Left out: float16 values too small for their 11 bits (weights below 6e-5 lose some); graphs with subgraphs (If, Loop), which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.graph.nodes import prune_initializers
from export.graph.ranges import Ranges
from foundation.models.inputs.padding import MASKED

Half = Literal["fp16", "bf16"]
LARGEST: Final[Mapping[str, float]] = {"fp16": 65504.0, "bf16": 3.3895e38}
SHARE: Final = 0.25
"""Share of the largest 16-bit value that a tensor may reach on calibration rows: other rows may be four times as large."""
LOWEST_MASK: Final = -1e9
"""Constants at or below it count as masks; no weight is that low."""
_TYPES: Final = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_NUMPY: Final = {half: helper.tensor_dtype_to_np_dtype(kind) for half, kind in _TYPES.items()}
_STATISTICS: Final = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "BatchNormalization",
        "GlobalAveragePool",
        "AveragePool",
        "ReduceMean",
        "ReduceSum",
        "ReduceSumSquare",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "CumSum",
    }
)
_POWERS: Final = frozenset({"Pow", "Exp", "Log", "Sqrt", "Reciprocal"})
_PRODUCTS: Final = frozenset({"MatMul", "Gemm", "Conv"})
_CODES: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
_INDIFFERENT: Final = frozenset({"Shape", "Size"})
"""Operations that accept any type."""


@dataclass(frozen=True)
class Halved:
    """A half-precision graph, and the reasons for its float32 islands."""

    model: onnx.ModelProto
    islands: Mapping[str, str]
    """Name of the rule by the name of each node that runs in float32."""
    casts: int
    """Casts that were added."""


@dataclass(frozen=True)
class Facts:
    """Facts about a graph that rules use."""

    half: Half
    ranges: Ranges
    floats: frozenset[str]
    """Tensors that are float32 in the float graph."""
    producer: Mapping[str, onnx.NodeProto]
    opset: int
    rounded: frozenset[str]
    """Float tensors that become indices: read by a Cast to integers, and what those are computed from."""

    @property
    def bound(self) -> float:
        """Largest magnitude of a 16-bit tensor on calibration rows."""
        return SHARE * LARGEST[self.half]

    def magnitude(self, tensor: str) -> float:
        """Returns the largest |value| of a tensor on calibration rows; inf where it was not a number."""
        value = self.ranges.largest[tensor]
        return value if value == value else float("inf")

    def of(self, node: onnx.NodeProto) -> list[str]:
        """Returns the float tensors that a node reads or writes."""
        return [name for name in (*node.input, *node.output) if name in self.floats]


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str
    holds: Callable[[onnx.NodeProto, Facts], bool]


def _undefined(node: onnx.NodeProto, facts: Facts) -> bool:
    return any(not _allows(parameter, facts.half) for parameter in _float_parameters(node, facts))


def _out_of_cube(node: onnx.NodeProto, facts: Facts) -> bool:
    return node.op_type in ("Gelu", "Erf") and facts.magnitude(node.input[0]) > facts.bound ** (1 / 3)


def _out_of_range(node: onnx.NodeProto, facts: Facts) -> bool:
    return node.op_type not in _INDIFFERENT and any(facts.magnitude(name) > facts.bound for name in facts.of(node))


def _large_sum(node: onnx.NodeProto, facts: Facts) -> bool:
    operands = [facts.producer.get(name) for name in node.input[:2]]
    if node.op_type not in _PRODUCTS or all(made is not None and made.op_type == "DequantizeLinear" for made in operands):
        return False
    return not facts.ranges.sums[node.name] <= facts.bound


RULES: tuple[Rule, ...] = (
    Rule("types", _undefined),
    Rule("codes", lambda node, _: node.op_type in _CODES),
    Rule("statistics", lambda node, _: node.op_type in _STATISTICS),
    Rule("softmax", lambda node, _: node.op_type in ("Softmax", "LogSoftmax")),
    Rule("powers", lambda node, _: node.op_type in _POWERS or (node.op_type == "Mul" and node.input[0] == node.input[1])),
    Rule("indices", lambda node, facts: any(name in facts.rounded for name in (*node.input[: node.op_type == "Cast"], *node.output))),
    Rule("gelu", _out_of_cube),
    Rule("range", _out_of_range),
    Rule("sums", _large_sum),
)
"""The rules that look at one node; the first that holds gives its name. `bridge` looks at what these leave."""


def clamp_masks(model: onnx.ModelProto) -> int:
    """Replaces constants at or below `LOWEST_MASK` by `MASKED`, in place.

    Returns:
        Tensors that were changed.
    """
    changed = 0
    for tensor in _constants(model.graph):
        if tensor.data_type != TensorProto.FLOAT:
            continue
        array = numpy_helper.to_array(tensor)
        if (array <= LOWEST_MASK).any():
            tensor.CopyFrom(numpy_helper.from_array(np.where(array <= LOWEST_MASK, np.float32(MASKED), array), tensor.name))
            changed += 1
    return changed


def to_half_precision(model: onnx.ModelProto, ranges: Ranges, half: Half) -> Halved:
    """Returns the strongly typed half graph of a float or Q/DQ graph.

    Args:
        model: A flat graph in float32, its masks clamped (`clamp_masks`); left as it is.
        ranges: Ranges of this graph.
        half: The type of everything that is not an island.

    Raises:
        ValueError: The graph has subgraphs, or operations that are not ONNX's own.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
            raise ValueError(f"node {node.name} ({node.domain}:{node.op_type}): flat graphs of ONNX operations are allowed")
    facts = _facts(made, ranges, half)
    islands = _islands(graph, facts)
    casts = _Writer(graph, facts, islands).write()
    return Halved(made, islands, casts)


def float_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """Returns the names of all float32 tensors: inputs, constants, and what nodes write."""
    graph = model.graph
    skeleton = helper.make_model(
        helper.make_graph(
            graph.node,
            "types",
            [*graph.input, *(helper.make_tensor_value_info(item.name, item.data_type, item.dims) for item in _weights(graph))],
            graph.output,
            [item for item in graph.initializer if item.data_type != TensorProto.FLOAT],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    typed = onnx.shape_inference.infer_shapes(skeleton).graph  # without the weights, whose bytes protobuf may not hold
    values = [*typed.input, *typed.value_info, *typed.output]
    return frozenset(value.name for value in values if value.type.tensor_type.elem_type == TensorProto.FLOAT)


def _weights(graph: onnx.GraphProto) -> list[TensorProto]:
    return [item for item in graph.initializer if item.data_type == TensorProto.FLOAT]


def _facts(model: onnx.ModelProto, ranges: Ranges, half: Half) -> Facts:
    producer = {output: node for node in model.graph.node for output in node.output}
    (opset,) = (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    floats = float_tensors(model)
    return Facts(half, ranges, floats, producer, opset, _rounded(model.graph, floats))


def _rounded(graph: onnx.GraphProto, floats: frozenset[str]) -> frozenset[str]:
    """Returns the float tensors that a Cast makes integers of, and those that they are computed from."""
    found: set[str] = set()
    for node in reversed(graph.node):
        to_integers = node.op_type == "Cast" and not any(name in floats for name in node.output)
        if to_integers or any(name in found for name in node.output):
            found |= {name for name in node.input if name in floats}
    return frozenset(found)


def _islands(graph: onnx.GraphProto, facts: Facts) -> dict[str, str]:
    """Returns the rule by the name of each node that runs in float32."""
    found: dict[str, str] = {}
    for node in graph.node:
        rule = next((rule.name for rule in RULES if rule.holds(node, facts)), None) if facts.of(node) else None
        if rule is not None:
            found[node.name] = rule
    return found | {node.name: "bridge" for node in _bridges(graph, facts, found)}


def _bridges(graph: onnx.GraphProto, facts: Facts, islands: Mapping[str, str]) -> Iterator[onnx.NodeProto]:
    """Yields the nodes all of whose float neighbours are islands, on both sides."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.name in islands or node.op_type in _PRODUCTS:
            continue
        before = [facts.producer[name] for name in node.input if name in facts.floats and name in facts.producer]
        behind = [reader for name in node.output if name in facts.floats for reader in readers.get(name, [])]
        if before and behind and all(other.name in islands for other in (*before, *behind)):
            yield node


class _Writer:
    """Gives every tensor of a graph its type."""

    def __init__(self, graph: onnx.GraphProto, facts: Facts, islands: Mapping[str, str]) -> None:
        self.graph, self.facts, self.islands = graph, facts, islands
        self.weights = {item.name: item for item in _weights(graph)}
        self.type = dict.fromkeys((value.name for value in graph.input), TensorProto.FLOAT)
        """Type of each float tensor of the new graph."""
        self.cache: dict[tuple[str, int], str] = {}
        """Name of a tensor in a type that it was not produced in."""
        self.nodes: list[onnx.NodeProto] = []

    def write(self) -> int:
        """Rewrites the graph; returns the number of casts."""
        outputs = {value.name for value in self.graph.output}
        for node in list(self.graph.node):
            wanted = TensorProto.FLOAT if node.name in self.islands else _TYPES[self.facts.half]
            for index, name in enumerate(node.input):
                if name in self.facts.floats and node.op_type not in _INDIFFERENT:
                    node.input[index] = self._read(name, wanted)
            if any(name in self.facts.floats for name in node.output):
                _set_type(node, wanted)
            self.nodes.append(node)
            for index, name in enumerate(node.output):
                if name in self.facts.floats:
                    self.type[name] = wanted
                    if name in outputs and wanted != TensorProto.FLOAT:
                        self._name_output(node, index, name, wanted)
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self.nodes]
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(nodes)
        prune_initializers(self.graph)
        return sum(node.name.endswith(_CAST) for node in nodes)

    def _name_output(self, node: onnx.NodeProto, index: int, name: str, wanted: int) -> None:
        """Casts an output of the graph back to float32, under its name; later readers take the tensor before the cast."""
        inner = f"{name}.{self.facts.half}"
        node.output[index] = inner
        self.type[inner] = wanted
        self.cache[name, wanted] = inner
        self.type[name] = TensorProto.FLOAT
        self.nodes.append(helper.make_node("Cast", [inner], [name], f"{name}.fp32{_CAST}", to=TensorProto.FLOAT))

    def _read(self, name: str, wanted: int) -> str:
        """Returns the name of a tensor in the wanted type; stores or casts it where it is not there yet."""
        if name in self.weights:
            return name if wanted == TensorProto.FLOAT else self._stored(name, wanted)
        if self.type[name] == wanted:
            return name
        if (name, wanted) not in self.cache:
            suffix = "fp32" if wanted == TensorProto.FLOAT else self.facts.half
            output = f"{name}.{suffix}"
            self.nodes.append(helper.make_node("Cast", [name], [output], f"{output}{_CAST}", to=wanted))
            self.cache[name, wanted] = output
        return self.cache[name, wanted]

    def _stored(self, name: str, wanted: int) -> str:
        if (name, wanted) not in self.cache:
            array: NDArray[np.float32] = numpy_helper.to_array(self.weights[name])
            halved = f"{name}.{self.facts.half}"
            self.graph.initializer.append(numpy_helper.from_array(array.astype(_NUMPY[self.facts.half]), halved))
            self.cache[name, wanted] = halved
        return self.cache[name, wanted]


_CAST: Final = "/HalfCast"
"""End of the names of the casts that are added."""


def _set_type(node: onnx.NodeProto, wanted: int) -> None:
    """Sets the type that an attribute of a node names: of Cast, and of what makes constants."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype", "output_dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = wanted
        elif attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT and wanted != TensorProto.FLOAT:
            half = next(name for name, kind in _TYPES.items() if kind == wanted)
            attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(_NUMPY[half]), attribute.t.name))


def _constants(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Yields all constants: initializers, Constant and ConstantOfShape."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t


def _float_parameters(node: onnx.NodeProto, facts: Facts) -> Iterator[frozenset[str]]:
    """Yields for each float input and output of a node the types that ONNX allows there."""
    for names, parameters in zip((node.input, node.output), _signature(node.op_type, facts.opset), strict=True):
        for index, name in enumerate(names):
            if name in facts.floats:
                yield parameters[min(index, len(parameters) - 1)]


@cache
def _signature(operation: str, opset: int) -> tuple[tuple[frozenset[str], ...], ...]:
    schema = onnx.defs.get_schema(operation, opset)
    return tuple(tuple(frozenset(item.types) for item in side) for side in (schema.inputs, schema.outputs))


def _allows(types: frozenset[str], half: Half) -> bool:
    return {"fp16": "tensor(float16)", "bf16": "tensor(bfloat16)"}[half] in types
