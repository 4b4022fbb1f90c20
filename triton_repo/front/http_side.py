"""HTTP of the front: the paths of the KServe protocol for inference, health, metadata and models; Prometheus metrics on their own port.

Triton's own HTTP server is switched off: deep JSON, compressed bodies and chunked bodies in many pieces have crashed it. Bodies are read
whole and within limits here, checked, and forwarded as gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import aiohttp
import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.core.json_value import Json
from triton_repo.front.bodies import compact, read_body, write_body
from triton_repo.front.generation import read_generation, write_generation
from triton_repo.front.index import ready_models
from triton_repo.front.inference import Inference, failure
from triton_repo.front.limits import (
    BODY_SECONDS,
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    MAX_STREAMS,
    REQUEST_SECONDS,
    RESTARTING,
    STREAM_IDLE_SECONDS,
    STREAM_SECONDS,
    TRY_LATER,
    Load,
    Places,
    Rejected,
)
from triton_repo.front.tensors import check_model

JSON_SIZE = "Inference-Header-Content-Length"
METRICS_SECONDS = 10.0
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Paths:
    """The handlers of all paths.

    Args:
        channel: Channel to Triton.
        load: The bytes under way.
        infer: Answers inferences.
        models: Names of all models of the repository.
    """

    def __init__(self, channel: grpc.aio.Channel, load: Load, infer: Inference, models: Sequence[str] = ()) -> None:
        self._stub, self._infer, self._load = service_pb2_grpc.GRPCInferenceServiceStub(channel), infer, load
        self._streams, self._models = Places(MAX_STREAMS), models

    def application(self) -> web.Application:
        """Returns the application; every error is a JSON object with the key `error`."""
        application = web.Application(middlewares=[_errors], client_max_size=MAX_REQUEST_BYTES)
        application.router.add_get("/v2", self.server)
        application.router.add_get("/v2/health/live", self.live)
        application.router.add_get("/v2/health/ready", self.ready)
        application.router.add_post("/v2/repository/index", self.index)
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            application.router.add_get(model, self.model)
            application.router.add_get(f"{model}/ready", self.model_ready)
            application.router.add_post(f"{model}/infer", self.infer)
            application.router.add_post(f"{model}/generate", self.generate)
            application.router.add_post(f"{model}/generate_stream", self.generate_stream)
        return application

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Whether Triton is alive."""
        answer = await self._stub.ServerLive(pb.ServerLiveRequest(), timeout=REQUEST_SECONDS)
        return web.Response(status=200 if answer.live else 503)

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Whether all models are ready."""
        answer = await self._stub.ServerReady(pb.ServerReadyRequest(), timeout=REQUEST_SECONDS)
        return web.Response(status=200 if answer.ready else 503)

    async def model_ready(self, request: web.Request) -> web.StreamResponse:
        """Whether a model is ready."""
        name, version = self._model(request)
        answer = await self._stub.ModelReady(pb.ModelReadyRequest(name=name, version=version), timeout=REQUEST_SECONDS)
        return web.Response(status=200 if answer.ready else 503)

    async def server(self, request: web.Request) -> web.StreamResponse:
        """Name and version of the server."""
        answer = await self._stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=REQUEST_SECONDS)
        return web.json_response({"name": answer.name, "version": answer.version, "extensions": ["binary_tensor_data"]}, dumps=compact)

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Inputs and outputs of a model."""
        name, version = self._model(request)
        answer = await self._stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), timeout=REQUEST_SECONDS)
        document: dict[str, Json] = {"name": answer.name, "versions": list(answer.versions), "platform": answer.platform}
        for key in ("inputs", "outputs"):
            tensors = getattr(answer, key)
            document[key] = [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in tensors]
        return web.json_response(document, dumps=compact)

    async def index(self, request: web.Request) -> web.StreamResponse:
        """The models that are ready."""
        found = await ready_models(self._stub, self._models)
        return web.json_response([{"name": one.name, "state": one.state} for one in found.models], dumps=compact)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """An inference."""
        name, version = self._model(request)
        _check_encoding(request)
        given = request.headers.get(JSON_SIZE)
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 12):
            raise Rejected(f"{JSON_SIZE}: a number of bytes is expected")
        with self._load.hold(_size(request)):
            body = await asyncio.wait_for(request.read(), BODY_SECONDS)
            wanted_request, wanted = read_body(name, version, body, None if given is None else int(given))
            answered, size = write_body(pb.ModelInferResponse.FromString(await self._infer(wanted_request)), wanted)
        headers = {"Content-Type": "application/json"}
        if size is not None:
            headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(size)}
        return web.Response(body=answered, headers=headers)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """An answer as one JSON object."""
        with self._load.hold(_size(request)):
            described, asked = await self._generation(request, stream=False)
            answers = [response async for response in self._responses(asked, most=2)]
        if len(answers) != 1:
            raise Rejected(f"{len(answers) or 'no'} responses came, or more; use generate_stream for a model that gives more than one")
        return web.json_response(write_generation(answers[0], described), dumps=compact)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """An answer in pieces: server-sent events, each with a JSON object. What fails before the first one has a status of its own."""
        with self._load.hold(_size(request)):
            described, asked = await self._generation(request, stream=True)
            async with aclosing(self._responses(asked)) as responses:
                first = await anext(responses, None)
                events = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
                await events.prepare(request)
                try:
                    if first is not None:
                        await _send(events, write_generation(first, described))
                    async for response in responses:
                        await _send(events, write_generation(response, described))
                except (Rejected, grpc.aio.AioRpcError, ValueError, TimeoutError) as error:
                    await _send(events, {"error": str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)})
            return events

    def _model(self, request: web.Request) -> tuple[str, str]:
        """Returns name and version of the model in a path."""
        name, version = request.match_info["model"], request.match_info.get("version", "")
        check_model(name, version)
        return self._infer.name_of(name), version

    async def _generation(self, request: web.Request, *, stream: bool) -> tuple[pb.ModelMetadataResponse, pb.ModelInferRequest]:
        """Returns the description of the model, and the checked request."""
        name, version = self._model(request)
        _check_encoding(request)
        body = await asyncio.wait_for(request.read(), BODY_SECONDS)
        described = await self._stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), timeout=REQUEST_SECONDS)
        return described, read_generation(described, version, body, stream=stream)

    async def _responses(self, request: pb.ModelInferRequest, most: int | None = None) -> AsyncGenerator[pb.ModelInferResponse]:
        """Yields the responses to a request, at most `most`; ends the request when it is closed.

        Raises:
            Rejected: The model has refused the request, failed, or has not answered in time.
        """
        if self._infer.answers_once(request.model_name):  # a stream says only in words what went wrong, and knows no version
            yield pb.ModelInferResponse.FromString(await self._infer(request))
            return
        with self._infer.streamed(request) as route, self._streams.open():
            call = self._stub.ModelStreamInfer(iter([request]), timeout=max(STREAM_SECONDS, route.silence_s))
            try:
                count, failed = 0, ""
                while count != most:
                    message = await _within(call.read(), route.silence_s, request.model_name)
                    if message is grpc.aio.EOF and failed:
                        raise failure(failed)
                    if message is grpc.aio.EOF:
                        return
                    if message.error_message:  # Triton then ends the stream; ending it with a status may crash Triton
                        failed = message.error_message
                        continue
                    count += 1
                    if message.infer_response.outputs:  # the last one may be empty
                        yield message.infer_response
            finally:
                call.cancel()


