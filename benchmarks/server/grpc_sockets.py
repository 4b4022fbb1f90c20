"""What gRPC costs and keeps with the front before Triton, and without it: `compress serve --grpc front` and `--grpc triton`, in turns.

    compress run RECIPE --out RUN
    python benchmarks/server/grpc_sockets.py RUN [--model NAME] [--turns 5] [--seconds 5] [--max-requests 64] [--timeout-ms 250]
        [--only one saturation overload rollover] [--out FILE]

Both servers run at once and are asked in turns, as is the engine alone (`parts/bare_engine.py`). Requests hold the evaluation rows of the
run with their real lengths, in the same order for all. The load generator runs on the same machine and shares its cores. Each figure is
the median over the turns; differences and ratios are those within a turn.

    one         one request after the other, one row in each: p50, p99, what is above the engine, and ms of the processor for a request
    saturation  rows per second with one row in a request and with 32; the engine alone gets requests of 32 rows, and of as many rows as the
                server puts into a batch
    overload    twice the rows per second that Triton answers at saturation, one in a request, as a Poisson process, with the limits of the
                queue: what clients got, how long answers and refusals took, and how many refusals the metrics of the server counted
    rollover    half of that rate, while the model is rolled over to a copy of itself: what clients got
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from foundation.measure.engine_process import EngineProcess
from parts.bare_engine import BareEngine, asked
from parts.beside import beside
from parts.served_model import ServedModel, Serving, Settings, arguments, carry_out, head_of, in_turns, median, ratio
from triton_repo.client import evaluate
from triton_repo.load.settings import Load
from triton_repo.ports import Grpc
from triton_repo.queueing import Queue

SIDES: tuple[Grpc, ...] = ("front", "triton")
MANY = 32
"""Rows of a large request."""
UNDER_WAY = {1: 64, MANY: 4}
"""Requests under way at saturation, by the rows of each."""
OVERLOAD, BESIDE = 2.0, 0.5
"""Rates as shares of the capacity."""
MARGIN_S = 2.0
OUTSTANDING = 2048
GOLDEN = 64
"""Rows that the new version is checked with in a roll-over."""
KINDS = ("refused", "timed_out", "failed")
REFUSED: Mapping[Grpc, re.Pattern[str]] = {
    "front": re.compile(r'^compress_front_requests_total\{.*outcome="(?:refused|timed_out)"\} (\d+)$', re.M),
    "triton": re.compile(r"^nv_inference_request_failure\{.*\} (\d+)$", re.M),
}
"""The counters of requests that a server refused or gave up."""


class Bench:
    """What all scenarios share.

    Args:
        model: The model.
        given: The command line.
    """

    def __init__(self, model: ServedModel, given: argparse.Namespace) -> None:
        self.model, self.turns, self.seconds = model, given.turns, given.seconds
        self.queue = Queue(max_requests=given.max_requests, timeout_ms=given.timeout_ms)
        self.batch = int(model.config.max_batch_size)
        self.folder = Path(tempfile.mkdtemp(prefix="compress-grpc-"))
        self._capacity: float | None = None

    def alone(self, process: EngineProcess, size: int) -> Callable[[], dict[str, Any]]:
        """Returns what lets the engine alone answer requests of `size` rows for a turn."""
        most = max(size, self.batch)
        return lambda: asked(process, self.model.rows, self.folder, size=size, most=most, seconds=self.seconds, seed=0)

    def bare(self) -> EngineProcess:
        """Starts the engine alone."""
        return EngineProcess(BareEngine(self.model.folder / "1", self.model.threads))

    def serving(self, stack: ExitStack, **settings: Any) -> dict[Grpc, Serving]:
        """Starts both servers, until the stack ends."""
        return {side: stack.enter_context(self.model.serving(Settings(grpc=side, **settings))) for side in SIDES}

    def capacity(self, serving: Serving) -> float:
        """Returns the rows per second of Triton at saturation, one in a request; measured once."""
        if self._capacity is None:
            self._capacity = float(serving.load(Load(concurrency=UNDER_WAY[1], seconds=self.seconds))["rows_per_s"])
        return self._capacity


def one(bench: Bench) -> dict[str, Any]:
    """See above."""
    with ExitStack() as stack:
        process, sides = stack.enter_context(bench.bare()), bench.serving(stack)
        load = Load(concurrency=1, seconds=bench.seconds)
        arms = {"engine": bench.alone(process, 1), **{side: _single(serving, load) for side, serving in sides.items()}}
        found = in_turns(arms, bench.turns)
    keys = ("p50_ms", "p99_ms")
    return {
        **{key: {name: median(some, key) for name, some in found.items()} for key in keys},
        **{f"above the engine, {key}": {side: _above(found[side], found["engine"], key) for side in SIDES} for key in keys},
        "front above triton, p50_ms": _above(found["front"], found["triton"], "p50_ms"),
        "cpu_ms": {side: _medians([turn["cpu_ms"] for turn in found[side]]) for side in SIDES},
        "turns": found,
    }


def _single(serving: Serving, load: Load) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        found = serving.load(load)
        times = found["latency_ms"]
        return {**found, "p50_ms": times["p50"], "p99_ms": times["p99"] or times["max"]}  # too few requests have no p99

    return measure


def _above(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    turns = [round(mine[key] - theirs[key], 3) for mine, theirs in zip(own, other, strict=True)]
    return {"median": round(float(np.median(turns)), 3), "turns": turns}


def _medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(float(np.median([turn[name] for turn in turns])), 4) for name in turns[0]}


def saturation(bench: Bench) -> dict[str, Any]:
    """See above."""
    with ExitStack() as stack:
        process, small = stack.enter_context(bench.bare()), bench.serving(stack)
        large = bench.serving(stack, max_batch_size=max(MANY, bench.batch))
        arms = {f"engine, requests of {size}": bench.alone(process, size) for size in (MANY, bench.batch)}
        for rows, sides in ((1, small), (MANY, large)):
            load = Load(concurrency=UNDER_WAY[rows], rows=rows, seconds=bench.seconds)
            arms |= {f"{side}, requests of {rows}": _loaded(serving, load) for side, serving in sides.items()}
        found = in_turns(arms, bench.turns)
    return {
        "rows_per_s": {name: median(some, "rows_per_s") for name, some in found.items()},
        "triton over front": {rows: ratio(found[f"triton, requests of {rows}"], found[f"front, requests of {rows}"]) for rows in UNDER_WAY},
        "over the engine": {
            name: ratio(found[name], found[f"engine, requests of {MANY if name.endswith(str(MANY)) else bench.batch}"])
            for name in arms
            if not name.startswith("engine")
        },
        "turns": found,
    }


def _loaded(serving: Serving, load: Load) -> Callable[[], dict[str, Any]]:
    return lambda: serving.load(load)


def overload(bench: Bench) -> dict[str, Any]:
    """See above."""
    with ExitStack() as stack:
        capacity = bench.capacity(bench.serving(stack)["triton"])
    load = Load(rate=OVERLOAD * capacity, seconds=bench.seconds, timeout_s=10.0, outstanding=OUTSTANDING)
    with ExitStack() as stack:
        sides = bench.serving(stack, queue=bench.queue)
        found = in_turns({side: _overloaded(bench, side, serving, load) for side, serving in sides.items()}, bench.turns)
        deaths = {side: serving.service.deaths for side, serving in sides.items()}
    keys = ("answered_per_s", "p50_ms", "p99_ms", "counted_by_the_server", *KINDS)
    return {
        "queue": bench.queue.model_dump(),
        "capacity_per_s": capacity,
        "rate": load.rate,
        **{side: {key: median(found[side], key) for key in keys} for side in SIDES},
        "deaths": deaths,
        "turns": found,
    }


def _overloaded(bench: Bench, side: Grpc, serving: Serving, load: Load) -> Callable[[], dict[str, Any]]:
    def counted() -> int:
        return sum(map(int, REFUSED[side].findall(serving.metrics())))

    def measure() -> dict[str, Any]:
        before = counted()
        found = bench.model.send(serving.service.grpc_address, load)
        times = found["latency_ms"]
        return {
            **{key: found[key] for key in ("n", "answered", "shed", "latency_ms", "errors")},
            **{kind: found["errors"][kind]["n"] for kind in KINDS},
            "answered_per_s": round(found["answered"] / bench.seconds, 1),
            "p50_ms": times["p50"],
            "p99_ms": times["p99"] or times["max"],
            "counted_by_the_server": counted() - before,
        }

    return measure


def rollover(bench: Bench) -> dict[str, Any]:
    """See above."""
    rows = bench.model.rows[:GOLDEN]
    copy = bench.model.write(bench.folder / "copy", Settings()) / bench.model.name
    with ExitStack() as stack:
        sides = bench.serving(stack)
        rate = BESIDE * bench.capacity(sides["triton"])
        wanted = evaluate(sides["triton"].service.grpc_address, bench.model.name, rows).logits

        def check(address: str, candidate: str) -> None:
            np.testing.assert_array_equal(evaluate(address, candidate, rows, 1).logits, wanted)

        def rolled(serving: Serving) -> Callable[[], dict[str, Any]]:
            def send(number: int) -> dict[str, Any]:
                return bench.model.send(serving.service.grpc_address, Load(rate=rate, seconds=bench.seconds, timeout_s=30.0, seed=number))

            def work() -> dict[str, Any]:
                return asdict(serving.service.roll_over(bench.model.name, copy, check))

            def measure() -> dict[str, Any]:
                found = beside(send, work, MARGIN_S)
                np.testing.assert_array_equal(evaluate(serving.service.grpc_address, bench.model.name, rows).logits, wanted)
                return found

            return measure

        found = in_turns({side: rolled(serving) for side, serving in sides.items()}, bench.turns)
    return {"rate": rate, **{side: _together(found[side]) for side in SIDES}, "turns": found}


def _together(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums over the turns, and the worst latencies."""
    loads = [turn["beside"] for turn in turns]
    return {
        "roll_overs": len(turns),
        **{key: sum(load[key] for load in loads) for key in ("n", "answered")},
        **{kind: sum(load["errors"][kind] for load in loads) for kind in KINDS},
        **{key: max(load[key] for load in loads) for key in ("worst_p99_ms", "max_ms")},
        "seconds": median(turns, "seconds"),
    }


SCENARIOS = (one, saturation, overload, rollover)


def main() -> None:
    """Runs the scenarios and prints what came of them."""
    parser = arguments(__doc__, SCENARIOS, seconds=5.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--timeout-ms", type=float, default=250.0)
    given = parser.parse_args()
    bench = Bench(ServedModel.of(given.run.resolve(), given.model), given)
    carry_out(given, head_of(bench.model), SCENARIOS, bench)


if __name__ == "__main__":
    main()
