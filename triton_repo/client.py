"""gRPC client for a model in Triton: predictions on the evaluation split, and latency under a given load.

    worker 1:  row 0 ----> row 2 ----> row 5 ...      each worker has one request in flight and takes the next row after its response
    worker 2:  row 1 --> row 3 -> row 4 ...           concurrency = number of workers

Latency is measured by a client on the same machine: serialization, network stack, queueing, batching and the model.

Rows are sent one a request, and batching is left to the server; only `batch_latency` sends several rows in one.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.triton import Limit, Load
from foundation.core.arrays import Array
from foundation.machine.waits import WaitedShare
from foundation.measure.answers import compressed
from foundation.standalone.adapted import adapter_of
from foundation.standalone.preprocess import Preprocessor, Row
from foundation.standalone.response import LOGITS, RESPONSES, TIER, VECTOR, placed
from foundation.standalone.windows import Window, parted, read_contexts
from triton_repo.config import inputs_of

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient, InferInput

REQUEST_SECONDS = 120.0
QUANTILES = (50, 90, 99)
MIN_FOR_P99 = 200
LOAD_REQUESTS, LOAD_SECONDS = 400, 5.0
"""Most requests, and most seconds, of a measurement under a constant load."""
OUTPUTS = (*dict.fromkeys(output.name for response in RESPONSES.values() for output in response.outputs(1)), TIER)
"""Every output that a model may have."""


class RequestError(RuntimeError):
    """A request failed or timed out; a one-line message that names the row."""


class ServedWrong(RuntimeError):
    """The answers of the server differ from the engine's; a one-line message."""


class Result(Protocol):
    """What a client of Triton returns, over gRPC or HTTP."""

    def as_numpy(self, name: str) -> Array | None:
        """Returns an output; None where the model has none of this name."""


@dataclass(frozen=True)
class Answers:
    """The responses of a model, in row order."""

    logits: NDArray[np.float32]
    """Raw outputs of the engine, float32 [n, C], or vectors [n, D]; of all tokens [n, L, C], with zeros after the end of shorter
    responses."""
    outputs: Mapping[str, Array]
    """The other outputs by name, [n, ...]; strings are bytes in an array of objects."""

    rows: Sequence[Row] = ()
    """The rows that were sent."""
    tiers: NDArray[np.int32] | None = None
    """Of a cascade the number of the tier that answered, from 1, int32 [n]."""

    @classmethod
    def of(cls, results: Sequence[Result], rows: Sequence[Row] = ()) -> Answers:
        """Returns the responses of the results of a client, one row each."""
        found = [{name: array for name in OUTPUTS if (array := result.as_numpy(name)) is not None} for result in results]
        whole = {name: _joined([one[name] for one in found]) for name in found[0]}
        raw = VECTOR if VECTOR in whole else LOGITS
        tiers = whole.pop(TIER).reshape(-1) if TIER in whole else None
        return cls(whole.pop(raw), whole, rows, tiers)

    def stored_predictions(self, prepared: Preprocessor) -> NDArray[np.float32]:
        """Returns the part of what the engine computed that is kept as predictions (`foundation.measure.answers.compressed`)."""
        if not prepared.finds_spans:
            return compressed(prepared, self.rows, self.logits)
        windows = [row for row in self.rows if isinstance(row, Window)]
        return compressed(
            prepared, windows, parted(read_contexts(prepared, [(row.question, row.context) for row in windows]), windows, self.logits)
        )

    def contradiction(self, prepared: Preprocessor) -> str | None:
        """Returns in one line the first output that does not follow from the logits; None if there is none."""
        response = RESPONSES[prepared.response]
        pairs = [(row.question, row.context) for row in self.rows if isinstance(row, Window)]
        told: Sequence[object] = read_contexts(prepared, pairs) if prepared.finds_spans else placed(prepared, self.rows)
        expected = response.of(self.logits, prepared.labels, told)
        del expected[response.RAW]
        if expected.keys() != self.outputs.keys():
            given, wanted = (", ".join(sorted(names)) or "none" for names in (self.outputs, expected))
            return f"outputs beside {response.RAW}: {given}; {wanted} expected"
        for name, values in expected.items():
            got = self.outputs[name]
            wrong = response.differ(got, values)
            if wrong.any():
                row = int(wrong.argmax())
                return f"row {row} has {name} {_shown(got[row])}, but its logits give {_shown(values[row])}"
        return None


