"""The process of the front: `python -m triton_repo.front.process SETTINGS`, a JSON object. Prints its ports in one line once it listens.

clients --> front (this process: HTTP, gRPC, metrics on loopback) --> Triton (gRPC on a Unix socket in a folder that only its owner enters)

Where gRPC of clients goes to Triton itself, the front serves HTTP and metrics alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError

from triton_repo.front.admission import Admission
from triton_repo.front.doors import Doors
from triton_repo.front.figures import figures
from triton_repo.front.grpc_side import serve_grpc, upstream
from triton_repo.front.http_side import Paths, listen, metrics_application
from triton_repo.front.inference import Inference
from triton_repo.front.limits import Load
from triton_repo.front.routes import Routes
from triton_repo.front.settings import Settings

if TYPE_CHECKING:  # imported only where requests are traced
    from triton_repo.front.traces import RequestTraces


def not_of_a_client(record: logging.LogRecord) -> bool:
    """Whether a log record is worth a line: bytes that are not HTTP are answered, and could otherwise fill the disk with tracebacks."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | RequestPayloadError))


async def run(settings: Settings) -> None:
    """Serves until the process is ended.

    Raises:
        OSError: A port is taken.
    """
    channel, load = upstream(settings.triton), Load()
    routes, admission = Routes(settings.routes, settings.aliases), Admission()
    traces = _traces(settings.traces)
    infer = Inference(channel, routes, admission, traces)
    doors = Doors.here(settings.certificate, settings.private_key)
    grpc_port = settings.grpc_port
    if settings.serves_grpc:
        server = serve_grpc(channel, load, infer, settings.models, doors)
        place, credentials = f"{settings.address}:{settings.grpc_port}", doors.credentials()
        grpc_port = server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
        await server.start()
    paths = Paths(channel, load, infer, settings.models, settings.folder)
    _, http_port = await listen(paths.application(doors), settings.address, settings.http_port, doors.context())
    _, metrics_port = await listen(
        metrics_application(settings.metrics, lambda: figures(admission, routes), doors),
        settings.address,
        settings.metrics_port,
        doors.context(),
    )
    ports = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    gc.freeze()  # what was imported stays: a collection that looked through it would hold up requests for tens of milliseconds
    print(json.dumps({**asdict(settings), **ports}), flush=True)
    if traces is not None:
        await _send_at_end(traces)
    await asyncio.Event().wait()


def _traces(endpoint: str) -> RequestTraces | None:
    """Returns what makes spans of requests; None where nothing is traced, and then nothing of OpenTelemetry is imported."""
    if not endpoint:
        return None
    from foundation.core.traces import Traces
    from triton_repo.front.traces import SERVICE, RequestTraces

    return RequestTraces(Traces(SERVICE, endpoint))


async def _send_at_end(traces: RequestTraces) -> None:
    """Waits for SIGTERM, sends the last spans, and ends as without them: by the signal."""
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    await ending.wait()
    traces.close()
    loop.remove_signal_handler(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    logging.getLogger("aiohttp.server").addFilter(not_of_a_client)
    asyncio.run(run(Settings(**json.loads(sys.argv[1]))))
