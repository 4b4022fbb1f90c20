"""What a server costs: a run's model behind `compress serve`, against its engine alone, in turns.

    compress run RECIPE --out RUN
    python benchmarks/server/serving.py RUN [--model NAME] [--turns 3] [--seconds 5] [--minutes 30]
        [--only equal saturation ...] [--out FILE]

The engine alone runs in a process of its own, with the tokenizer, from the files that the server runs (`parts/bare_engine.py`). Requests
hold the evaluation rows of the run with their real lengths, in the same order for both. The load generator runs on the same machine as the
server and shares its cores; what it takes is shown. Each figure is the median over the turns, and ratios are those within a turn.

    equal       all evaluation rows, one and 32 in a request, over gRPC and HTTP: logits, labels and scores are those of the engine
    saturation  rows per second at saturation with 32 rows and with one row in a request; the engine alone gets requests of 32 rows, and
                of as many rows as the server puts into a batch
    alone       p50 of one request after the other, one row in each: the engine, Triton asked on its own socket, and the whole server
    batching    rows per second with the dynamic batching of the run, and with batches of one row
    tuned       the settings that `tune` finds, and those of the run: rows per second within the same p99
    soak        80 % of the capacity for --minutes: errors, answers that change, and the resident memory of each process every 10 s
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from foundation.measure.engine_process import EngineProcess
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES
from parts.bare_engine import BareEngine, asked, predicted
from parts.served_model import ServedModel, Serving, Settings, arguments, carry_out, head_of, in_turns, median, ratio, sampled
from triton_repo.client import Answers, tensors
from triton_repo.load.settings import Load
from triton_repo.tuning.load import loaded
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point, points
from triton_repo.tuning.tuning import Measure, search

MANY = 32
"""Rows of a large request."""
UNDER_WAY = {1: 64, MANY: 4}
"""Requests under way at saturation, by the rows of each."""
SHARE = 0.8
"""Load of the soak, as a share of the capacity."""
SAMPLE_SECONDS = 10.0
SETTLED = 0.2
"""Share of the soak at its start whose memory does not count: caches fill."""


class Bench:
    """What all scenarios share.

    Args:
        model: The model.
        given: The command line.
    """

    def __init__(self, model: ServedModel, given: argparse.Namespace) -> None:
        self.model, self.turns, self.seconds, self.minutes = model, given.turns, given.seconds, given.minutes
        self.batch = int(model.config.max_batch_size)
        self.folder = Path(tempfile.mkdtemp(prefix="compress-serving-"))

    def bare(self) -> EngineProcess:
        """Starts the engine alone."""
        return EngineProcess(BareEngine(self.model.folder / "1", self.model.threads))

    def alone(self, process: EngineProcess, size: int) -> Callable[[], dict[str, Any]]:
        """Returns what lets the engine alone answer requests of `size` rows for a turn."""
        most = max(size, self.batch)
        return lambda: asked(process, self.model.rows, self.folder, size=size, most=most, seconds=self.seconds, seed=0)

    def served(self, serving: Serving, rows: int = 1, under_way: int | None = None) -> Callable[[], dict[str, Any]]:
        """Returns what loads a server for a turn, at saturation unless told otherwise."""
        load = Load(concurrency=under_way or UNDER_WAY[rows], rows=rows, seconds=self.seconds)
        return lambda: serving.load(load)


def equal(bench: Bench) -> dict[str, Any]:
    """See above."""
    rows, found = bench.model.rows, {}
    prepared = Preprocessor.load(bench.model.folder / "1")
    with bench.bare() as process, bench.model.serving(Settings(max_batch_size=max(MANY, bench.batch))) as serving:
        wanted = predicted(process, rows, bench.folder, size=1, most=1)
        for protocol, client in (("grpc", tritonclient.grpc), ("http", tritonclient.http)):
            for size in (1, MANY):
                started = time.perf_counter()
                answers = _answers(client, getattr(serving.service, f"{protocol}_address"), bench.model.name, rows, size)
                found[f"{protocol}, {size} rows in a request"] = {
                    "n": len(rows),
                    "rows_with_other_logits": _apart(answers.logits, wanted),
                    "rows_with_other_labels": _apart(answers.outputs["LABEL"], _labels(prepared, wanted)),
                    "label_or_score_beside_its_logits": answers.contradiction(prepared),
                    "seconds": round(time.perf_counter() - started, 1),
                }
    return {"the engine that was evaluated": {"rows_with_other_logits": _apart(bench.model.evaluated(), wanted)}, **found}


def _apart(one: np.ndarray, other: np.ndarray) -> int:
    return int((one != other).any(axis=1).sum())


def _labels(prepared: Preprocessor, logits: np.ndarray) -> np.ndarray:
    return RESPONSES[prepared.response].of(logits, prepared.labels)["LABEL"]


def _answers(client: Any, address: str, model: str, rows: Sequence[Any], size: int) -> Answers:
    """Sends all rows in order; outputs over HTTP come as raw bytes."""
    with client.InferenceServerClient(address) as connection:
        parts = [
            Answers.of([connection.infer(model, tensors(rows[start : start + size], client.InferInput))])
            for start in range(0, len(rows), size)
        ]
    outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs}
    return Answers(np.concatenate([part.logits for part in parts]), outputs, rows)


def saturation(bench: Bench) -> dict[str, Any]:
    """See above."""
    with (
        bench.bare() as process,
        bench.model.serving() as small,
        bench.model.serving(Settings(max_batch_size=max(MANY, bench.batch))) as large,
    ):
        arms = {
            f"engine, requests of {MANY}": bench.alone(process, MANY),
            f"server, requests of {MANY}": bench.served(large, MANY),
            f"engine, requests of {bench.batch}": bench.alone(process, bench.batch),
            "server, requests of 1": bench.served(small),
        }
        found = in_turns(arms, bench.turns)
    names = list(arms)
    return {
        "rows_per_s": {name: median(some, "rows_per_s") for name, some in found.items()},
        f"ratio of {MANY}": ratio(found[names[1]], found[names[0]]),
        "ratio of 1": ratio(found[names[3]], found[names[2]]),
        "turns": found,
    }


def alone(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.bare() as process, bench.model.serving() as serving:
        load = Load(concurrency=1, seconds=bench.seconds)
        arms = {
            "engine": bench.alone(process, 1),
            "Triton without the front": lambda: serving.load_behind(load),
            "server": bench.served(serving, under_way=1),
        }
        found = in_turns(arms, bench.turns)
    above: dict[str, Any] = {}
    for name in list(arms)[1:]:
        for one in found[name]:
            one["p50_ms"] = one["latency_ms"]["p50"]
        turns = [round(own["p50_ms"] - other["p50_ms"], 3) for own, other in zip(found[name], found["engine"], strict=True)]
        above[name] = {"median": float(np.median(turns)), "turns": turns}
    return {"p50_ms": {name: median(some, "p50_ms") for name, some in found.items()}, "above_ms": above, "turns": found}


def batching(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.model.serving() as own, bench.model.serving(Settings(max_batch_size=1)) as single:
        found = in_turns({"batches": bench.served(own), "batches of 1": bench.served(single)}, bench.turns)
    rates = {name: median(some, "rows_per_s") for name, some in found.items()}
    return {"rows_per_s": rates, "ratio": ratio(found["batches"], found["batches of 1"]), "turns": found}


def tuned(bench: Bench) -> dict[str, Any]:
    """See above: the search of `triton_repo.tuning`, and then its best settings against those of the run, in turns."""
    config = bench.model.config
    own = Point(
        config.instance_group[0].count,
        bench.model.threads,
        bench.batch,
        int(config.dynamic_batching.max_queue_delay_microseconds),
    )
    tune = Tune()
    found = search(tune, points(tune, own, bench.model.threads), _measure(bench.model, tune))

    def within(serving: Serving) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            levels = loaded(lambda count: serving.load(Load(concurrency=count, seconds=bench.seconds)), tune.concurrency, found.limit_ms)
            assert levels.best is not None, "the search found one"
            return {"rows_per_s": levels.best.rows_per_s, "p99_ms": levels.best.p99_ms, "concurrency": levels.best.concurrency}

        return measure

    with bench.model.serving() as first, bench.model.serving(_settings(found.best)) as second:
        turns = in_turns({"own": within(first), "tuned": within(second)}, bench.turns)
    return {
        **found.as_document(bench.model.name).written(),
        "own": _settings(own).__dict__,
        "rows_per_s": {name: median(some, "rows_per_s") for name, some in turns.items()},
        "ratio": ratio(turns["tuned"], turns["own"]),
        "turns": turns,
    }


def _settings(point: Point) -> Settings:
    return Settings(point.max_batch_size, point.instances, point.threads, point.max_queue_delay_us)


def _measure(model: ServedModel, tune: Tune) -> Measure:
    """Returns what measures a point behind the front, as it will be served."""

    def measure(point: Point, seconds: float, limit_ms: float | None) -> Any:
        with model.serving(_settings(point)) as serving:
            found = loaded(lambda count: serving.load(Load(concurrency=count, seconds=seconds)), sorted(tune.concurrency), limit_ms)
        print(point, f"{found.rate:.0f} rows/s", flush=True)
        return found

    return measure


def soak(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.model.serving() as serving:
        capacity = serving.load(Load(concurrency=UNDER_WAY[1], seconds=10.0))["rows_per_s"]
        with sampled(serving.resident_mb, SAMPLE_SECONDS) as samples:
            found = serving.load(Load(rate=SHARE * capacity, seconds=60 * bench.minutes, outstanding=2048))
    settled = samples[int(SETTLED * len(samples)) :]
    at_s, names = [one["s"] for one in settled], [name for name in samples[-1] if name != "s"]
    memory = {name: slope(at_s, [one[name] for one in settled]) for name in names}
    return {"capacity_rows_per_s": capacity, "rate": SHARE * capacity, "load": found, "memory": memory, "samples_mb": samples}


def slope(at_s: Sequence[float], values_mb: Sequence[float]) -> dict[str, float]:
    """Returns the slope of a line through values in MB per hour, with its standard error, and the first and last value."""
    t, y = np.array(at_s) / 3600, np.array(values_mb)
    about = {"first_mb": float(y[0]), "last_mb": float(y[-1]), "most_mb": float(y.max())}
    if len(t) < 3:
        return about
    centred = t - t.mean()
    steep = float(centred @ y / (centred @ centred))
    residual = y - y.mean() - steep * centred
    error = float(np.sqrt(residual @ residual / (len(t) - 2) / (centred @ centred)))
    return {"slope_mb_per_h": round(steep, 3), "standard_error": round(error, 3), **about}


SCENARIOS = (equal, saturation, alone, batching, tuned, soak)


def main() -> None:
    """Runs the scenarios and prints what came of them."""
    parser = arguments(__doc__, SCENARIOS, seconds=5.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0)
    given = parser.parse_args()
    bench = Bench(ServedModel.of(given.run.resolve(), given.model), given)
    carry_out(given, head_of(bench.model), SCENARIOS, bench)


if __name__ == "__main__":
    main()