async def _within(answer: Awaitable[T], seconds: float, model: str) -> T:
    """Awaits an answer of Triton.

    Raises:
        Rejected: None came in time.
    """
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise Rejected(f"model {model}: nothing came for {seconds:g} s; {TRY_LATER}", 504) from None


def metrics_application(socket: str, own: Callable[[], str]) -> web.Application:
    """Returns the application of the metrics port: `/metrics`, read from Triton's socket, with the metrics of the front below."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
        session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=timeout)
        async with session, session.get("http://localhost/metrics") as answer:
            body = await answer.read() + own().encode("utf-8")
            return web.Response(body=body, headers={"Content-Type": "text/plain; charset=utf-8"})

    application = web.Application(middlewares=[_errors], client_max_size=0)
    application.router.add_get("/metrics", metrics)
    return application


async def listen(application: web.Application, address: str, port: int) -> tuple[web.AppRunner, int]:
    """Serves an application; returns the runner, and the port.

    More than `MAX_CONNECTIONS` connections are closed at once, and what a client asked that has gone is cancelled.
    """
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=BODY_SECONDS, auto_decompress=False, handler_cancellation=True)
    await runner.setup()
    accepting = runner.server
    assert accepting is not None, "set up"

    def protocol() -> asyncio.BaseProtocol:
        return accepting() if len(accepting.connections) < MAX_CONNECTIONS else _Closing()

    listening = await asyncio.get_running_loop().create_server(protocol, address, port)
    return runner, int(listening.sockets[0].getsockname()[1])


class _Closing(asyncio.Protocol):
    """Closes a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


async def _send(events: web.StreamResponse, document: Mapping[str, Json]) -> None:
    """Sends an event; a client that does not read it in time is given up."""
    async with asyncio.timeout(STREAM_IDLE_SECONDS):
        await events.write(f"data: {compact(document)}\n\n".encode())


def _size(request: web.Request) -> int:
    return min(request.content_length or MAX_REQUEST_BYTES, MAX_REQUEST_BYTES)


def _check_encoding(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Rejected("compressed bodies are not accepted; send it without Content-Encoding", 415)


@web.middleware
async def _errors(request: web.Request, handler: _Answer) -> web.StreamResponse:
    try:
        return await handler(request)
    except Rejected as error:
        status, message = error.status, str(error)
    except web.RequestPayloadError as error:
        status, message = 400, f"the body did not arrive whole: {' '.join(str(error).split())[:200]}"
    except web.HTTPRequestEntityTooLarge:
        status, message = 413, f"at most {MAX_REQUEST_BYTES} bytes are accepted"
    except web.HTTPException as error:
        status, message = error.status, f"{request.method} of this path is not offered here; inference, health and metadata are"
    except grpc.aio.AioRpcError as error:
        status, message = _STATUS.get(error.code(), 500), str(error.details())
        if status == 503 and not message.endswith(TRY_LATER):
            message = RESTARTING
    except TimeoutError:
        status, message = 408, "the request did not arrive in time"
    except (aiohttp.ClientError, OSError):
        status, message = 503, RESTARTING
    except ValueError as error:
        status, message = 500, f"the answer cannot be written as JSON: {error}"
    return web.json_response({"error": message}, status=status, dumps=compact)
