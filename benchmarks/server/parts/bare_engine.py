"""The engine of a served model, without the server: a process that tokenizes requests and predicts, one after the other.

It runs the files of the model's own folder in the repository, `engine.py` and what belongs to it. What differs from the server is the
server alone. It speaks as `export.engines.worker` does:

    open       spec: folder (that of a version)                  -> versions; compiles every shape
    requests   rows (file), size, most, seconds, seed            -> rows, rows_per_s, cpu_share, p50_ms and p99_ms of a request
    predict    rows (file), out (file), size, most               -> n; the logits, float32 [n, C]

A request of `size` rows is tokenized, divided into batches of one length and at most `most` rows, and predicted. Requests hold the rows in
the order in which the load generator sends them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from export.engines.worker import Request, Tell, serve
from foundation.core.engines import ENGINES
from foundation.measure.engine_process import EngineProcess, read_rows, write_rows
from foundation.standalone.preprocess import Preprocessor, Row
from triton_repo.load.process import drawn
from triton_repo.load.settings import Load


@dataclass(frozen=True)
class BareEngine:
    """How the process is started."""

    folder: Path
    """Folder of a version in a model repository."""
    threads: int

    @property
    def labels(self) -> dict[str, str]:
        """What its messages are marked with."""
        about = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        return {"engine": about["engine"], "mode": about["mode"], "precision": "as it is served"}

    @property
    def command(self) -> list[str]:
        """Command line of its process."""
        return [sys.executable, "-P", str(Path(__file__).resolve())]

    def message(self) -> dict[str, Any]:
        """Returns what opens it."""
        return {"folder": str(self.folder)}


def asked(process: EngineProcess, rows: Sequence[Row], folder: Path, **given: float) -> dict[str, Any]:
    """Lets the process answer requests for some seconds; returns what `requests` above gives.

    Args:
        process: That of a `BareEngine`.
        rows: n rows.
        folder: Where the file of rows is written.
        given: size, most, seconds, seed.
    """
    file = folder / "rows.safetensors"
    write_rows(file, rows)
    return process.ask("requests", rows=str(file), **given)


def predicted(process: EngineProcess, rows: Sequence[Row], folder: Path, **given: int) -> NDArray[np.float32]:
    """Returns the logits of all rows, float32 [n, C]; arguments as above, without seconds and seed."""
    file, out = folder / "rows.safetensors", folder / "logits.safetensors"
    write_rows(file, rows)
    process.ask("predict", rows=str(file), out=str(out), **given)
    logits: NDArray[np.float32] = load_file(out)["logits"]
    return logits


class Opened:
    """The open engine, and how its rows are prepared."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        sys.dont_write_bytecode = True  # the folder is hashed: nothing may be added to it
        sys.path.insert(0, str(folder))  # what engine.py imports lies beside it
        spec = importlib.util.spec_from_file_location("engine", folder / "engine.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.library = ENGINES[settings["engine"]].library
        self.preprocessor = Preprocessor.load(folder)
        self.engine = module.Engine(folder, settings["mode"], settings["batch_sizes"], settings["properties"])
        shape = self.preprocessor.shape
        self.engine.prepare([(bucket,) for bucket in self.preprocessor.buckets] if shape is None else [shape])

    def answered(self, rows: Sequence[Row], most: int) -> np.ndarray:
        """Returns the logits of one request, float32 [n, C]."""
        logits = np.zeros((len(rows), self.preprocessor.width), np.float32)
        for indices, features in self.preprocessor.batches(rows, most):
            logits[indices] = self.engine.predict(features)
        return logits

    def requests(self, request: Request) -> dict[str, Any]:
        """Answers requests for some seconds."""
        rows, most, load = (
            read_rows(Path(request["rows"])),
            request["most"],
            Load(concurrency=1, rows=request["size"], seed=request["seed"]),
        )
        order = drawn(sys.maxsize, [len(str(row)) for row in rows], load)
        taken: list[float] = []
        self.answered([rows[row] for row in order[0]], most)
        started, cpu = time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) - started < request["seconds"]:
            self.answered([rows[row] for row in order[len(taken) % len(order)]], most)
            taken.append(time.perf_counter() - now)
        spent, count = time.perf_counter() - started, len(taken) * request["size"]
        return {
            "rows": count,
            "rows_per_s": round(count / spent, 3),
            "p50_ms": round(1e3 * float(np.median(taken)), 4),
            "p99_ms": round(1e3 * float(np.percentile(taken, 99)), 4),
            "cpu_share": round((time.process_time() - cpu) / spent, 4),
        }

    def predict(self, request: Request) -> dict[str, Any]:
        """Writes the logits of all rows, in requests of `size` rows in their own order."""
        rows, size = read_rows(Path(request["rows"])), request["size"]
        parts = [self.answered(rows[start : start + size], request["most"]) for start in range(0, len(rows), size)]
        save_file({"logits": np.concatenate(parts)}, request["out"])
        return {"n": len(rows)}


def answer(opened: list[Opened], request: Request, tell: Tell) -> Mapping[str, Any]:
    """Does what one request asks; nothing is told before the answer."""
    if request["op"] == "open":
        opened.append(Opened(Path(request["spec"]["folder"])))
        return {"versions": {opened[0].library: importlib.metadata.version(opened[0].library)}}
    return opened[0].predict(request) if request["op"] == "predict" else opened[0].requests(request)


if __name__ == "__main__":
    serve(partial(answer, []))
