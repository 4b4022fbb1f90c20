"""What the benchmarks of a server share: scenarios, a run's model with other settings of the server, loads in turns, and what they take."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from compress.commands.load_test import evaluation_rows
from compress.report import evaluations
from foundation.artifacts.run_folder import open_run
from foundation.core.engines import ENGINES
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_logits
from foundation.standalone.preprocess import Preprocessor
from triton_repo import environment, served_models
from triton_repo.config import from_text, model_names, to_text
from triton_repo.deployment import models_in, repository_of
from triton_repo.entrance import Entrance
from triton_repo.load.connection import Address, Model
from triton_repo.load.load import load_test
from triton_repo.load.settings import Load
from triton_repo.ports import Grpc
from triton_repo.queueing import Queue, write_policy
from triton_repo.service import Service

SHOWN = ("concurrency", "rows", "n", "answered", "errors", "changed", "rows_per_s", "latency_ms", "cpu_share", "warnings")
_ANSWERED = re.compile(r"^nv_inference_request_success\{.*\} (\d+)$", re.M)
Arms = Mapping[str, Callable[[], dict[str, Any]]]


def arguments(about: str | None, scenarios: Sequence[Callable[..., Any]], seconds: float) -> argparse.ArgumentParser:
    """Returns the command line of a benchmark: RUN [--model NAME] [--seconds ...] [--only SCENARIO ...] [--out FILE].

    Args:
        about: Its description.
        scenarios: What it can do, by the name of each function.
        seconds: Default of --seconds.
    """
    names = [one.__name__ for one in scenarios]
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", default=None)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--only", nargs="+", choices=sorted(names), default=names)
    parser.add_argument("--out", type=Path, default=None)
    return parser


def carry_out(given: argparse.Namespace, head: Mapping[str, Any], scenarios: Sequence[Callable[..., Any]], bench: Any) -> dict[str, Any]:
    """Runs the scenarios that were asked for, in that order; prints what came of each, writes all of it after each, and returns it.

    Args:
        given: The command line.
        head: What stands before them in the file.
        scenarios: Each is given `bench`.
        bench: What they share.
    """
    document, known = dict(head), {one.__name__: one for one in scenarios}
    print(json.dumps(document, indent=1), flush=True)
    for name in given.only:
        document[name] = known[name](bench)
        print(json.dumps({name: document[name]}, indent=1), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def back_after(service: Service, process: str, answers: Callable[[], bool]) -> float:
    """Kills a process of a server; returns the seconds until it answers again.

    Args:
        service: The server.
        process: Part of the name of the process: stub for a model's, tritonserver for Triton itself.
        answers: Sends a request; whether it was answered.
    """
    assert service._triton is not None
    assert service._triton._process is not None
    below = psutil.Process(service._triton._process.pid).children(recursive=True)
    next(one for one in below if process in one.name()).kill()
    started = time.monotonic()
    time.sleep(0.3)
    while time.monotonic() - started < 60:
        if answers():
            return round(time.monotonic() - started, 2)
        time.sleep(0.02)
    raise AssertionError("not back within a minute")


def deaths(service: Service, answers: Callable[[], bool]) -> dict[str, Any]:
    """Kills the process of a model, then Triton itself; arguments as above."""
    model = back_after(service, "stub", answers)
    time.sleep(2.0)
    return {"back_after_s": {"model process": model, "Triton": back_after(service, "tritonserver", answers)}}


def head_of(model: ServedModel) -> dict[str, Any]:
    """Returns what stands before the scenarios: versions, hardware, the model and its engine."""
    return {
        "environment": fingerprint(),
        "server": dict(environment.check().versions),
        "model": model.name,
        "engine": {**model.engine, "max_batch_size": int(model.config.max_batch_size)},
        "rows": len(model.rows),
        "load_average": psutil.getloadavg(),
    }


def under_their_folders(run: Path) -> list[served_models.ServedModel]:
    """Returns the models of a run as `Service` serves a repository alone: each is called as its folder."""
    return [replace(model, name=model.folder) for model in models_in(run)]


def sent_slowly(address: str, path: str) -> dict[str, Any]:
    """Sends the bodies of 200 requests, a byte a second, for ten seconds."""
    host, _, port = address.rpartition(":")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        for one in clients:
            one.sendall(head)
        for _ in range(10):
            for one in clients:
                one.sendall(b" ")
            time.sleep(1.0)
    return {"clients": len(clients), "seconds": 10}


@dataclass(frozen=True)
class Settings:
    """Settings of the server; None keeps those of the run."""

    max_batch_size: int | None = None
    instances: int | None = None
    threads: int | None = None
    max_queue_delay_us: int | None = None
    buckets: tuple[int, ...] | None = None
    """Lengths that rows are padded to."""
    limited: bool = False
    """Keeps the limits of the queue."""
    queue: Queue | None = None
    """Other limits of the queue."""
    grpc: Grpc = "front"
    """Who answers gRPC."""
    traces: str = ""
    """Address of a collector of OpenTelemetry; empty: nothing is traced."""


@dataclass(frozen=True)
class ServedModel:
    """The model of a run that was chosen to be served, and the evaluation rows of the run."""

    run: Path
    folder: Path
    """Its folder in the repository of the run, whose files were hashed."""
    rows: Sequence[Any]

    @classmethod
    def of(cls, run: Path, name: str | None = None) -> ServedModel:
        """Returns a model of a finished run: that of this name, or the one that was chosen."""
        repository = repository_of(run)
        chosen = json.loads((repository.parent / evaluations.SERVED).read_text(encoding="utf-8")).get("chosen")
        name = name or chosen or model_names(repository)[-1]
        return cls(run, repository / name, evaluation_rows(run))

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def config(self) -> Any:
        """Its `ModelConfig`."""
        return from_text((self.folder / "config.pbtxt").read_text(encoding="utf-8"))

    @property
    def engine(self) -> dict[str, Any]:
        """What its version reads: `engine`, `mode`, `batch_sizes`, `properties`."""
        found: dict[str, Any] = json.loads((self.folder / "1" / "settings.json").read_text(encoding="utf-8"))
        return found

    @property
    def threads(self) -> int:
        """CPU threads of its engine."""
        about = self.engine
        return int(about["properties"][ENGINES[about["engine"]].threads_property])

    def evaluated(self) -> NDArray[np.float32]:
        """Returns the logits of the engine that was evaluated, of all evaluation rows, float32 [n, C]."""
        run = open_run(self.run)
        exported = run.of_kind("engine")
        assert exported is not None, "the run exports"
        entry = next(one for one in evaluations.served(run) if one.model == self.name)
        (file,) = (
            engine["predictions"]
            for build in evaluations.exported(run).written()["builds"]
            for engine in build["engines"]
            if (build["variant"], build["precision"]) == (entry.variant, entry.precision)
            and all(engine[name] == getattr(entry, name) for name in ("engine", "mode", "float_precision"))
        )
        logits: NDArray[np.float32] = load_logits(exported.path / file)
        return logits

    def send(self, grpc_address: str, load: Load) -> dict[str, Any]:
        """Sends a load of the evaluation rows; returns its figures."""
        inputs = tuple(one.name for one in self.config.input)
        (found,) = load_test(Address("grpc", grpc_address), Model(self.name, inputs), self.rows, [load])
        return found

    def write(self, out: Path, settings: Settings) -> Path:
        """Writes a repository of this model alone, with other settings; returns the repository."""
        made, config, about = out / self.name, self.config, self.engine
        shutil.copytree(self.folder, made)
        if not settings.limited:
            config.dynamic_batching.ClearField("default_queue_policy")
        if settings.queue is not None:
            write_policy(config, settings.queue)
        if settings.max_batch_size is not None:
            config.max_batch_size = settings.max_batch_size
            about["batch_sizes"] = [size for size in about["batch_sizes"] if size <= settings.max_batch_size]
        if settings.instances is not None:
            config.instance_group[0].count = settings.instances
        if settings.max_queue_delay_us is not None:
            config.dynamic_batching.max_queue_delay_microseconds = settings.max_queue_delay_us
        if settings.threads is not None:
            about["properties"][ENGINES[about["engine"]].threads_property] = str(settings.threads)
        if settings.buckets is not None:
            replace(Preprocessor.load(made / "1"), buckets=settings.buckets).save(made / "1")
        (made / "config.pbtxt").write_text(to_text(config), encoding="utf-8")
        (made / "1" / "settings.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return out

    @contextlib.contextmanager
    def serving(self, settings: Settings | None = None) -> Iterator[Serving]:
        """Serves it as `compress serve` does."""
        with tempfile.TemporaryDirectory() as folder:
            wanted = settings or Settings()
            repository, entrance = self.write(Path(folder, "repository"), wanted), Entrance(grpc=wanted.grpc)
            log = Path(folder, "log")
            with Service(repository, environment.check(), log, entrance=entrance, traces=wanted.traces) as running:
                yield Serving(self, running)


@dataclass(frozen=True)
class Serving:
    """A running server of the model."""

    model: ServedModel
    service: Service

    def load(self, load: Load) -> dict[str, Any]:
        """Sends a load; returns its figures, and `cpu_ms`: the time of the processor for a request, by process.

        That of the server counts all requests from the start of the generator to its end, so also those that warm up.
        """
        before, answered = self._spent(), self._answered()
        found = self.model.send(self.service.grpc_address, load)
        count = max(1, self._answered() - answered)
        cpu_ms = {name: round(1e3 * (spent - before[name]) / count, 4) for name, spent in self._spent().items()}
        generator = 1e3 * found["cpu_share"] / found["throughput_per_s"] if found["throughput_per_s"] else None
        kept = {key: found[key] for key in SHOWN if key in found}
        return {
            **kept,
            "deaths": self.service.deaths,
            "cpu_ms": {**cpu_ms, "generator": generator and round(generator, 4)},
        }

    def load_behind(self, load: Load) -> dict[str, Any]:
        """Sends a load to Triton itself, on the socket that the front asks it on; returns its figures."""
        triton = self.service._triton
        assert triton is not None, "it runs"
        found = self.model.send(triton.grpc_address, load)
        return {key: found[key] for key in SHOWN if key in found}

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Returns the processes of the server."""
        front, triton = self.service._front, self.service._triton
        assert front is not None, "it runs"
        assert triton is not None, "it runs"
        return {"front": psutil.Process(front.pid).children(), "Triton": triton._servers, "model": triton._stubs}

    def resident_mb(self) -> dict[str, float]:
        """Returns the resident memory of each kind of process."""
        return {name: round(sum(one.memory_info().rss for one in some) / 2**20, 3) for name, some in self.processes().items()}

    def _spent(self) -> dict[str, float]:
        """Returns the seconds of the processor that each kind of process has had."""
        return {name: sum(sum(one.cpu_times()[:2]) for one in some) for name, some in self.processes().items()}

    def _answered(self) -> int:
        return sum(int(count) for count in _ANSWERED.findall(self.metrics()))

    def metrics(self) -> str:
        """Returns the metrics of the server, in the text format of Prometheus."""
        with urllib.request.urlopen(f"http://{self.service.metrics_address}/metrics") as answer:
            text: str = answer.read().decode()
        return text


