"""Traces of requests: a span of the front for each inference, and one for each call of Triton, which makes its own spans below that.

    client -- traceparent --> front: server span of the request
                              front: client span of the call of Triton -- traceparent --> Triton: spans of request, model and compute

Triton traces whatever context it gets, sampled or not. So it gets one only where the caller, or the sampler of the front, samples. Health,
metadata and metrics have no spans, and a request without a key has none either.

Imported only where `OTEL_EXPORTER_OTLP_ENDPOINT` is set: without it the handlers of requests are the same as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from foundation.core.traces import PARENT, STATE, W3C, Traces, extracted
from triton_repo.front.failures import status_and_line

SERVICE = "compress-front"
LIST = "/v2/repository/index"
"""A path of POST that asks no model."""
CLOSE_SECONDS = 2.0
"""Seconds that the end of the front waits for the collector."""
RPC = {"rpc.system": "grpc", "rpc.service": "inference.GRPCInferenceService"}
FAULTS = frozenset((2, 4, 12, 13, 14, 15))
"""Codes of gRPC that count as errors of a server: unknown, deadline exceeded, unimplemented, internal, unavailable, data loss."""
Metadata = tuple[tuple[str, str], ...]


class RequestTraces:
    """The spans of the front.

    Args:
        traces: Where they are made.
    """

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    @property
    def middleware(self) -> Middleware:
        """The middleware of HTTP that makes a span of each request that asks a model."""

        @web.middleware
        async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != "POST" or request.path == LIST:
                return await handler(request)
            resource, headers = request.match_info.route.resource, request.headers
            route = {} if resource is None else {"http.route": resource.canonical}  # no path that a client made up
            context = extracted(headers.getall(PARENT, []), headers.getall(STATE, []))
            name = " ".join(("POST", *route.values()))
            with self._served(name, {"http.request.method": "POST", **route}, context) as span:
                try:
                    response = await handler(request)
                except Exception as error:
                    refusal = status_and_line(error, request.method)
                    _note_status(span, 500 if refusal is None else refusal[0])
                    raise
                _note_status(span, response.status)
                return response

        return traced

    @contextmanager
    def call(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Holds the span of a call of gRPC by a client.

        Args:
            method: Name of the method.
            context: Of the call.
        """
        metadata = tuple(context.invocation_metadata() or ())
        parents, states = ([str(value) for name, value in metadata if name == wanted] for wanted in (PARENT, STATE))
        name = f"{RPC['rpc.service']}/{method}"
        with self._served(name, {**RPC, "rpc.method": method}, extracted(parents, states)) as span:
            try:
                yield
            finally:
                _note_code(span, context.code())

    @contextmanager
    def upstream(self, method: str, model: str = "", version: str = "") -> Iterator[Metadata]:
        """Holds the span of a call of Triton; yields the metadata that it sends along.

        Args:
            method: Name of the method.
            model: The model; empty for a stream, whose requests may be of several.
            version: Its version.
        """
        attributes = {**RPC, "rpc.method": method, **({"compress.model": model, "compress.model.version": version} if model else {})}
        span = self._traces.tracer.start_span(f"triton {method}", kind=SpanKind.CLIENT, attributes=attributes)
        carrier = dict[str, str]()
        if span.get_span_context().trace_flags.sampled:
            W3C.inject(carrier, set_span_in_context(span))
        try:
            yield tuple(carrier.items())
        except GeneratorExit:  # whoever reads an answer in pieces has enough
            raise
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            if isinstance(error, grpc.aio.AioRpcError):
                _note_code(span, error.code())
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends what is left, for some seconds at most."""
        self._traces.close(CLOSE_SECONDS)

    @contextmanager
    def _served(self, name: str, attributes: Mapping[str, str], context: Context) -> Iterator[Span]:
        """Holds the span of a request, the parent of others meanwhile; of an error it has the type, as messages may quote a request."""
        with self._traces.tracer.start_as_current_span(
            name, context, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                raise


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def _note_code(span: Span, code: grpc.StatusCode | int | None) -> None:
    """Notes how a call of gRPC ended; a client's fault is no error of the server."""
    number = int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code or 0)
    span.set_attribute("rpc.grpc.status_code", number)
    if number in FAULTS:
        span.set_status(StatusCode.ERROR)
