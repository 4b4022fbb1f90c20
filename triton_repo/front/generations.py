"""Answers of models that may answer in pieces: each request in a stream of its own to Triton, which ends when nobody reads on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from triton_repo.front.inference import Inference, failure
from triton_repo.front.limits import MAX_STREAMS, STREAM_SECONDS, TRY_LATER, Places, Rejected

T = TypeVar("T")


class Generations:
    """All answers.

    Args:
        channel: Channel to Triton.
        infer: Takes and counts requests.
    """

    def __init__(self, channel: grpc.aio.Channel, infer: Inference) -> None:
        self._stub, self._infer, self._streams = service_pb2_grpc.GRPCInferenceServiceStub(channel), infer, Places(MAX_STREAMS)

    async def responses(self, request: pb.ModelInferRequest, most: int | None = None) -> AsyncGenerator[pb.ModelInferResponse]:
        """Yields the responses to a request, at most `most`; ends the request when it is closed.

        Raises:
            Rejected: The model has refused the request, failed, or has not answered in time.
        """
        if self._infer.answers_once(request.model_name):  # a stream says only in words what went wrong, and knows no version
            yield pb.ModelInferResponse.FromString(await self._infer(request))
            return
        traced = self._infer.upstream("ModelStreamInfer", request.model_name)
        with self._infer.streamed(request) as route, self._streams.open(), traced as metadata:
            call = self._stub.ModelStreamInfer(iter([request]), timeout=max(STREAM_SECONDS, route.silence_s), metadata=metadata)
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
