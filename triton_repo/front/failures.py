"""What clients of HTTP are told when a request fails: the status, and one line."""

from __future__ import annotations

import aiohttp
import grpc
from aiohttp import web

from triton_repo.front.limits import MAX_REQUEST_BYTES, RESTARTING, TRY_LATER, Rejected

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

GONE = {grpc.StatusCode.NOT_FOUND: "has no available versions", grpc.StatusCode.INTERNAL: "is not healthy."}
"""Ends of Triton's messages for a model that it knows and unloads, as when it ends before another one is started in its place, and for one
whose process has died."""


def is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call failed because the model has gone: it is there again when Triton has been started again."""
    return error.code() in GONE and str(error.details()).endswith(GONE[error.code()])


def status_and_line(error: Exception, method: str) -> tuple[int, str] | None:
    """Returns status and message of a failed request; None for an error that is a fault of the front.

    Args:
        error: The error.
        method: HTTP method of the request.
    """
    match error:
        case Rejected():
            return error.status, str(error)
        case web.RequestPayloadError():
            return 400, f"the body did not arrive whole: {' '.join(str(error).split())[:200]}"
        case web.HTTPRequestEntityTooLarge():
            return 413, f"at most {MAX_REQUEST_BYTES} bytes are accepted"
        case web.HTTPException():
            return error.status, f"{method} of this path is not offered here; inference, health and metadata are"
        case grpc.aio.AioRpcError():
            status, message = 503 if is_gone(error) else _STATUS.get(error.code(), 500), str(error.details())
            return status, RESTARTING if status == 503 and not message.endswith(TRY_LATER) else message
        case TimeoutError():
            return 408, "the request did not arrive in time"
        case aiohttp.ClientError() | OSError():
            return 503, RESTARTING
        case ValueError():
            return 500, f"the answer cannot be written as JSON: {error}"
    return None
