import json
from pathlib import Path

import pytest

from export.engines.registry import open_engine
from export.engines.spec import EngineSpec, compiled_batch_sizes, spec_of, torch_spec
from foundation.artifacts.exported import Build, Engine
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from tests.export import sentiment

BUILD = Build(precision="int8", float_precision="fp32", folder="quantize-int8")


def test_a_spec_survives_its_journey_as_json() -> None:
    spec = torch_spec(Checkpoint(sentiment.checkpoint()), sentiment.checkpoint(), "bf16", sentiment.TARGET)
    assert EngineSpec.from_message(json.loads(json.dumps(spec.message()))) == spec
    assert (spec.float_precision, spec.batch_sizes, spec.evaluation_batch, spec.threads) == ("bf16", (1, 4), 4, 1)


@pytest.mark.parametrize(
    ("engine", "device", "expected"), [("openvino", "cuda", "cpu"), ("onnxruntime", "cuda", "cuda"), ("onnxruntime", "cpu", "cpu")]
)
def test_spec_of_an_entry_of_export_json(engine: str, device: str, expected: str, tmp_path: Path) -> None:
    entry = Engine(engine=engine, mode="static", file="quantize-int8/model")
    spec = spec_of(tmp_path, BUILD, entry, Target(device=device, threads=3))
    assert (spec.path, spec.folder) == (str(tmp_path / "quantize-int8/model"), str(tmp_path / "quantize-int8"))
    assert (spec.engine, spec.mode, spec.precision, spec.float_precision, spec.device, spec.threads) == (
        engine,
        "static",
        "int8",
        "fp32",
        expected,
        3,
    )


def test_a_static_engine_always_takes_single_rows() -> None:
    assert compiled_batch_sizes(Target(batch_sizes=(8, 4, 8))) == (1, 4, 8)


@pytest.mark.whole
@pytest.mark.parametrize(("engine", "name"), [("openvino", "OpenVino"), ("onnxruntime", "OnnxRuntime"), ("torch", "Torch")])
def test_open_engine_opens_each(engine: str, name: str, float_build: Path) -> None:
    path = {"openvino": float_build / "openvino.xml", "onnxruntime": float_build / "model.onnx", "torch": sentiment.checkpoint()}[engine]
    mode = "eager" if engine == "torch" else "dynamic"
    assert type(open_engine(EngineSpec(engine, mode, "fp32", "fp32", "cpu", 1, str(path), str(float_build)))).__name__ == name
