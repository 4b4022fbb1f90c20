"""An inference through the front: the limits of its queue, and the message when it fails.

Which version answers a request that names none is Triton's choice: there is one, and while it is exchanged Triton answers with either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import grpc
from tritonclient.grpc import service_pb2 as pb

from triton_repo.front.admission import Admission, Request
from triton_repo.front.failures import GONE, is_gone
from triton_repo.front.limits import MODEL_FAILED, REQUEST_SECONDS, RESTARTING, TRY_LATER, Rejected
from triton_repo.front.routes import Route, Routes
from triton_repo.front.tensors import QUEUED

if TYPE_CHECKING:  # imported only where requests are traced
    from triton_repo.front.traces import Metadata, RequestTraces

SERVICE = "/inference.GRPCInferenceService/"
INFER = f"{SERVICE}ModelInfer"
PRIORITY, TIMEOUT = QUEUED
QUEUE_FULL, QUEUED_TOO_LONG = "maximum queue size", "timeout expired"
"""Triton's messages for a request that its queue rejects, and for one that has waited there too long."""
UNTRACED: AbstractContextManager[None] = nullcontext()


class Inference:
    """Sends checked requests to Triton.

    Args:
        channel: Channel to Triton.
        routes: Routes of the requests.
        admission: Accepts or refuses them.
        traces: Makes spans of the calls of Triton; None: nothing is traced.
    """

    def __init__(self, channel: grpc.aio.Channel, routes: Routes, admission: Admission, traces: RequestTraces | None = None) -> None:
        self.traces = traces
        self._call = channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString)
        self._routes, self._admission = routes, admission

    async def __call__(self, request: pb.ModelInferRequest, remaining_s: float | None = None) -> bytes:
        """Returns the serialized `ModelInferResponse` to a checked request.

        Args:
            request: The `ModelInferRequest`.
            remaining_s: Seconds that the client still waits.

        Raises:
            Rejected: The request is not taken, was not answered in time, or asks for a priority that the model does not have.
            grpc.aio.AioRpcError: It failed.
        """
        model = request.model_name = self.name_of(request.model_name)
        route = self._routes.of(model)
        asked = queue_request(request, route, remaining_s)
        with self._admission.enter(model, asked, route):
            return await self._sent(request, asked)

    def name_of(self, model: str) -> str:
        """Returns the current name of a model that a client may call by an earlier name."""
        return self._routes.name_of(model)

    def version_of(self, model: str) -> str:
        """Returns the version that answers requests to a model, by its current name; empty where Triton chooses."""
        return self._routes.of(model).version

    def most_rows(self, model: str) -> int:
        """Returns the most rows of one request to a model, by its current name."""
        return self._routes.of(model).max_rows

    def answers_once(self, model: str) -> bool:
        """Whether a model answers each request once, as far as is known."""
        route = self._routes.of(self.name_of(model))
        return bool(route.version) and route.request_seconds is None

    @contextmanager
    def streamed(self, request: pb.ModelInferRequest) -> Iterator[Route]:
        """Holds a place for a checked request that is answered in a stream, and counts how it ended; yields its route.

        Raises:
            Rejected: The request is not taken.
        """
        request.model_name = self.name_of(request.model_name)
        route = self._routes.of(request.model_name)
        with self._admission.enter(request.model_name, queue_request(request, route), route):
            yield route

    def upstream(self, method: str, model: str = "") -> AbstractContextManager[Metadata | None]:
        """Holds the span of a stream to Triton, if requests are traced; yields the metadata that it sends along."""
        return UNTRACED if self.traces is None else self.traces.upstream(method, model)

    async def _sent(self, request: pb.ModelInferRequest, queued: Request) -> bytes:
        seconds = REQUEST_SECONDS if queued.timeout_s is None else min(REQUEST_SECONDS, queued.timeout_s)
        started = time.monotonic()
        try:
            answer: bytes
            if self.traces is None:
                answer = await self._call(request, timeout=seconds)
            else:
                with self.traces.upstream("ModelInfer", request.model_name, request.model_version) as metadata:
                    answer = await self._call(request, timeout=seconds, metadata=metadata)
            return answer
        except grpc.aio.AioRpcError as error:
            details, code = str(error.details()), error.code()
            if code == grpc.StatusCode.CANCELLED and time.monotonic() - started >= seconds:  # Triton was the first to see that
                code = grpc.StatusCode.DEADLINE_EXCEEDED
            if is_gone(error):
                raise Rejected(f"model {request.model_name}: {RESTARTING}", 503) from error
            if code == grpc.StatusCode.UNAVAILABLE and QUEUE_FULL in details:
                raise Rejected(f"model {request.model_name}: its queue is full; {TRY_LATER}", 503) from error
            if code == grpc.StatusCode.DEADLINE_EXCEEDED or QUEUED_TOO_LONG in details:
                raise Rejected(f"model {request.model_name}: no answer within {1e3 * seconds:.0f} ms; {TRY_LATER}", 504) from error
            raise


def failure(line: str) -> Rejected:
    """Returns the error of a stream with its status: Triton gives only the message."""
    if line.endswith(TRY_LATER):
        return Rejected(line, 503)
    if QUEUE_FULL in line or line.endswith(tuple(GONE.values())):
        return Rejected(f"{line}; {TRY_LATER}", 503)
    if QUEUED_TOO_LONG in line:
        return Rejected(line, 504)
    return Rejected(line, 500 if line.startswith(MODEL_FAILED) else 400)


def queue_request(request: pb.ModelInferRequest, route: Route, remaining_s: float | None = None) -> Request:
    """Returns the queue parameters of a request.

    Raises:
        Rejected: The model has no such level of priority.
    """
    priority = _number(request, PRIORITY) or route.priorities
    if priority > route.priorities:
        raise Rejected(f"priority {priority} given; model {request.model_name} has {route.priorities}, of which 1 is served first")
    timeout_us = _number(request, TIMEOUT)
    limits = [
        None if route.timeout_ms is None else route.timeout_ms / 1e3,
        timeout_us / 1e6 if timeout_us else None,
        remaining_s,
    ]
    rows = 1 if route.request_seconds is not None else max(1, int(request.inputs[0].shape[0]))
    return Request(rows, priority, min((limit for limit in limits if limit is not None), default=None))


def _number(request: pb.ModelInferRequest, name: str) -> int:
    """Returns a checked parameter; 0 where it is not given."""
    if name not in request.parameters:
        return 0
    value = request.parameters[name]
    return int(getattr(value, value.WhichOneof("parameter_choice")))
