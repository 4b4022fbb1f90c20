"""What traces of requests cost: a server without them, with every request traced, and with one of a hundred, in turns.

    compress run RECIPE --out RUN
    python benchmarks/server/traced.py RUN [--model NAME] [--turns 5] [--seconds 3] [--only one saturation] [--out FILE]

Three servers run at once, each as `compress serve` starts it, and are asked in turns over gRPC at the front, by clients without a
`traceparent`. The collector is a process on the same machine that reads what comes, and answers; its time is the machine's, not the
server's. Each figure is the median over the turns; ratios are those within a turn.

    one         one request after the other, one row in each: p50, and ms of the processor for a request, by process
    saturation  rows per second, one row in a request, 64 under way
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from parts.served_model import ServedModel, Serving, Settings, arguments, carry_out, head_of, in_turns, median, ratio
from triton_repo.load.settings import Load

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

OFF, ALL, FEW = "off", "every request", "one of 100"
SAMPLERS: Mapping[str, Mapping[str, str]] = {
    OFF: {},
    ALL: {},
    FEW: {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
}
UNDER_WAY = 64


class Collector(BaseHTTPRequestHandler):
    """Reads traces and answers."""

    protocol_version = "HTTP/1.1"
    received = multiprocessing.Value("q", 0)
    """Bytes that came."""

    def do_POST(self) -> None:
        """Takes one message."""
        with self.received.get_lock():
            self.received.value += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


def collect(port: Connection) -> None:
    """Collects until it is terminated."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        port.send(server.server_port)
        server.serve_forever()


class Bench:
    """What the scenarios share.

    Args:
        model: The model.
        given: The command line.
    """

    def __init__(self, model: ServedModel, given: argparse.Namespace) -> None:
        self.model, self.turns, self.seconds = model, given.turns, given.seconds

    @contextmanager
    def serving(self) -> Iterator[dict[str, Serving]]:
        """Starts the three servers and the collector."""
        near, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=collect, args=(far,), daemon=True)
        process.start()
        try:
            url = f"http://127.0.0.1:{near.recv()}/v1/traces"
            with ExitStack() as stack:
                found = {}
                for name, variables in SAMPLERS.items():
                    with patch.dict(os.environ, variables):
                        settings = Settings(traces="" if name == OFF else url)
                        found[name] = stack.enter_context(self.model.serving(settings))
                yield found
        finally:
            process.terminate()
            process.join()


def one(bench: Bench) -> dict[str, Any]:
    """See above."""

    def measured(serving: Serving) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            found = serving.load(Load(concurrency=1, seconds=bench.seconds))
            spent = {name: found["cpu_ms"][name] for name in ("front", "Triton", "model")}
            return {**found, "p50_ms": found["latency_ms"]["p50"], "server_ms": round(sum(spent.values()), 4)}

        return measure

    return {**_compared(bench, measured, "p50_ms"), "collector_bytes": Collector.received.value}


def saturation(bench: Bench) -> dict[str, Any]:
    """See above."""
    load = Load(concurrency=UNDER_WAY, seconds=bench.seconds)
    return _compared(bench, lambda serving: lambda: serving.load(load), "rows_per_s")


def _compared(bench: Bench, measured: Callable[[Serving], Callable[[], dict[str, Any]]], key: str) -> dict[str, Any]:
    """Returns the medians of a figure, and its ratios to the server without traces."""
    with bench.serving() as sides:
        found = in_turns({name: measured(serving) for name, serving in sides.items()}, bench.turns)
    traced = [name for name in found if name != OFF]
    more = {"server_ms": {name: median(turns, "server_ms") for name, turns in found.items()}} if key == "p50_ms" else {}
    return {
        key: {name: median(turns, key) for name, turns in found.items()},
        **more,
        f"{key} over {OFF}": {name: ratio(found[name], found[OFF], key) for name in traced},
        "turns": found,
    }


def main() -> None:
    """Runs the scenarios."""
    scenarios = (one, saturation)
    parser = arguments(__doc__, scenarios, seconds=3.0)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    model = ServedModel.of(given.run.resolve(), given.model)
    carry_out(given, head_of(model), scenarios, Bench(model, given))


if __name__ == "__main__":
    main()