@contextlib.contextmanager
def sampled(sample: Callable[[], Mapping[str, float]], every_s: float) -> Iterator[list[dict[str, float]]]:
    """Takes samples while the block runs: at its start, every `every_s` seconds, and at its end.

    Yields:
        The list that gets them, each with the seconds since the start as `s`. One that meets a dead process is left out, and ends nothing.
    """
    started, over, samples = time.monotonic(), threading.Event(), list[dict[str, float]]()

    def take() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            samples.append({"s": round(time.monotonic() - started, 1), **sample()})

    def watch() -> None:
        while not over.wait(every_s):
            take()

    take()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()
        take()


def in_turns(arms: Arms, turns: int) -> dict[str, list[dict[str, Any]]]:
    """Measures the arms one after the other, and all again; every second turn goes backwards.

    Args:
        arms: What measures each; returns its figures.
        turns: How often.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(turns):
        for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append({**arms[name](), "load_average": round(psutil.getloadavg()[0], 1), "at": time.strftime("%H:%M:%S")})
    return found


def median(found: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the median of a figure over the turns."""
    return round(statistics.median(one[key] for one in found), 3)


def ratio(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], key: str = "rows_per_s") -> dict[str, Any]:
    """Returns the median of the ratios within a turn, and all of them."""
    ratios = [round(one[key] / two[key], 3) for one, two in zip(own, other, strict=True)]
    return {"median": round(statistics.median(ratios), 3), "turns": ratios}
