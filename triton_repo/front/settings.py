"""The settings of the front: all that the code that starts it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

KEYS = "COMPRESS_API_KEYS"
"""Variable of the environment that holds the keys of clients."""


@dataclass(frozen=True)
class Settings:
    """Addresses of the front and of Triton."""

    address: str
    """Address to listen on."""
    grpc_port: int
    """0: a free port, as for the others."""
    http_port: int
    metrics_port: int
    triton: str
    """Target of Triton's gRPC: unix:path, or host:port."""
    metrics: str
    """Unix socket of its metrics."""
    models: tuple[str, ...] = ()
    """Names of all models of the repository."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Earlier names of models, under which they answer, too."""
    routes: str = ""
    """File of the versions and limits (`triton_repo.front.routes`)."""
    certificate: str = ""
    """Files of the certificate and of its private key, PEM; empty: no TLS. Keys of clients come by the environment (`front.doors`)."""
    private_key: str = ""
    serves_grpc: bool = True
    """Whether clients of gRPC come to the front; else Triton itself listens on `grpc_port`."""
    folder: str = ""
    """The repository that the server reads (`triton_repo.live`)."""
    traces: str = ""
    """Address of a collector of OpenTelemetry for traces (`front.traces`); empty: nothing is traced."""
