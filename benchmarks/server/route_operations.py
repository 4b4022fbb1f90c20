"""What the routes of other servers do when things go wrong: overload, roll-over, deaths, slow clients, large and malformed bodies.

    compress run RECIPE --out RUN --set 'stages.triton_repo.queue={max_requests: 64, timeout_ms: 250}'
    python benchmarks/server/route_operations.py RUN [--next RUN2] [--model NAME] [--seconds 30] [--only overload rollover ...] [--out FILE]

A run of `text-classification` or `sentence-embedding`, served as `compress serve` does. Clients send evaluation rows, one in a request, in
turns over all routes that fit the model: `/predict` and `/models/NAME`, or `/v1/embeddings`, `/embed` and `/models/NAME`. Every answer is
compared with the answer to the same row before anything went wrong. Beside a scenario 4 clients ask, each one request after the other.

    overload   128 clients for --seconds; then how long until 4 clients are answered as before
    rollover   the model is rolled over to the one of RUN2 (default: RUN)
    death      the process of the model is killed, then Triton itself
    slow       200 clients that send a byte a second
    large      bodies of 10 MB
    malformed  1,000 bodies that are no request

It passes (exit status 0) if no request fails and no answer is wrong. A request that is refused (status 429 or 503) or timed out (504) has
not failed: clients send it again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.commands.rollout import answer as roll_out
from foundation.machine.environment import fingerprint
from foundation.standalone.response import VECTOR
from parts.served_model import ServedModel, arguments, carry_out, deaths, sent_slowly, under_their_folders
from triton_repo import environment
from triton_repo.deployment import repository_of
from triton_repo.service import Service

FEW, MANY = 4, 128
MARGIN_S = 4.0
"""Load before a scenario begins and after it has ended."""
TOLERANCE = 1e-4
LARGE = 10_000_000
REFUSED, TIMED_OUT = (429, 503), 504


@dataclass(frozen=True)
class Route:
    """A route, how a row is sent to it, and the values in its answer."""

    path: str
    body: Callable[[Any], dict[str, Any]]
    values: Callable[[Any], list[float]]


def routes_of(model: ServedModel) -> list[Route]:
    """Returns the routes that fit a model."""
    name = model.name
    hugging_face = f"/models/{name}"
    if VECTOR in [one.name for one in model.config.output]:
        return [
            Route("/v1/embeddings", lambda row: {"model": name, "input": row}, lambda found: found["data"][0]["embedding"]),
            Route("/embed", lambda row: {"model": name, "inputs": [row]}, lambda found: found[0]),
            Route(hugging_face, lambda row: {"inputs": [row]}, lambda found: found[0]),
        ]
    return [
        Route("/predict", lambda row: {"model": name, "inputs": [[row]], "raw_scores": True}, lambda found: by_label(found[0])),
        Route(hugging_face, lambda row: {"inputs": row}, lambda found: by_label(found[0] if isinstance(found[0], list) else found)),
    ]


def by_label(scores: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the scores in the order of the names of the labels."""
    return [one["score"] for one in sorted(scores, key=lambda one: one["label"])]


@dataclass
class Counted:
    """What came of requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    ms: list[float] = field(default_factory=list)
    """Of answered ones."""
    first: dict[str, str] = field(default_factory=dict)
    """The first body of each kind of failure."""

    def written(self) -> dict[str, Any]:
        """Returns the figures."""
        p50, p99 = np.percentile(self.ms, (50, 99)) if self.ms else (None, None)
        times = {"p50_ms": p50 and round(p50, 2), "p99_ms": p99 and round(p99, 2), "max_ms": round(max(self.ms, default=0.0), 2)}
        return {"n": self.outcomes.total(), **dict(sorted(self.outcomes.items())), **times, **({"first": self.first} if self.first else {})}


class Clients:
    """Threads that each send one request after the other, over all routes in turns.

    Args:
        address: host:port.
        routes: The routes.
        rows: What is sent.
        expected: The values of each row by route; None where these are asked for the first time.
    """

    def __init__(self, address: str, routes: Sequence[Route], rows: Sequence[Any], expected: dict[tuple[str, int], list[float]]) -> None:
        self.address, self.routes, self.rows, self.expected = address, routes, rows, expected
        self._lock = threading.Lock()

    def first(self) -> None:
        """Asks for every row once over every route."""
        connection = http.client.HTTPConnection(self.address, timeout=30)
        for route in self.routes:
            for number, row in enumerate(self.rows):
                status, body = posted(connection, route.path, json.dumps(route.body(row)).encode())
                if status != 200:
                    raise SystemExit(f"{route.path}: status {status}: {body[:200]!r}")
                self.expected[route.path, number] = route.values(json.loads(body))

    @contextlib.contextmanager
    def asking(self, count: int) -> Iterator[Counted]:
        """Keeps so many clients asking inside the block; what came of it is complete after the block."""
        counted, over = Counted(), threading.Event()
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self._ask, counted, over, number) for number in range(count)]
            try:
                yield counted
            finally:
                over.set()
        for future in futures:
            future.result()

    def _ask(self, counted: Counted, over: threading.Event, number: int) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        while not over.is_set():
            route, row = self.routes[number % len(self.routes)], (number // len(self.routes)) % len(self.rows)
            number += FEW + 1
            started = time.perf_counter()
            try:
                status, body = posted(connection, route.path, json.dumps(route.body(self.rows[row])).encode())
            except OSError as error:
                connection.close()
                self._count(counted, "failed", 0.0, repr(error))
                continue
            self._count(counted, *self._judged(route, row, status, body, 1e3 * (time.perf_counter() - started)))
            if status in REFUSED:
                time.sleep(0.01)

    def _judged(self, route: Route, row: int, status: int, body: bytes, ms: float) -> tuple[str, float, str]:
        if status == 200:
            same = np.allclose(route.values(json.loads(body)), self.expected[route.path, row], rtol=0, atol=TOLERANCE)
            return ("answered" if same else "wrong", ms, body[:200].decode())
        outcome = "refused" if status in REFUSED else "timed out" if status == TIMED_OUT else "failed"
        return outcome, ms, f"{status}: {body[:200].decode()}"

    def _count(self, counted: Counted, outcome: str, ms: float, text: str) -> None:
        with self._lock:
            counted.outcomes[outcome] += 1
            if outcome == "answered":
                counted.ms.append(ms)
            elif outcome in ("failed", "wrong"):
                counted.first.setdefault(outcome, text)


def posted(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    """Sends a body; returns status and body of the answer."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


