"""The JSON of Triton's generate extension, to `ModelInferRequest` and back.

    {"id": ..., "TEXT": "Once upon a time", "MAX_TOKENS": 40, "parameters": {"TEMPERATURE": 0.7}}      each key is an input of the model
    {"model_name": ..., "model_version": ..., "TEXT": "...", "TOKENS": [...]}                          each key is an output

Inputs of one element are values, others lists; inputs may be in `parameters` too, as clients of other servers expect. Triton passes keys
that name no input on as parameters of the request; here they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from foundation.core.json_value import Json
from triton_repo.front.bodies import parsed, raw_values, strings, text_of
from triton_repo.front.limits import Rejected
from triton_repo.front.tensors import TYPES, check_request, check_tensor

STREAM = "STREAM"
"""Input of a model that can answer whole or in pieces."""


def read_generation(described: pb.ModelMetadataResponse, version: str, body: bytes, *, stream: bool) -> pb.ModelInferRequest:
    """Returns the checked `ModelInferRequest` of a body.

    Args:
        described: `ModelMetadataResponse` of the model.
        version: Its version, from the path, or empty.
        body: The body.
        stream: As below.

    Raises:
        Rejected: The body is none of the extension.
    """
    return generation_request(described, version, parsed(body), stream=stream)


def generation_request(
    described: pb.ModelMetadataResponse, version: str, document: dict[str, Json], *, stream: bool
) -> pb.ModelInferRequest:
    """Returns the checked `ModelInferRequest` of inputs by name.

    Args:
        described: `ModelMetadataResponse` of the model.
        version: Its version, or empty.
        document: The inputs; `id` and `parameters` as in a body.
        stream: Whether the answer is to come in pieces; goes to the input `STREAM` if the model has it and it is not given.

    Raises:
        Rejected: An input is unknown or wrong.
    """
    request = pb.ModelInferRequest(model_name=described.name, model_version=version, id=text_of(document.pop("id", ""), "id"))
    known = {one.name: one for one in described.inputs}
    for name, value in _values(document, known, stream=stream).items():
        flat: list[Json] = value if isinstance(value, list) else [value]
        shape = _shape(list(known[name].shape), len(flat))
        count = check_tensor(name, known[name].datatype, shape)
        request.inputs.add(name=name, datatype=known[name].datatype, shape=shape)
        request.raw_input_contents.append(raw_values(name, known[name].datatype, count, flat))
    check_request(request)
    return request


def write_generation(response: pb.ModelInferResponse, described: pb.ModelMetadataResponse) -> dict[str, Json]:
    """Returns a response as a JSON object.

    Args:
        response: `ModelInferResponse`.
        described: `ModelMetadataResponse` of the model.
    """
    lists = {one.name for one in described.outputs if any(size != 1 for size in one.shape)}
    document: dict[str, Json] = {"id": response.id} if response.id else {}
    document |= {"model_name": response.model_name, "model_version": response.model_version}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values: list[Json] = list(strings(raw)) if tensor.datatype == "BYTES" else np.frombuffer(raw, TYPES[tensor.datatype]).tolist()
        document[tensor.name] = values if tensor.name in lists or len(values) != 1 else values[0]
    return document


def _values(document: Mapping[str, Json], known: Collection[str], *, stream: bool) -> dict[str, Json]:
    nested = document.get("parameters", {})
    if not isinstance(nested, dict):
        raise Rejected("parameters: an object is expected")
    top = {name: value for name, value in document.items() if name != "parameters"}
    for name in [*top, *nested]:
        if name not in known:
            raise Rejected(f"{name[:64]!r}: the model has no such input; {', '.join(known)} are known")
        if name in top and name in nested:
            raise Rejected(f"{name}: given twice, also in parameters")
    values = {**top, **nested}
    return {**values, STREAM: stream} if STREAM in known and STREAM not in values else values


def _shape(wanted: Sequence[int], count: int) -> list[int]:
    """Returns the shape for so many values: the first open axis takes what the others leave."""
    fixed = math.prod(size for size in wanted if size > 0)
    shape = [1 if size < 0 else size for size in wanted]
    if -1 in wanted and fixed and count % fixed == 0:
        shape[list(wanted).index(-1)] = count // fixed
    return shape
