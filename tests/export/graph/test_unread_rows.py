"""Which rows an operation needs for the first rows of its output: every operation, every axis, against the whole output."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph.unread_tokens import KnownGraph, _rows_needed, drop_unread_tokens

SIZES = st.integers(1, 4)


def shapes(least: int = 1, most: int = 4) -> st.SearchStrategy[list[int]]:
    return st.lists(SIZES, min_size=least, max_size=most)


def run(node: onnx.NodeProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    typed = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None) for name, value in inputs.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output]
    graph = helper.make_graph([node], "one", typed, outputs)
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)).run(None, inputs)


def passing(node: onnx.NodeProto, inputs: dict[str, np.ndarray]) -> list[int]:
    """Returns the axes whose rows pass, each checked: from so many rows of the inputs come so many rows of every output, the same ones."""
    whole = run(node, inputs)
    sizes = {name: list(value.shape) for name, value in (*inputs.items(), *zip(node.output, whole, strict=True))}
    constants = {name: numpy_helper.from_array(value, name) for name, value in inputs.items() if value.dtype == np.int64}
    found = []
    for axis, size in enumerate(whole[0].shape):
        rows = _rows_needed(node, axis, KnownGraph(sizes, constants))
        if rows is None:
            continue
        found.append(axis)
        for count in range(1, size):
            few = {
                name: value if own is None else np.take(value, range(count), own)
                for (name, value), own in zip(inputs.items(), rows, strict=True)
            }
            if node.op_type == "Reshape":  # as it is written: sizes up to the rows are those that come
                few["sizes"] = np.array([*[0] * (axis + 1), *whole[0].shape[axis + 1 :]])
            for part, all_of_it in zip(run(node, few), whole, strict=True):
                np.testing.assert_allclose(part, np.take(all_of_it, range(count), axis), rtol=1e-5, atol=1e-6)
    return found


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(shapes(), st.data())
def test_norms_and_softmax_pass_axes_that_they_do_not_reduce(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    first = axis % len(shape)
    norm = helper.make_node("LayerNormalization", ["x", "scale"], ["y"], axis=axis)
    assert passing(norm, {"x": numbers(*shape), "scale": numbers(*shape[first:])}) == list(range(first))
    for name in ("Softmax", "LogSoftmax"):
        node = helper.make_node(name, ["x"], ["y"], axis=axis)
        assert passing(node, {"x": numbers(*shape)}) == [other for other in range(len(shape)) if other != first]


@given(shapes(), st.data())
def test_a_transpose_passes_every_axis(shape, data):
    perm = data.draw(st.permutations(range(len(shape))))
    assert passing(helper.make_node("Transpose", ["x"], ["y"], perm=perm), {"x": numbers(*shape)}) == list(range(len(shape)))


@given(shapes(), st.data())
def test_split_and_concat_pass_the_other_axes(shape, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    others = [other for other in range(len(shape)) if other != axis % len(shape)]
    shape[axis] *= 2
    node = helper.make_node("Split", ["x"], ["one", "two"], axis=axis, num_outputs=2)
    assert passing(node, {"x": numbers(*shape)}) == others
    node = helper.make_node("Concat", ["x", "z"], ["y"], axis=axis)
    assert passing(node, {"x": numbers(*shape), "z": numbers(*shape, seed=1)}) == others


@given(shapes(), st.data())
def test_slices_and_reductions_pass_axes_that_they_leave_alone(shape, data):
    axes = np.array(data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True)))
    others = [axis for axis in range(len(shape)) if axis not in axes]
    named = np.where(np.arange(len(axes)) % 2, axes, axes - len(shape))  # counted from the end too
    ends = {"start": np.zeros_like(axes), "end": np.full_like(axes, data.draw(st.integers(1, 4))), "axes": named}
    assert passing(helper.make_node("Slice", ["x", *ends], ["y"]), {"x": numbers(*shape), **ends}) == others
    for name in ("ReduceMean", "ReduceSum", "ReduceMax"):
        node = helper.make_node(name, ["x", "axes"], ["y"], keepdims=1)
        assert passing(node, {"x": numbers(*shape), "axes": named}) == others
        node = helper.make_node(name, ["x", "axes"], ["y"], keepdims=0)
        assert passing(node, {"x": numbers(*shape), "axes": named}) == []


@given(shapes(most=3), st.data())
def test_axes_of_one_that_come_and_go(shape, data):
    new = data.draw(st.lists(st.integers(0, len(shape)), min_size=1, max_size=2, unique=True))
    node = helper.make_node("Unsqueeze", ["x", "axes"], ["y"])
    total = len(shape) + len(new)
    assert passing(node, {"x": numbers(*shape), "axes": np.array(new)}) == [axis for axis in range(total) if axis not in new]
    wide = np.expand_dims(numbers(*shape), tuple(new))
    assert passing(helper.make_node("Squeeze", ["x", "axes"], ["y"]), {"x": wide, "axes": np.array(new)}) == list(range(len(shape)))


@given(shapes(least=2), shapes(most=3), st.data())
def test_products_pass_rows_of_the_first_matrix_and_a_batch_that_is_its_own(left, batch, data):
    columns = data.draw(SIZES)
    many = data.draw(st.booleans())
    right = [*(1 if data.draw(st.booleans()) else size for size in left[:-2]), left[-1], columns] if many else [left[-1], columns]
    found = passing(helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": numbers(*left), "w": numbers(*right)})
    assert len(left) - 2 in found
    assert len(left) - 1 not in found
    if not many:
        assert found == list(range(len(left) - 1))
    vector = passing(helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": numbers(left[-1]), "w": numbers(*batch, left[-1], columns)})
    assert vector == []


@given(shapes(least=2, most=3), st.data())
def test_a_reshape_passes_axes_up_to_which_nothing_changes(shape, data):
    kept = data.draw(st.integers(0, len(shape)))
    rest = int(np.prod(shape[kept:]))
    target = [*shape[:kept], *([rest] if data.draw(st.booleans()) else [1, rest])]
    found = passing(helper.make_node("Reshape", ["x", "sizes"], ["y"]), {"x": numbers(*shape), "sizes": np.array(target)})
    assert set(range(kept)) <= set(found)


@pytest.mark.parametrize(
    ("left", "right"), [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 4)), ((2, 3, 4), (1, 4)), ((3, 1), (2, 1, 4)), ((2, 3, 4), ())]
)
def test_numbers_on_their_own_pass_every_axis(left, right):
    found = passing(helper.make_node("Add", ["x", "z"], ["y"]), {"x": numbers(*left), "z": numbers(*right, seed=1)})
    assert found == list(range(len(np.broadcast_shapes(left, right))))


def test_other_operations_pass_nothing():
    assert passing(helper.make_node("CumSum", ["x", "axis"], ["y"]), {"x": numbers(2, 3), "axis": np.array(1)}) == []


def test_rows_of_two_axes_are_read_in_full():
    """One head reads the first rows of one axis, one those of another: neither is all that is read."""
    shape = ["batch", 5, 6, 4]
    weight = numpy_helper.from_array(numbers(4, 4), "w")
    zero = numpy_helper.from_array(np.array(0), "zero")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Tanh", ["m"], ["t"]),
        helper.make_node("Gather", ["t", "zero"], ["one"], axis=1),
        helper.make_node("Gather", ["t", "zero"], ["two"], axis=2),
    ]
    kinds = {"m": shape, "t": shape}
    typed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in kinds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("one", "two")]
    entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "two", [entry], outputs, [weight, zero], value_info=typed)
    before = [node.SerializeToString() for node in graph.node]
    assert drop_unread_tokens(graph) == 0
    assert [node.SerializeToString() for node in graph.node] == before
