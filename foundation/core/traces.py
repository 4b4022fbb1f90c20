"""Makes spans and sends them to a collector over OTLP/HTTP, from a thread of its own: what is traced waits for nothing.

Imported only where something is traced. Nothing of it is global: a program with a tracer provider of its own keeps it. Spans that the
collector does not take are counted and dropped.

    Traces("compress", "http://collector:4318/v1/traces").tracer.start_span("run")

Left out: metrics, logs and baggage; the gRPC exporter, because HTTP needs no second stack next to `requests`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from foundation.core.version import version

PARENT, STATE = "traceparent", "tracestate"
"""Headers of the W3C recommendation Trace Context."""
W3C = TraceContextTextMapPropagator()


class Traces:
    """Spans of one service.

    Args:
        service: Its name, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` say another.
        endpoint: Address of the collector for traces.
        exporter: Takes the spans instead.
    """

    def __init__(self, service: str, endpoint: str, exporter: SpanExporter | None = None) -> None:
        for noisy in ("exporter", "sdk._shared_internal", "trace.propagation"):  # a line for each try, and for each malformed header
            logging.getLogger(f"opentelemetry.{noisy}").setLevel(logging.CRITICAL)
        self.endpoint = endpoint
        self._exporter = _Counting(exporter or OTLPSpanExporter(endpoint=endpoint))
        self._provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer: Tracer = self._provider.get_tracer("compress", version())

    @property
    def lost(self) -> int:
        """Spans that the collector did not take."""
        return self._exporter.lost

    def close(self, seconds: float) -> bool:
        """Sends what is left, for some seconds at most; returns whether the collector has taken every span."""
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()  # the time-outs of the package do not hold: it waits for the exporter, and then for the thread of it
        sending.join(seconds)
        ended = not sending.is_alive()
        if not ended:
            self._exporter.shutdown()
        return ended and not self.lost


class _Counting(SpanExporter):
    """An exporter that counts what was lost.

    Args:
        inner: The exporter.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner, self.lost = inner, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends spans."""
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Ends the exporter, and its waiting for another try."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is buffered here."""
        return self._inner.force_flush(timeout_millis)


def _resource(service: str) -> Resource:
    """Returns what the spans are of."""
    named = bool(os.environ.get("OTEL_SERVICE_NAME")) or f"{SERVICE_NAME}=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {SERVICE_NAME: service})


def extracted(parents: Sequence[str], states: Sequence[str] = ()) -> Context:
    """Returns the context of a caller; an empty one, in which a new trace begins, where it is missing or malformed.

    Args:
        parents: Values of `traceparent`; several are as wrong as none, as the recommendation says.
        states: Values of `tracestate`.
    """
    carrier: Mapping[str, Sequence[str]] = {PARENT: parents, STATE: states}
    if len(parents) != 1:
        return Context()
    return W3C.extract({name: list(values) for name, values in carrier.items() if values}, Context())
