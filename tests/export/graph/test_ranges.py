import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph.half_precision import float_tensors
from export.graph.ranges import measure
from tests.export import half_graphs

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_ranges_are_those_of_a_run_written_out(kind):
    model = onnx.load(str(half_graphs.graph(kind)))
    floats = float_tensors(model)
    batches = [half_graphs.features(kind, 2, 9, 1), half_graphs.features(kind, 3, 5, 2)]
    ranges = measure(model, floats, batches)
    names = [name for node in model.graph.node for name in node.output if name in floats]
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    weights = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    evaluator = ReferenceEvaluator(with_outputs(model, names))
    runs = [dict(zip(names, evaluator.run(names, batch), strict=True)) for batch in batches]
    for name in names:
        assert ranges.largest[name] == pytest.approx(max(np.abs(run[name]).max() for run in runs), rel=1e-3, abs=1e-5), name
    for node in products:
        found = []
        for run in runs:
            left, right = ({**run, **weights}[name] for name in node.input[:2])
            found.append((np.abs(left) @ np.abs(right.T if node.op_type == "Gemm" else right)).max())
        assert ranges.sums[node.name] == pytest.approx(max(found), rel=1e-3), node.name
    assert all(ranges.largest[name] == np.abs(values).max() for name, values in weights.items() if name in floats)


def test_what_is_no_number_is_kept():
    model = square()
    ranges = measure(model, frozenset({"x", "y"}), [{"x": np.ones(2, np.float32)}, {"x": np.full(2, np.nan, np.float32)}])
    assert np.isnan(ranges.largest["y"])


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="one batch of calibration rows or more"):
        measure(square(), frozenset({"x", "y"}), [])


def square() -> onnx.ModelProto:
    """y = x * x, float32 [n]."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "x"], ["y"], "square")], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def with_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """Returns a copy that gives out these tensors."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name != "logits")
    return made
