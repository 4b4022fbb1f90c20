"""Products whose result is split: the answers and the integers stay, one product is there for each part."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph.macs import count_macs
from export.graph.onnx import MODULE
from export.graph.split_products import split_products
from foundation.artifacts.graph import Graph
from tests.export import half_graphs


def graph(sizes: list[int] | int, width: int, *, codes: bool, bias: bool = True, axis: int = 2, seed: int = 0) -> onnx.ModelProto:
    """Returns x [B, S, 3] -> MatMul, Add, Split -> y0, y1, ...; sizes as a number are equal parts."""
    random = np.random.default_rng(seed)
    weight = random.integers(-127, 128, (3, width), np.int8) if codes else random.standard_normal((3, width)).astype(np.float32)
    values = {"w": weight, "b": random.standard_normal(width).astype(np.float32)}
    nodes = []
    if codes:
        values |= {"s": random.uniform(0.01, 0.1, width).astype(np.float32), "z": np.zeros(width, np.int8)}
        nodes = [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wd"], "m.weight/DequantizeLinear", axis=1)]
    product = helper.make_node("MatMul", ["x", "wd" if codes else "w"], ["p"], "m/MatMul")
    product.metadata_props.add(key=MODULE, value="m")
    nodes.append(product)
    if bias:
        nodes.append(helper.make_node("Add", ["b", "p"], ["a"], "add"))
    count = sizes if isinstance(sizes, int) else len(sizes)
    outputs = [f"y{index}" for index in range(count)]
    more = {"num_outputs": count} if isinstance(sizes, int) else {}
    if not isinstance(sizes, int):
        values["sizes"] = np.array(sizes, np.int64)
    inputs = ["a" if bias else "p", *([] if isinstance(sizes, int) else ["sizes"])]
    nodes.append(helper.make_node("Split", inputs, outputs, "split", axis=axis, **more))
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, None]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    codes=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_part_is_what_the_split_gave(sizes, codes, bias, seed):
    before = graph(sizes, sum(sizes), codes=codes, bias=bias, seed=seed)
    after = onnx.ModelProto()
    after.CopyFrom(before)
    assert split_products(after) == 1
    onnx.checker.check_model(after, full_check=True)
    rows = {"x": np.random.default_rng(seed).standard_normal((2, 4, 3)).astype(np.float32)}
    for expected, found in zip(ReferenceEvaluator(before).run(None, rows), ReferenceEvaluator(after).run(None, rows), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    products = [node for node in after.graph.node if node.op_type == "MatMul"]
    assert [node.name for node in products] == [f"m/MatMul.{part}" for part in range(len(sizes))]
    assert {entry.value for node in products for entry in node.metadata_props} == {"m"}
    assert "Split" not in {node.op_type for node in after.graph.node}


def test_parts_in_equal_numbers_leave_the_rest_to_the_last():
    model = graph(3, 7, codes=True)
    rows = {"x": np.ones((1, 2, 3), np.float32)}
    expected = ReferenceEvaluator(model).run(None, rows)
    assert split_products(model) == 1
    widths = [item.dims[1] for item in model.graph.initializer if item.name.startswith("w.")]
    assert widths == [3, 3, 1]
    for before, after in zip(expected, ReferenceEvaluator(model).run(None, rows), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_split_of_rows_stays(axis):
    model = graph(2, 4, codes=True, axis=axis)
    before = model.SerializeToString()
    assert split_products(model) == 0
    assert len(model.graph.node) == len(onnx.ModelProto.FromString(before).graph.node)


def test_a_product_that_is_read_twice_stays():
    model = graph([2, 2], 4, codes=False)
    model.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [None, None, None]))
    model.graph.node.append(helper.make_node("Relu", ["a"], ["r"], "relu"))
    model.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, [None, None, None]))
    assert split_products(model) == 0


def test_a_result_that_the_graph_returns_stays():
    model = graph([2, 2], 4, codes=False)
    model.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [None, None, None]))
    assert split_products(model) == 0


@pytest.mark.whole
def test_gpt2_answers_bit_for_bit_and_its_multiply_accumulates_stay():
    source = half_graphs.quantized("gpt2")
    made = half_graphs.split(source)
    assert made != source
    rows = half_graphs.features("gpt2", 3, 20)
    answers = [onnxruntime.InferenceSession(str(path)).run(None, rows)[0] for path in (source, made)]
    np.testing.assert_array_equal(*answers)
    before, after = (count_macs(Graph(path), 2, 16) for path in (source, made))
    for name in {gemm.name for gemm in before}:
        assert sum(gemm.macs for gemm in before if gemm.name == name) == sum(gemm.macs for gemm in after if gemm.name == name)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["ragged", "vit"])
def test_graphs_without_such_a_split_are_left_alone(kind):
    assert half_graphs.split(half_graphs.quantized(kind)) == half_graphs.quantized(kind)
