"""The connection of the load generator to a Triton server, over gRPC or HTTP, on the asyncio clients of tritonclient.

Requests are encoded before the clock starts; a prepared one may be under way many times at once. Over gRPC messages go out and come in as
the bytes that they are. How an error counts is the same for both protocols:

    refused     the request was not taken, or its connection was lost: UNAVAILABLE, RESOURCE_EXHAUSTED; 503, 429; errors of the socket
    timed_out   no answer within the time limit, ours or the server's: DEADLINE_EXCEEDED; 504, 408; Triton's message for its own
                queue, whatever the status
    failed      the server answered with any other error

Answers are compared with the first one to the same request, bit by bit, by their digests. Whether that one is right is not looked at.

The key of the environment goes with each request, and TLS trusts what the address says (`triton_repo.load.access`).

Left out: shared memory, streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypedDict
from urllib.parse import urlsplit

import aiohttp
import grpc
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from foundation.core.errors import InputError, nearest
from foundation.core.shown import reason, shown
from foundation.standalone.preprocess import Row
from foundation.standalone.response import TIER
from foundation.standalone.windows import Window
from triton_repo.client import parts_of, tensors
from triton_repo.config import ADAPTER, AUDIO, CONTEXT, IMAGE, QUESTION, TEXT, TEXT_PAIR, inputs_of, serialized
from triton_repo.load import access
from triton_repo.load.generator import Failure, Kind

if TYPE_CHECKING:
    from tritonclient.http import InferInput
    from tritonclient.http import InferResult as HttpResult

Protocol = Literal["grpc", "http"]
MEASURED = {
    (TEXT,): "single texts",
    (TEXT, TEXT_PAIR): "pairs of texts",
    (IMAGE,): "encoded images",
    (AUDIO,): "encoded sounds",
    (QUESTION, CONTEXT): "questions with contexts",
    (TEXT, ADAPTER): "single texts with adapters",
    (TEXT, TEXT_PAIR, ADAPTER): "pairs of texts with adapters",
}
"""Inputs of the models that can be measured, and what their rows are."""
METADATA_SECONDS = 10.0
QUEUED_TOO_LONG = "Request timeout expired"
"""Triton's message for a request that has waited too long in its queue."""
INFER = "/inference.GRPCInferenceService/ModelInfer"
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_REFUSED = ("StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED", "503", "429")
_TIMED_OUT = ("StatusCode.DEADLINE_EXCEEDED", "504", "408")
_ERRORS = (InferenceServerException, aiohttp.ClientError, OSError, ValueError)  # the last: an answer over HTTP that is not of the protocol


class Tensor(TypedDict):
    """An input of a model, as a server describes it."""

    name: str
    datatype: str
    shape: list[int | str]


class Metadata(TypedDict, total=False):
    """A model, as a server describes it."""

    inputs: list[Tensor]


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    protocol: Protocol
    place: str
    """host:port."""
    tls: bool = False
    """Whether it is reached by TLS."""
    ca: str = ""
    """File of the certificates that are trusted, PEM; empty: the public ones."""

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.place}"


@dataclass(frozen=True)
class Model:
    """A model that can be measured."""

    name: str
    inputs: tuple[str, ...]
    """TEXT, or TEXT and TEXT_PAIR, either with ADAPTER, or QUESTION and CONTEXT, or IMAGE, or AUDIO."""


def address_of(url: str, protocol: str | None, option: str = "--server", ca: str = "") -> Address:
    """Returns where and how to reach a server.

    Args:
        url: host:port, with or without `grpc://` or `http://` before it, or with `grpcs://` or `https://`, for TLS.
        protocol: `grpc` or `http`; None takes it from the URL, else gRPC.
        option: What the URL was given with, for messages.
        ca: File of the certificates that are trusted, PEM; empty: the public ones.

    Raises:
        InputError: The URL is none, the protocol is not one of them or another than in the URL, the file is none of certificates, or a key
            would travel in the clear.
    """
    scheme, mark, place = url.rpartition("://")
    tls, named = scheme in ("grpcs", "https"), scheme.removesuffix("s")
    found = protocol or named or "grpc"
    if found not in ("grpc", "http") or (mark and named not in ("grpc", "http")):
        raise InputError(f"{option} {shown(url, 80)}", f"protocol {scheme or found}", "grpc, grpcs, http and https are allowed")
    if mark and named != found:
        raise InputError(
            f"{option} {shown(url, 80)}", f"given with --protocol {protocol}", remedy="give one of the two, or the same in both"
        )
    place = place.rstrip("/")
    try:
        parts = urlsplit(f"//{place}")
        is_place = bool(parts.hostname and parts.port) and parts.netloc == place and "@" not in place
    except ValueError:  # a port that is no number
        is_place = False
    if not is_place:
        raise InputError(f"{option} {shown(url, 80)}", "host:port is allowed, such as 127.0.0.1:8001, with or without grpc:// or http://")
    access.check_key(str(parts.hostname), tls, f"{option} {shown(url, 80)}")
    return Address("http" if found == "http" else "grpc", place, tls, access.check_ca(ca, tls))


