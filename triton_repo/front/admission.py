"""Admission control: a request that would not be answered in time is refused at once, not when its time is over.

    service   s <- s + GAIN * (dt / rows - s)           seconds for a row; dt since the answer before, or since the model got work
    ahead     rows under way of the same or a higher priority
    refused   (ahead + own rows) * s > HEADROOM * time-out,   or max_requests are under way

The estimate comes from the answers themselves, so it follows the lengths of the texts, the batches and what else runs on the machine. When
nothing is ahead a request is taken whatever the estimate says: so it is corrected after a standstill. Before the first answer few rows are
taken.

Not here: fairness between clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from triton_repo.front.limits import TRY_LATER, Rejected
from triton_repo.front.routes import Route

GAIN = 1 / 64
HEADROOM = 0.7
"""Share of the time-out that the estimated wait may take: answers come in batches, and not evenly."""
COLD_ROWS = 8
"""Rows that are taken before the first answer, from when on the time for a row is known."""
OUTCOMES = {503: "refused", 504: "timed_out"}
"""Outcome by the status of the error; any other error counts as failed. The full queue may be in the front, in Triton or in a language
model."""


@dataclass
class Flow:
    """The requests of one model."""

    rows: Counter[int] = field(default_factory=Counter)
    """Rows under way by priority."""
    requests: int = 0
    """Requests under way."""
    service_s: float = 0.0
    """Estimated seconds for a row."""
    since: float = 0.0
    """When the last answer came, or when the model got work after a pause."""
    ended: Counter[str] = field(default_factory=Counter)
    """Requests that have ended, by outcome."""


@dataclass(frozen=True)
class Request:
    """Queue parameters of a request."""

    rows: int = 1
    priority: int = 1
    timeout_s: float | None = None


class Admission:
    """Takes or refuses requests.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.flows: dict[str, Flow] = {}

    @contextmanager
    def enter(self, model: str, request: Request, route: Route) -> Iterator[None]:
        """Holds a place while a request is answered; what is raised inside counts as no answer.

        Raises:
            Rejected: The request is not taken.
        """
        if not route.version:  # whatever name a client made up
            yield
            return
        flow = self.flows.setdefault(model, Flow())
        reason = refusal(flow, request, route)
        if reason is not None:
            flow.ended["refused"] += 1
            raise Rejected(f"model {model}: {reason}; {TRY_LATER}", 503)
        if not flow.requests:
            flow.since = self._clock()
        flow.requests += 1
        flow.rows[request.priority] += request.rows
        outcome = "failed"
        try:
            yield
            outcome = "answered"
            self._learn(flow, request.rows)
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except TimeoutError:
            outcome = "timed_out"
            raise
        except Rejected as error:
            outcome = OUTCOMES.get(error.status, outcome)
            raise
        finally:
            flow.requests -= 1
            flow.rows[request.priority] -= request.rows
            flow.ended[outcome] += 1

    def _learn(self, flow: Flow, rows: int) -> None:
        now = self._clock()
        took = (now - flow.since) / rows
        flow.service_s += (took - flow.service_s) * (GAIN if flow.service_s else 1.0)
        flow.since = now


def refusal(flow: Flow, request: Request, route: Route) -> str | None:
    """Returns why a request is not taken; None where it is."""
    if route.max_requests is not None and flow.requests >= route.max_requests:
        return f"{flow.requests} requests are under way, the most allowed"
    ahead = sum(rows for priority, rows in flow.rows.items() if priority <= request.priority)
    if request.timeout_s is not None and ahead >= COLD_ROWS and not flow.service_s:
        return f"{ahead} rows are under way, and the model has not answered yet"
    wait_s = (ahead + request.rows) * flow.service_s
    if request.timeout_s is not None and ahead and wait_s > HEADROOM * request.timeout_s:
        return f"an answer would take about {1e3 * wait_s:.0f} ms, longer than the {1e3 * request.timeout_s:.0f} ms that it may take"
    return None
