"""gRPC of the front: inference, whole or streamed, health, metadata and models of the KServe protocol; all else is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from triton_repo.front.doors import Doors
from triton_repo.front.index import ready_models
from triton_repo.front.inference import INFER, SERVICE, Inference
from triton_repo.front.limits import MAX_REQUEST_BYTES, REQUEST_SECONDS, RESTARTING, Load, Rejected
from triton_repo.front.streams import Streams
from triton_repo.front.tensors import QUEUED, read_request

if TYPE_CHECKING:  # imported only where requests are traced
    from triton_repo.front.traces import RequestTraces

OPEN = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
"""The methods that clients may call."""
NAMING = {"ModelReady": pb.ModelReadyRequest, "ModelMetadata": pb.ModelMetadataRequest}
"""Methods that name a model, possibly by an earlier name of it."""
OPEN_STREAM = "ModelStreamInfer"
"""And the one that answers in pieces."""
INDEX = "RepositoryIndex"
"""And the one that the front answers itself."""
RECONNECT_MS = 100
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_Handler = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]
_StreamHandler = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


def upstream(address: str) -> grpc.aio.Channel:
    """Returns a channel to Triton that finds it again soon after a restart."""
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
    ]
    return grpc.aio.insecure_channel(address, options=options)


def serve_grpc(
    channel: grpc.aio.Channel, load: Load, infer: Inference, models: Sequence[str] = (), doors: Doors | None = None
) -> grpc.aio.Server:
    """Returns a gRPC server, not started, that forwards to `channel`, lists the ready ones of `models` and asks for a key."""
    options = [
        ("grpc.so_reuseport", 0),  # no other process may listen on the same port
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 8192),
        ("grpc.max_concurrent_streams", 1024),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4096)
    server.add_generic_rpc_handlers((_Methods(channel, load, infer, models, doors or Doors()),))
    return server


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method; handlers of open methods are made once, and not with each call."""

    def __init__(self, channel: grpc.aio.Channel, load: Load, infer: Inference, models: Sequence[str], doors: Doors) -> None:
        self._doors = doors
        opened = {f"{SERVICE}{name}": _forwarding(channel, f"{SERVICE}{name}", load, _renaming(infer, name)) for name in OPEN}
        streams: _StreamHandler = Streams(channel, load, infer).forward
        opened[INFER] = _inferring(infer, load)
        if infer.traces is not None:
            opened[INFER], streams = _traced(opened[INFER], infer.traces), _traced_stream(streams, infer.traces)
        opened[f"{SERVICE}{INDEX}"] = _listing(service_pb2_grpc.GRPCInferenceServiceStub(channel), models)
        self._open = {method: grpc.unary_unary_rpc_method_handler(handler) for method, handler in opened.items()}
        self._open[f"{SERVICE}{OPEN_STREAM}"] = grpc.stream_stream_rpc_method_handler(streams)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Returns the handler of a call; bytes go in and out as they are."""
        method = str(details.method)
        if not self._doors.opens(method, tuple(details.invocation_metadata or ())):
            return grpc.unary_unary_rpc_method_handler(_unknown)
        return self._open[method] if method in self._open else grpc.unary_unary_rpc_method_handler(_refusing(method))


def _renaming(infer: Inference, method: str) -> Callable[[bytes], bytes]:
    """Returns a function that replaces an earlier name of a model in a message to a method; other messages stay as they are."""

    def renamed(body: bytes) -> bytes:
        try:
            request = NAMING[method].FromString(body)
        except DecodeError:
            return body  # Triton refuses it
        request.name = infer.name_of(request.name)
        encoded: bytes = request.SerializeToString()
        return encoded

    return renamed if method in NAMING else lambda body: body


def _forwarding(channel: grpc.aio.Channel, method: str, load: Load, renamed: Callable[[bytes], bytes]) -> _Handler:
    call = channel.unary_unary(method)

    async def forward(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with load.hold(len(body)):
            remaining = context.time_remaining()
            answer: bytes = await call(renamed(body), timeout=min(REQUEST_SECONDS, REQUEST_SECONDS if remaining is None else remaining))
            return answer

    return _with_status(forward)


def _inferring(infer: Inference, load: Load) -> _Handler:
    async def answered(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with load.hold(len(body)):
            return await infer(read_request(body, QUEUED), context.time_remaining())

    return _with_status(answered)


def _with_status(handler: _Handler) -> _Handler:
    """Returns a handler that ends a refused or failed request with its status."""

    async def answered(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await handler(body, context)
        except Rejected as error:
            await context.abort(_CODES[error.status], str(error))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), _message(error))
        raise AssertionError("unreachable: abort raises")

    return answered


def _traced(handler: _Handler, traces: RequestTraces) -> _Handler:
    async def traced(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with traces.call("ModelInfer", context):
            return await handler(body, context)

    return traced


def _traced_stream(handler: _StreamHandler, traces: RequestTraces) -> _StreamHandler:
    async def traced(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        with traces.call(OPEN_STREAM, context):
            await handler(requests, context)

    return traced


def _listing(stub: service_pb2_grpc.GRPCInferenceServiceStub, models: Sequence[str]) -> _Handler:
    async def listed(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            encoded: bytes = (await ready_models(stub, models)).SerializeToString()
            return encoded
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), _message(error))
        raise AssertionError("unreachable: abort raises")

    return listed


async def _unknown(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed: send the metadata 'authorization: Bearer KEY'")
    raise AssertionError("unreachable: abort raises")


def _refusing(method: str) -> _Handler:
    async def refuse(body: bytes, context: grpc.aio.ServicerContext) -> bytes:
        name = method.rpartition("/")[2][:64]
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{name} is not offered here; {', '.join((*OPEN, OPEN_STREAM, INDEX))} are")
        raise AssertionError("unreachable: abort raises")

    return refuse


def _message(error: grpc.aio.AioRpcError) -> str:
    """Returns the message to a client about a failed call."""
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return RESTARTING
    return str(error.details())
