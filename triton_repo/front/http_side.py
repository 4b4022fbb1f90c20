"""HTTP of the front: the paths of the KServe protocol for inference, health, metadata and models; Prometheus metrics on their own port.

Triton's own HTTP server is switched off: deep JSON, compressed bodies and chunked bodies in many pieces have crashed it. Bodies are read
whole and within limits here, checked, and forwarded as gRPC.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import aiohttp
import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from foundation.core.json_value import Json
from triton_repo.front.apis.body import read
from triton_repo.front.apis.catalog import Catalog
from triton_repo.front.apis.completions import Completions
from triton_repo.front.apis.embeddings_inference import EmbeddingsInference
from triton_repo.front.apis.errors import error_document
from triton_repo.front.apis.hugging_face import HuggingFace
from triton_repo.front.apis.openai import OpenAI
from triton_repo.front.bodies import compact, read_body, write_body
from triton_repo.front.doors import Doors
from triton_repo.front.events import send_events
from triton_repo.front.failures import status_and_line
from triton_repo.front.generation import read_generation, write_generation
from triton_repo.front.generations import Generations
from triton_repo.front.index import ready_models
from triton_repo.front.inference import Inference
from triton_repo.front.limits import BODY_SECONDS, MAX_CONNECTIONS, MAX_REQUEST_BYTES, REQUEST_SECONDS, Load, Rejected
from triton_repo.front.tensors import check_model

JSON_SIZE = "Inference-Header-Content-Length"
METRICS_SECONDS = 10.0
OPEN = Doors()
"""Everybody gets in."""
_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Paths:
    """The handlers of all paths.

    Args:
        channel: Channel to Triton.
        load: The bytes under way.
        infer: Answers inferences.
        models: Names of all models of the repository.
        folder: The repository that the server reads.
    """

    def __init__(self, channel: grpc.aio.Channel, load: Load, infer: Inference, models: Sequence[str] = (), folder: str = "") -> None:
        self._stub, self._infer, self._load = service_pb2_grpc.GRPCInferenceServiceStub(channel), infer, load
        self._models, self._generations = models, Generations(channel, infer)
        catalog = Catalog(channel, infer, models, folder)
        self._apis = (
            OpenAI(catalog),
            Completions(catalog, self._generations),
            EmbeddingsInference(catalog),
            HuggingFace(catalog, self._generations),
        )

    def application(self, doors: Doors = OPEN) -> web.Application:
        """Returns the application; every error is a JSON object with the key `error`."""

        @web.middleware
        async def held(request: web.Request, handler: _Answer) -> web.StreamResponse:
            """Counts the bytes of a request while it is answered."""
            with self._load.hold(_size(request)):
                return await handler(request)

        traced = [] if self._infer.traces is None else [self._infer.traces.middleware]  # behind the doors: no key, no span
        application = web.Application(middlewares=[_errors, doors.middleware, *traced, held], client_max_size=MAX_REQUEST_BYTES)
        application.router.add_get("/v2", self.server)
        application.router.add_get("/v2/health/live", self.live)
        for ready in ("/v2/health/ready", "/health"):  # the latter as Text Embeddings Inference has it
            application.router.add_get(ready, self.ready)
        application.router.add_post("/v2/repository/index", self.index)
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            application.router.add_get(model, self.model)
            application.router.add_get(f"{model}/ready", self.model_ready)
            application.router.add_post(f"{model}/infer", self.infer)
            application.router.add_post(f"{model}/generate", self.generate)
            application.router.add_post(f"{model}/generate_stream", self.generate_stream)
        for api in self._apis:
            api.add(application.router)
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
        given = request.headers.get(JSON_SIZE)
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 12):
            raise Rejected(f"{JSON_SIZE}: a number of bytes is expected")
        wanted_request, wanted = read_body(name, version, await read(request), None if given is None else int(given))
        answered, size = write_body(pb.ModelInferResponse.FromString(await self._infer(wanted_request)), wanted)
        headers = {"Content-Type": "application/json"}
        if size is not None:
            headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(size)}
        return web.Response(body=answered, headers=headers)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """An answer as one JSON object."""
        described, wanted = await self._generation(request, stream=False)
        answers = [response async for response in self._generations.responses(wanted, most=2)]
        if len(answers) != 1:
            raise Rejected(f"{len(answers) or 'no'} responses came, or more; use generate_stream for a model that gives more than one")
        return web.json_response(write_generation(answers[0], described), dumps=compact)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """An answer in pieces: server-sent events, each with a JSON object. What fails before the first one has a status of its own."""
        described, wanted = await self._generation(request, stream=True)

        async def payloads() -> AsyncGenerator[str]:
            async with aclosing(self._generations.responses(wanted)) as responses:
                async for response in responses:
                    yield compact(write_generation(response, described))

        return await send_events(request, payloads(), lambda _, message: compact({"error": message}))

    def _model(self, request: web.Request) -> tuple[str, str]:
        """Returns name and version of the model in a path."""
        name, version = request.match_info["model"], request.match_info.get("version", "")
        check_model(name, version)
        return self._infer.name_of(name), version

    async def _generation(self, request: web.Request, *, stream: bool) -> tuple[pb.ModelMetadataResponse, pb.ModelInferRequest]:
        """Returns the description of the model, and the checked request."""
        name, version = self._model(request)
        body = await read(request)
        described = await self._stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version), timeout=REQUEST_SECONDS)
        return described, read_generation(described, version, body, stream=stream)


def metrics_application(socket: str, own: Callable[[], str], doors: Doors = OPEN) -> web.Application:
    """Returns the application of the metrics port: `/metrics`, read from Triton's socket, with the metrics of the front below."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
        session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=timeout)
        async with session, session.get("http://localhost/metrics") as answer:
            body = await answer.read() + own().encode("utf-8")
            return web.Response(body=body, headers={"Content-Type": "text/plain; charset=utf-8"})

    application = web.Application(middlewares=[_errors, doors.middleware], client_max_size=0)
    application.router.add_get("/metrics", metrics)
    return application


async def listen(application: web.Application, address: str, port: int, context: ssl.SSLContext | None = None) -> tuple[web.AppRunner, int]:
    """Serves an application; returns the runner, and the port.

    More than `MAX_CONNECTIONS` connections are closed at once, and what a client asked that has gone is cancelled.
    """
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=BODY_SECONDS, auto_decompress=False, handler_cancellation=True)
    await runner.setup()
    accepting = runner.server
    assert accepting is not None, "set up"

    def protocol() -> asyncio.BaseProtocol:
        return accepting() if len(accepting.connections) < MAX_CONNECTIONS else _Closing()

    listening = await asyncio.get_running_loop().create_server(protocol, address, port, ssl=context)
    return runner, int(listening.sockets[0].getsockname()[1])


class _Closing(asyncio.Protocol):
    """Closes a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


def _size(request: web.Request) -> int:
    """Returns the most bytes that the body of a request may have."""
    return 0 if not request.can_read_body else min(request.content_length or MAX_REQUEST_BYTES, MAX_REQUEST_BYTES)


@web.middleware
async def _errors(request: web.Request, handler: _Answer) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        refusal = status_and_line(error, request.method)
        if refusal is None:
            raise
        status, document = error_document(request.path, *refusal)
    return web.json_response(document, status=status, dumps=compact)
