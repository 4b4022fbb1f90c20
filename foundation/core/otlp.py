"""Where traces are sent to: the standard variables of OpenTelemetry, and its packages. Imports nothing of them.

OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or else OTEL_EXPORTER_OTLP_ENDPOINT with /v1/traces behind it
OTEL_SDK_DISABLED=true, OTEL_TRACES_EXPORTER=none         nothing is sent
OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...     read by the packages themselves
"""

from __future__ import annotations

import importlib.metadata
import os
import re

from foundation.core.errors import InputError
from foundation.core.shown import shown, without_credentials

PATH = "/v1/traces"
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
SPOKEN = "http/protobuf"
"""The protocol of the exporter, and the standard's default: Triton's exporter speaks no other."""
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
INSTALL = "pip install 'compress-transformers[otlp]'"
ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[\w./~%-]*)?")
ALLOWED = f"http://HOST:PORT or https://HOST is allowed, without user, password and query: put credentials into {HEADERS}"


def endpoint_of(base: str) -> str:
    """Returns the address for traces of a collector.

    Args:
        base: Its address, as in `OTEL_EXPORTER_OTLP_ENDPOINT`.

    Raises:
        ValueError: It is no address, or could hold credentials.
    """
    if not ADDRESS.fullmatch(base):
        raise ValueError(ALLOWED)
    return base.rstrip("/") + PATH


def endpoint() -> str | None:
    """Returns the address for traces that the environment names; None: nothing is sent.

    Raises:
        InputError: It is no address, could hold credentials, or is to be spoken with in another protocol; its value is not shown.
    """
    exporters = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or "otlp" not in exporters.split(","):
        return None
    name = next((name for name in (TRACES_ENDPOINT, ENDPOINT) if os.environ.get(name)), None)
    if name is None:
        return None
    given = os.environ[name]
    check_protocol()
    if not ADDRESS.fullmatch(given):
        raise InputError(name, f"{without_credentials(shown(given))} given", ALLOWED)
    return given if name == TRACES_ENDPOINT else endpoint_of(given)


def check_protocol() -> None:
    """Checks that the environment asks for no other protocol than the exporter's.

    Raises:
        InputError: It does.
    """
    for name in (TRACES_PROTOCOL, PROTOCOL):
        if given := os.environ.get(name):
            if given != SPOKEN:
                raise InputError(name, f"{shown(given)} given", f"{SPOKEN} is allowed", "collectors listen for it on port 4318")
            return


def missing() -> str | None:
    """Returns the package that is needed to send traces and is not installed; None if all are."""
    for package in PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return package
    return None