def evaluate(
    address: str,
    model: str,
    rows: Sequence[Row],
    concurrency: int = 4,
    advance: Callable[[int], None] | None = None,
) -> Answers:
    """Sends every row once.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        rows: n rows.
        concurrency: Number of requests in flight.
        advance: Called with 1 after each response.

    Raises:
        RequestError: A request failed; no further rows are sent.
    """
    answers: dict[int, Result] = {}
    lock = Lock()

    def note(index: int, result: Result, _: float) -> None:
        answers[index] = result
        if advance is not None:
            with lock:
                advance(1)

    drive(address, model, rows, enumerate(rows), concurrency, note)
    return Answers.of([answers[index] for index in range(len(rows))], rows)


def latency(
    address: str,
    model: str,
    rows: Sequence[Row],
    concurrency: int,
    *,
    requests: int = LOAD_REQUESTS,
    seconds: float = LOAD_SECONDS,
    warm_up: int = 20,
) -> Load:
    """Measures request latency under a constant load: real rows in turn, one row per request.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        rows: Rows to send, in a cycle.
        concurrency: Number of requests in flight.
        requests: Maximum number of requests.
        seconds: Maximum duration.
        warm_up: Uncounted requests of each worker before the measurement.

    Returns:
        The latency; its `p99_ms` is None below 200 requests.

    Raises:
        RequestError: A request failed.
    """
    samples: list[float] = []
    drive(address, model, rows, _cycle(rows, warm_up * concurrency, None), concurrency, lambda *_: None)
    started = time.perf_counter()
    drive(address, model, rows, _cycle(rows, requests, started + seconds), concurrency, lambda _, __, taken: samples.append(taken))
    spent = time.perf_counter() - started
    p50, p90, p99 = _percentiles(samples)
    rate = round(len(samples) / spent, 2)
    return Load(concurrency=concurrency, p50_ms=p50, p90_ms=p90, p99_ms=p99, throughput_per_s=rate, n=len(samples))


def batch_latency(
    address: str,
    model: str,
    rows: Sequence[Row],
    *,
    processes: Sequence[int] = (),
    requests: int = LOAD_REQUESTS,
    seconds: float = LOAD_SECONDS,
    warm_up: int = 20,
) -> Limit:
    """Measures the latency of one request with all `rows`, sent again and again, one under way.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        rows: Rows of the request.
        processes: Processes of the server; whether they and this process waited for a core is noted.
        requests: Maximum number of requests.
        seconds: Maximum duration.
        warm_up: Uncounted requests before the measurement.

    Returns:
        The latency without its shape; its `p99_ms` is None below 200 requests.

    Raises:
        RequestError: A request failed.
    """
    from tritonclient.grpc import InferenceServerClient

    samples: list[float] = []
    with InferenceServerClient(address) as client:
        for _ in range(warm_up):
            infer_rows(client, model, rows)
        waits = WaitedShare([os.getpid(), *processes])
        end = time.perf_counter() + seconds
        while len(samples) < requests and (not samples or time.perf_counter() < end):
            started = time.perf_counter()
            infer_rows(client, model, rows)
            samples.append(time.perf_counter() - started)
        waited = waits.share()
    p50, p90, p99 = _percentiles(samples)
    return Limit(p50_ms=p50, p90_ms=p90, p99_ms=p99, n=len(samples), waited=None if waited is None else round(waited, 4))


def _percentiles(samples: Sequence[float]) -> tuple[float, float, float | None]:
    """Returns p50, p90 and p99 in ms of samples in seconds; p99 is None where there are too few."""
    p50, p90, p99 = (round(1e3 * float(value), 4) for value in np.percentile(samples, QUANTILES))
    return p50, p90, p99 if len(samples) >= MIN_FOR_P99 else None


