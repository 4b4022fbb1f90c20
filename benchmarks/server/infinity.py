"""Infinity beside `compress serve`: requests per second for vectors of single texts, and how close the vectors are to torch, in turns.

    compress run RECIPE --out RUN          a text embedding model in the layout of sentence-transformers
    python benchmarks/server/infinity.py RUN --python ENVIRONMENT/bin/python [--engine torch] [--folder FOLDER] [--model NAME] [--turns 5]
        [--seconds 3] [--instances 2] [--only cosine throughput] [--out FILE]

ENVIRONMENT has `infinity-emb`. Infinity serves the model that the run was made of (or FOLDER, such as one that `compress publish --as onnx`
wrote, for its engine `optimum`), with its own dynamic batching and as many threads as the run. `--instances` divides the threads of ours
among so many processes. Both servers run at once, are asked in turns by the same client, and share the processors with it. Each request
holds one evaluation row, as JSON; vectors come as base64.

    cosine       of the vectors of `--rows` texts to those of the run's first variant in torch: lowest and mean
    throughput   requests per second and p50, with 1, 8 and 64 requests under way: `/v1/embeddings` of the front, `/embeddings` of Infinity
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from foundation.artifacts.run_folder import open_run
from foundation.machine.process import environment, spawn
from foundation.models.checkpoint import load_float
from parts.http_load import Request, loaded
from parts.served_model import ServedModel, Settings, arguments, carry_out, head_of, in_turns, median, ratio
from triton_repo.server import free_port

UNDER_WAY = (1, 8, 64)
START_SECONDS = 600.0
OURS, THEIRS = "compress serve", "Infinity"


class Bench:
    """What the scenarios share.

    Args:
        model: The model.
        given: The command line.
    """

    def __init__(self, model: ServedModel, given: argparse.Namespace) -> None:
        run = open_run(model.run)
        self.model, self.given = model, given
        self.baseline = run.variants[run.baseline].path
        self.folder = given.folder or Path(str(run.recipe["model"]["path"]))
        self.texts = [str(row) for row in model.rows]

    @contextmanager
    def serving(self) -> Iterator[dict[str, tuple[str, str]]]:
        """Starts both servers; yields the route for vectors of each, and the name of its model."""
        count, threads = self.given.instances, self.model.threads
        settings = Settings() if count is None else Settings(instances=count, threads=threads // count)
        with self.model.serving(settings) as ours, infinity(self.given.python, self.folder, self.given.engine, threads) as theirs:
            yield {OURS: (f"http://{ours.service.http_address}/v1/embeddings", self.model.name), THEIRS: (f"{theirs}/embeddings", "peer")}


@contextmanager
def infinity(python: Path, folder: Path, engine: str, threads: int) -> Iterator[str]:
    """Starts Infinity; yields its address."""
    port = free_port()
    command = [str(python.parent / "infinity_emb"), "v2", "--model-id", str(folder.resolve()), "--served-model-name", "peer"]
    command += ["--engine", engine, "--device", "cpu", "--no-bettertransformer", "--host", "127.0.0.1", "--port", str(port)]
    settings = environment(HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", OMP_NUM_THREADS=str(threads), INFINITY_LOG_LEVEL="warning")
    settings.pop("PYTHONPATH")  # it has packages of its own
    with tempfile.TemporaryFile() as log:
        process = spawn(command, group=True, env=settings, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    """Waits until a server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "Infinity ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"Infinity does not answer within {START_SECONDS:.0f} s")


def cosine(bench: Bench) -> dict[str, Any]:
    """See above."""
    texts = bench.texts[: bench.given.rows]
    expected = in_torch(bench.baseline, texts)
    with bench.serving() as sides:
        found = {name: vectors(url, model, texts) for name, (url, model) in sides.items()}
    cosines = {name: _cosines(one, expected) for name, one in found.items()}
    return {name: {"lowest": float(one.min()), "mean": float(one.mean()), "n": len(one)} for name, one in cosines.items()}


def _cosines(found: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    products = (found * expected).sum(1)
    cosines: NDArray[np.float64] = products / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    return cosines


@torch.no_grad()
def in_torch(folder: Path, texts: Sequence[str]) -> NDArray[np.float64]:
    """Returns the vectors of a checkpoint, float64 [N, D]."""
    model, tokenizer = load_float(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double().numpy())
    return np.stack(found)


def vectors(url: str, model: str, texts: Sequence[str]) -> NDArray[np.float64]:
    """Returns the vectors of a server, float64 [N, D], asked for one text after the other."""
    found = []
    for body, headers in requests(model, texts):
        with urllib.request.urlopen(urllib.request.Request(url, body, dict(headers))) as answer:
            (one,) = json.load(answer)["data"]
        found.append(np.frombuffer(base64.b64decode(one["embedding"]), "<f4").astype(np.float64))
    return np.stack(found)


def requests(model: str, texts: Sequence[str]) -> list[Request]:
    """Returns a request for each text."""
    head = {"Content-Type": "application/json"}
    return [(json.dumps({"model": model, "input": [text], "encoding_format": "base64"}).encode(), head) for text in texts]


def throughput(bench: Bench) -> dict[str, Any]:
    """See above."""
    result: dict[str, Any] = {}
    with bench.serving() as sides:
        for under_way in UNDER_WAY:
            arms = {name: _arm(url, requests(model, bench.texts), bench, under_way) for name, (url, model) in sides.items()}
            for arm in arms.values():
                arm()  # warms up
            found = in_turns(arms, bench.given.turns)
            result[f"{under_way} under way"] = {
                "requests_per_s": {name: median(one, "rows_per_s") for name, one in found.items()},
                "p50_ms": {name: median(one, "p50_ms") for name, one in found.items()},
                f"{OURS} over {THEIRS}": ratio(found[OURS], found[THEIRS]),
                "turns": found,
            }
    return result


def _arm(url: str, some: Sequence[Request], bench: Bench, under_way: int) -> Callable[[], dict[str, Any]]:
    return lambda: loaded(url, some, 1, bench.given.seconds, under_way)


def main() -> None:
    """Runs the scenarios."""
    scenarios = (cosine, throughput)
    parser = arguments(__doc__, scenarios, seconds=3.0)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of an environment with infinity-emb")
    parser.add_argument("--engine", default="torch", help="engine of Infinity")
    parser.add_argument("--folder", type=Path, help="folder that Infinity serves; default: the model of the run")
    parser.add_argument("--instances", type=int, help="processes of our model; default: those of the run")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    bench = Bench(ServedModel.of(given.run.resolve(), given.model), given)
    program = "from importlib.metadata import version; print(*(f'{name} {version(name)}' for name in ('infinity-emb', 'torch')))"
    peer = subprocess.run([str(given.python), "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    carry_out(given, {**head_of(bench.model), "peer": peer}, scenarios, bench)


if __name__ == "__main__":
    main()
