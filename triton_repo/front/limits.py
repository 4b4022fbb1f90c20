"""Limits of the front: of one request and of all requests together, and the error for a request that exceeds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_REQUEST_BYTES = 72 * 2**20
"""Largest body of a request, HTTP or gRPC: an image of 64 MiB, the most that a model takes, and what surrounds it."""
MAX_JSON_BYTES = 8 * 2**20
"""Largest JSON part of a request; larger inputs belong in its binary part."""
MAX_JSON_DEPTH = 16
"""Deepest nesting of JSON; a request of the protocol needs about 8."""
MAX_BYTES_UNDER_WAY = 512 * 2**20
"""Bytes of all requests that are being answered."""
MAX_CONNECTIONS = 1024
"""Open HTTP connections."""
MAX_TENSORS, MAX_AXES, MAX_ELEMENTS = 32, 8, 2**22
BODY_SECONDS = 60.0
"""Time for a client to send its request."""
REQUEST_SECONDS = 120.0
"""Time for Triton to answer."""
STREAM_SECONDS = 3600.0
"""Age at which a stream takes no further requests; it ends once none is under way."""
STREAM_IDLE_SECONDS = 300.0
"""Time after which an idle stream ends: its client sends nothing, or does not read."""
GRACE_SECONDS = 60.0
"""Time beyond the limit of a model after which a stream ends that waits for it: the model ends its answers itself, between two steps."""
MAX_STREAMS, MAX_STREAM_REQUESTS = 256, 256
"""Open streams, and requests that are being answered in one of them."""
TRY_LATER = "try again later"
"""Suffix of the error message of an overloaded model."""
MODEL_FAILED = "the model failed: "
"""How the line of a model begins that has failed, through no fault of the request."""
RESTARTING = "the model server is not there; it is started again, try again in some seconds"
"""The message to clients while Triton restarts."""


class Rejected(Exception):
    """A request that goes no further; a one-line message.

    Args:
        message: What is wrong.
        status: HTTP status: 400 wrong, 404 unknown, 413 too large, 503 too busy, 504 too late.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Load:
    """The bytes of all requests that are being answered."""

    held: int = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Counts a request while it is answered.

        Raises:
            Rejected: There are too many.
        """
        if self.held + size > MAX_BYTES_UNDER_WAY:
            raise Rejected("too many large requests are under way; try again later", 503)
        self.held += size
        try:
            yield
        finally:
            self.held -= size


@dataclass
class Places:
    """Places for streams; each stream takes one."""

    most: int
    taken: int = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Takes a place.

        Raises:
            Rejected: All are taken.
        """
        if self.taken >= self.most:
            raise Rejected(f"{self.taken} streams are open, the most allowed; {TRY_LATER}", 503)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