def drive(
    address: str,
    model: str,
    rows: Sequence[Row],
    feed: Iterator[tuple[int, Row]],
    concurrency: int,
    note: Callable[[int, Result, float], None],
) -> None:
    """Sends the rows of `feed` with `concurrency` workers and calls `note` with index, result and seconds of each.

    The first failure stops all workers and is raised.
    """
    from tritonclient.grpc import InferenceServerClient

    lock, failed = Lock(), Event()

    def next_row() -> tuple[int, Row] | None:
        with lock:
            return next(feed, None)

    def work() -> None:
        with InferenceServerClient(address) as client:
            while not failed.is_set() and (entry := next_row()) is not None:
                index, row = entry
                started = time.perf_counter()
                try:
                    result = infer(client, model, row)
                except BaseException as error:
                    failed.set()
                    if isinstance(error, RequestError):
                        raise RequestError(f"row {index} of {len(rows)}: {error}") from error
                    raise
                note(index, result, time.perf_counter() - started)

    with ThreadPoolExecutor(concurrency) as pool:
        try:
            for future in [pool.submit(work) for _ in range(concurrency)]:
                future.result()
        except BaseException:  # also Ctrl-C: the workers stop after their current request
            failed.set()
            raise


def infer(client: InferenceServerClient, model: str, row: Row, seconds: float = REQUEST_SECONDS) -> Result:
    """Sends one row and returns the client's result.

    Raises:
        RequestError: The request failed or timed out.
    """
    return infer_rows(client, model, [row], seconds)


def infer_rows(client: InferenceServerClient, model: str, rows: Sequence[Row], seconds: float = REQUEST_SECONDS) -> Result:
    """Sends one request with several rows and returns the client's result; errors as above."""
    from tritonclient.grpc import InferInput
    from tritonclient.utils import InferenceServerException

    try:
        result: Result = client.infer(model, tensors(rows, InferInput), client_timeout=seconds)
        return result
    except InferenceServerException as error:
        raise RequestError(f"model {model}: the request failed: {' '.join(str(error.message()).split())[:300]}") from error


def inputs(row: Row) -> list[InferInput]:
    """Returns the input tensors of one row for gRPC, [1, 1] each."""
    from tritonclient.grpc import InferInput

    return tensors([row], InferInput)


def tensors(rows: Sequence[Row], kind: type[InferInput]) -> list[InferInput]:
    """Returns the input tensors of a request.

    Args:
        rows: k rows: all texts, all pairs of texts, all encoded images, all encoded sounds, or all windows; of these the whole context is
            sent.
        kind: Class `InferInput` of the protocol.

    Returns:
        Tensors BYTES [k, 1]: TEXT, TEXT and TEXT_PAIR, QUESTION and CONTEXT, IMAGE, or AUDIO; with texts ADAPTER, where rows name one.
    """
    made = []
    for index, name in enumerate(inputs_of(rows[0])):
        values = np.array([[_bytes(parts_of(row)[index])] for row in rows], dtype=np.object_)
        tensor = kind(name, list(values.shape), "BYTES")
        tensor.set_data_from_numpy(values)
        made.append(tensor)
    return made


def parts_of(row: Row) -> tuple[str | bytes, ...]:
    """Returns the parts of a row, one for each input."""
    texts = row.texts if isinstance(row, Window) else row if isinstance(row, tuple) else (row,)
    parts = tuple(text for text in texts if isinstance(text, str | bytes))
    assert len(parts) == len(texts), "rows of tokens go to the models that generate"
    name = adapter_of(row)
    return parts if name is None else (*parts, name)


def _joined(parts: Sequence[Array]) -> Array:
    """Returns the outputs of several requests as one; of tokens those that are missing in shorter ones are zeros."""
    if parts[0].ndim < 3:
        return np.concatenate(parts)
    longest = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, longest - part.shape[1]), (0, 0))) for part in parts])


def _shown(values: Array) -> str:
    """Returns the first of the values of an output, for a message."""
    first = values.reshape(-1)[0]
    return repr(first.decode("utf-8", "replace")) if isinstance(first, bytes) else f"{float(first):.6f}"


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8")


def _cycle(rows: Sequence[Row], count: int, deadline: float | None) -> Iterator[tuple[int, Row]]:
    """Yields rows in turn, at most `count` and none after `deadline`."""
    for index in itertools.islice(itertools.cycle(range(len(rows))), count):
        if deadline is not None and time.perf_counter() > deadline:
            return
        yield index, rows[index]
