from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.engines.registry import open_engine
from export.engines.spec import EngineSpec
from export.parity.parity import (
    ParityError,
    QuantizedGemm,
    check_layers,
    compare_layer,
    compare_layers,
    quantized_gemms,
)
from foundation.artifacts.graph import Graph
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment

SCALE = np.float32(0.05)


def layer(seed: int = 0, outputs: int = 6, inputs: int = 10, bias: float = 0.0) -> QuantizedGemm:
    random = np.random.default_rng(seed)
    weight = random.integers(-63, 64, (outputs, inputs)).astype(np.int8)
    scales = random.uniform(0.001, 0.1, outputs).astype(np.float32)
    biases = (bias * random.standard_normal(outputs)).astype(np.float32)
    return QuantizedGemm("some.layer", "x", "q", "y", SCALE, weight, scales, biases)


def engine(gemm: QuantizedGemm, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A correct engine, written out: codes and product."""
    codes = np.clip(np.rint(x / gemm.input_scale), -128, 127).astype(np.int8)
    sums = codes.astype(np.int64) @ gemm.weight_OI.T.astype(np.int64)
    return codes, sums.astype(np.float32) * (gemm.input_scale * gemm.weight_scale) + gemm.bias


def inputs(seed: int, shape: tuple[int, ...] = (2, 5, 10)) -> np.ndarray:
    """Random inputs away from rounding boundaries."""
    random = np.random.default_rng(seed)
    return ((random.integers(-200, 200, shape) + random.uniform(-0.4, 0.4, shape)) * SCALE).astype(np.float32)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), bias=st.sampled_from([0.0, 1.0, 30.0]))
def test_a_correct_engine_passes(seed: int, bias: float) -> None:
    gemm = layer(seed, bias=bias)
    x = inputs(seed)
    found = compare_layer(gemm, x, *engine(gemm, x))
    assert (found.codes, found.sums, found.different, found.wrong_sums, found.passed) == (100, 60, 0, 0, True)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), bias=st.sampled_from([0.0, 1.0]), off=st.sampled_from([-2, -1, 1, 2]))
def test_a_sum_that_is_off_by_one_is_found(seed: int, bias: float, off: int) -> None:
    gemm, x = layer(seed, bias=bias), inputs(seed)
    codes, y = engine(gemm, x)
    y[0, 0, 0] += off * gemm.input_scale * gemm.weight_scale[0]
    found = compare_layer(gemm, x, codes, y)
    assert (found.different, found.wrong_sums, found.passed) == (0, 1, False)


def test_a_kernel_that_saturates_at_16_bits_is_found() -> None:
    gemm, x = layer(outputs=4, inputs=64), np.full((3, 64), 127 * SCALE, np.float32)
    gemm.weight_OI[:] = 127
    codes, y = engine(gemm, x)
    assert compare_layer(gemm, x, codes, y).passed
    pairs = ((codes.astype(int) + 128)[:, None, :] * gemm.weight_OI[None].astype(int)).reshape(3, 4, 32, 2).sum(-1)  # vpmaddubsw
    sums = np.clip(pairs, -32768, 32767).sum(-1) - 128 * gemm.weight_OI.astype(int).sum(-1)
    found = compare_layer(gemm, x, codes, sums.astype(np.float32) * (gemm.input_scale * gemm.weight_scale))
    assert (found.wrong_sums, found.passed) == (12, False)
    with pytest.raises(ParityError, match=r"int8 openvino: some.layer .* 12 of 12 .* weight_bits: 7"):
        check_layers("int8 openvino", [found])


@pytest.mark.parametrize(
    ("step", "code", "allowed"), [(0.5, 1, True), (0.4995, 1, True), (2.5, 3, True), (-1.5, -1, True), (0.4, 1, False), (0.5, 2, False)]
)
def test_only_roundings_at_a_boundary_may_differ(step: float, code: int, allowed: bool) -> None:
    gemm = layer()
    x = np.zeros((1, 10), np.float32)
    x[0, 3] = step * SCALE
    codes = np.zeros((1, 10), np.int8)
    codes[0, 3] = code
    y = (codes.astype(int) @ gemm.weight_OI.T.astype(int)).astype(np.float32) * (gemm.input_scale * gemm.weight_scale)
    found = compare_layer(gemm, x, codes, y)
    assert (found.different, found.allowed, found.wrong_sums) == (1, int(allowed), 0)
    if not allowed:
        with pytest.raises(ParityError, match=r"some.layer is the first .*: 1 of 10 .*, 0 of them"):
            check_layers("name", [found])


@pytest.mark.whole
@pytest.mark.parametrize(("name", "mode"), [("openvino", "static"), ("openvino", "dynamic"), ("onnxruntime", "dynamic")])
def test_the_engines_agree_with_torch_layer_by_layer(name: str, mode: str, int8_build: Path, prepared: Preprocessor) -> None:
    gemms = quantized_gemms(Graph(int8_build / "model.onnx"))
    file = "openvino.xml" if name == "openvino" else "model_uint8.onnx"
    opened = open_engine(EngineSpec(name, mode, "int8", "fp32", "cpu", 1, str(int8_build / file), str(int8_build), (1, 4)))
    features = prepared.encode(sentiment.rows(4), 16)
    compared = compare_layers(gemms, opened.probe([tensor for gemm in gemms for tensor in gemm.tensors], features))
    assert [found.layer for found in compared][:2] == [
        "bert.encoder.layer.0.attention.self.query",
        "bert.encoder.layer.0.attention.self.key",
    ]
    assert len(compared) == 12
    tokens = {found.layer: 16 if "layer.0" in found.layer or found.layer.endswith(("key", "value")) else 1 for found in compared}
    assert all(found.passed and found.codes >= 4 * tokens[found.layer] * 32 for found in compared), compared


@pytest.mark.whole
def test_gemms_are_read_with_their_constants(int8_build: Path) -> None:
    from foundation.models.checkpoint import load

    model = load(sentiment.quantized())
    for gemm in quantized_gemms(Graph(int8_build / "model.onnx")):
        torch_layer = model.get_submodule(gemm.layer)
        np.testing.assert_array_equal(gemm.weight_OI, torch_layer.weight)
        np.testing.assert_array_equal(gemm.weight_scale, torch_layer.weight_scale)
        assert gemm.input_scale == torch_layer.input_scale
