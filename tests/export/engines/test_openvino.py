from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.engines.openvino import OpenVino, chunks, comes_from, computes_bf16, properties
from export.engines.spec import EngineSpec
from export.engines.torch import Torch
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment

pytestmark = pytest.mark.whole


def spec(folder: Path, mode: str, precision: str = "fp32") -> EngineSpec:
    return EngineSpec("openvino", mode, precision, "fp32", "cpu", 1, str(folder / "openvino.xml"), str(folder), (1, 4))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), sizes=st.sets(st.integers(1, 9), min_size=1))
def test_chunks_have_compiled_sizes_and_lose_nothing(count: int, sizes: set[int]) -> None:
    batch_sizes = sorted(sizes)
    features = {"a": np.arange(count * 2).reshape(count, 2), "b": np.arange(count)}
    cut = list(chunks(features, batch_sizes))
    assert all(len(array) in sizes for _, part in cut for array in part.values())
    for name, array in features.items():
        np.testing.assert_array_equal(np.concatenate([part[name][:rows] for rows, part in cut]), array)
        assert all((part[name][rows:] == part[name][rows - 1]).all() for rows, part in cut)
    assert len(cut) == -(-count // batch_sizes[-1])


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("layer.1/MatMul", True),
        ("layer.1/MatMul/Dequantization", True),
        ("layer.1/MatMul_2", True),
        ("layer.1/MatMul2", False),
        ("x/layer.1/MatMul", False),
    ],
)
def test_comes_from_respects_the_end_of_a_name(origin: str, expected: bool) -> None:
    assert comes_from(origin, "layer.1/MatMul") is expected


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_it_answers_what_torch_answers(mode: str, count: int, float_build: Path, prepared: Preprocessor) -> None:
    checkpoint = sentiment.checkpoint()
    reference = Torch(EngineSpec("torch", "eager", "fp32", "fp32", "cpu", 1, str(checkpoint), str(float_build)))
    features = prepared.encode(sentiment.rows(count))
    answer = OpenVino(spec(float_build, mode)).predict(features)
    assert answer.dtype == np.float32
    np.testing.assert_allclose(answer, reference.predict(features), atol=1e-5)


def test_answers_are_not_overwritten_by_the_next_call(float_build: Path, prepared: Preprocessor) -> None:
    engine = OpenVino(spec(float_build, "static"))
    first = engine.predict(prepared.encode(["a bad film"], 8))
    kept = first.copy()
    engine.predict(prepared.encode(["a bad film"], 16))
    engine.predict(prepared.encode(["good good good"], 8))
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_answers_are_those_of_a_plain_call_however_arrays_lie_in_memory(mode: str, float_build: Path, prepared: Preprocessor) -> None:
    engine = OpenVino(spec(float_build, mode))
    for texts, length in ((["good bad film"] * 4, 16), (["a film"], 8), (["bad", "good film", "film film", "a"], 8)):
        features = prepared.encode(texts, length)
        strided = {name: np.asfortranarray(np.repeat(values, 2, axis=1))[:, ::2] for name, values in features.items()}
        model = library.Core().read_model(float_build / "openvino.xml")
        model.reshape({port.any_name: list(features[port.any_name].shape) for port in model.inputs})
        plain = library.Core().compile_model(model, "CPU", properties(1, "fp32"))(dict(features))[0]
        for arrays in (features, strided):
            before = {name: values.copy() for name, values in arrays.items()}
            np.testing.assert_allclose(engine.predict(arrays), plain, atol=1e-5)
            assert all((arrays[name] == before[name]).all() for name in arrays)


def test_static_compiles_each_shape_once_and_only_on_use(float_build: Path, prepared: Preprocessor) -> None:
    engine = OpenVino(spec(float_build, "static"))
    assert engine._compiled == {}
    for count, length in ((3, 8), (4, 8), (5, 16), (1, 8), (1, 8)):
        engine.predict(prepared.encode(["good"] * count, length))
    assert sorted(engine._compiled) == [(1, 8), (1, 16), (4, 8), (4, 16)]


def test_the_settings_are_in_force(float_build: Path) -> None:
    compiled = OpenVino(spec(float_build, "dynamic"))._compile(()).model
    assert compiled.get_property("INFERENCE_PRECISION_HINT") == library.Type.f32
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert compiled.get_property("NUM_STREAMS") == 1
    assert compiled.get_property("ENABLE_CPU_PINNING") is False
    assert properties(2, "bf16")["INFERENCE_PRECISION_HINT"] == "bf16"


def test_weights_are_stored_as_they_are(float_build: Path, int8_build: Path) -> None:
    constants = [node for node in library.Core().read_model(float_build / "openvino.xml").get_ops() if node.get_type_name() == "Constant"]
    assert not any(node.get_element_type() == library.Type.f16 for node in constants)
    assert (int8_build / "openvino.bin").stat().st_size < 0.6 * (float_build / "openvino.bin").stat().st_size


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_the_placement_is_what_the_compiled_model_reports(mode: str, float_build: Path, prepared: Preprocessor) -> None:
    engine = OpenVino(spec(float_build, mode))
    engine.predict(prepared.encode(["good"], 8))
    assert engine.placement() == {"device": "cpu", "provider": "OpenVINO CPU", "float_precision": "fp32"}


def test_tensors_are_not_probed_in_bf16_that_the_processor_lacks(
    float_build: Path, prepared: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.standalone.openvino_request.computes_bf16", lambda core: False)
    engine = OpenVino(replace(spec(float_build, "static"), float_precision="bf16"))
    with pytest.warns(UserWarning, match="no bfloat16"):
        found = engine.probe(["logits"], prepared.encode(["good"], 8))
    np.testing.assert_allclose(found["logits"], OpenVino(spec(float_build, "dynamic")).predict(prepared.encode(["good"], 8)), atol=1e-5)


def test_bf16_is_reported_where_the_processor_has_it_alone(float_build: Path) -> None:
    engine = OpenVino(replace(spec(float_build, "dynamic"), float_precision="bf16"))
    assert engine.placement()["float_precision"] == ("bf16" if computes_bf16() else "fp32")
