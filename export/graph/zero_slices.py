"""Zero slices: products of matrices without the inputs and outputs whose weights are all 0; the numbers that are left are the same.

    y = x W            W [I, O] with zeros in all but the rows K and the columns N

    gather    x[..., K]                       only the inputs that are read
    product   x[..., K] W[K, N]               a dense matrix
    scatter   a 0 for every other output      Pad by one 0, then Gather: output o reads column n(o), or the 0

In a Q/DQ graph the gathered input is quantized with the scale of the whole one and codes are taken from the codes, so every integer sum is
the same: what is left out of it is a product with 0. In float the sums have another order. A matrix without any number becomes zeros of its
shape, and the layer its bias.

Which products are worth it is the caller's choice (`export.product_times` measures it): a gather and a scatter take time too. Left out:
Gemm and Conv nodes, weights that are not int8 or float32 matrices of a Q/DQ or float graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.graph.nodes import replace_nodes
from export.graph.onnx import MODULE, module_of


class Extent(NamedTuple):
    """What is left of a matrix."""

    inputs: int
    """I."""
    outputs: int
    """O."""
    read: int
    """Inputs with a weight that is not 0."""
    written: int
    """Outputs with one."""
    integer: bool
    """Whether its codes are int8."""


@dataclass(frozen=True)
class Product:
    """A product with a constant matrix in a graph."""

    node: onnx.NodeProto
    weight: str
    """Its matrix, [I, O]: float32, or int8 codes."""
    codes_IO: npt.NDArray[np.float32] | npt.NDArray[np.int8]
    read_I: npt.NDArray[np.bool_]
    written_O: npt.NDArray[np.bool_]
    dequantizes: onnx.NodeProto | None = None
    """In a Q/DQ graph the node that dequantizes the matrix."""
    activation: tuple[onnx.NodeProto, onnx.NodeProto] | None = None
    """In a Q/DQ graph the nodes that quantize and dequantize the input."""

    @property
    def extent(self) -> Extent:
        """What is left of the matrix."""
        inputs, outputs = self.codes_IO.shape
        return Extent(inputs, outputs, int(self.read_I.sum()), int(self.written_O.sum()), self.dequantizes is not None)

    @property
    def layer(self) -> str:
        """Path of the torch module."""
        return module_of(self.node) or self.node.name


def products(graph: onnx.GraphProto) -> list[Product]:
    """Returns the products of a graph whose matrix has an input or an output without weights, in order."""
    constant = {tensor.name: tensor for tensor in graph.initializer}
    producer = {output: node for node in graph.node for output in node.output}
    found = [_product(node, producer, constant) for node in graph.node if node.op_type == "MatMul"]
    return [one for one in found if one is not None and not (one.read_I.all() and one.written_O.all())]


def _product(node: onnx.NodeProto, producer: Mapping[str, onnx.NodeProto], constant: Mapping[str, onnx.TensorProto]) -> Product | None:
    dequantizes = producer.get(node.input[1])
    if dequantizes is None:
        weight, activation = node.input[1], None
    else:
        of_input = producer.get(node.input[0])
        quantizes = None if of_input is None else producer.get(of_input.input[0])
        if dequantizes.op_type != "DequantizeLinear" or of_input is None or of_input.op_type != "DequantizeLinear":
            return None
        if quantizes is None or quantizes.op_type != "QuantizeLinear":
            return None
        weight, activation = dequantizes.input[0], (quantizes, of_input)
    if weight not in constant or len(constant[weight].dims) != 2:
        return None
    if constant[weight].data_type != (TensorProto.FLOAT if dequantizes is None else TensorProto.INT8):
        return None
    codes_IO = numpy_helper.to_array(constant[weight])
    held_IO = codes_IO != 0
    return Product(node, weight, codes_IO, held_IO.any(axis=1), held_IO.any(axis=0), dequantizes, activation)


def drop_zero_slices(graph: onnx.GraphProto, worth: Callable[[Product], bool]) -> list[Product]:
    """Multiplies without zero slices, in place, where it is worth it.

    Args:
        graph: A float graph of `export.graph.onnx`, or a Q/DQ graph of `export.graph.qdq`.
        worth: Decides for a product.

    Returns:
        The products that changed, as they were.
    """
    chosen = {id(one.node): one for one in products(graph) if worth(one)}
    if not chosen:
        return []
    constant = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        product = chosen.get(id(node))
        nodes += [node] if product is None else _Smaller(graph, product, constant).nodes()
    changed = list(chosen.values())
    replace_nodes(graph, nodes)
    return changed


class _Smaller:
    """The nodes that take the place of one product."""

    def __init__(self, graph: onnx.GraphProto, product: Product, constant: Mapping[str, onnx.TensorProto]) -> None:
        self.graph, self.product, self.constant = graph, product, constant
        self.name = product.node.name  # unique in the graph

    def nodes(self) -> list[onnx.NodeProto]:
        """Returns the nodes; their constants are added to the graph."""
        product = self.product
        if not product.read_I.any():
            return self._zeros()
        before, x = self._gather()
        weights, matrix = self._matrix()
        whole = bool(product.written_O.all())
        y = product.node.output[0] if whole else f"{self.name}.written"
        small = helper.make_node("MatMul", [x, matrix], [y], product.node.name)
        helper.set_metadata_props(small, {MODULE: product.layer})
        return [*before, *weights, small, *([] if whole else self._scatter(y))]

    def _constant(self, suffix: str, values: npt.NDArray[np.generic]) -> str:
        name = f"{self.name}.{suffix}"
        self.graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    def _zeros(self) -> list[onnx.NodeProto]:
        """Returns nodes that write zeros of the shape of the product."""
        product, shape, sizes = self.product, f"{self.name}.rows", f"{self.name}.shape"
        x = product.node.input[0] if product.activation is None else product.activation[0].input[0]
        outputs = self._constant("outputs", np.array([len(product.written_O)], np.int64))
        zero = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.0])
        return [
            helper.make_node("Shape", [x], [shape], f"{shape}/Shape", end=-1),
            helper.make_node("Concat", [shape, outputs], [sizes], f"{sizes}/Concat", axis=0),
            helper.make_node("ConstantOfShape", [sizes], [product.node.output[0]], f"{self.name}.zeros", value=zero),
        ]

    def _gather(self) -> tuple[list[onnx.NodeProto], str]:
        """Returns the nodes that take the inputs that are read, and the tensor that the product reads."""
        product = self.product
        if product.read_I.all():
            return [], product.node.input[0]
        read, indices = f"{self.name}.read", self._constant("inputs", product.read_I.nonzero()[0])
        source = product.node.input[0] if product.activation is None else product.activation[0].input[0]
        gather = helper.make_node("Gather", [source, indices], [read], f"{read}/Gather", axis=-1)
        if product.activation is None:
            return [gather], read
        codes, floats = f"{read}.quantized", f"{read}.dequantized"
        scale = list(product.activation[0].input[1:])
        return [
            gather,
            helper.make_node("QuantizeLinear", [read, *scale], [codes], f"{codes}/QuantizeLinear"),
            helper.make_node("DequantizeLinear", [codes, *scale], [floats], f"{floats}/DequantizeLinear"),
        ], floats

    def _matrix(self) -> tuple[list[onnx.NodeProto], str]:
        """Returns the node that dequantizes the small matrix, if any, and the tensor that the product reads."""
        product = self.product
        small_KN = np.ascontiguousarray(product.codes_IO[product.read_I][:, product.written_O])
        name = self._constant("small", small_KN)
        if product.dequantizes is None:
            return [], name
        of_outputs = [np.array(numpy_helper.to_array(self.constant[other])) for other in product.dequantizes.input[1:]]
        given = [self._constant(f"small.{number}", values[product.written_O]) for number, values in enumerate(of_outputs)]
        floats = f"{name}.dequantized"
        return [helper.make_node("DequantizeLinear", [name, *given], [floats], f"{floats}/DequantizeLinear", axis=1)], floats

    def _scatter(self, written: str) -> list[onnx.NodeProto]:
        """Returns the nodes that put the outputs in their places, and zeros in the others."""
        product, padded = self.product, f"{self.name}.padded"
        count = int(product.written_O.sum())
        pads, axes = self._constant("pads", np.array([0, 1], np.int64)), self._constant("axes", np.array([-1], np.int64))
        places_O = np.where(product.written_O, np.cumsum(product.written_O) - 1, count)
        indices = self._constant("places", places_O.astype(np.int64))
        return [
            helper.make_node("Pad", [written, pads, "", axes], [padded], f"{padded}/Pad", mode="constant"),
            helper.make_node("Gather", [padded, indices], [product.node.output[0]], f"{self.name}.scattered", axis=-1),
        ]
