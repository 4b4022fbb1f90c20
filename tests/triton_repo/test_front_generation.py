"""The JSON of the generate extension: keys are inputs of the model, whatever is none is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front import limits
from triton_repo.front.generation import read_generation, write_generation
from triton_repo.front.inference import failure
from triton_repo.front.limits import Rejected
from triton_repo.generation.served import engine, request


def described() -> Any:
    model = pb.ModelMetadataResponse(name="model", versions=["1"], platform="python")
    for name, datatype, shape in (("TEXT", "BYTES", [1]), ("MAX_TOKENS", "INT32", [1]), ("STOP", "BYTES", [-1]), ("STREAM", "BOOL", [1])):
        model.inputs.add(name=name, datatype=datatype, shape=shape)
    for name, datatype, shape in (("TEXT", "BYTES", [1]), ("TOKENS", "INT64", [-1])):
        model.outputs.add(name=name, datatype=datatype, shape=shape)
    return model


def read(document: Any, *, stream: bool = True) -> dict[str, list[Any]]:
    request = read_generation(described(), "", json.dumps(document).encode(), stream=stream)
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values, at = [], 0
            while at < len(raw):
                size = int.from_bytes(raw[at : at + 4], "little")
                values.append(raw[at + 4 : at + 4 + size].decode())
                at += 4 + size
            found[tensor.name] = values
        else:
            found[tensor.name] = np.frombuffer(raw, {"INT32": np.int32, "BOOL": np.bool_}[tensor.datatype]).tolist()
    return found


def test_keys_are_inputs_and_may_stand_in_parameters() -> None:
    expected = {"TEXT": ["Once é"], "MAX_TOKENS": [4], "STOP": ["a", "b"], "STREAM": [True]}
    assert read({"TEXT": "Once é", "MAX_TOKENS": 4, "STOP": ["a", "b"]}) == expected
    assert read({"TEXT": "Once é", "parameters": {"MAX_TOKENS": 4, "STOP": ["a", "b"]}}) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_the_path_decides_whether_the_answer_comes_in_pieces(stream: bool) -> None:
    assert read({"TEXT": "a"}, stream=stream)["STREAM"] == [stream]
    assert read({"TEXT": "a", "STREAM": not stream}, stream=stream)["STREAM"] == [not stream]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"TEXT": "a", "OTHER": 1}, "'OTHER': the model has no such input"),
        ({"TEXT": "a", "parameters": {"TEXT": "b"}}, "TEXT: given twice, also in parameters"),
        ({"TEXT": "a", "parameters": [1]}, "parameters: an object is expected"),
        ({"TEXT": "a", "MAX_TOKENS": "4"}, "MAX_TOKENS"),
        ({"TEXT": "a", "MAX_TOKENS": [1, 2]}, "MAX_TOKENS"),
        ({"TEXT": 4}, "TEXT"),
        ({"TEXT": "\ud800"}, "TEXT"),
        ([1], "object"),
    ],
)
def test_what_is_no_input_is_refused_by_name(document: Any, words: str) -> None:
    with pytest.raises(Rejected) as refused:
        read(document)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("TOP_K given without TEMPERATURE; nothing is sampled", 400),
        ("8 requests are being answered and 64 wait, the most allowed; try again later", 503),
        ("the model failed: the engine failed: out of memory", 500),
        ("TEXT: the model failed: is no text", 400),
        ("[request id: <id_unknown>] Exceeds maximum queue size", 503),
        ("[request id: <id_unknown>] Request timeout expired", 504),
        ("Request for unknown model: 'model' has no available versions", 503),
        ("Stub process 'model_0_0' is not healthy.", 503),
    ],
)
def test_the_words_of_an_error_tell_its_status(line: str, status: int) -> None:
    found = failure(line)
    assert str(found).startswith(line)
    assert found.status == status
    assert str(found).endswith(limits.TRY_LATER) == (status == 503)  # what clients and figures of a load look for


def test_the_front_knows_the_words_of_the_model() -> None:
    assert (limits.MODEL_FAILED, limits.TRY_LATER) == (request.MODEL_FAILED, engine.TRY_LATER)


def test_an_answer_names_its_outputs() -> None:
    response = pb.ModelInferResponse(model_name="model", model_version="1", id="7")
    response.outputs.add(name="TEXT", datatype="BYTES", shape=[1])
    response.outputs.add(name="TOKENS", datatype="INT64", shape=[1])
    response.raw_output_contents.extend([b"\x02\x00\x00\x00\xc3\xa9", np.array([5], np.int64).tobytes()])
    expected = {"id": "7", "model_name": "model", "model_version": "1", "TEXT": "é", "TOKENS": [5]}
    assert write_generation(response, described()) == expected
