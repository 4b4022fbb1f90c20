"""Streams of gRPC through the front: every request in one is checked like any other, every response goes to the client as it comes.

    client  -- requests -->  checked, with a number for an id  -->  Triton
    client  <-- responses --  with the id of the client          <--  Triton

A request that is refused gets a response with an error, and the stream continues. When either side ends or breaks off, so does the other:
Triton then ends what it is answering. A client that does not read holds up only its own stream, until nothing has moved for
`STREAM_IDLE_SECONDS`. A model may be silent as long as it may answer (`triton_repo.front.routes`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front.inference import Inference, failure
from triton_repo.front.limits import (
    MAX_STREAM_REQUESTS,
    MAX_STREAMS,
    RESTARTING,
    STREAM_IDLE_SECONDS,
    STREAM_SECONDS,
    TRY_LATER,
    Load,
    Places,
    Rejected,
)
from triton_repo.front.tensors import read_request

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
LOOK_SECONDS = 1.0
"""Time between two looks at the time."""
FINAL = "triton_final_response"
"""Parameter of the last response to a request."""


class Streams:
    """All streams.

    Args:
        channel: Channel to Triton.
        load: The bytes under way.
        infer: Takes and counts requests.
    """

    def __init__(self, channel: grpc.aio.Channel, load: Load, infer: Inference) -> None:
        self._call = channel.stream_stream(METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString)
        self._load, self._infer, self._places = load, infer, Places(MAX_STREAMS)

    async def forward(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Passes requests and responses on until either side ends."""
        try:
            with self._places.open(), self._infer.upstream("ModelStreamInfer") as metadata:
                stream = _Stream(self._call(metadata=metadata), context, self._load, self._infer)
                await stream.run(requests)
        except Rejected as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except grpc.aio.AioRpcError as error:
            gone = error.code() == grpc.StatusCode.UNAVAILABLE
            await context.abort(error.code(), RESTARTING if gone else str(error.details()))


@dataclass(frozen=True)
class _Request:
    """A request that has not been answered whole."""

    id: str
    """As the client gave it."""
    silence_s: float
    """Seconds without a response that its model may take."""
    held: ExitStack
    """Resources that it holds until it is answered."""

    def end(self, error: BaseException | None = None) -> None:
        """Lets go of what it holds; counts the error, where it ended with one."""
        self.held.__exit__(None if error is None else type(error), error, None)


@dataclass
class _Stream:
    """One stream."""

    call: grpc.aio.StreamStreamCall
    context: grpc.aio.ServicerContext
    load: Load
    infer: Inference
    requests: dict[str, _Request] = field(default_factory=dict)
    """Streams by our number."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    moved: float = 0.0

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Runs until Triton has ended the stream.

        Raises:
            AioRpcError: Triton broke it off.
            TimeoutError: Nothing moved for too long, or the stream is too old.
        """
        ending: BaseException = asyncio.CancelledError()
        self._note()
        passing = asyncio.create_task(self._pass_requests(requests))
        answering = asyncio.create_task(self._pass_responses())
        try:
            while True:
                self._check_time()
                waited = {answering} if passing.done() else {answering, passing}
                done, _ = await asyncio.wait(waited, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if answering in done:
                    return
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            ending = error
            raise
        finally:
            passing.cancel()
            answering.cancel()
            self.call.cancel()
            await asyncio.gather(passing, answering, return_exceptions=True)
            for request in self.requests.values():
                request.end(ending)

    def _check_time(self) -> None:
        """Raises TimeoutError if the stream has to end."""
        now = asyncio.get_running_loop().time()
        unread = self.writing.locked()
        silence_s = STREAM_IDLE_SECONDS if unread else max((one.silence_s for one in self.requests.values()), default=STREAM_IDLE_SECONDS)
        if now >= self.moved + silence_s:
            raise TimeoutError(f"nothing came or went in this stream for {silence_s:g} s")
        if self._is_old() and not self.requests:
            raise TimeoutError(f"this stream was opened {STREAM_SECONDS:g} s ago; open another one")

    def _is_old(self) -> bool:
        return asyncio.get_running_loop().time() >= self.begun + STREAM_SECONDS

    async def _pass_requests(self, requests: AsyncIterator[bytes]) -> None:
        async for body in requests:
            self._note()
            try:
                request = self._admitted(body)
            except Rejected as error:
                await self._write(pb.ModelStreamInferResponse(error_message=str(error)))
            else:
                try:
                    await self.call.write(request)
                except asyncio.InvalidStateError:  # Triton has ended the stream; its status follows its last response
                    return
        await self.call.done_writing()

    def _admitted(self, body: bytes) -> pb.ModelInferRequest:
        """Returns the checked request under a number of ours.

        Raises:
            Rejected: It is wrong, or too much is under way.
        """
        request = read_request(body)
        if len(self.requests) >= MAX_STREAM_REQUESTS:
            raise Rejected(f"{len(self.requests)} requests of this stream are being answered, the most allowed; {TRY_LATER}", 503)
        if self._is_old():
            raise Rejected(f"this stream was opened {STREAM_SECONDS:g} s ago; open another one and {TRY_LATER}", 503)
        with ExitStack() as held:
            held.enter_context(self.load.hold(len(body)))
            route = held.enter_context(self.infer.streamed(request))
            made = _Request(request.id, route.silence_s, held.pop_all())
        number = str(next(self.numbers))
        self.requests[number] = made
        request.id = number
        return request

    async def _pass_responses(self) -> None:
        while (response := await self.call.read()) is not grpc.aio.EOF:
            inferred = response.infer_response
            known = self.requests.get(inferred.id)
            if known is not None:
                if response.error_message or (FINAL in inferred.parameters and inferred.parameters[FINAL].bool_param):
                    del self.requests[inferred.id]
                    known.end(failure(response.error_message) if response.error_message else None)
                inferred.id = known.id
            await self._write(response)

    async def _write(self, response: pb.ModelStreamInferResponse) -> None:
        async with self.writing:
            await self.context.write(response.SerializeToString())
        self._note()

    def _note(self) -> None:
        self.moved = asyncio.get_running_loop().time()
