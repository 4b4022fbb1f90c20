"""Attention as one node: the answers stay, the scale is applied to the queries, and what no fused kernel runs is left alone."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph.attention import OPSET, Fused, fuse_attention
from tests.export import half_graphs
from tests.seldom import seldom

pytestmark = pytest.mark.whole

ATTENTIONS = {"bert": 2, "ragged": 2, "distilbert": 2, "vit": 2, "gpt2": 2, "t5": 6}
CLOSE = 4e-3
"""Share of the largest answer that half rounding of another order of operations may move it by."""


def fused(kind: str) -> Fused:
    path = half_graphs.graph(kind)
    return fuse_attention(half_graphs.halved(path).model, half_graphs.measured(path)[1].largest)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(ATTENTIONS, ("bert", "distilbert", "t5")))
def test_every_attention_becomes_one_node_and_answers_stay(kind):
    halved = half_graphs.halved(half_graphs.graph(kind)).model
    found = fused(kind)
    onnx.checker.check_model(found.model, full_check=True)
    assert (len(found.products), found.of) == (ATTENTIONS[kind], ATTENTIONS[kind])
    assert found.model.opset_import[0].version == OPSET
    operations = [node.op_type for node in found.model.graph.node]
    assert operations.count("Attention") == ATTENTIONS[kind]
    assert "Softmax" not in operations
    if kind in ("vit", "gpt2"):  # the evaluator has no GatherElements for the others
        rows = half_graphs.features(kind, 3, 8, 5)
        expected, answers = (ReferenceEvaluator(model).run(None, rows)[0] for model in (halved, found.model))
        np.testing.assert_allclose(answers, expected, atol=CLOSE * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["ragged", "gpt2"])
def test_products_that_are_replaced_are_named(kind):
    before = {node.name for node in half_graphs.halved(half_graphs.graph(kind)).model.graph.node}
    found = fused(kind)
    named = {node.name for node in found.model.graph.node if node.op_type == "Attention"}
    assert set(found.products) == named
    assert {name.rsplit("/", 1)[1] for pair in found.products.values() for name in pair} == {"qk", "pv"}
    assert all(name in before for pair in found.products.values() for name in pair)


def test_products_of_int8_codes_stay():
    found = fuse_attention(half_graphs.halved(half_graphs.quantized("ragged")).model, {})
    assert found.of == len(found.products) == 2  # linear layers alone have codes there


def attention(*between: tuple[str, list[str], str], constants: dict[str, np.ndarray], kind: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """Returns (qk) -> between -> (pv) on inputs q [1, 2, 3, 4], k [1, 3, 2, 4] and v [1, 2, 3, 4]; the chain starts at `s`, ends at `p`."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], "kt", perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"], "a/qk"),
        *(helper.make_node(op, inputs, [output], output) for op, inputs, output in between),
        helper.make_node("MatMul", ["p", "v"], ["y"], "a/pv"),
    ]
    shapes = {"q": [1, 2, 3, 4], "k": [1, 3, 2, 4], "v": [1, 2, 3, 4]}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", kind, [1, 2, 3, 4])]
    values = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def rows(dtype=np.float16) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"q": (1, 2, 3, 4), "k": (1, 3, 2, 4), "v": (1, 2, 3, 4)}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


HALF, MASK = np.float16(0.5), np.array([[[[0, -30000, 0]]]], np.float16)
BIAS = np.random.default_rng(1).standard_normal((1, 2, 3, 3)).astype(np.float16)


@pytest.mark.parametrize(
    ("between", "constants", "scale"),
    [
        ([("Softmax", ["s"], "p")], {}, None),
        ([("Mul", ["s", "c"], "m"), ("Softmax", ["m"], "p")], {"c": HALF}, 0.5),
        ([("Div", ["s", "c"], "m"), ("Add", ["m", "n"], "z"), ("Softmax", ["z"], "p")], {"c": HALF, "n": MASK}, 2.0),
        ([("Add", ["b", "s"], "m"), ("Add", ["m", "n"], "z"), ("Softmax", ["z"], "p")], {"b": BIAS, "n": MASK}, None),
    ],
)
def test_scale_goes_to_the_queries_and_masks_are_added_up(between, constants, scale):
    model = attention(*between, constants=constants)
    found = fuse_attention(model, {})
    onnx.checker.check_model(found.model, full_check=True)
    by_kind = {node.op_type: node for node in found.model.graph.node}
    node = by_kind["Attention"]
    assert next(attribute.f for attribute in node.attribute if attribute.name == "scale") == 1.0
    stored = {item.name: numpy_helper.to_array(item) for item in found.model.graph.initializer}
    if scale is None:
        assert node.input[0] == "q"
    else:
        assert by_kind["Mul"].input[0] == "q"
        assert stored[by_kind["Mul"].input[1]] == np.float16(scale)
    expected = ReferenceEvaluator(model).run(None, rows())[0]
    np.testing.assert_allclose(ReferenceEvaluator(found.model).run(None, rows())[0], expected, atol=5e-3)


