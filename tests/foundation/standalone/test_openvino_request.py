"""Requests against the model's own call, whatever memory the arrays come in, and what stays bound from run to run."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import openvino
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as ops

from foundation.standalone.openvino_request import Request, compiled, computes_bf16, for_this_cpu

WIDTH = 5


def opened(shape: tuple[int, int] | None = None) -> Any:
    """Returns a model of two inputs, float `x` and int64 `k`, with outputs y = 3 x + k and z = k."""
    x = ops.parameter([-1, WIDTH] if shape is None else shape, np.float32, name="x")
    k = ops.parameter([-1, WIDTH] if shape is None else shape, np.int64, name="k")
    for node in (x, k):
        node.output(0).set_names({node.get_friendly_name()})
    y = ops.add(ops.multiply(x, np.float32(3)), ops.convert(k, "f32"))
    z = ops.multiply(k, np.int64(1))
    y.output(0).set_names({"y"})
    z.output(0).set_names({"z"})
    return openvino.Core().compile_model(openvino.Model([y, z], [x, k], "small"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((count, WIDTH)).astype(np.float32), "k": random.integers(-9, 9, (count, WIDTH))}


def expected(inputs: dict[str, np.ndarray]) -> np.ndarray:
    return inputs["x"] * np.float32(3) + inputs["k"].astype(np.float32)


def laid_out(array: np.ndarray, how: str) -> np.ndarray:
    """Returns equal values in other memory."""
    if how == "columns first":
        return np.asfortranarray(array)
    if how == "every second":
        wide = np.zeros((len(array), 2 * WIDTH), array.dtype)
        wide[:, ::2] = array
        return wide[:, ::2]
    if how == "read only":
        array = array.copy()
        array.flags.writeable = False
    return array


LAYOUTS = st.sampled_from(["plain", "columns first", "every second", "read only"])
ANY, FIXED = opened(), opened((3, WIDTH))


@pytest.mark.parametrize("other", ["hidden", "a", "view", "ids_2"])
@pytest.mark.parametrize("shape", [(), (2, 4)])
def test_an_input_is_found_by_its_own_name(other: str, shape: tuple[int, ...]) -> None:
    """OpenVINO 2026.4.1 gives an input of a compiled model the name of a reshape that it removes, and may name that one first."""
    ids = ops.parameter([-1, 4], np.int64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    removed = ops.reshape(ids, np.array([-1, 4], np.int64), special_zero=False)
    removed.output(0).set_names({other})
    y = ops.multiply(ops.convert(removed, "f32"), np.float32(2))
    y.output(0).set_names({"y"})
    model = compiled(openvino.Core(), openvino.Model([y], [ids], "small"), shape, {})
    assert model.inputs[0].names == {"input_ids", other}
    request, values = Request(model, known=bool(shape)), np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(request.infer({"input_ids": values}), 2 * values)
    with pytest.raises(KeyError) if shape else pytest.raises(RuntimeError):
        request.infer({"another": values})


@given(st.lists(st.tuples(st.integers(1, 6), LAYOUTS, LAYOUTS), min_size=1, max_size=4))
def test_any_shape_and_any_memory(runs: list[tuple[int, str, str]]) -> None:
    request = Request(ANY)
    for seed, (count, x, k) in enumerate(runs):
        inputs = rows(count, seed)
        found = request.infer({"x": laid_out(inputs["x"], x), "k": laid_out(inputs["k"], k)})
        np.testing.assert_allclose(found, expected(inputs), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(request.outputs()["z"], inputs["k"])


@given(st.lists(st.tuples(LAYOUTS, LAYOUTS), min_size=1, max_size=4))
def test_known_shapes(runs: list[tuple[str, str]]) -> None:
    request = Request(FIXED, known=True)
    for seed, (x, k) in enumerate(runs):
        inputs = rows(3, seed)
        found = request.infer({"x": laid_out(inputs["x"], x), "k": laid_out(inputs["k"], k)})
        np.testing.assert_allclose(found, expected(inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("known", [False, True])
def test_what_was_answered_stays(known: bool) -> None:
    request = Request(FIXED if known else ANY, known=known)
    first = request.infer(rows(3, 1))
    kept, outputs = first.copy(), request.outputs()
    request.infer(rows(3, 2))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(outputs["z"], rows(3, 1)["k"])


@pytest.mark.parametrize("known", [False, True])
def test_what_was_given_is_not_written(known: bool) -> None:
    inputs = rows(3)
    Request(FIXED if known else ANY, known=known).infer(inputs)
    for name, values in rows(3).items():
        np.testing.assert_array_equal(inputs[name], values)


def test_what_is_bound_stays_bound_where_it_lies() -> None:
    request, bound = Request(ANY), rows(2, 7)["k"]
    request.bind({"k": bound})
    for seed in range(3):
        inputs = {"x": rows(2, seed)["x"], "k": bound}
        np.testing.assert_allclose(request.infer({"x": inputs["x"]}), expected(inputs), rtol=1e-6, atol=1e-6)
    bound += 1  # it is read where it lies
    inputs = {"x": rows(2, 9)["x"], "k": bound}
    np.testing.assert_allclose(request.infer({"x": inputs["x"]}), expected(inputs), rtol=1e-6, atol=1e-6)
    request.bind({"k": rows(4, 8)["k"]})
    again = {"x": rows(4, 9)["x"], "k": rows(4, 8)["k"]}
    np.testing.assert_allclose(request.infer({"x": again["x"]}), expected(again), rtol=1e-6, atol=1e-6)


@pytest.mark.whole
def test_what_is_bound_lives_as_long_as_the_request() -> None:
    request, size = Request(ANY), 20_000
    request.bind({"k": np.full((size, WIDTH), 4)})
    gc.collect()
    others = [np.full((size, WIDTH), 77) for _ in range(20)]  # would be given the memory that was freed
    found = request.infer({"x": np.zeros((size, WIDTH), np.float32)})
    assert len(others) == 20
    np.testing.assert_array_equal(found, 4)


def test_a_row_is_not_repeated_to_fill_a_known_shape() -> None:
    request = Request(FIXED, known=True)
    with pytest.raises(ValueError, match=r"x: shape \[1, 5\] given; the model is compiled for \[3, 5\]"):
        request.infer({**rows(3), "x": rows(1)["x"]})
    with pytest.raises(KeyError, match="k"):  # not answered with those of the run before
        request.infer({"x": rows(3)["x"]})


@pytest.mark.parametrize(("known", "error"), [(False, RuntimeError), (True, TypeError)])
def test_another_type_is_refused(known: bool, error: type[Exception]) -> None:
    with pytest.raises(error):
        Request(FIXED if known else ANY, known=known).infer({**rows(3), "x": rows(3)["x"].astype(np.float64)})


def test_a_state_is_forgotten() -> None:
    x = ops.parameter([1, WIDTH], np.float32, name="x")
    x.output(0).set_names({"x"})
    variable = openvino.op.util.VariableInfo()
    variable.data_shape, variable.data_type, variable.variable_id = openvino.PartialShape([1, WIDTH]), openvino.Type.f32, "sum"
    held = openvino.op.util.Variable(variable)
    total = ops.add(ops.read_value(ops.constant(np.zeros((1, WIDTH), np.float32)), held), x)
    model = openvino.Model([total.output(0)], [ops.assign(total, held)], [x], "sum")
    request, ones = Request(openvino.Core().compile_model(model, "CPU")), {"x": np.ones((1, WIDTH), np.float32)}
    assert [request.infer(ones)[0, 0] for _ in range(3)] == [1, 2, 3]
    request.reset_state()
    assert request.infer(ones)[0, 0] == 1


@pytest.mark.whole
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_token_ids_of_a_known_shape_go_in_as_int32(batch: int, length: int, seed: int) -> None:
    """The network itself stays as it is, and so do answers, up to the largest id."""
    ids = ops.parameter([-1, -1], np.int64, name="ids")
    ids.output(0).set_names({"ids"})
    network = openvino.Model([ops.convert(ops.multiply(ids, ops.constant(np.int64(3))), "f32").output(0)], [ids], "triple")
    given = np.random.default_rng(seed).integers(0, 100_000, (batch, length))
    found = {}
    for shape in ((), (batch, length)):
        model = compiled(openvino.Core(), network, shape, {})
        assert str(model.inputs[0].get_element_type().get_type_name()) == ("i32" if shape else "i64")
        found[shape] = Request(model, known=bool(shape)).infer({"ids": given})
    np.testing.assert_array_equal(found[()], 3 * given)
    np.testing.assert_array_equal(found[batch, length], 3 * given)
    assert network.inputs[0].get_partial_shape().is_dynamic


def test_the_leading_axes_are_fixed_and_the_others_stay() -> None:
    pixels = ops.parameter([-1, 3, 8, 8], np.float32, name="pixels")
    pixels.output(0).set_names({"pixels"})
    network = openvino.Model([ops.relu(pixels).output(0)], [pixels], "image")
    for shape in ((5,), (5, 3, 8, 8)):
        assert list(compiled(openvino.Core(), network, shape, {}).inputs[0].shape) == [5, 3, 8, 8]


class Cpu:
    """What OpenVINO says that a CPU can do."""

    def __init__(self, *capabilities: str) -> None:
        self._capabilities = list(capabilities)

    def get_property(self, device: str, name: str) -> list[str]:
        assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return self._capabilities


def test_bfloat16_is_computed_where_the_cpu_has_it_and_float32_elsewhere() -> None:
    """OpenVINO 2026.4.1 emulates bfloat16 on a CPU with AVX-512 alone, 34 times slower than float32."""
    assert [computes_bf16(Cpu("FP32", *more)) for more in (["BF16"], ["INT8"])] == [True, False]
    given = {"INFERENCE_PRECISION_HINT": "bf16", "NUM_STREAMS": "1"}
    assert for_this_cpu(Cpu("FP32", "INT8", "BF16"), given) == given
    with pytest.warns(UserWarning, match="no bfloat16"):
        assert for_this_cpu(Cpu("FP32", "INT8"), given) == {**given, "INFERENCE_PRECISION_HINT": "f32"}
    for other in ({}, {"INFERENCE_PRECISION_HINT": "f32"}):
        assert for_this_cpu(Cpu("FP32"), other) == other


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_model_is_not_compiled_for_bfloat16_that_the_cpu_lacks(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.standalone.openvino_request.computes_bf16", lambda core: False)
    x = ops.parameter([-1, WIDTH], np.float32, name="x")
    network = openvino.Model([ops.matmul(x, np.ones((WIDTH, WIDTH), np.float32), False, False)], [x], "small")
    with pytest.warns(UserWarning, match="no bfloat16"):
        model = compiled(openvino.Core(), network, shape, {"INFERENCE_PRECISION_HINT": "bf16"})
    assert model.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
