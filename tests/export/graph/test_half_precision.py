"""The half graph: types, casts and answers on small models, and for each rule of the table a graph that breaks without it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph import half_precision
from export.graph.half_precision import LARGEST, RULES, SHARE, Halved, clamp_masks, float_tensors, to_half_precision
from export.graph.ranges import measure
from foundation.models.inputs.padding import MASKED
from tests.export import half_graphs
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KINDS = seldom(half_graphs.CONFIGS, ("bert", "bert-base", "distilbert", "t5"))
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
CLOSE = 2e-3
"""Largest difference from float32 as a share of the largest answer: twice the spacing of halves; four layers of rounding stay below it."""


def run(model: onnx.ModelProto, features: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the answers of ONNX Runtime, which adds, fuses and drops nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, features)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_stay_close_to_float32_and_logits_are_float32(kind):
    halved, rows = half_graphs.halved(half_graphs.graph(kind)), half_graphs.features(kind, 5, 24, 7)
    expected, found = run(onnx.load(str(half_graphs.graph(kind))), rows), run(halved.model, rows)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - expected).max() < CLOSE * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["vit", "gpt2"])
def test_onnx_runtime_answers_as_a_naive_evaluation_in_halves(kind):
    halved, rows = half_graphs.halved(half_graphs.graph(kind)), half_graphs.features(kind, 3, 8, 7)
    naive = ReferenceEvaluator(halved.model).run(None, rows)[0]
    np.testing.assert_allclose(run(halved.model, rows), naive, atol=CLOSE * np.abs(naive).max())


@pytest.mark.parametrize("kind", KINDS)
def test_int8_with_a_half_rest_is_hardly_further_from_float_than_with_float32(kind):
    drawn = [half_graphs.features(kind, 8, 24, seed) for seed in range(3 if kind == "bert-base" else 8)]
    rows = {name: np.concatenate([some[name] for some in drawn]) for name in drawn[0]}
    floating = run(onnx.load(str(half_graphs.graph(kind))), rows)
    int8 = run(onnx.load(str(half_graphs.quantized(kind))), rows)
    halved = run(half_graphs.halved(half_graphs.quantized(kind)).model, rows)
    # A rest that is nearly equal flips codes one way or the other: of 8 rows the ratio is 0.7 to 1.5, by the processor's rounding.
    assert np.abs(halved - floating).mean() < 1.5 * np.abs(int8 - floating).mean()


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [half_graphs.graph, half_graphs.quantized])
def test_every_tensor_has_one_type_and_no_cast_is_wasted(kind, half, which):
    halved = half_graphs.halved(which(kind), half)
    onnx.checker.check_model(halved.model, full_check=True)  # types of every operation agree
    graph = halved.model.graph
    casts = [node for node in graph.node if node.name.endswith("/HalfCast")]
    assert len(casts) == halved.casts
    assert len({(node.input[0], node.attribute[0].i) for node in casts}) == len(casts)
    made = {output: node for node in graph.node for output in node.output}
    assert not [node.name for node in casts if node.input[0] in made and made[node.input[0]].name.endswith("/HalfCast")]
    assert not {node.input[0] for node in casts} & {item.name for item in graph.initializer}  # weights are stored in their type
    names = [name for node in graph.node for name in node.output] + [item.name for item in graph.initializer]
    assert len(names) == len(set(names))
    boundaries = sum(len(reads(node)) + len(node.output) for node in graph.node if node.name in halved.islands)
    assert halved.casts <= boundaries + len(graph.input) + len(graph.output)


def reads(node: onnx.NodeProto) -> set[str]:
    return set(node.input)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_gemm_runs_in_halves(kind):
    halved = half_graphs.halved(half_graphs.graph(kind))
    types = {item.name: item.data_type for item in halved.model.graph.initializer}
    gemms = [node for node in halved.model.graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    assert not {node.name for node in gemms} & halved.islands.keys()
    assert {types.get(name, TensorProto.FLOAT16) for node in gemms for name in node.input} == {TensorProto.FLOAT16}


@pytest.mark.parametrize("kind", ["ragged", "gpt2"])
def test_integers_stay_those_of_float32_scales(kind):
    before, after = (
        {item.name: item for item in model.graph.initializer}
        for model in (onnx.load(str(half_graphs.quantized(kind))), half_graphs.halved(half_graphs.quantized(kind)).model)
    )
    kept = [name for name in before if name.endswith((".codes", ".scale", ".zero_point"))]
    assert kept
    assert all(before[name] == after[name] for name in kept)


def test_a_model_that_overflows_is_rescued_by_islands(monkeypatch):
    model, rows = overflowing(), half_graphs.features("ragged", 4, 16, 3)
    expected = run(model, rows)
    ranges = measure(model, float_tensors(model), [rows])
    assert max(ranges.largest.values()) > LARGEST["fp16"]
    rescued = to_half_precision(model, ranges, "fp16")
    assert "bert.encoder.layer.0.intermediate.dense/MatMul" in rescued.islands
    assert "bert.encoder.layer.1.intermediate.dense/MatMul" not in rescued.islands
    assert np.abs(run(rescued.model, rows) - expected).max() < CLOSE * np.abs(expected).max()
    monkeypatch.setattr(half_precision, "RULES", tuple(rule for rule in RULES if rule.name not in ("range", "sums")))
    with np.errstate(over="ignore"):
        broken = to_half_precision(model, ranges, "fp16")
    assert not np.isfinite(run(broken.model, rows)).all()


def overflowing() -> onnx.ModelProto:
    """Returns a BERT with an FFN in the first layer whose neurons reach millions, and whose second layer brings them back."""
    model = onnx.load(str(half_graphs.graph("ragged")))
    clamp_masks(model)
    for item in model.graph.initializer:
        factor = {"intermediate.dense.weight": 1e6, "output.dense.weight": 1e-6}
        for end, by in factor.items():
            if item.name.startswith("bert.encoder.layer.0.") and item.name.endswith(end) and "attention" not in item.name:
                item.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item) * np.float32(by), item.name))
    return model


@dataclass
class Case:
    """A graph x -> y that needs a rule: its nodes, constants, and rows; `half` and the opset are the usual ones."""

    nodes: list[tuple[Any, ...]]
    x: np.ndarray
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    half: str = "fp16"
    y: int = TensorProto.FLOAT
    island: str = ""
    """Operation that the rule has to find."""

    def model(self) -> onnx.ModelProto:
        nodes = [
            helper.make_node(op, inputs, outputs, f"{index}/{op}", **dict(*attributes))
            for index, (op, inputs, outputs, *attributes) in enumerate(self.nodes)
        ]
        values = [
            helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(self.x.dtype), self.x.shape),
            helper.make_tensor_value_info("y", self.y, [None] * self.x.ndim),
        ]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def halved(self) -> Halved:
        model = self.model()
        return to_half_precision(model, measure(model, float_tensors(model), [{"x": self.x}]), self.half)


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


FOUR = np.array([[200, 200, -200, -200]], np.float32)
CASES = {
    "types": Case([("Sin", ["x"], ["y"])], array(0.5, 1.0), half="bf16", island="Sin"),
    "codes": Case(
        [("QuantizeLinear", ["x", "s", "z"], ["q"]), ("DequantizeLinear", ["q", "s", "z"], ["y"])],
        array(3e-7, -4e-7),
        {"s": np.float32(1e-8), "z": np.int8(0)},
        island="DequantizeLinear",
    ),
    "statistics": Case(
        [("LayerNormalization", ["x", "w"], ["y"])],
        300 * np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32),
        {"w": np.ones(8, np.float32)},
        island="LayerNormalization",
    ),
    "softmax": Case([("Softmax", ["x"], ["y"])], array(0, -18), island="Softmax"),
    "powers": Case([("Pow", ["x", "two"], ["y"])], array(1e-4, 2e-4), {"two": np.float32(2)}, island="Pow"),
    "indices": Case(
        [
            ("Cast", ["x"], ["f"], {"to": TensorProto.FLOAT}),
            ("Mul", ["f", "third"], ["t"]),
            ("Add", ["t", "off"], ["a"]),
            ("Cast", ["a"], ["y"], {"to": TensorProto.INT64}),
        ],
        np.arange(2040, 2060),
        {"third": np.float32(1 / 3), "off": np.float32(1e-4)},
        y=TensorProto.INT64,
        island="Mul",
    ),
    "gelu": Case([("Gelu", ["x"], ["y"])], array(-50, 50), island="Gelu"),
    "range": Case([("Mul", ["x", "w"], ["y"])], array(300), {"w": array(300)}, island="Mul"),
    "sums": Case([("MatMul", ["x", "w"], ["y"])], np.abs(FOUR), {"w": np.ascontiguousarray(FOUR.T)}, island="MatMul"),
    "bridge": Case(
        [
            ("Pow", ["x", "two"], ["p"]),
            ("ReduceMean", ["p"], ["m"]),
            ("Add", ["m", "epsilon"], ["e"]),
            ("Sqrt", ["e"], ["r"]),
            ("Div", ["x", "r"], ["y"]),
        ],
        np.zeros((1, 4), np.float32),
        {"two": np.float32(2), "epsilon": np.float32(1e-8)},
        island="Add",
    ),
}
"""A graph for each rule, and `bridge`."""
BY_PLACE_ALONE = ("gelu", "sums")
"""What breaks without these rules is inside of a kernel: only where they put islands can be seen."""


def test_every_rule_has_its_graph():
    assert set(CASES) == {rule.name for rule in RULES} | {"bridge"}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_puts_its_island_and_answers_break_without_it(rule, monkeypatch):
    case = CASES[rule]
    with_rule = case.halved()
    places = {name: found for name, found in with_rule.islands.items() if found == rule}
    assert any(name.endswith(f"/{case.island}") for name in places), with_rule.islands
    assert same(case, with_rule)
    if rule == "bridge":
        monkeypatch.setattr(half_precision, "_bridges", lambda *_: iter(()))
    else:
        monkeypatch.setattr(half_precision, "RULES", tuple(other for other in RULES if other.name != rule))
    without = case.halved()
    assert not any(name in without.islands for name in places)
    assert rule in BY_PLACE_ALONE or not same(case, without)


def same(case: Case, halved: Halved) -> bool:
    """Whether a half graph is valid and answers as float32 does, evaluated naively, in numpy."""
    expected = ReferenceEvaluator(case.model()).run(None, {"x": case.x})[0]
    try:
        onnx.checker.check_model(halved.model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(halved.model).run(None, {"x": case.x})[0]
    if not np.issubdtype(expected.dtype, np.floating):
        return np.array_equal(found, expected)
    return bool(np.isfinite(found).all()) and np.allclose(found, expected, rtol=CLOSE, atol=1e-12)


def test_a_sum_that_fits_overflows_on_its_way_in_halves():
    terms = (np.abs(FOUR) * FOUR).astype(np.float16).ravel()
    with np.errstate(all="ignore"):
        running = np.float16(0)
        for term in terms:
            running = np.float16(running + term)
    assert not np.isfinite(running)
    assert float(np.sum(terms.astype(np.float32))) == 0


@given(share=st.floats(0.01, 4))
def test_range_makes_an_island_exactly_above_its_share(share):
    largest = np.float32(share * SHARE * LARGEST["fp16"])
    case = Case([("Relu", ["x"], ["y"])], np.array([largest], np.float32))
    assert bool(case.halved().islands) == (largest > SHARE * LARGEST["fp16"])


def test_a_product_of_integers_is_no_island():
    nodes = [
        ("DequantizeLinear", ["x", "s"], ["a"]),
        ("DequantizeLinear", ["w", "s"], ["b"]),
        ("MatMul", ["a", "b"], ["y"]),
    ]
    codes = (np.abs(FOUR) / 2).astype(np.int8)
    constants = {"s": np.float32(2), "w": np.ascontiguousarray((FOUR.T / 2).astype(np.int8))}
    assert set(Case(nodes, codes, constants).halved().islands.values()) == {"codes"}


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min, -1e9])
def test_masks_stay_finite_in_halves(lowest):
    nodes = [("Where", ["keep", "x", "mask"], ["m"]), ("Softmax", ["m"], ["y"])]
    model = Case(nodes, array(1, 2, 3), {"keep": np.array([True, False, True]), "mask": np.float32(lowest)}).model()
    (expected,) = ReferenceEvaluator(model).run(None, {"x": array(1, 2, 3)})
    assert clamp_masks(model) == 1
    assert clamp_masks(model) == 0
    clamped = next(numpy_helper.to_array(item) for item in model.graph.initializer if item.name == "mask")
    assert clamped == np.float32(MASKED)
    assert np.isfinite(np.float16(clamped))
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": array(1, 2, 3)})[0], expected)


def test_weights_are_no_masks():
    model = Case([("Mul", ["x", "w"], ["y"])], array(1), {"w": array(-70000, 3)}).model()
    assert clamp_masks(model) == 0


def test_an_output_that_is_read_again_keeps_its_name_and_type():
    case = Case([("Relu", ["x"], ["y"]), ("Add", ["y", "one"], ["z"])], array(1, -2), {"one": array(1)})
    halved = case.halved().model
    onnx.checker.check_model(halved, full_check=True)
    assert Counter(node.op_type for node in halved.graph.node) == {"Cast": 2, "Relu": 1, "Add": 1}
    np.testing.assert_array_equal(ReferenceEvaluator(halved).run(None, {"x": case.x})[0], array(1, 0))


def test_other_domains_and_subgraphs_are_refused():
    case = Case([("Relu", ["x"], ["y"])], array(1))
    model = case.model()
    ranges = measure(model, float_tensors(model), [{"x": case.x}])
    model.graph.node[0].domain = "com.microsoft"
    with pytest.raises(ValueError, match=r"0/Relu \(com.microsoft:Relu\): flat graphs of ONNX"):
        to_half_precision(model, ranges, "fp16")
