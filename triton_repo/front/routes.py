"""Routes of the requests of each model: the version that answers them, and the limits of its queue.

The service writes them to a file, and replaces it when a model was rolled over to another version. The front looks at the file with each
request, which takes a microsecond; so the limits of the new version hold at once, and a front that is started again knows what the front
before it knew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from triton_repo.front.limits import GRACE_SECONDS, STREAM_IDLE_SECONDS


@dataclass(frozen=True)
class Route:
    """The route of the requests of a model."""

    version: str = ""
    """Its version; empty: the one that Triton chooses."""
    max_requests: int | None = None
    """See `triton_repo.queueing.Queue`, as for the others."""
    timeout_ms: float | None = None
    priorities: int = 1
    max_rows: int = 1
    """Most rows of one request."""
    request_seconds: float | None = None
    """Most seconds of an answer of a model that answers in pieces, where it says so; None: it answers each request once."""

    @property
    def silence_s(self) -> float:
        """Seconds without a piece after which an answer has failed; the model may be silent as long as it may answer."""
        return max(STREAM_IDLE_SECONDS, (self.request_seconds or 0.0) + GRACE_SECONDS)


class Routes:
    """The routes in a file.

    Args:
        path: The file, an object of `Route` by name of the model; empty: no route is known.
        aliases: Earlier names of models, and what they are called now.
    """

    def __init__(self, path: str = "", aliases: Mapping[str, str] | None = None) -> None:
        self._path, self._seen, self._routes = path, (0, 0), dict[str, Route]()
        self._aliases = dict(aliases or {})

    def name_of(self, model: str) -> str:
        """Returns the name of a model that a client may call by an earlier one."""
        return self._aliases.get(model, model)

    def of(self, model: str) -> Route:
        """Returns the route of a model; the default one where none is known."""
        if self._path:
            found = os.stat(self._path)
            if (seen := (found.st_mtime_ns, found.st_ino)) != self._seen:
                with open(self._path, encoding="utf-8") as stream:
                    self._routes = {name: Route(**values) for name, values in json.load(stream).items()}
                self._seen = seen
        return self._routes.get(model, Route())
