"""Checks an inference request, so that Triton only sees requests whose parts agree with each other.

A request is a `ModelInferRequest` of the KServe protocol, version 2. Its parameters would reach shared memory and sequences, so all are
refused but the parameters of the queue, `priority` and `timeout`. Types, shapes and the number of bytes must agree.

    BYTES tensor of n elements:  n times (length as 4 little-endian bytes, bytes)
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Sequence

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front.limits import MAX_AXES, MAX_ELEMENTS, MAX_TENSORS, Rejected

TYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` for each type."""
QUEUED = ("priority", "timeout")
"""Parameters of an inference that a client may give: its level, and the microseconds that an answer may take."""
MOST_PARAMETER = 2**40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_VERSION = re.compile(r"[0-9]{0,18}")


def read_request(body: bytes, parameters: Collection[str] = ()) -> pb.ModelInferRequest:
    """Returns the checked `ModelInferRequest` of a message.

    Args:
        body: The message.
        parameters: Names of the parameters that it may have.

    Raises:
        Rejected: It is none, or a part of it is wrong.
    """
    try:
        request = pb.ModelInferRequest.FromString(body)
    except DecodeError as error:
        raise Rejected("not a ModelInferRequest") from error
    request.DiscardUnknownFields()
    check_request(request, parameters)
    return request


def check_request(request: pb.ModelInferRequest, parameters: Collection[str] = ()) -> None:
    """Checks a `ModelInferRequest`.

    Args:
        request: The request.
        parameters: Names of the parameters that it may have, all positive whole numbers.

    Raises:
        Rejected: A part of it is wrong; the message names it.
    """
    check_model(request.model_name, request.model_version)
    if len(request.id) > 256:
        raise Rejected(f"id: {len(request.id)} characters; at most 256 are allowed")
    if not 1 <= len(request.inputs) <= MAX_TENSORS or len(request.outputs) > MAX_TENSORS:
        raise Rejected(f"{len(request.inputs)} inputs and {len(request.outputs)} outputs; 1 to {MAX_TENSORS} inputs are allowed")
    if any(part.parameters for part in (*request.inputs, *request.outputs)) or set(request.parameters) - set(parameters):
        offered = f"only {' and '.join(parameters)} of the request are" if parameters else "none is"
        raise Rejected(f"parameters: {offered} offered here (no shared memory, sequences, classification); leave the others out")
    for name, value in request.parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind not in ("int64_param", "uint64_param") or not 0 < getattr(value, kind) <= MOST_PARAMETER:
            raise Rejected(f"parameter {name}: a whole number from 1 to {MOST_PARAMETER} is allowed")
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise Rejected(f"raw_input_contents: {len(raw)} given for {len(request.inputs)} inputs")
    for index, tensor in enumerate(request.inputs):
        count = check_tensor(tensor.name, tensor.datatype, tensor.shape)
        if raw:
            if tensor.HasField("contents"):
                raise Rejected(f"input {tensor.name}: give either contents or raw_input_contents")
            check_raw(tensor.name, tensor.datatype, count, raw[index])
        else:
            _check_contents(tensor, count)


def check_model(name: str, version: str) -> None:
    """Checks the name and the version of a model."""
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        raise Rejected(f"model {name[:64]!r}, version {version[:32]!r}: no such name can exist", 404)


def check_tensor(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Checks name, type and shape of a tensor; returns its number of elements."""
    if not _NAME.fullmatch(name):
        raise Rejected(f"input {name[:64]!r}: no such name can exist")
    if datatype not in TYPES:
        raise Rejected(f"input {name}: datatype {datatype[:32]!r}; one of {', '.join(TYPES)} is allowed")
    if not 1 <= len(shape) <= MAX_AXES or any(not 0 <= size <= MAX_ELEMENTS for size in shape):
        raise Rejected(f"input {name}: shape with {len(shape)} axes; 1 to {MAX_AXES} axes of 0 to {MAX_ELEMENTS} are allowed")
    count = math.prod(int(size) for size in shape)
    if count > MAX_ELEMENTS:
        raise Rejected(f"input {name}: {count} elements; at most {MAX_ELEMENTS} are allowed", 413)
    return count


def check_raw(name: str, datatype: str, count: int, raw: bytes) -> None:
    """Checks that raw bytes hold exactly `count` elements."""
    if datatype != "BYTES":
        wanted = count * np.dtype(TYPES[datatype]).itemsize
        if len(raw) != wanted:
            raise Rejected(f"input {name}: {len(raw)} bytes given, {wanted} expected for its shape and datatype")
        return
    place, found = 0, 0
    while place < len(raw) and found <= count:
        if place + 4 > len(raw):
            break
        place += 4 + struct.unpack_from("<I", raw, place)[0]
        found += 1
    if place != len(raw) or found != count:
        raise Rejected(f"input {name}: its bytes do not hold {count} strings, each after its length")


def _check_contents(tensor: pb.ModelInferRequest.InferInputTensor, count: int) -> None:
    wanted = _CONTENTS.get(tensor.datatype)
    if wanted is None:
        raise Rejected(f"input {tensor.name}: {tensor.datatype} has no contents; give raw_input_contents")
    given = {field.name: value for field, value in tensor.contents.ListFields()}
    if set(given) - {wanted}:
        raise Rejected(f"input {tensor.name}: {', '.join(given)} given; {wanted} is expected for {tensor.datatype}")
    if len(given.get(wanted, ())) != count:
        raise Rejected(f"input {tensor.name}: {len(given.get(wanted, ()))} values given, {count} expected for its shape")
