from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from export.engines import onnxruntime
from export.engines.onnxruntime import PROVIDERS, OnnxRuntime
from export.engines.spec import BuildRequest, EngineSpec
from export.engines.torch import Torch
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


def spec(folder: Path, file: str, precision: str) -> EngineSpec:
    return EngineSpec("onnxruntime", "dynamic", precision, "fp32", "cpu", 1, str(folder / file), str(folder), (1, 4))


def request(folder: Path, precision: str) -> BuildRequest:
    where = {"root": folder.parent, "folder": folder, "shared": folder, "model": folder / "model.onnx"}
    how = {"precision": precision, "float_precision": "fp32", "bf16_float_part": False, "buckets": (8, 16)}
    return BuildRequest("onnxruntime", Checkpoint(sentiment.checkpoint()), **where, **how, target=sentiment.TARGET, log=print)


@pytest.mark.parametrize("count", [1, 5])
def test_it_answers_what_torch_answers(count: int, float_build: Path, prepared: Preprocessor) -> None:
    reference = Torch(EngineSpec("torch", "eager", "fp32", "fp32", "cpu", 1, str(sentiment.checkpoint()), str(float_build)))
    features = prepared.encode(sentiment.rows(count))
    np.testing.assert_allclose(
        OnnxRuntime(spec(float_build, "model.onnx", "fp32")).predict(features), reference.predict(features), atol=1e-5
    )


def test_float_needs_no_second_file(float_build: Path, int8_build: Path) -> None:
    (entry,) = onnxruntime.build(request(float_build, "fp32"))
    assert entry.file == f"{float_build.name}/model.onnx"
    assert not (float_build / "model_uint8.onnx").exists()
    assert (int8_build / "model_uint8.onnx").exists()


def test_int8_runs_on_integer_kernels(int8_build: Path) -> None:
    engine = OnnxRuntime(spec(int8_build, "model_uint8.onnx", "int8"))
    operators = [node.op_type for node in engine._optimized_graph().node]
    assert operators.count("MatMulIntegerToFloat") == 12  # six layers in each of two blocks


def test_probed_codes_are_those_of_the_int8_model(int8_build: Path, prepared: Preprocessor) -> None:
    from export.parity.parity import quantized_gemms

    gemm = quantized_gemms(Graph(int8_build / "model.onnx"))[0]
    found = OnnxRuntime(spec(int8_build, "model_uint8.onnx", "int8")).probe(gemm.tensors, prepared.encode(sentiment.rows(3)))
    assert list(found) == list(gemm.tensors)
    codes = found[gemm.codes]
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, np.clip(np.rint(found[gemm.input] / gemm.input_scale), -128, 127))


def test_cuda_without_its_provider_is_refused(float_build: Path) -> None:
    asked = replace(spec(float_build, "model.onnx", "fp32"), device="cuda")
    with raises_problem("target.device", "cuda", "CUDAExecutionProvider", "pip install onnxruntime-gpu"):
        OnnxRuntime(asked)


def test_a_session_that_fell_back_says_so(float_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: list(PROVIDERS.values()))
    engine = OnnxRuntime(replace(spec(float_build, "model.onnx", "fp32"), device="cuda"))
    assert engine.placement() == {"device": "cpu", "provider": "CPUExecutionProvider", "float_precision": "fp32"}


@pytest.mark.parametrize("file", ["model.onnx", "model_uint8.onnx"])
def test_the_float_type_is_that_of_the_graph(file: str, int8_build: Path) -> None:
    assert OnnxRuntime(spec(int8_build, file, "int8")).placement()["float_precision"] == "fp32"
