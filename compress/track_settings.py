"""The `track` section of a recipe: where `compress run` sends a run to. Without it nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from foundation.core.config import Config
from foundation.core.otlp import ADDRESS, endpoint_of

SQLITE = "sqlite:///"
CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN,"
"""Environment variables that MLflow reads by itself."""


PROJECT = r"^([A-Za-z0-9][A-Za-z0-9_-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def absolute(uri: str, folder: Path) -> str:
    """Returns an address in which a database file has its absolute path; others stay as they are.

    Args:
        uri: The address.
        folder: What the path is relative to.
    """
    return f"{SQLITE}{folder.absolute() / uri.removeprefix(SQLITE)}" if uri.startswith(SQLITE) and uri != SQLITE else uri


class Track(Config):
    """Where `compress run` sends a run to, at least one place; see `docs/how-to/track-runs.md`. Changes no result and no cache key."""

    LATER: ClassVar[tuple[str, ...]] = ("mlflow", "wandb", "otlp")

    mlflow: str | None = None
    """URI of an MLflow server, http://HOST:PORT or https://HOST, or of a database file, sqlite:///FILE (relative to the recipe). User name,
    password and token are read from the environment alone: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    MLFLOW_TRACKING_TOKEN."""
    experiment: Annotated[str, Field(min_length=1, max_length=250)] = "compress"
    """Experiment of MLflow that the run belongs to; created if it does not exist."""
    wandb: Annotated[str, Field(pattern=PROJECT)] | None = None
    """Project of Weights & Biases, PROJECT or ENTITY/PROJECT. The run is written to the folder `wandb` of the run folder, and sent by
    `wandb sync`; with WANDB_MODE=online in the environment it is sent at once, with the key in WANDB_API_KEY."""
    otlp: str | None = None
    """Address of a collector of OpenTelemetry, http://HOST:PORT or https://HOST, that takes OTLP over HTTP: the run is a trace, its steps
    are spans. Credentials are read from the environment alone: OTEL_EXPORTER_OTLP_HEADERS."""
    model: bool = True
    """Send the served model too, and not only figures and report."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if self.mlflow is None and self.wandb is None and self.otlp is None:
            raise ValueError("a place is needed: mlflow, wandb or otlp")
        return self

    @field_validator("otlp")
    @classmethod
    def _is_an_address(cls, address: str | None) -> str | None:
        if address is not None:
            endpoint_of(address)
        return address

    @field_validator("mlflow")
    @classmethod
    def _without_credentials(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        if uri.startswith(SQLITE):
            if not uri.startswith(f"{SQLITE}/") or any(mark in uri for mark in "?#@"):
                raise ValueError("the absolute path of a file is allowed after sqlite:///, without ?, # and @")
            return uri
        if "@" in uri or "?" in uri or "#" in uri:
            raise ValueError(f"an address without user, password and query is allowed: put {CREDENTIALS} into the environment")
        if not ADDRESS.fullmatch(uri):
            raise ValueError("http://HOST:PORT, https://HOST or sqlite:///FILE is allowed")
        return uri
