"""Who may ask the server: bearer keys, and TLS.

    Authorization: Bearer KEY        in the headers of HTTP, in the metadata of gRPC

Keys come from the environment alone, several separated by spaces, so that one can be replaced by another without an interruption. They are
never written anywhere. Whether the server is alive and ready may be asked without a key, as the probes of Kubernetes do.
"""

from __future__ import annotations

import hmac
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from triton_repo.front.limits import Rejected
from triton_repo.front.settings import KEYS

if TYPE_CHECKING:  # a server is checked and started without what only its front needs
    import grpc
    from aiohttp import web
    from aiohttp.typedefs import Middleware

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/health", "/v2/health/live", "/v2/health/ready")
OPEN_METHODS = ("ServerLive", "ServerReady")
HEADER = "authorization"


@dataclass(frozen=True)
class Doors:
    """What a client needs to get in."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of them opens; none: everybody gets in."""
    certificate: str = ""
    """File of the certificate with its chain, PEM; empty: no TLS."""
    private_key: str = ""
    """File of its private key, PEM."""

    @classmethod
    def here(cls, certificate: str = "", private_key: str = "") -> Self:
        """Returns the doors with the keys of the environment of this process."""
        return cls(tuple(os.environ.get(KEYS, "").split()), certificate, private_key)

    def admits(self, authorization: str | bytes | None) -> bool:
        """Whether the value of the header `Authorization` opens; it takes as long for a wrong key as for a right one."""
        if not self.keys:
            return True
        value = authorization if isinstance(authorization, bytes) else (authorization or "").encode("utf-8", "surrogateescape")
        scheme, _, key = value.partition(b" ")
        same = [hmac.compare_digest(key.strip(), one.encode()) for one in self.keys]
        return scheme.lower() == b"bearer" and any(same)

    @property
    def middleware(self) -> Middleware:
        """The middleware of HTTP that refuses others."""
        from aiohttp import web

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in OPEN_PATHS and not self.admits(request.headers.get(HEADER)):
                raise Rejected("a key is needed: send the header 'Authorization: Bearer KEY'", 401)
            return await handler(request)

        return guarded

    def opens(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> bool:
        """Whether the metadata of a call of gRPC open its method."""
        if method.rpartition("/")[2] in OPEN_METHODS:
            return True
        return self.admits(next((value for name, value in metadata if name == HEADER), None))

    def context(self) -> ssl.SSLContext | None:
        """Returns the TLS context of HTTP; None without TLS.

        Raises:
            OSError: A file cannot be read, or holds no certificate or key (`ssl.SSLError`).
        """
        if not self.certificate:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.private_key)
        return context

    def credentials(self) -> grpc.ServerCredentials | None:
        """Returns the TLS credentials of gRPC; None without TLS."""
        import grpc

        if not self.certificate:
            return None
        return grpc.ssl_server_credentials([(Path(self.private_key).read_bytes(), Path(self.certificate).read_bytes())])
