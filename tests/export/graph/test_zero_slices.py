"""Products without zero slices, beside the whole products, on random and adversarial masks: in float to rounding, in int8 exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.graph.onnx import MODULE
from export.graph.zero_slices import Extent, drop_zero_slices, products

SCALE = np.float32(0.031)


def graph_of(weight_IO: np.ndarray, integer: bool, smooth: bool = False, nodes: int = 1) -> onnx.ModelProto:
    """Returns y = x W + b for x [batch, sequence, I], float or Q/DQ; `nodes` products share the matrix."""
    inputs, outputs = weight_IO.shape
    random = np.random.default_rng(inputs)
    scale_O = (0.01 + random.random(outputs)).astype(np.float32)
    constants = {"bias": random.standard_normal(outputs).astype(np.float32)}
    made: list[onnx.NodeProto] = []
    x = "x"
    if integer:
        constants |= {"s": SCALE, "zero": np.array(0, np.int8), "w.codes": weight_IO, "w.scale": scale_O}
        constants |= {"w.zero": np.zeros(outputs, np.int8)}
        if smooth:
            constants["factor"] = (0.5 + random.random(inputs)).astype(np.float32)
            made.append(helper.make_node("Mul", [x, "factor"], ["smoothed"], "smooth"))
            x = "smoothed"
        made.append(helper.make_node("QuantizeLinear", [x, "s", "zero"], ["q"], "q"))
        made.append(helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["dq"], "dq"))
        made.append(helper.make_node("DequantizeLinear", ["w.codes", "w.scale", "w.zero"], ["w"], "dqw", axis=1))
        x = "dq"
    else:
        constants["w"] = weight_IO
    results = []
    for number in range(nodes):
        node = helper.make_node("MatMul", [x, "w"], [f"product{number}"], f"layer/MatMul.{number}")
        helper.set_metadata_props(node, {MODULE: "layer"})
        made += [node, helper.make_node("Add", [f"product{number}", "bias"], [f"y{number}"], f"add{number}")]
        results += [f"product{number}", f"y{number}"]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", inputs])
    given_out = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", outputs]) for name in results]
    model = helper.make_model(helper.make_graph(made, "g", [value], given_out, tensors), opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    return model


def answers(model: onnx.ModelProto, x: np.ndarray, optimized: bool = False) -> list[np.ndarray]:
    options, levels = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    found: list[np.ndarray] = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    return found


MASKS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "random": lambda random, i, o: random.random((i, o)) < 0.5,
    "rows": lambda random, i, o: (random.random((i, 1)) < 0.5) & np.ones((1, o), bool),
    "columns": lambda random, i, o: (random.random((1, o)) < 0.5) & np.ones((i, 1), bool),
    "both": lambda random, i, o: (random.random((1, o)) < 0.5) & (random.random((i, 1)) < 0.5),
    "all gone": lambda random, i, o: np.zeros((i, o), bool),
    "one left": lambda random, i, o: np.arange(i * o).reshape(i, o) == random.integers(i * o),
    "last output gone": lambda random, i, o: np.arange(o)[None, :].repeat(i, 0) < o - 1,
    "first output gone": lambda random, i, o: np.arange(o)[None, :].repeat(i, 0) > 0,
    "diagonal": lambda random, i, o: np.eye(i, o, dtype=bool),
}


def matrix(kind: str, inputs: int, outputs: int, seed: int, integer: bool) -> np.ndarray:
    random = np.random.default_rng(seed)
    mask = MASKS[kind](random, inputs, outputs)
    if integer:
        codes: np.ndarray = (np.where(random.random(mask.shape) < 0.5, -1, 1) * random.integers(1, 128, mask.shape) * mask).astype(np.int8)
        return codes
    weight: np.ndarray = ((random.random(mask.shape) + 0.1) * mask).astype(np.float32)
    return weight


SHAPES = st.tuples(st.integers(1, 17), st.integers(1, 17))


@given(st.sampled_from(list(MASKS)), SHAPES, st.integers(0, 1000), st.integers(1, 2), st.booleans())
def test_float_products_are_the_same_to_rounding(kind: str, shape: tuple[int, int], seed: int, nodes: int, optimized: bool) -> None:
    whole = graph_of(matrix(kind, *shape, seed, integer=False), integer=False, nodes=nodes)
    small = onnx.ModelProto.FromString(whole.SerializeToString())
    drop_zero_slices(small.graph, lambda product: True)
    onnx.checker.check_model(small)
    x = np.random.default_rng(seed + 1).standard_normal((2, 3, shape[0])).astype(np.float32)
    for before, after in zip(answers(whole, x), answers(small, x, optimized), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@given(st.sampled_from(list(MASKS)), SHAPES, st.integers(0, 1000), st.booleans(), st.integers(1, 2))
def test_integer_sums_are_the_same(kind: str, shape: tuple[int, int], seed: int, smooth: bool, nodes: int) -> None:
    """Beside the sums of the codes, written out."""
    codes_IO = matrix(kind, *shape, seed, integer=True)
    whole = graph_of(codes_IO, integer=True, smooth=smooth, nodes=nodes)
    small = onnx.ModelProto.FromString(whole.SerializeToString())
    drop_zero_slices(small.graph, lambda product: True)
    onnx.checker.check_model(small)
    x = (np.random.default_rng(seed + 1).standard_normal((2, 3, shape[0])) * 3).astype(np.float32)
    constant = {tensor.name: numpy_helper.to_array(tensor) for tensor in whole.graph.initializer}
    read = x * constant["factor"] if smooth else x
    naive = np.clip(np.rint(read / SCALE), -128, 127).astype(np.int64) @ codes_IO.astype(np.int64)
    for number in range(nodes):
        product = answers(small, x)[2 * number].astype(np.float64)
        sums = product / (np.float64(SCALE) * constant["w.scale"].astype(np.float64))
        assert np.array_equal(np.rint(sums), naive)
        assert np.abs(sums - naive).max() < 0.01


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("kind", list(MASKS))
def test_what_is_left_is_as_small_as_the_mask_allows(kind: str, integer: bool) -> None:
    weight_IO = matrix(kind, 12, 9, 3, integer)
    model = graph_of(weight_IO, integer)
    read, written = (int((weight_IO != 0).any(axis=axis).sum()) for axis in (1, 0))
    found = products(model.graph)
    if read == 12 and written == 9:
        assert found == []
        return
    assert [product.extent for product in found] == [Extent(12, 9, read, written, integer)]
    assert [product.layer for product in found] == ["layer"]
    changed = drop_zero_slices(model.graph, lambda product: True)
    assert [product.extent for product in changed] == [product.extent for product in found]
    kept = [tensor for tensor in model.graph.initializer if tensor.name.endswith(".small")]
    assert [list(tensor.dims) for tensor in kept] == ([] if read == 0 else [[read, written]])
    assert products(model.graph) == []
    assert not any(tensor.name in ("w", "w.codes") for tensor in model.graph.initializer)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Gather") == ((read < 12) + (written < 9) if read else 0)
    assert kinds.count("MatMul") == (read > 0)


def test_what_is_not_worth_it_stays() -> None:
    model = graph_of(matrix("both", 8, 8, 1, integer=False), integer=False)
    before = model.SerializeToString()
    assert drop_zero_slices(model.graph, lambda product: False) == []
    assert model.SerializeToString() == before


def test_dense_matrices_and_other_weights_are_left_alone() -> None:
    dense = graph_of(np.ones((4, 4), np.float32), integer=False)
    assert products(dense.graph) == []
    model = graph_of(np.zeros((4, 4), np.float32), integer=False)
    model.graph.node[0].op_type = "Gemm"
    assert products(model.graph) == []
