"""A collector of OpenTelemetry on a free port: takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    """Empty for a root span."""
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    """Trace and span of each."""
    events: list[str]
    """Names, in the order of time."""


@dataclass
class Collector:
    """What has come."""

    url: str
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request, their names in small letters."""
    status: int = 200
    open: threading.Event = field(default_factory=threading.Event)
    """While it is not set, requests are held up."""
    came: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each request before it is held up."""

    def take(self, body: bytes, kind: str) -> None:
        for resource in _parsed(body, kind).resource_spans:
            service = next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
            for scope in resource.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]

    def named(self, name: str) -> Received:
        [found] = [span for span in self.spans if span.name == name]
        return found


def _parsed(body: bytes, kind: str) -> ExportTraceServiceRequest:
    """Parses a request. In JSON ids are hexadecimal, against protobuf's own rule of base64."""
    if kind != "application/json":
        return ExportTraceServiceRequest.FromString(body)
    document = json.loads(body)
    for resource in document["resourceSpans"]:
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            for one in (span, *span.get("links", ())):
                known = [key for key in ("traceId", "spanId", "parentSpanId") if one.get(key)]
                one |= {key: base64.b64encode(bytes.fromhex(one[key])).decode() for key in known}
    return json_format.ParseDict(document, ExportTraceServiceRequest())


def _received(service: str, span: Any) -> Received:
    attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
    links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    events = [event.name for event in sorted(span.events, key=lambda event: event.time_unix_nano)]
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Received(service, span.name, *ids, span.kind, *times, span.status.code == 2, attributes, links, events)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Runs a collector for the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.came.release()
            collector.open.wait()
            if collector.status == 200 and self.path == "/v1/traces":
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.take(body, self.headers["Content-Type"])
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    collector.open.set()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield collector
    finally:
        collector.open.set()
        server.shutdown()
        server.server_close()
