"""The process that an engine runs in: `python -m export.engines.worker`, started by `foundation.measure.engine_process`.

It reads one JSON request a line from its input and writes one JSON answer a line; the end of its input ends it. Libraries print to standard
output as they like, so that the channel is a copy of it, and standard output itself is turned to standard error first.

    open        spec                                 -> versions
    predict     rows, out (files), batch_size, stream -> n, placement; with stream first lines {"done"}: rows of a batch
    measure     batch, sequence, least, most, seconds -> samples_ms, cpu_ms, waited_ms, came_first, peak_memory_bytes, placement
    precisions  gemms, batch, sequence               -> precisions
    reported                                         -> reported
    probe       rows, out (files), tensors, length   -> n
    generate    rows (file), decoding, stream         -> answers, peak_memory_bytes; with stream first lines {"prompt", "tokens"}

An answer {"error": line} says what went wrong; the traceback goes to standard error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from export.engines.registry import open_engine
from export.engines.spec import Engine, EngineSpec, Generates, Probed, ReadsPrompts, Reports
from foundation.core.arrays import Features
from foundation.core.decoding import Decoding
from foundation.core.engines import ENGINES
from foundation.machine.priority import first
from foundation.machine.process import peak_memory_bytes
from foundation.machine.waits import ThreadWaits
from foundation.measure.answers import compressed
from foundation.measure.engine_process import read_rows
from foundation.measure.samples import enough, is_undisturbed
from foundation.standalone.preprocess import ADAPTER_IDS, Preprocessor, Row
from foundation.standalone.windows import merged

Request = Mapping[str, Any]
Tell = Callable[[Mapping[str, object]], None]
WARM_UP_CALLS = 3
WARM_UP_SECONDS, WARM_UP_AGAIN_SECONDS = 0.1, 0.02
"""At a new shape, and at one that was timed before."""
LONG_WARM_UP_SECONDS = 1.0
"""After so long a single call is enough."""


class Worker:
    """An open engine and the rows it understands."""

    def __init__(self, spec: EngineSpec, tell: Tell = lambda line: None) -> None:
        self.spec, self.tell = spec, tell
        self.engine: Engine = open_engine(spec)
        self.seen: set[tuple[int, int | None]] = set()

    @cached_property
    def preprocessor(self) -> Preprocessor:
        """How rows are prepared; prompts are token ids already and need none."""
        return Preprocessor.load(Path(self.spec.folder))

    def predict(self, request: Request) -> dict[str, object]:
        """Writes the logits of all rows, float32 [n, C], or for generation the answers [n, T, 2], in row order."""
        rows = read_rows(Path(request["rows"]))
        logits: np.ndarray | None = None
        for indices, found in self._logits(rows, request["batch_size"]):
            answer = compressed(self.preprocessor, [rows[index] for index in indices], found)
            logits = np.zeros((len(rows), *answer.shape[1:]), np.float32) if logits is None else logits
            logits[indices] = answer
            if request.get("stream"):
                self.tell({"done": len(indices)})
        if logits is None:
            raise ValueError("no rows to predict")
        save_file({"logits": logits}, request["out"])
        return {"n": len(rows), "placement": self.engine.placement()}

    def _logits(self, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """Yields row indices and logits of each batch; where texts are read in windows, of all rows at once."""
        found = ((indices, self.engine.predict(features)) for indices, features in self.preprocessor.batches(rows, batch_size))
        if self.preprocessor.aggregate and rows:
            yield range(len(rows)), merged(found, len(rows), self.preprocessor.aggregate)
        else:
            yield from found

    def measure(self, request: Request) -> dict[str, object]:
        """Times single calls on made-up rows: at least `least`, then until there are `most` or they took `seconds`.

        Only undisturbed calls count (`foundation.measure.samples`); disturbed ones are taken again, until there are twice as many calls as
        were wanted. All of them are returned, with processor time and waits.
        """
        shape = request["batch"], request["sequence"]
        features = synthetic(self.preprocessor, *shape)
        self._warm_up(features, shape in self.seen)
        self.seen.add(shape)
        with first(self.spec.threads) as came_first:
            samples = self._samples(features, request["least"], request["most"], request["seconds"])
        memory = peak_memory_bytes()  # placement is queried last: its memory is not the engine's
        return {**samples, "came_first": came_first, "peak_memory_bytes": memory, "placement": self.engine.placement()}

    def _samples(self, features: Features, least: int, most: int, seconds: float) -> dict[str, list[float] | list[float | None]]:
        """Returns wall time, processor time and waits of calls, ms each."""
        wall: list[float] = []
        cpu: list[float] = []
        waited: list[float | None] = []
        count, clean_s, waits = 0, 0.0, ThreadWaits()
        while not (enough(count, clean_s, least, most, seconds) or enough(len(wall), sum(wall), 2 * least, 2 * most, 2 * seconds)):
            started = time.process_time()
            wall.append(self._time(features))
            cpu.append(time.process_time() - started)
            waited.append(waits.waited_ms())
            if is_undisturbed(1e3 * wall[-1], waited[-1] or 0.0):
                count, clean_s = count + 1, clean_s + wall[-1]
        waits.close()
        return {"samples_ms": [1e3 * one for one in wall], "cpu_ms": [1e3 * one for one in cpu], "waited_ms": waited}

    def precisions(self, request: Request) -> dict[str, object]:
        """Asks the engine which precision each GEMM runs in."""
        return {"precisions": self.engine.precisions(request["gemms"], request["batch"], request["sequence"])}

    def reported(self, request: Request) -> dict[str, object]:
        """Asks the engine what decides its precision."""
        return {"reported": self.engine.reported() if isinstance(self.engine, Reports) else {}}

    def probe(self, request: Request) -> dict[str, object]:
        """Writes tensors inside the graph, for all rows in one batch."""
        if not isinstance(self.engine, Probed):
            raise ValueError(f"{self.spec.engine} does not show what is inside its graph")
        rows = read_rows(Path(request["rows"]))
        tensors = self.engine.probe(request["tensors"], self.preprocessor.encode(rows, request["length"]))
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, request["out"])
        return {"n": len(rows)}

    def generate(self, request: Request) -> dict[str, object]:
        """Answers prompts, blocks of token ids; as many run at once as the engine can."""
        if not isinstance(self.engine, Generates):
            raise ValueError(f"{self.spec.engine} does not answer prompts")
        prompts = [block for block in read_rows(Path(request["rows"])) if isinstance(block, np.ndarray)]
        told = self.tell_tokens if request["stream"] else None
        answers = self.engine.generate(prompts, Decoding.from_message(request["decoding"]), told)
        return {"answers": [answer.message() for answer in answers], "peak_memory_bytes": peak_memory_bytes()}

    def tell_tokens(self, number: int, tokens: Sequence[int]) -> None:
        """Sends the tokens of a prompt before its answer is complete."""
        self.tell({"prompt": number, "tokens": list(tokens)})

    def _warm_up(self, features: Features, seen: bool) -> None:
        calls, seconds = (1, WARM_UP_AGAIN_SECONDS) if seen else (WARM_UP_CALLS, WARM_UP_SECONDS)
        spent, done = 0.0, 0
        while (done < calls and spent < LONG_WARM_UP_SECONDS) or spent < seconds:
            spent, done = spent + self._time(features), done + 1

    def _time(self, features: Features) -> float:
        started = time.perf_counter()
        if isinstance(self.engine, ReadsPrompts):
            self.engine.read(features)
        else:
            self.engine.predict(features)
        return time.perf_counter() - started


def synthetic(preprocessor: Preprocessor, batch: int, sequence: int | None) -> dict[str, np.ndarray]:
    """Returns made-up rows of one shape: random tokens of the vocabulary, none of them padding, or random pixels, samples or energies."""
    if preprocessor.towers:  # images have no length
        preprocessor = preprocessor.towers["image" if sequence is None else "text"]
    generator = np.random.default_rng(0)
    if preprocessor.modality != "text":
        shape = preprocessor.shape or (sequence,)
        assert shape != (None,), "images of one size are needed, and waveforms need a sequence"
        values = generator.standard_normal((batch, *shape), dtype=np.float32)
        mask = np.ones((batch, *shape), np.int64)
        return dict(zip(preprocessor.input_names, (values, mask), strict=False))
    assert sequence is not None, "texts need a sequence"
    assert preprocessor.tokenizer is not None
    arrays = {
        "input_ids": generator.integers(0, preprocessor.tokenizer.get_vocab_size(), (batch, sequence), dtype=np.int64),
        "attention_mask": np.ones((batch, sequence), np.int64),
        "token_type_ids": np.zeros((batch, sequence), np.int64),
        ADAPTER_IDS: np.arange(batch)[:, None].repeat(sequence, axis=1) % max(1, len(preprocessor.adapters)),  # rows of all of them
    }
    arrays["decoder_input_ids"] = arrays["input_ids"].copy()
    # Models that count positions from the padding id would take a random token of that id for padding.
    arrays["input_ids"][arrays["input_ids"] == preprocessor.pad_token_id] = 1 if preprocessor.pad_token_id == 0 else 0
    return {name: arrays[name] for name in preprocessor.input_names}


def answer(worker: list[Worker], request: Request, tell: Tell = lambda line: None) -> dict[str, object]:
    """Does what one request asks; `worker` holds the open engine once there is one; `tell` takes lines before the answer."""
    if request["op"] == "open":
        spec = EngineSpec.from_message(request["spec"])
        worker.append(Worker(spec, tell))
        library = ENGINES[spec.engine].library
        return {"versions": {library: importlib.metadata.version(library)}}
    known: dict[str, Callable[[Request], dict[str, object]]] = {
        "predict": worker[0].predict,
        "measure": worker[0].measure,
        "precisions": worker[0].precisions,
        "reported": worker[0].reported,
        "probe": worker[0].probe,
        "generate": worker[0].generate,
    }
    return known[request["op"]](request)


def serve(answer: Callable[[Request, Tell], Mapping[str, object]]) -> None:
    """Answers the requests of the input until it ends; `answer` may tell lines before it returns its own."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: Mapping[str, object]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    for line in sys.stdin:
        tell(replied(answer, line, tell))


def replied(answer: Callable[[Request, Tell], Mapping[str, object]], line: str | bytes, tell: Tell) -> Mapping[str, object]:
    """Returns the answer to a line; whatever a library raises has to reach the parent as one too."""
    try:
        return answer(json.loads(line), tell)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def main() -> None:
    """Runs one engine until the input ends."""
    serve(partial(answer, []))


if __name__ == "__main__":
    main()