@dataclass
class Prepared:
    """An encoded request."""

    model: str
    content: bytes | list[InferInput]
    """gRPC: the serialized `ModelInferRequest`. HTTP: the input tensors, [k, 1] each."""
    answer: bytes | None = None
    """Digest of the first answer; None until there is one."""
    tiers: tuple[int, ...] = ()
    """Of a cascade the rows that each tier answered in it, from the first tier on."""


class Connection:
    """A connection; an asynchronous context manager, to be made within an event loop.

    Args:
        address: The server.
        seconds: Time limit of a request.
        most: Connections of HTTP that may be open at once.
    """

    def __init__(self, address: Address, seconds: float = METADATA_SECONDS, most: int = 1) -> None:
        self._address = address
        if address.protocol == "http":
            from tritonclient.http.aio import InferenceServerClient

            trusted = access.context(address.ca) if address.tls else None
            self._client = InferenceServerClient(address.place, conn_limit=most, conn_timeout=seconds, ssl=address.tls, ssl_context=trusted)
            self._limit: dict[str, float] = {}  # conn_timeout is the limit of a whole request
        else:
            from tritonclient.grpc.aio import InferenceServerClient

            secure = access.credentials(address.ca) if address.tls else None
            self._client = InferenceServerClient(address.place, creds=secure)
            self._limit = {"client_timeout": seconds}
            self._channel = (
                grpc.aio.insecure_channel(address.place, options=_UNLIMITED)
                if secure is None
                else grpc.aio.secure_channel(address.place, secure, options=_UNLIMITED)
            )
            self._infer, self._seconds, self._metadata = self._channel.unary_unary(INFER), seconds, access.metadata()
        if (plugin := access.plugin()) is not None:
            self._client.register_plugin(plugin)
        self.changed = 0
        """Answers that differed from the first one to the same request."""
        self.rows_per_tier: list[int] = []
        """Of a cascade the rows that each tier answered."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.close()
        if self._address.protocol == "grpc":
            await self._channel.close()

    async def model(self, name: str | None) -> Model:
        """Returns the model of this name, or the only one that is ready.

        Raises:
            InputError: The server cannot be reached, there is no such model or not exactly one, or its inputs are others.
        """
        await self._check_alive()
        ready = await self._ready()
        if name is None:
            if ready is None or len(ready) != 1:
                raise InputError(f"--server {self._address}", "give --model", _listed(ready))
            (name,) = ready
        elif ready is not None and name not in ready and not await self._answers(name):
            raise InputError(f"--model {name}", f"{self._address} has no such model", f"{_listed(ready)}{nearest(name, ready)}")
        try:
            found = await self._client.get_model_metadata(name, **self._described)
        except _ERRORS as error:
            raise InputError(f"--model {name}", f"{self._address} does not describe it ({_line(error)})", _listed(ready)) from error
        return Model(name, _inputs(name, found))

    async def _answers(self, name: str) -> bool:
        """Whether the server answers to a name that it does not list, as `compress serve` does to earlier ones."""
        try:
            return bool(await self._client.is_model_ready(name, **self._limit))
        except _ERRORS:
            return False

    def prepare(self, model: str, rows: Sequence[Row]) -> Prepared:
        """Returns the encoded request for k rows."""
        if self._address.protocol == "http":
            from tritonclient.http import InferInput

            return Prepared(model, tensors(rows, InferInput))
        request = pb.ModelInferRequest(model_name=model)
        for name, values in zip(inputs_of(rows[0]), zip(*map(parts_of, rows), strict=True), strict=True):
            request.inputs.add(name=name, datatype="BYTES", shape=[len(rows), 1])
            request.raw_input_contents.append(serialized([value.encode() if isinstance(value, str) else value for value in values]))
        return Prepared(model, request.SerializeToString())

    async def send(self, request: Prepared) -> Failure | None:
        """Sends a prepared request and waits for its answer; returns why there is none."""
        try:
            answer = await self._answer(request)
        except _ERRORS as error:
            return Failure(_kind(error), _line(error))
        if request.answer is None:
            request.answer = answer
        self.changed += answer != request.answer
        self.rows_per_tier = [sum(pair) for pair in zip_longest(self.rows_per_tier, request.tiers, fillvalue=0)]
        return None

    async def _answer(self, request: Prepared) -> bytes:
        """Returns the digest of an answer; of the first one to a request notes the tiers."""
        if self._address.protocol == "http":
            found = await self._client.infer(request.model, request.content, **self._limit)
            if request.answer is None:
                request.tiers = _tiers(found.as_numpy(TIER))
            return _digest(_contents(found))
        try:
            message = await self._infer(request.content, timeout=self._seconds, metadata=self._metadata)
            if request.answer is None:
                request.tiers = _tiers(InferResult(pb.ModelInferResponse.FromString(message)).as_numpy(TIER))
            return _digest([message])
        except grpc.aio.AioRpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error
        except DecodeError as error:
            raise InferenceServerException("the answer is no message of the protocol") from error

    @property
    def _described(self) -> dict[str, float | bool]:
        return self._limit | ({"as_json": True} if self._limit else {})

    async def _check_alive(self) -> None:
        try:
            alive = await self._client.is_server_live(**self._limit)
        except _ERRORS as error:
            other = {"grpc": "http", "http": "grpc"}[self._address.protocol]
            raise InputError(
                f"--server {self._address}",
                f"no answer ({_line(error)})",
                remedy=f"start the server, or give its port of {self._address.protocol}, or --protocol {other}",
            ) from error
        if not alive:
            raise InputError(
                f"--server {self._address}", "answers, but it is not live", remedy="give the address of a running Triton server"
            )

    async def _ready(self) -> list[str] | None:
        """Returns the names of the models that are ready, sorted; None where the server does not list its models."""
        try:
            found = await self._client.get_model_repository_index(**self._described)
        except InferenceServerException as error:
            if error.status() in access.REFUSED:
                raise access.refused(f"--server {self._address}") from error
            return None  # a server may keep its list to itself
        except _ERRORS as error:
            raise InputError(
                f"--server {self._address}", f"its models cannot be read ({_line(error)})", remedy="give a Triton server"
            ) from error
        models = found.get("models", []) if isinstance(found, dict) else found
        return sorted({one["name"] for one in models if one.get("state") == "READY"})


def _digest(parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


def _contents(result: HttpResult) -> Iterator[bytes]:
    """Yields name, shape and values of each output of an HTTP answer."""
    for output in result.get_response().get("outputs", []):
        values = result.as_numpy(output["name"])
        yield f"{output['name']} {values.dtype} {values.shape} ".encode()
        yield serialized(values.reshape(-1).tolist()) if values.dtype == object else values.tobytes()


def _tiers(answer: NDArray[np.int32] | None) -> tuple[int, ...]:
    """Returns how many rows each tier answered, from the first on; empty where the model is no cascade."""
    return () if answer is None else tuple(np.bincount(answer.reshape(-1) - 1).tolist())


def check_rows(rows: Sequence[Row], model: Model) -> None:
    """Checks that rows are what a model reads.

    Raises:
        InputError: They are not, or there are none.
    """
    if not rows:
        raise InputError("rows", "none given", remedy="give at least one")
    wanted = MEASURED[model.inputs]
    found = sorted({MEASURED[inputs_of(row)] if isinstance(row, str | tuple | bytes | Window) else "tokens" for row in rows})
    if found != [wanted]:
        raise InputError(f"--model {model.name}", f"reads {wanted} ({', '.join(model.inputs)}), but the rows are {' and '.join(found)}")


def _inputs(name: str, metadata: Metadata) -> tuple[str, ...]:
    """Returns the inputs of a model that can be measured."""
    given = {str(one["name"]): (one["datatype"], [int(axis) for axis in one["shape"]]) for one in metadata.get("inputs", [])}
    for inputs in MEASURED:
        if set(inputs) == set(given) and all(about == ("BYTES", [-1, 1]) for about in given.values()):
            return inputs
    described = ", ".join(f"{key} {datatype} {shape}" for key, (datatype, shape) in given.items()) or "none"
    allowed = "TEXT, TEXT and TEXT_PAIR (with or without ADAPTER), QUESTION and CONTEXT, IMAGE or AUDIO are measured, BYTES [-1, 1] each"
    raise InputError(f"--model {name}", f"its inputs are {described}", allowed)


def _listed(ready: list[str] | None) -> str:
    if ready is None:
        return "the server does not list its models"
    return f"ready: {', '.join(ready) or 'none'}"


def _kind(error: Exception) -> Kind:
    if isinstance(error, InferenceServerException):
        status = error.status()
        if QUEUED_TOO_LONG in (error.message() or ""):
            return "timed_out"
        return "refused" if status in _REFUSED else "timed_out" if status in _TIMED_OUT else "failed"
    if isinstance(error, TimeoutError):
        return "timed_out"
    return "refused" if isinstance(error, aiohttp.ClientError | OSError) else "failed"


def _line(error: Exception) -> str:
    """Returns an error as one line."""
    return reason(Exception(error.message() or error.status()) if isinstance(error, InferenceServerException) else error, 300)
