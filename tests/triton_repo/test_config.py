import json

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from foundation.core.errors import InputError
from triton_repo.config import ModelSettings, Scheduling, from_text, model_config, serialized, to_text, version_settings

TEXT = ModelSettings(
    "quantize-int8", "text", False, 3, "openvino", 8, (1, 8), "static", {"B": "1", "A": "2"}, ("32", "128"), Scheduling(2, 50)
)


def test_text_model():
    config = model_config(TEXT)
    assert (config.name, config.backend, config.max_batch_size) == ("quantize-int8", "python", 8)
    assert [(value.name, value.data_type, list(value.dims)) for value in config.input] == [("TEXT", pb.TYPE_STRING, [1])]
    assert [(value.name, value.data_type, list(value.dims)) for value in config.output] == [
        ("LABEL", pb.TYPE_STRING, [1]),
        ("SCORE", pb.TYPE_FP32, [1]),
        ("LOGITS", pb.TYPE_FP32, [3]),
    ]
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    assert [(group.kind, group.count) for group in config.instance_group] == [(pb.ModelInstanceGroup.KIND_CPU, 2)]


def test_dynamic_batching_is_there_without_a_delay():
    config = from_text(to_text(model_config(ModelSettings("m", "text", False, 2, "openvino", 8, (1,), "static", {}))))
    assert config.HasField("dynamic_batching")


def test_the_settings_of_a_version_tell_how_to_compile():
    expected = {"engine": "openvino", "mode": "static", "batch_sizes": [1, 8], "properties": {"A": "2", "B": "1"}}
    assert json.loads(version_settings(TEXT)) == expected
    assert not model_config(TEXT).parameters  # two versions share the configuration


@pytest.mark.parametrize(("modality", "pairs", "names"), [("text", True, ["TEXT", "TEXT_PAIR"]), ("image", False, ["IMAGE"])])
def test_inputs_and_warm_up_of_other_rows(modality, pairs, names):
    config = model_config(ModelSettings("m", modality, pairs, 2, "onnxruntime", 8, (1,), "static", {}, ("8",)))
    assert [value.name for value in config.input] == names
    assert [warm_up.name for warm_up in config.model_warmup] == ["8"]
    files = {name: value.input_data_file for name, value in config.model_warmup[0].inputs.items()}
    assert files == {name: f"8.{name}" for name in names}


def test_text_of_a_configuration_reads_back():
    config = model_config(TEXT)
    assert from_text(to_text(config)) == config


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "x" * 129, "\u00e9"])
def test_names_that_are_no_folders(name):
    with pytest.raises(InputError, match="model name"):
        model_config(ModelSettings(name, "text", False, 2, "openvino", 8, (1,), "static", {}))


def test_serialized_strings():
    assert serialized([b"ab", b""]) == b"\x02\x00\x00\x00ab\x00\x00\x00\x00"
