"""What a served run does when things go wrong: overload, roll-over, deaths, damaged files, slow and hostile clients, and starts.

    compress run RECIPE --out RUN --set 'stages.triton_repo.queue={max_requests: 64, timeout_ms: 250}'
    python benchmarks/server/operations.py RUN [--next RUN2] [--model NAME] [--grpc triton] [--seconds 120] [--only overload rollover ...]
        [--out FILE]

Each scenario serves the run as `compress serve` does (front, Triton, supervisor; `--grpc` is its option) and sends its evaluation rows with
the load generator of `compress bench --server`, as a Poisson process. Capacity is the throughput of 32 requests under way. Prints and
writes JSON: figures of the load beside each scenario, hardware and versions. The load generator runs on the same machine as the server.

    overload   3 times the capacity for --seconds, then how long until requests are answered as before
    rollover   half the capacity, while the model is rolled over to the one of RUN2 (default: RUN), and while a damaged one is refused; and
               again without limits of the queue, where nothing is refused because both versions share the processors
    death      half the capacity, while the process of the model is killed, then Triton itself
    damage     half the capacity, while the files of the run are overwritten; answers before and after
    slow       half the capacity, beside 200 clients that send a byte a second
    large      half the capacity, beside bodies of 10 MB, as JSON and as raw bytes
    malformed  half the capacity, beside 1,000 messages that are no protobuf
    starts     seconds until the server is ready: the first start, without compiled networks, and three more
    lengths    evaluation rows per second, padded to max_length, with one more bucket of 64, and with the buckets of the run: in the engine
               alone, in batches of the largest size, and in the server with 32 requests of one row under way; they take turns
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import grpc
import numpy as np
import psutil
from tritonclient.grpc import InferenceServerClient

from compress.commands.rollout import answer as roll_out
from compress.report.evaluations import read_golden
from foundation.artifacts.chain import GOLDEN
from foundation.core.errors import InputError
from foundation.machine.environment import fingerprint
from foundation.standalone.preprocess import Preprocessor
from parts.beside import beside
from parts.served_model import (
    ServedModel,
    Settings,
    arguments,
    carry_out,
    deaths,
    in_turns,
    median,
    ratio,
    sent_slowly,
    under_their_folders,
)
from triton_repo import environment
from triton_repo.blobs import BlobCache
from triton_repo.client import RequestError, evaluate, infer
from triton_repo.config import model_names
from triton_repo.cpu_engines.openvino import Engine
from triton_repo.deployment import repository_of
from triton_repo.entrance import Entrance
from triton_repo.front.inference import INFER
from triton_repo.live import without_limits
from triton_repo.load.settings import Load
from triton_repo.ports import Grpc
from triton_repo.queueing import read_policy
from triton_repo.service import Service

TOGETHER = 32
TURNS = 3
OVERLOAD = 3.0
BESIDE = 0.5
"""Load beside a scenario, as a share of the capacity."""
MARGIN_S = 4.0
"""Load before a scenario begins and after it has ended."""
SHOWN = ("n", "answered", "shed", "latency_ms", "errors", "throughput_per_s", "lag_ms", "cpu_share")


@dataclass
class Bench:
    """What all scenarios share."""

    model: ServedModel
    following: Path
    """The run to roll over to."""
    seconds: float
    timeout_ms: float
    entrance: Entrance
    capacity: float = 0.0

    @contextlib.contextmanager
    def serving(self, folder: Path | None = None) -> Iterator[Service]:
        """Serves a run, or this one."""
        with self.served(repository_of(folder or self.model.run)) as running:
            yield running

    @contextlib.contextmanager
    def served(self, repository: Path) -> Iterator[Service]:
        """Serves a repository."""
        with (
            tempfile.TemporaryDirectory() as logs,
            Service(repository, environment.check(), Path(logs, "log"), entrance=self.entrance) as running,
        ):
            yield running

    def load(self, running: Service, load: Load) -> dict[str, Any]:
        """Sends a load; returns its figures."""
        found = self.model.send(running.grpc_address, load)
        return {key: found[key] for key in SHOWN}

    def beside(self, running: Service, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Does something under half the capacity of load; returns what it gave, with the figures of the load."""

        def send(number: int) -> dict[str, Any]:
            return self.load(running, Load(rate=BESIDE * self.capacity, seconds=5.0, timeout_s=10.0, seed=number))

        return beside(send, work, MARGIN_S)


