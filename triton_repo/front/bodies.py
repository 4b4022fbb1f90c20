"""The JSON of the KServe protocol over HTTP, to `ModelInferRequest` and back.

A body is JSON, or JSON and then the tensors as raw bytes; the header `Inference-Header-Content-Length` says where JSON ends:

    {"id": ..., "inputs": [{"name", "shape", "datatype", "data" | "parameters": {"binary_data_size": n}}],
     "outputs": [{"name", "parameters": {"binary_data": true}}],
     "parameters": {"binary_data_output": true, "priority": 1, "timeout": 20000}}
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from foundation.core.json_value import Json
from triton_repo.front.limits import MAX_ELEMENTS, MAX_JSON_BYTES, MAX_JSON_DEPTH, Rejected
from triton_repo.front.tensors import MOST_PARAMETER, QUEUED, TYPES, check_request, check_tensor


@dataclass(frozen=True)
class Wanted:
    """How the answer is to be written."""

    binary: bool
    """Outputs that are not named go out as raw bytes."""
    named: Mapping[str, bool]
    """Whether a requested output is sent as raw bytes, by its name."""


compact = partial(json.dumps, allow_nan=False, separators=(",", ":"))
"""Writes JSON as Triton does, without spaces."""


def read_body(model: str, version: str, body: bytes, json_size: int | None) -> tuple[pb.ModelInferRequest, Wanted]:
    """Returns the checked `ModelInferRequest` of a body, and how to answer it.

    Args:
        model: Name of the model, from the path.
        version: Its version, or empty.
        body: The body.
        json_size: Bytes of its JSON part; None: all of it.

    Raises:
        Rejected: The body is not a request of the protocol.
    """
    size = len(body) if json_size is None else json_size
    if not 0 < size <= len(body):
        raise Rejected(f"Inference-Header-Content-Length: {size} given, the body has {len(body)} bytes")
    document = parsed(body[:size])
    request, place = pb.ModelInferRequest(model_name=model, model_version=version, id=text_of(document.get("id", ""), "id")), size
    for entry in _list(document, "inputs"):
        name, datatype = text_of(entry.get("name"), "inputs.name"), text_of(entry.get("datatype"), "inputs.datatype")
        shape = entry.get("shape")
        axes = [axis for axis in shape if type(axis) is int] if isinstance(shape, list) else []
        if axes != shape:
            raise Rejected(f"input {name[:64]!r}: shape must be a list of integers")
        count = check_tensor(name, datatype, axes)
        given = _parameters(entry, {"binary_data_size"}).get("binary_data_size")
        request.inputs.add(name=name, datatype=datatype, shape=axes)
        if given is None:
            request.raw_input_contents.append(raw_values(name, datatype, count, entry.get("data")))
            continue
        if type(given) is not int or not 0 <= given <= len(body) - place:
            raise Rejected(f"input {name}: binary_data_size {str(given)[:32]} given, {len(body) - place} bytes are left")
        request.raw_input_contents.append(body[place : place + given])
        place += given
    if place != len(body):
        raise Rejected(f"{len(body) - place} bytes follow the last tensor")
    named = {}
    for entry in _list(document, "outputs") if "outputs" in document else []:
        name = text_of(entry.get("name"), "outputs.name")
        named[name] = _parameters(entry, {"binary_data"}).get("binary_data", False) is True
        request.outputs.add(name=name)
    given = _parameters(document, {"binary_data_output", *QUEUED})
    binary = given.get("binary_data_output", False) is True
    for key in QUEUED:
        if key in given:
            number = given[key]
            if type(number) is not int or not 0 < number <= MOST_PARAMETER:
                raise Rejected(f"parameter {key}: a whole number from 1 to {MOST_PARAMETER} is allowed")
            request.parameters[key].int64_param = number
    check_request(request, QUEUED)
    return request, Wanted(binary, named)


def write_body(response: pb.ModelInferResponse, wanted: Wanted) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the bytes of its JSON part if raw bytes follow.

    Raises:
        ValueError: An output holds a value that JSON does not know, such as NaN.
    """
    outputs: list[dict[str, Json]] = []
    tail: list[bytes] = []
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        entry: dict[str, Json] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if wanted.named.get(tensor.name, wanted.binary):
            entry["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            entry["data"] = list(strings(raw)) if tensor.datatype == "BYTES" else np.frombuffer(raw, TYPES[tensor.datatype]).tolist()
        outputs.append(entry)
    document = {"model_name": response.model_name, "model_version": response.model_version, "outputs": outputs}
    head = compact({**({"id": response.id} if response.id else {}), **document}).encode("utf-8")
    return head + b"".join(tail), len(head) if tail else None


def check_size(text: bytes) -> None:
    """Raises `Rejected` if a JSON text is too large."""
    if len(text) > MAX_JSON_BYTES:
        raise Rejected(f"JSON of {len(text)} bytes; at most {MAX_JSON_BYTES} are allowed: send tensors in the binary part", 413)


def parsed(text: bytes) -> dict[str, Json]:
    """Returns the object of a JSON text, or raises `Rejected`."""
    check_size(text)
    try:
        document = json.loads(text)
    except RecursionError as error:  # the parser counts its levels and stops far from the end of the stack
        raise Rejected(f"JSON is nested too deep; at most {MAX_JSON_DEPTH} levels are allowed") from error
    except ValueError as error:
        raise Rejected(f"not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict):
        raise Rejected("a JSON object is expected")
    return document


def _list(document: Mapping[str, Json], key: str) -> list[dict[str, Json]]:
    entries = document.get(key)
    objects = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if objects != entries:
        raise Rejected(f"{key}: a list of objects is expected")
    return objects


def text_of(value: Json, key: str) -> str:
    """Returns a value that has to be text which UTF-8 can hold, or raises `Rejected`."""
    if not isinstance(value, str):
        raise Rejected(f"{key}: a string is expected")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Rejected(f"{key}: holds half a surrogate pair") from error
    return value


def _parameters(entry: Mapping[str, Json], known: set[str]) -> dict[str, Json]:
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict) or set(parameters) - known:
        raise Rejected(f"parameters: only {', '.join(sorted(known))} is offered here")
    return parameters


def raw_values(name: str, datatype: str, count: int, data: Json) -> bytes:
    """Returns nested lists of values as raw bytes."""
    values = list(_flat(name, data))
    if len(values) != count:
        raise Rejected(f"input {name}: {len(values)} values given, {count} expected for its shape")
    if datatype == "BYTES":
        if not all(isinstance(value, str) for value in values):
            raise Rejected(f"input {name}: BYTES are strings in JSON")
        texts = [text_of(value, f"input {name}").encode("utf-8") for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    whole = not datatype.startswith("FP")
    allowed: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if whole else (int, float)
    if any(type(value) not in allowed for value in values):
        raise Rejected(f"input {name}: a value is not of the datatype {datatype}")
    try:
        with np.errstate(over="raise"):
            return np.array(values, TYPES[datatype]).tobytes()
    except (OverflowError, FloatingPointError) as error:
        raise Rejected(f"input {name}: a value does not fit {datatype}") from error


def _flat(name: str, data: Json) -> Iterator[Json]:
    if not isinstance(data, list):
        raise Rejected(f"input {name}: data must be a list")
    stack, seen = [iter(data)], 0
    while stack:
        for value in stack[-1]:
            seen += 1
            if seen > 4 * MAX_ELEMENTS:
                raise Rejected(f"input {name}: too many values", 413)
            if isinstance(value, list):
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()
        if len(stack) > MAX_JSON_DEPTH:
            raise Rejected(f"input {name}: data is nested too deep; at most {MAX_JSON_DEPTH} levels are allowed")


def strings(raw: bytes) -> Iterator[str]:
    """Yields the texts of a BYTES tensor."""
    place = 0
    while place < len(raw):
        size = struct.unpack_from("<I", raw, place)[0]
        yield raw[place + 4 : place + 4 + size].decode("utf-8")
        place += 4 + size
