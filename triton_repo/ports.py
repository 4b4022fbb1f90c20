"""The ports of `compress serve`: Triton's own by default, so that a client's address stays the same from start to start.

    gRPC 8001   HTTP 8000   metrics 8002        0: a free one

Whether a port is taken is asked before anything is started: Triton takes seconds to load, and what gRPC says of a taken port names neither
the port nor the cause.

Triton itself listens on its port only while it runs. `hold` keeps the port for it from start to start.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Literal

from foundation.core.errors import InputError, Problem

Ports = tuple[int, int, int]
"""Ports of gRPC, HTTP and metrics."""
Grpc = Literal["front", "triton"]
"""Who answers gRPC."""
FIXED: Ports = (8001, 8000, 8002)
FREE: Ports = (0, 0, 0)
_OPTIONS = ("--grpc-port", "--http-port", "--metrics-port")


def check_ports(address: str, ports: Ports) -> None:
    """Checks that a server can listen on ports.

    Args:
        address: Address to listen on.
        ports: The ports; 0 is always free.

    Raises:
        InputError: A port is taken, given twice or not allowed; one line for each.
    """
    problems = list(_problems(address, ports))
    if problems:
        raise InputError.of(problems)


def hold(address: str, port: int) -> socket.socket:
    """Returns a socket that keeps a port for a server of this user, which may start and end meanwhile; 0: a free port.

    The socket never listens, so who connects while there is no server is refused at once. Linux gives one port to several sockets of one
    user if each of them asks for that (SO_REUSEPORT), and to nobody else.

    Raises:
        InputError: It is taken, or not allowed.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address, port))
    except OSError:
        held.close()
        check_ports(address, (port, 0, 0))  # says why
        raise
    return held


def _problems(address: str, ports: Ports) -> Iterator[Problem]:
    for position, (option, port) in enumerate(zip(_OPTIONS, ports, strict=True)):
        if port and port in ports[:position]:
            given = f"given for {_OPTIONS[ports.index(port)]} too"
            yield Problem(f"{option} {port}", given, remedy="give each a port of its own, or 0 for a free one")
        elif port and (refused := _refusal(address, port)):
            reason, remedy = refused
            yield Problem(f"{option} {port}", reason, remedy=f"{remedy}, or give {option} another port (0: a free one)")


def _refusal(address: str, port: int) -> tuple[str, str] | None:
    """Returns why nobody can listen on a port, and what to do; None where somebody can."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the front does: closed connections do not hold a port
        try:
            one.bind((address, port))
            one.listen()
        except PermissionError:
            return f"you may not listen on port {port} of {address}", "take one above 1023"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} of {address} is taken by another program", "stop that one"
            return f"port {port} of {address} cannot be listened on ({error.strerror})", "see to that"
    return None
