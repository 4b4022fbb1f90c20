"""A run as a trace of OpenTelemetry: a root span for the run, and a child span for each step.

    compress run              compress.run.name, compress.recipe.digest, compress.status
      STEP                    compress.step.kind, compress.cached, compress.artifact.digest, compress.artifact.folder,
                              compress.seconds, compress.peak_memory_bytes

The span of a cached step has no length: nothing ran, and `compress.seconds` are those of the run that made the artifact. A resumed run is
a trace of its own, linked to the trace before it, which `track-otlp.json` names. A variable TRACEPARENT of the environment, as CI systems
set it, is the parent of the run. A collector that is away is reported once, after the run; its spans are lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, Field, ValidationError

from compress.track.note import SCHEMA, Status
from compress.track_settings import Track
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact, DamagedArtifact
from foundation.core import otlp
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.shown import reason
from foundation.core.version import version

if TYPE_CHECKING:  # imported only where a run is traced
    from opentelemetry.trace import Link, Span

    from foundation.core.traces import Traces

FILE = "track-otlp.json"
SERVICE = "compress"
CLOSE_SECONDS = 5.0
"""Seconds that the end of a run waits for a collector."""


class Traced(BaseModel):
    """The contents of track-otlp.json: the last trace of a run folder."""

    schema_: int = Field(SCHEMA, alias="schema")
    otlp: str
    """Address of the collector."""
    recipe: str
    """Digest of the recipe without `track`."""
    trace: str
    """Id of the trace, 32 hexadecimal digits."""
    span: str
    """Id of its root span, 16 hexadecimal digits."""
    sampled: bool
    """Whether the collector has it."""


class TraceRuns:
    """The trace of a run.

    Args:
        traces: Where spans are made.
        root: The span of the run, started.
        progress: Where lost spans are reported.
    """

    def __init__(self, traces: Traces, root: Span, progress: ConsoleProgress) -> None:
        self._traces, self._root, self._progress = traces, root, progress
        self._running: tuple[str, int] | None = None
        """The step that runs, and when it began, in nanoseconds since 1970."""

    @classmethod
    def begun(cls, plain: Mapping[str, object], track: Track, folder: Path, progress: ConsoleProgress) -> Self:
        """Starts the trace of a run that starts, or resumes.

        Args:
            plain: The recipe as plain data, without `track`.
            track: Where it is traced.
            folder: The run folder.
            progress: Where lost spans are reported.

        Raises:
            InputError: The note of the trace before is damaged.
        """
        assert track.otlp is not None, "asked for"
        from opentelemetry.trace import SpanKind

        from foundation.core.traces import PARENT, STATE, Traces, extracted

        digest, known = artifact.digest(plain), read_traced(folder)
        links = [] if known is None or (known.otlp, known.recipe) != (track.otlp, digest) else [_link(known)]
        parent = extracted(*([value] if (value := os.environ.get(name.upper())) else [] for name in (PARENT, STATE)))
        traces = Traces(SERVICE, otlp.endpoint_of(track.otlp))
        attributes = {"compress.run.name": str(plain["name"]), "compress.recipe.digest": digest, "compress.version": version()}
        root = traces.tracer.start_span("compress run", parent, SpanKind.INTERNAL, attributes, links)
        here = root.get_span_context()
        made = Traced(
            otlp=track.otlp,
            recipe=digest,
            trace=f"{here.trace_id:032x}",
            span=f"{here.span_id:016x}",
            sampled=here.trace_flags.sampled,
            schema=SCHEMA,
        )
        artifact.write_json(folder / FILE, made.model_dump(mode="json", by_alias=True))
        progress.log(f"tracking: trace {made.trace}, {track.otlp}")
        return cls(traces, root, progress)

    def started(self, step: str) -> None:
        """Notes that a step runs; may be called again while it does."""
        if self._running is None or self._running[0] != step:
            self._running = (step, time.time_ns())

    def done(self, step: str, made: Artifact, cached: bool) -> None:
        """Makes the span of a step."""
        begun = self._running[1] if self._running is not None and self._running[0] == step and not cached else time.time_ns()
        self._running = None
        self._span(step, begun, {"compress.cached": cached, **_attributes(made)}, ended=begun if cached else None)

    def finished(self) -> None:
        """Ends the trace, and waits some seconds for the collector."""
        self._end("FINISHED")

    def ended(self, status: Status) -> None:
        """Ends the trace of a run that failed or was stopped, and the span of the step that it was in."""
        if self._running is not None:
            step, begun = self._running
            self._span(step, begun, {"compress.cached": False, "compress.status": status.lower()}, failed=True)
        self._end(status)

    def _span(
        self, step: str, begun: int, attributes: Mapping[str, str | bool | float | int], *, ended: int | None = None, failed: bool = False
    ) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        span = self._traces.tracer.start_span(step, set_span_in_context(self._root), start_time=begun, attributes=attributes)
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    def _end(self, status: Status) -> None:
        from opentelemetry.trace import StatusCode

        self._root.set_attribute("compress.status", status.lower())
        if status != "FINISHED":
            self._root.set_status(StatusCode.ERROR)
        self._root.end()
        if not self._traces.close(CLOSE_SECONDS):
            self._progress.warn(f"tracking: {self._traces.endpoint} did not take every span; the run is not affected, and they are lost")


def _attributes(made: Artifact) -> dict[str, str | float | int]:
    """Returns what the span of a step says of its artifact."""
    manifest = made.manifest
    found: dict[str, str | float | int] = {
        "compress.step.kind": str(manifest["stage"]),
        "compress.artifact.digest": made.digest,
        "compress.artifact.folder": made.path.name,
        "compress.seconds": float(manifest["seconds"]),
    }
    if "peak_memory_bytes" in manifest:
        found["compress.peak_memory_bytes"] = int(manifest["peak_memory_bytes"])
    return found


def _link(known: Traced) -> Link:
    """Returns the link to an earlier trace."""
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if known.sampled else TraceFlags.DEFAULT)
    return Link(SpanContext(int(known.trace, 16), int(known.span, 16), is_remote=True, trace_flags=flags), {"compress.link": "resumed"})


def read_traced(folder: Path) -> Traced | None:
    """Returns the last trace of a run folder; None if there is none.

    Raises:
        InputError: The file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        return Traced.model_validate(artifact.read_json(file))
    except (DamagedArtifact, ValidationError) as error:
        raise InputError(f"{file}", f"damaged ({reason(error)})", remedy="remove the file: the next trace has no link then") from error


def check_otlp() -> None:
    """Checks that a run can be traced; the collector is not looked for, as no run depends on it.

    Raises:
        InputError: A package is not installed, or the environment asks for another protocol.
    """
    if package := otlp.missing():
        raise InputError("track.otlp", f"given, but the package {package} is not installed", remedy=otlp.INSTALL)
    otlp.check_protocol()
