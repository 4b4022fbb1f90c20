"""Streams of gRPC through the front: every request in one is checked like any other, every response goes to the client as it comes.

    client  -- requests -->  checked, with a number for an id  -->  Triton
    client  <-- responses --  with the id of the client          <--  Triton

A request that is refused gets a response with an error, and the stream goes on. When either side ends or breaks off, so does the other:
Triton then ends what it is answering. A client that does not read holds up its own stream alone, until nothing has moved for
`STREAM_IDLE_SECONDS`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

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
FINAL = "triton_final_response"
"""Parameter of the last response to a request."""


class Streams:
    """All streams.

    Args:
        channel: Channel to Triton.
        load: The bytes under way.
    """

    def __init__(self, channel: Any, load: Load) -> None:
        self._call = channel.stream_stream(METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString)
        self._load, self._places = load, Places(MAX_STREAMS)

    async def forward(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Passes requests and responses on until either side ends."""
        try:
            with self._places.open():
                stream = _Stream(self._call(timeout=STREAM_SECONDS), context, self._load)
                await stream.run(requests)
        except Rejected as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing came or went in this stream for {STREAM_IDLE_SECONDS:.0f} s")
        except grpc.aio.AioRpcError as error:
            gone = error.code() == grpc.StatusCode.UNAVAILABLE
            await context.abort(error.code(), RESTARTING if gone else str(error.details()))


@dataclass
class _Stream:
    """One stream."""

    call: Any
    context: Any
    load: Load
    asked: dict[str, tuple[str, ExitStack]] = field(default_factory=dict)
    """By our number: the id that the client gave, and what the request holds until it is answered."""
    numbers: Any = field(default_factory=itertools.count)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    moved: float = 0.0

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Runs until Triton has ended the stream.

        Raises:
            AioRpcError: Triton broke it off.
            TimeoutError: Nothing moved for too long.
        """
        self._note()
        passing = asyncio.create_task(self._pass_requests(requests))
        answering = asyncio.create_task(self._pass_responses())
        try:
            while True:
                left = self.moved + STREAM_IDLE_SECONDS - asyncio.get_running_loop().time()
                if left <= 0:
                    raise TimeoutError
                waited = {answering} if passing.done() else {answering, passing}
                done, _ = await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if answering in done:
                    return
        finally:
            passing.cancel()
            answering.cancel()
            self.call.cancel()
            await asyncio.gather(passing, answering, return_exceptions=True)
            for _, held in self.asked.values():
                held.close()

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
                except asyncio.InvalidStateError:  # Triton has ended the stream; how it did stands behind its last response
                    return
        await self.call.done_writing()

    def _admitted(self, body: bytes) -> Any:
        """Returns the checked request under a number of ours.

        Raises:
            Rejected: It is wrong, or too much is under way.
        """
        request = read_request(body)
        if len(self.asked) >= MAX_STREAM_REQUESTS:
            raise Rejected(f"{len(self.asked)} requests of this stream are being answered, the most allowed; {TRY_LATER}", 503)
        held = ExitStack()
        held.enter_context(self.load.hold(len(body)))
        number = str(next(self.numbers))
        self.asked[number] = (request.id, held)
        request.id = number
        return request

    async def _pass_responses(self) -> None:
        while (response := await self.call.read()) is not grpc.aio.EOF:
            inferred = response.infer_response
            known = self.asked.get(inferred.id)
            if known is not None:
                if response.error_message or (FINAL in inferred.parameters and inferred.parameters[FINAL].bool_param):
                    del self.asked[inferred.id]
                    known[1].close()
                inferred.id = known[0]
            await self._write(response)

    async def _write(self, response: Any) -> None:
        async with self.writing:
            await self.context.write(response.SerializeToString())
        self._note()

    def _note(self) -> None:
        self.moved = asyncio.get_running_loop().time()
