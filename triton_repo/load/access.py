"""The key that a client sends to a server, and the certificates that it trusts.

    COMPRESS_API_KEY        the key, sent as `Authorization: Bearer KEY`
    --ca FILE               certificates that are trusted instead of the public ones, PEM

The key comes from the environment alone: it stands in no command line, file, message or figure. It is never sent in the clear to another
machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.core.shown import reason

if TYPE_CHECKING:
    import grpc

KEY = "COMPRESS_API_KEY"
CA = "--ca"
REFUSED = ("401", "StatusCode.UNAUTHENTICATED")
"""Statuses of a server that does not accept the key."""
_PRINTABLE = re.compile(r"[!-~]+")


class Request(Protocol):
    """A request of tritonclient before it is sent."""

    headers: MutableMapping[str, str]
    """Headers of HTTP, or metadata of gRPC."""


def key() -> str | None:
    """Returns the key of the environment; None where there is none.

    Raises:
        InputError: It has characters that no header can have.
    """
    value = os.environ.get(KEY, "").strip()
    if value and not _PRINTABLE.fullmatch(value):
        allowed = "one key of printable ASCII characters without spaces is allowed"
        raise InputError(KEY, f"{len(value)} characters that cannot all be sent", allowed)
    return value or None


def check_key(host: str, tls: bool, where: str) -> None:
    """Checks that the key of the environment may be sent to a host.

    Raises:
        InputError: It would travel in the clear, or it cannot be sent at all.
    """
    if key() is None or tls or _is_loopback(host):
        return
    given = f"{host} is another machine, and the key of {KEY} would travel in the clear"
    raise InputError(where, given, remedy=f"give https:// or grpcs://, or unset {KEY}")


def check_ca(file: str, tls: bool) -> str:
    """Returns the absolute path of a file of trusted certificates; empty where none is given.

    Raises:
        InputError: It cannot be read, holds no certificate, or is given without TLS.
    """
    if not file:
        return ""
    if not tls:
        raise InputError(f"{CA} {file}", "given for a server without TLS", remedy="give its address as https://... or grpcs://...")
    path = local(file, CA).absolute()
    try:
        context(str(path))
    except OSError as error:  # of ssl, too
        raise InputError(f"{CA} {file}", f"cannot be used ({reason(error)})", remedy="give certificates as PEM") from error
    return str(path)


def context(ca: str) -> ssl.SSLContext:
    """Returns the TLS context of HTTP, which trusts the certificates of a file, or those that the system trusts."""
    return ssl.create_default_context(cafile=ca or None)


def credentials(ca: str) -> grpc.ChannelCredentials:
    """Returns the TLS credentials of gRPC, which trust the certificates of a file, or those that gRPC comes with."""
    import grpc

    return grpc.ssl_channel_credentials(Path(ca).read_bytes() if ca else None)


def plugin() -> Callable[[Request], None] | None:
    """Returns what adds the key of the environment to each request of a client of tritonclient; None where there is no key."""
    headers = metadata()
    if not headers:
        return None

    def add(request: Request) -> None:
        request.headers.update(headers)

    return add


def metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call of gRPC with the key of the environment."""
    value = key()
    return () if value is None else (("authorization", f"Bearer {value}"),)


def refused(where: str) -> InputError:
    """Returns the error of a server that does not accept the key."""
    given = "asks for a key" if key() is None else f"does not accept the key of {KEY}"
    return InputError(where, given, remedy=f"set the variable {KEY} to one of its keys")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
