"""A server in the place of Triton, over gRPC and HTTP, that does what a test says: it stalls, refuses, fails, is slow, and takes notes."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

WORDS = {  # a row with this text: status of gRPC and HTTP
    "unavailable": (grpc.StatusCode.UNAVAILABLE, 503),
    "exhausted": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "deadline": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "invalid": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "internal": (grpc.StatusCode.INTERNAL, 500),
    "Exceeds maximum queue size": (grpc.StatusCode.UNAVAILABLE, 503),  # as Triton itself says it
    "Request timeout expired": (grpc.StatusCode.UNAVAILABLE, 503),
}
SLOW = "slow"
TEXT = {"TEXT": ("BYTES", [-1, 1])}


@dataclass
class Fake:
    """What the server does, and what it got."""

    models: dict[str, dict[str, tuple[str, list[int]]]] = field(default_factory=lambda: {"m": TEXT})
    """Inputs of each model: data type and shape."""
    unlisted: tuple[str, ...] = ()
    """Names of models that it answers to and does not list."""
    lists: bool = True
    """Whether it tells its models."""
    stall_at: int | None = None
    """Number of the request (from 1) with which the server stands still: it answers nothing more."""
    stall_until: int | None = None
    """Number of the request that ends the stall; None: only time does."""
    stall_seconds: float = 60.0
    """The stall ends after this time at the latest."""
    stalled: int = 0
    """Requests that came in the stall, the first and the last among them."""
    stall_end: float = 0.0
    """On `time.monotonic`."""
    requests: list[dict[str, list[bytes]]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    tiers: tuple[int, ...] = ()
    """Of a cascade the tier that each row of a request is answered by."""
    scores: list[float] = field(default_factory=list)
    """What the next requests are answered; then 0.5."""
    grpc_address: str = ""
    http_address: str = ""

    def __post_init__(self) -> None:
        self._over = asyncio.Event()
        self._over.set()

    async def answer(self, inputs: dict[str, list[bytes]]) -> str | None:
        """Takes a request; returns the word of the error, if it is to have one."""
        self.requests.append(inputs)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        number = len(self.requests)
        if number == self.stall_at:
            self._over = asyncio.Event()
            asyncio.get_running_loop().call_later(self.stall_seconds, self._end)
        self.stalled += not self._over.is_set()
        if number == self.stall_until:
            self._end()
        try:
            await self._over.wait()
            await asyncio.sleep(0.001)
            texts = [text.decode("utf-8", "replace") for values in inputs.values() for text in values]
            if SLOW in texts:
                await asyncio.sleep(30)
            return next((text for text in texts if text in WORDS), None)
        finally:
            self.under_way -= 1

    def _end(self) -> None:
        if not self._over.is_set():
            self.stall_end = time.monotonic()
            self._over.set()

    def score(self) -> float:
        return self.scores.pop(0) if self.scores else 0.5

    def described(self, name: str) -> dict[str, Any]:
        tensors = [{"name": key, "datatype": kind, "shape": shape} for key, (kind, shape) in self.models[name].items()]
        return {"name": name, "inputs": tensors}


def strings(raw: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(raw):
        (size,) = struct.unpack_from("<I", raw, place)
        found.append(raw[place + 4 : place + 4 + size])
        place += 4 + size
    return found


class Grpc(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    async def ServerLive(self, request, context):
        return pb.ServerLiveResponse(live=True)

    async def RepositoryIndex(self, request, context):
        if not self.fake.lists:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "closed")
        answer = pb.RepositoryIndexResponse()
        for name in self.fake.models.keys() - set(self.fake.unlisted):
            answer.models.add(name=name, state="READY")
        answer.models.add(name="loading", state="UNAVAILABLE")
        return answer

    async def ModelReady(self, request, context):
        return pb.ModelReadyResponse(ready=request.name in self.fake.models)

    async def ModelMetadata(self, request, context):
        if request.name not in self.fake.models:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model: {request.name!r}")
        answer = pb.ModelMetadataResponse(name=request.name)
        for one in self.fake.described(request.name)["inputs"]:
            answer.inputs.add(**one)
        return answer

    async def ModelInfer(self, request, context):
        inputs = {one.name: strings(raw) for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        assert all(list(one.shape) == [len(inputs[one.name]), 1] for one in request.inputs)
        word = await self.fake.answer(inputs)
        if word is not None:
            await context.abort(WORDS[word][0], f"the word was {word}")
        answer = pb.ModelInferResponse(model_name=request.model_name)
        answer.outputs.add(name="SCORE", datatype="FP32", shape=[1, 1])
        answer.raw_output_contents.append(struct.pack("<f", self.fake.score()))
        if self.fake.tiers:
            answer.outputs.add(name="TIER", datatype="INT32", shape=[len(self.fake.tiers), 1])
            answer.raw_output_contents.append(struct.pack(f"<{len(self.fake.tiers)}i", *self.fake.tiers))
        return answer


class Http:
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/v2/health/live", self.live)
        application.router.add_post("/v2/repository/index", self.index)
        application.router.add_get("/v2/models/{model}", self.model)
        application.router.add_get("/v2/models/{model}/ready", self.ready)
        application.router.add_post("/v2/models/{model}/infer", self.infer)
        return application

    async def live(self, request):
        return web.Response()

    async def index(self, request):
        if not self.fake.lists:
            return web.json_response({"error": "closed"}, status=404)
        models = [{"name": name, "state": "READY"} for name in self.fake.models.keys() - set(self.fake.unlisted)]
        return web.json_response([*models, {"name": "loading", "state": "UNAVAILABLE"}, {"name": "never loaded"}])

    async def ready(self, request):
        return web.Response(status=200 if request.match_info["model"] in self.fake.models else 400)

    async def model(self, request):
        name = request.match_info["model"]
        if name not in self.fake.models:
            return web.json_response({"error": f"unknown model: {name!r}"}, status=400)
        return web.json_response(self.fake.described(name))

    async def infer(self, request):
        body, size = await request.read(), int(request.headers["Inference-Header-Content-Length"])
        document, place, inputs = json.loads(body[:size]), size, {}
        for one in document["inputs"]:
            length = one["parameters"]["binary_data_size"]
            inputs[one["name"]] = strings(body[place : place + length])
            assert one["shape"] == [len(inputs[one["name"]]), 1]
            place += length
        word = await self.fake.answer(inputs)
        if word == "invalid":
            return web.Response(body=b"neither JSON nor tensors", status=200)
        if word is not None:
            return web.json_response({"error": f"the word was {word}"}, status=WORDS[word][1])
        outputs: list[dict[str, Any]] = [{"name": "SCORE", "datatype": "FP32", "shape": [1, 1], "data": [self.fake.score()]}]
        if self.fake.tiers:
            outputs.append({"name": "TIER", "datatype": "INT32", "shape": [len(self.fake.tiers), 1], "data": [*self.fake.tiers]})
        return web.json_response({"outputs": outputs})


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serves on free ports of loopback, in a thread with an event loop of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def serve(end: asyncio.Event) -> None:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Grpc(fake), server)
        fake.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        runner = web.AppRunner(Http(fake).application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.http_address = f"127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await end.wait()
        await server.stop(0)
        await runner.cleanup()

    end = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(end)), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.close()


def address(fake: Fake, protocol: str) -> str:
    return fake.grpc_address if protocol == "grpc" else fake.http_address
