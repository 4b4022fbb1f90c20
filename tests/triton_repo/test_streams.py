"""Streams of gRPC through the front, before a stand-in for the call to Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front.limits import RESTARTING, Load
from triton_repo.front.streams import Streams


class Aborted(Exception):
    """What `abort` raises."""


class Context:
    """Keeps what the client is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.aborted: tuple[Any, str] | None = None

    async def write(self, body: bytes) -> None:
        self.sent.append(pb.ModelStreamInferResponse.FromString(body))

    async def abort(self, code: Any, line: str) -> None:
        self.aborted = (code, line)
        raise Aborted


class Call:
    """A call to Triton that answers each request with one response; `ends` is how it ends after so many."""

    def __init__(self, ends: BaseException | None, after: int) -> None:
        self._ends, self._left, self.asked = ends, after, asyncio.Queue[Any]()
        self.cancelled = False

    async def write(self, request: Any) -> None:
        if not self._left:
            raise asyncio.InvalidStateError("the call is over")  # as grpc.aio does
        self._left -= 1
        await self.asked.put(request)

    async def done_writing(self) -> None:
        await self.asked.put(None)

    async def read(self) -> Any:
        if not self._left and self.asked.empty():
            await asyncio.sleep(0.02)  # the end is known later here than to `write`
            if self._ends is not None:
                raise self._ends
        request = await self.asked.get()
        if request is None:
            return grpc.aio.EOF
        response = pb.ModelStreamInferResponse()
        response.infer_response.id = request.id
        response.infer_response.parameters["triton_final_response"].bool_param = True
        return response

    def cancel(self) -> None:
        self.cancelled = True


def forward(call: Call, requests: int) -> tuple[Context, Load]:
    asked = pb.ModelInferRequest(model_name="m", id="mine")
    asked.inputs.add(name="X", datatype="INT32", shape=[1])
    asked.raw_input_contents.append(b"\0" * 4)

    async def bodies() -> AsyncIterator[bytes]:
        for _ in range(requests):
            yield asked.SerializeToString()
            await asyncio.sleep(0)

    class Channel:
        def stream_stream(self, *_: Any) -> Any:
            return lambda timeout: call

    context, load = Context(), Load()

    async def run() -> None:
        with suppress(Aborted):
            await Streams(Channel(), load).forward(bodies(), context)

    asyncio.run(run())
    assert call.cancelled
    assert load.held == 0
    return context, load


def test_responses_have_the_id_of_the_client() -> None:
    context, _ = forward(Call(None, 5), 3)
    assert [one.infer_response.id for one in context.sent] == ["mine"] * 3
    assert context.aborted is None


@pytest.mark.parametrize(("code", "line"), [(grpc.StatusCode.UNAVAILABLE, RESTARTING), (grpc.StatusCode.INTERNAL, "as Triton says")])
def test_a_stream_that_triton_breaks_off_ends_as_triton_says(code: grpc.StatusCode, line: str) -> None:
    """Requests that come after the end must not hide how it ended."""
    broken = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="as Triton says")
    context, _ = forward(Call(broken, 2), 5)
    assert len(context.sent) == 2
    assert context.aborted == (code, line)
