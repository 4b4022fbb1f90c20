from foundation.artifacts.exported import Build, Exported
from foundation.artifacts.triton import Results
from tests.report_keys import unknown

ENGINES = [
    {"engine": "torch", "mode": "eager", "runnable": True},
    {"engine": "openvino", "mode": "static", "float_precision": "bf16", "runnable": True, "metrics": {"f1": 0.5, "accuracy": None}},
    {"engine": "openvino", "mode": "dynamic", "runnable": True, "file": None},
    {"engine": "onnxruntime", "mode": "dynamic", "runnable": False, "reason": "why"},
]
BUILD = {"variant": "a", "precision": "int8", "float_precision": "fp32", "folder": "a-int8", "engines": ENGINES}


def test_a_configuration_has_the_float_precision_of_its_engine_or_else_of_its_build() -> None:
    build = Build.model_validate(BUILD)
    assert build.key(build.engines[1]) == ("a", "int8", "bf16", "openvino", "static")
    assert build.key(build.engines[2]) == ("a", "int8", "fp32", "openvino", "dynamic")


def test_the_first_mode_of_each_engine_but_torch_is_recommended() -> None:
    recommended = Build.model_validate(BUILD).recommended
    assert [(one.engine, one.mode) for one in recommended] == [("openvino", "static"), ("onnxruntime", "dynamic")]
    assert recommended[0].figures == {"f1": 0.5}


def test_export_json_is_read_and_written_as_it_was() -> None:
    document = {"schema": 1, "builds": [BUILD], "compressed_tensors": None, "divided": {"variant": "a", "ranks": 2, "bytes": [1, 2]}}
    read = Exported.model_validate(document)
    assert read.written() == document
    assert list(unknown(read)) == []


def test_additional_repositories_are_listed_in_one_order() -> None:
    told = {"ranks": {"model": "c"}, "models": [{"model": "a"}], "gpu": {"model": "b"}}
    assert [model.model for model in Results.model_validate(told).additional] == ["b", "c"]
    assert Results().additional == ()
