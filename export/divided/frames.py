"""Messages between the server and its ranks, over pipes: a kind, a length, and as many bytes. Imports nothing of ours."""

from __future__ import annotations

import struct
from typing import IO

READY, ANSWER, ERROR, ASK = b"R", b"A", b"E", b"Q"
HEADER = struct.Struct("<cQ")


def send(stream: IO[bytes], kind: bytes, body: bytes = b"") -> None:
    """Writes one message.

    Raises:
        OSError: The other side is gone.
    """
    stream.write(HEADER.pack(kind, len(body)))
    stream.write(body)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """Returns the kind and the body of the next message; None where the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    kind, length = HEADER.unpack(header)
    body = stream.read(length)
    return (kind, body) if len(body) == length else None