@pytest.mark.parametrize(
    ("between", "constants", "reason"),
    [
        ([("Tanh", ["s"], "m"), ("Softmax", ["m"], "p")], {}, "Tanh stands between its products"),
        ([("Mul", ["s", "b"], "m"), ("Softmax", ["m"], "p")], {"b": BIAS}, "scores are changed by Mul with a tensor"),
        ([("Div", ["c", "s"], "m"), ("Softmax", ["m"], "p")], {"c": HALF}, "scores are changed by Div with a tensor"),
        ([("Add", ["s", "b"], "m"), ("Mul", ["m", "c"], "z"), ("Softmax", ["z"], "p")], {"b": BIAS, "c": HALF}, "a mask is scaled"),
        ([("Identity", ["s"], "p")], {}, "Identity stands between its products"),
        ([("Cast", ["s"], "p")], {}, "no Softmax stands between its products"),
    ],
)
def test_what_no_fused_kernel_has_stays_with_its_reason(between, constants, reason):
    model = attention(*between, constants=constants)
    for node in model.graph.node:
        if node.op_type == "Cast":
            node.attribute.append(helper.make_attribute("to", TensorProto.FLOAT16))
    found = fuse_attention(model, {})
    assert reason in found.left["a/pv"]
    assert found.model == model
    assert found.of == 1


def test_attention_in_float32_stays():
    found = fuse_attention(attention(("Softmax", ["s"], "p"), constants={}, kind=TensorProto.FLOAT), {})
    assert found.left == {"a/pv": "the product with the values is not in halves"}


def test_attention_whose_scores_overflow_stays():
    model = attention(("Cast", ["s"], "p"), constants={})
    del model.graph.node[:]
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], "kt", perm=[0, 2, 3, 1]),
        helper.make_node("Cast", ["q"], ["q32"], "q32", to=TensorProto.FLOAT),
        helper.make_node("Cast", ["kt"], ["k32"], "k32", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["q32", "k32"], ["s"], "a/qk"),
        helper.make_node("Softmax", ["s"], ["p32"], "softmax"),
        helper.make_node("Cast", ["p32"], ["p"], "p", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["p", "v"], ["y"], "a/pv"),
    ]
    model.graph.node.extend(nodes)
    assert fuse_attention(model, {}).left == {"a/pv": "the product of queries and keys is not in halves"}


def test_products_that_read_codes_stay():
    model = attention(("Softmax", ["s"], "p"), constants={})
    nodes = list(model.graph.node)
    nodes[-1].input[1] = "vd"
    extra = [
        helper.make_node("QuantizeLinear", ["v", "t", "z"], ["vq"], "vq"),
        helper.make_node("DequantizeLinear", ["vq", "t", "z"], ["vd"], "vd"),
    ]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*extra, *nodes)]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.initializer.extend([numpy_helper.from_array(np.float16(0.1), "t"), numpy_helper.from_array(np.int8(0), "z")])
    assert fuse_attention(model, {}).left == {"a/pv": "its products read codes of int8; no fused kernel takes them"}


def test_masks_that_are_infinite_in_halves_stay():
    model = attention(("Add", ["s", "n"], "z"), ("Softmax", ["z"], "p"), constants={"n": MASK})
    assert fuse_attention(model, {"n": 30000.0}).of == len(fuse_attention(model, {"n": 30000.0}).products) == 1
    assert fuse_attention(model, {"n": 70000.0}).left == {"a/pv": "its masks are too large for halves"}


@pytest.mark.parametrize(("kind", "heads"), [("ragged", [2, 1]), ("gpt2", [2, 2]), ("vit", [2, 2])])
def test_the_number_of_heads_is_written_where_a_reshape_would_find_it(kind, heads):
    found = fused(kind).model
    typed = onnx.shape_inference.infer_shapes(found, data_prop=True).graph
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in typed.value_info}
    nodes = [node for node in found.graph.node if node.op_type == "Attention"]
    assert [[shapes[name][1] for name in node.input[:3]] for node in nodes] == [[count] * 3 for count in heads]


def test_attentions_that_may_not_be_nodes_stay_with_their_reason():
    halved = half_graphs.halved(half_graphs.graph("ragged")).model
    first, second = fuse_attention(halved, {}).products
    found = fuse_attention(halved, {}, {second: "no kernel runs it"})
    assert list(found.products) == [first]
    assert list(found.left.values()) == ["no kernel runs it"]
    assert [node.op_type for node in found.model.graph.node].count("Softmax") == 1