@dataclass
class Bench:
    """What all scenarios share."""

    model: ServedModel
    following: Path
    """The run to roll over to."""
    seconds: float
    rows: list[Any]

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[Service, Clients]]:
        """Serves the run; the clients know the answers."""
        log = Path(self.model.run, "route_operations.log")
        with Service(repository_of(self.model.run), environment.check(), log) as running:
            clients = Clients(running.http_address, routes_of(self.model), self.rows, {})
            clients.first()
            yield running, clients

    def beside(self, clients: Clients, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Does something while a few clients ask."""
        with clients.asking(FEW) as counted:
            time.sleep(MARGIN_S)
            found = work()
            time.sleep(MARGIN_S)
        return {**found, "beside": counted.written()}


def overload(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as (running, clients):
        quiet = bench.beside(clients, dict)["beside"]
        with clients.asking(MANY) as counted:
            time.sleep(bench.seconds)
        ended = time.monotonic()
        with clients.asking(FEW) as after:
            time.sleep(MARGIN_S)
        recovered = after.outcomes["answered"] == after.outcomes.total()
        return {
            "clients": MANY,
            "load": counted.written(),
            "before": quiet,
            "after": after.written(),
            "all_answered_after_s": round(time.monotonic() - ended - MARGIN_S, 2) if recovered else None,
            "deaths": running.deaths,
        }


def rollover(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as (running, clients):
        order = {"run": str(bench.following), "model": bench.model.name}
        return bench.beside(clients, lambda: roll_out(running, under_their_folders(bench.model.run), order, lambda line: None))


def death(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as (running, clients):
        route, connection = clients.routes[0], http.client.HTTPConnection(running.http_address, timeout=30)
        body = json.dumps(route.body(bench.rows[0])).encode()
        found = bench.beside(clients, lambda: deaths(running, lambda: posted(connection, route.path, body)[0] == 200))
        return {**found, "deaths": running.deaths}


def slow(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as (running, clients):
        return bench.beside(clients, lambda: sent_slowly(running.http_address, clients.routes[0].path))


def large(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as (running, clients):
        text = "a fine film " * (LARGE // 12)

        def work() -> dict[str, Any]:
            found: dict[str, list[dict[str, Any]]] = {route.path: [] for route in clients.routes}
            for route in clients.routes * 5:
                connection, started = http.client.HTTPConnection(running.http_address, timeout=60), time.monotonic()
                status, _ = posted(connection, route.path, json.dumps(route.body(text)).encode())
                found[route.path].append({"status": status, "ms": round(1e3 * (time.monotonic() - started), 1)})
            return found

        return bench.beside(clients, work)


def malformed(bench: Bench) -> dict[str, Any]:
    """See above."""
    generator = np.random.default_rng(0)
    with bench.serving() as (running, clients):

        def work() -> dict[str, Any]:
            connection = http.client.HTTPConnection(running.http_address, timeout=30)
            statuses = Counter(posted(connection, clients.routes[n % 2].path, generator.bytes(200))[0] for n in range(1000))
            return {"statuses": dict(statuses)}

        return {**bench.beside(clients, work), "deaths": running.deaths}


SCENARIOS = (overload, rollover, death, slow, large, malformed)


def main() -> int:
    """Runs the scenarios and prints what came of them."""
    parser = arguments(__doc__, SCENARIOS, seconds=30.0)
    parser.add_argument("--next", type=Path, default=None)
    parser.add_argument("--rows", type=int, default=200)
    given = parser.parse_args()
    model = ServedModel.of(given.run.resolve(), given.model)
    bench = Bench(model, (given.next or given.run).resolve(), given.seconds, list(model.rows)[: given.rows])
    document = carry_out(given, {"environment": fingerprint(), "model": model.name}, SCENARIOS, bench)
    counted = [part for name in given.only for part in document[name].values() if isinstance(part, dict)]
    return int(any(part.get(outcome) for part in counted for outcome in ("failed", "wrong")))


if __name__ == "__main__":
    sys.exit(main())