def overload(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as running:
        before = bench.load(running, Load(rate=BESIDE * bench.capacity, seconds=5.0))
        rate = OVERLOAD * bench.capacity
        found = bench.load(running, Load(rate=rate, seconds=bench.seconds, timeout_s=10.0, outstanding=2048))
        ended, late, probes = time.monotonic(), 0.0, []
        with InferenceServerClient(running.grpc_address) as client:
            while (now := time.monotonic() - ended) < 8.0:
                try:
                    started = time.monotonic()
                    infer(client, bench.model.name, bench.model.rows[len(probes) % len(bench.model.rows)], 5.0)
                    probes.append(1e3 * (time.monotonic() - started))
                    fine = probes[-1] <= bench.timeout_ms
                except RequestError:
                    fine = False
                late = late if fine else time.monotonic() - ended
                time.sleep(max(0.0, 0.02 - (time.monotonic() - ended - now)))
        after = bench.load(running, Load(rate=BESIDE * bench.capacity, seconds=5.0, seed=1))
    return {
        "rate": rate,
        "seconds": bench.seconds,
        "timeout_ms": bench.timeout_ms,
        "load": found,
        "recovery_s": round(late, 3),
        "p50_ms": {"before": before["latency_ms"]["p50"], "after": after["latency_ms"]["p50"]},
        "deaths": running.deaths,
    }


def rollover(bench: Bench) -> dict[str, Any]:
    """See above."""
    damaged = Path(tempfile.mkdtemp()) / "damaged"
    shutil.copytree(bench.following, damaged, symlinks=True)
    overwrite(damaged)
    with bench.serving() as running:

        def work() -> dict[str, Any]:
            served = under_their_folders(bench.model.run)
            done = roll_out(running, served, {"run": str(bench.following), "model": bench.model.name}, print)
            try:
                roll_out(running, served, {"run": str(damaged), "model": bench.model.name}, print)
            except InputError as error:
                return {**done, "damaged": error.lines[0]}
            raise AssertionError("a damaged run was rolled over to")

        found = bench.beside(running, work)
    shutil.rmtree(damaged.parent)
    return {**found, "without_limits": _unlimited(bench)}


def _unlimited(bench: Bench) -> dict[str, Any]:
    rows, recorded = read_golden(bench.following / GOLDEN)

    def check(address: str, candidate: str) -> None:
        logits = evaluate(address, candidate, rows, 1).logits
        assert (logits.argmax(axis=1) == recorded[f"{bench.model.name}.triton"].argmax(axis=1)).all()

    with tempfile.TemporaryDirectory() as folder:
        repository = without_limits(repository_of(bench.following), Path(folder, "repository"))
        with bench.served(repository) as running:
            return bench.beside(running, lambda: asdict(running.roll_over(bench.model.name, repository / bench.model.name, check)))


def death(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as running:

        def answers() -> bool:
            try:
                evaluate(running.grpc_address, bench.model.name, bench.model.rows[:1])
            except RequestError:
                return False
            return True

        return {**bench.beside(running, lambda: deaths(running, answers)), "deaths": running.deaths}


def damage(bench: Bench) -> dict[str, Any]:
    """See above."""
    copied = Path(tempfile.mkdtemp()) / "run"
    shutil.copytree(bench.model.run, copied, symlinks=True)
    golden, _ = read_golden(bench.model.run / GOLDEN)
    with bench.serving(copied) as running:

        def logits() -> np.ndarray:
            found = []
            while len(found) < len(golden):
                with contextlib.suppress(RequestError):  # refused, because others ask too
                    found.append(evaluate(running.grpc_address, bench.model.name, golden[len(found) : len(found) + 1]).logits)
            return np.concatenate(found)

        def work() -> dict[str, Any]:
            before = logits()
            overwrite(copied)
            after = logits()
            running._triton._process.kill()  # type: ignore[union-attr]
            time.sleep(0.5)
            restarted = logits()
            return {
                "golden_rows": len(golden),
                "changed_answers": int((before != after).any(axis=1).sum()),
                "changed_answers_after_a_restart": int((before != restarted).any(axis=1).sum()),
            }

        found = bench.beside(running, work)
    with contextlib.suppress(InputError):
        repository_of(copied)
        raise AssertionError("a damaged run would be served again")
    shutil.rmtree(copied.parent)
    return {**found, "served_again": False}


def slow(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as running:
        return bench.beside(running, lambda: sent_slowly(running.http_address, f"/v2/models/{bench.model.name}/infer"))


def large(bench: Bench) -> dict[str, Any]:
    """See above."""
    with bench.serving() as running:
        url = f"http://{running.http_address}/v2/models/{bench.model.name}/infer"

        def post(body: bytes, **headers: str) -> dict[str, Any]:
            started = time.monotonic()
            try:
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
                    status = answer.status
                    answer.read()
            except urllib.error.HTTPError as error:
                status = error.code
            return {"status": status, "ms": round(1e3 * (time.monotonic() - started), 1)}

        text = b"a fine film " * (10_000_000 // 12)
        entry = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES"}
        plain = json.dumps({"inputs": [{**entry, "data": [text.decode()]}]}).encode()
        raw = len(text).to_bytes(4, "little") + text
        start = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": len(raw)}}]}).encode()

        def work() -> dict[str, Any]:
            found = {"json": [], "raw": []}
            for _ in range(5):
                found["json"].append(post(plain))
                found["raw"].append(post(start + raw, **{"Inference-Header-Content-Length": str(len(start))}))
            return {"bytes": len(plain), **found}

        return bench.beside(running, work)


def malformed(bench: Bench) -> dict[str, Any]:
    """See above."""
    generator = np.random.default_rng(0)
    with bench.serving() as running, grpc.insecure_channel(running.grpc_address) as channel:

        def work() -> dict[str, Any]:
            times, codes = [], []
            call = channel.unary_unary(INFER)
            for _ in range(1000):
                started = time.monotonic()
                try:
                    call(generator.bytes(200), timeout=10)
                    codes.append("answered")
                except grpc.RpcError as error:
                    codes.append(error.code().name)
                times.append(1e3 * (time.monotonic() - started))
            p50, p99 = np.percentile(times, (50, 99))
            return {"codes": {code: codes.count(code) for code in sorted(set(codes))}, "p50_ms": round(p50, 2), "p99_ms": round(p99, 2)}

        return {**bench.beside(running, work), "deaths": running.deaths}


def starts(bench: Bench) -> dict[str, Any]:
    """See above: the chosen model alone, and the whole repository."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = bench.model.write(Path(folder, "alone"), Settings(limited=True))
        for name, repository in (("the model", alone), ("the repository", repository_of(bench.model.run))):
            times, found_environment = [], environment.check()
            blobs = Path(tempfile.mkdtemp(dir=folder))
            for _ in range(4):
                started = time.monotonic()
                with Service(repository, found_environment, Path(folder, "log"), blobs=BlobCache(found_environment.versions, blobs)):
                    times.append(round(time.monotonic() - started, 2))
            found[name] = {"models": len(model_names(repository)), "first_s": times[0], "later_s": times[1:]}
    return found


def lengths(bench: Bench) -> dict[str, Any]:
    """See above."""
    version, settings = bench.model.folder / "1", bench.model.engine
    prepared = Preprocessor.load(version)
    cases = {"max_length": prepared.buckets[-1:], "64": (64, *prepared.buckets[-1:]), "run": prepared.buckets}
    engine = Engine(version, settings["mode"], settings["batch_sizes"], settings["properties"])

    def alone(buckets: tuple[int, ...]) -> dict[str, Any]:
        padded = list(replace(prepared, buckets=buckets).batches(bench.model.rows, max(settings["batch_sizes"])))
        for _turn in ("compiles", "counts"):
            started = time.perf_counter()
            for _, features in padded:
                engine.predict(features)
            spent = time.perf_counter() - started
        return {"rows_per_s": len(bench.model.rows) / spent}

    def served(buckets: tuple[int, ...]) -> dict[str, Any]:
        with bench.model.serving(Settings(buckets=buckets, limited=True)) as serving:
            serving.load(Load(concurrency=TOGETHER, seconds=2.0))
            return serving.load(Load(concurrency=TOGETHER, seconds=5.0))

    by_arm = [in_turns({name: partial(arm, buckets) for name, buckets in cases.items()}, TURNS) for arm in (alone, served)]
    return {"buckets": cases, "engine_rows_per_s": _turns(by_arm[0]), "served_rows_per_s": _turns(by_arm[1])}


def _turns(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the median over the turns, and of the ratio of the run to each other within a turn."""
    return {
        "median": {name: median(some, "rows_per_s") for name, some in found.items()},
        "run_is_faster_than": {name: ratio(found["run"], some)["median"] for name, some in found.items() if name != "run"},
        "turns": {name: [one["rows_per_s"] for one in some] for name, some in found.items()},
    }


def overwrite(run: Path) -> None:
    """Overwrites the middle of each file of weights in the model repository of a run."""
    for file in run.glob("stages/triton_repo-*/model_repository/*/1/*.bin"):
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(b"\xa5" * 65536)


SCENARIOS = (starts, lengths, overload, rollover, death, damage, slow, large, malformed)


def main() -> None:
    """Runs the scenarios and prints what came of them."""
    parser = arguments(__doc__, SCENARIOS, seconds=120.0)
    parser.add_argument("--next", type=Path, default=None)
    parser.add_argument("--grpc", choices=get_args(Grpc), default="front", help="who answers gRPC")
    given = parser.parse_args()
    model = ServedModel.of(given.run.resolve(), given.model)
    queue = read_policy(model.config)
    if queue.timeout_ms is None:
        raise SystemExit(f"{given.run}: {model.name} has no time-out; give stages.triton_repo.queue, as above")
    bench = Bench(model, (given.next or given.run).resolve(), given.seconds, queue.timeout_ms, Entrance(grpc=given.grpc))
    with bench.serving() as running:
        bench.load(running, Load(concurrency=TOGETHER, seconds=3.0))
        bench.capacity = bench.load(running, Load(concurrency=TOGETHER, seconds=10.0))["throughput_per_s"]
    head = {
        "environment": fingerprint(),
        "model": bench.model.name,
        "grpc": given.grpc,
        "queue": queue.model_dump(),
        "capacity_per_s": bench.capacity,
        "load_average": psutil.getloadavg(),
    }
    carry_out(given, head, SCENARIOS, bench)


if __name__ == "__main__":
    main()
