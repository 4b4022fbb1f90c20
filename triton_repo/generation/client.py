"""gRPC client for a language model in Triton: answers as they come, and their timing under a given load.

    with LanguageClient(address, model) as client:
        for piece in client.stream(text="Once upon a time", max_tokens=40):
            print(piece.text, end="", flush=True)

The settings are the keys of `served.request.FIELDS` in small letters, and `stop`, `stop_tokens`. To cancel an answer, leave the loop.

    first token      from the request to the first response with a token
    time per token   between two responses with tokens, divided by the number of tokens of the second
"""

from __future__ import annotations

import itertools
import json
import queue
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.figures import Percentiles
from foundation.artifacts.triton import Load
from foundation.measure.tokens import ENDED
from triton_repo.client import MIN_FOR_P99, QUANTILES, RequestError
from triton_repo.front.limits import GRACE_SECONDS
from triton_repo.generation.config import PROMPTS
from triton_repo.generation.limits import REQUEST_SECONDS
from triton_repo.generation.served.messages import MESSAGES
from triton_repo.generation.served.request import FIELDS, INPUT_IDS, TEXT

if TYPE_CHECKING:
    from tritonclient.grpc import InferInput, InferResult
    from tritonclient.utils import InferenceServerException

    Arrived = queue.Queue[tuple[InferResult, InferenceServerException | None]]

DATATYPES = {**{name: about[0] for name, about in PROMPTS.items()}, **{one.name: one.datatype for one in FIELDS}}
FINAL = "triton_final_response"
"""Parameter of the last response to a request."""
Setting = bool | int | float | str | Sequence[int] | Sequence[str]
"""The value of an input."""
NUMBERS: Mapping[str, type[np.generic]] = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}


class Prompted(TypedDict, total=False):
    """A prompt: one of these."""

    text: str
    messages: Sequence[Mapping[str, str]]
    ids: Sequence[int]


@dataclass(frozen=True)
class Piece:
    """One response."""

    text: str
    tokens: list[int]
    index: int = 0
    """Number of the answer, where a search gives several."""
    finish_reason: str | None = None
    """stop, length, timeout or cancelled in the last piece of an answer; None before."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class LanguageClient:
    """A connection to one model, for one answer at a time; a context manager.

    One stream of gRPC carries all answers, as long as each is read to its end: opening another one for each answer takes a thread here and
    a call there, longer than the answer of a small model.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        seconds: Most time between two pieces. Default: a little longer than the model may take for an answer.
        request_seconds: Most time that the model may take for an answer.
    """

    def __init__(self, address: str, model: str, seconds: float | None = None, *, request_seconds: float = REQUEST_SECONDS) -> None:
        from tritonclient.grpc import InferenceServerClient

        self._client, self._model = InferenceServerClient(address), model
        self._seconds = request_seconds + GRACE_SECONDS if seconds is None else seconds
        self._responses: Arrived | None = None
        """What comes in the open stream; None: none is open."""
        self._answering = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._client.close()

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        ids: Sequence[int] | None = None,
        **settings: Setting | None,
    ) -> Generator[Piece]:
        """Yields the answer to a prompt in pieces; give one of `text`, `messages` and `ids`.

        Raises:
            RequestError: The server refused the request or did not answer in time, or another answer is under way.
        """
        given: dict[str, Setting | None] = {TEXT: text, MESSAGES: None if messages is None else json.dumps(list(messages)), INPUT_IDS: ids}
        values = {**given, **{name.upper(): value for name, value in settings.items()}}
        tensors = inputs({name: value for name, value in values.items() if value is not None})
        if self._answering:
            raise RequestError(f"model {self._model}: an answer is under way on this connection; read it to its end, or close it")
        responses, whole, self._answering = self._open(), False, True
        try:
            self._client.async_stream_infer(self._model, tensors)
            while not whole:
                piece, whole = self._next(responses)
                yield piece
        finally:
            self._answering = False
            if not whole:
                self._stop()

    def _stop(self) -> None:
        """Ends the stream, and the answer in it."""
        self._responses = None
        self._client.stop_stream(cancel_requests=True)

    def _open(self) -> Arrived:
        """Opens a stream, if none is open; returns what comes in it."""
        if self._responses is not None and not self._responses.empty():  # between two answers comes nothing but its end
            self._stop()
        if self._responses is None:
            arrived: Arrived = queue.Queue()
            self._client.start_stream(lambda result, error: arrived.put((result, error)))
            self._responses = arrived
        return self._responses

    def _next(self, responses: Arrived) -> tuple[Piece, bool]:
        """Returns the next piece, and whether it is the last."""
        try:
            result, error = responses.get(timeout=self._seconds)
        except queue.Empty:
            raise RequestError(f"model {self._model}: no piece within {self._seconds:g} s") from None
        if error is not None:
            raise RequestError(f"model {self._model}: the request failed: {' '.join(str(error.message()).split())[:300]}")
        return _piece(result), bool(result.get_response().parameters[FINAL].bool_param)


def inputs(values: Mapping[str, Setting]) -> list[InferInput]:
    """Returns the input tensors of a request.

    Raises:
        RequestError: There is no such input.
    """
    from tritonclient.grpc import InferInput

    unknown = [name for name in values if name not in DATATYPES]
    if unknown:
        raise RequestError(f"{unknown[0].lower()}: no such setting; {', '.join(name.lower() for name in DATATYPES)} are known")
    tensors = []
    for name, value in values.items():
        datatype = DATATYPES[name].removeprefix("TYPE_")
        items = [value] if isinstance(value, str | int | float) else list(value)
        if datatype == "STRING":
            array = np.array([str(item).encode("utf-8") for item in items], np.object_)
        else:
            array = np.array(items, NUMBERS[datatype])
        tensors.append(InferInput(name, [len(array)], "BYTES" if datatype == "STRING" else datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def greedy(
    address: str,
    model: str,
    prompts: Sequence[NDArray[np.int32]],
    tokens: int,
    concurrency: int,
    *,
    ends: bool = False,
    request_seconds: float = REQUEST_SECONDS,
) -> NDArray[np.int32]:
    """Returns the most likely tokens after each prompt, int32 [n, T].

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        prompts: int32 [P] each.
        tokens: T.
        concurrency: Number of answers at once.
        ends: Whether end tokens end an answer; `ENDED` follows it.
        request_seconds: Most time that the model may take for an answer.

    Raises:
        RequestError: A request failed, or an answer has another length.
    """

    def answer(prompt: NDArray[np.int32]) -> list[int]:
        with LanguageClient(address, model, request_seconds=request_seconds) as client:
            pieces = list(client.stream(ids=prompt.tolist(), max_tokens=tokens, ignore_eos=not ends))
        found = [token for piece in pieces for token in piece.tokens]
        if len(found) != tokens and not (ends and pieces[-1].finish_reason == "stop"):
            reason = pieces[-1].finish_reason
            more = "; raise triton_repo.request_seconds" if reason == "timeout" else ""
            raise RequestError(f"model {model}: {len(found)} tokens came, {tokens} were asked for ({reason}){more}")
        return found + [ENDED] * (tokens - len(found))

    with ThreadPoolExecutor(concurrency) as pool:
        return np.array(list(pool.map(answer, prompts)), np.int32)


def short_answer(address: str, model: str, prompt: Prompted, tokens: int) -> Piece:
    """Returns the greedy answer to one prompt in one piece, past end tokens.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        prompt: The prompt.
        tokens: Tokens of the answer.

    Raises:
        RequestError: The request failed.
    """
    with LanguageClient(address, model) as client:
        pieces = list(client.stream(**prompt, max_tokens=tokens, ignore_eos=True, stream=False))
    tokens_of = [token for piece in pieces for token in piece.tokens]
    return replace(pieces[-1], text="".join(piece.text for piece in pieces), tokens=tokens_of)


@dataclass
class Samples:
    """The measured figures."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each answer."""
    between: list[float] = field(default_factory=list)
    """Seconds for each later token."""
    whole: list[float] = field(default_factory=list)
    """Seconds of each answer."""
    tokens: int = 0

    def add(self, moments: Sequence[tuple[float, int]], started: float) -> None:
        """Adds an answer: when pieces came and how many tokens they had."""
        came = [(moment, count) for moment, count in moments if count]
        self.first.append(came[0][0] - started)
        for (before, _), (moment, count) in itertools.pairwise(came):
            self.between += [(moment - before) / count] * count
        self.whole.append(moments[-1][0] - started)
        self.tokens += sum(count for _, count in came)

    def figures(self, seconds: float) -> Load:
        """Returns times and rates of a measurement that took so many seconds."""
        whole = quantiles(self.whole)
        return Load(
            p50_ms=whole.p50,
            p90_ms=whole.p90,
            p99_ms=whole.p99,
            first_token_ms=quantiles(self.first),
            token_ms=quantiles(self.between),
            tokens_per_s=round(self.tokens / seconds, 2),
            throughput_per_s=round(len(self.whole) / seconds, 2),
            n=len(self.whole),
        )


def load(
    address: str,
    model: str,
    prompts: Sequence[NDArray[np.int32]],
    tokens: int,
    concurrency: int,
    *,
    requests: int = 200,
    seconds: float = 10.0,
    request_seconds: float = REQUEST_SECONDS,
) -> Load:
    """Measures answers under a constant load: real prompts in turn, greedy, all of the same length.

    Args:
        address: host:port of gRPC.
        model: Name of the model.
        prompts: int32 [P] each.
        tokens: Tokens of each answer.
        concurrency: Number of answers at once.
        requests: Maximum number of answers.
        seconds: No answer begins after this time.
        request_seconds: Most time that the model may take for an answer.

    Returns:
        The latency; a p99 is None below 200 samples.

    Raises:
        RequestError: A request failed.
    """
    samples, lock, feed = Samples(), Lock(), itertools.islice(itertools.cycle(prompts), requests)
    begun = time.perf_counter()

    def work() -> None:
        with LanguageClient(address, model, request_seconds=request_seconds) as client:
            while True:
                with lock:
                    prompt = next(feed, None)
                started = time.perf_counter()
                if prompt is None or (samples.whole and started > begun + seconds):
                    return
                moments = []
                with closing(client.stream(ids=prompt.tolist(), max_tokens=tokens, ignore_eos=True)) as pieces:
                    for piece in pieces:
                        moments.append((time.perf_counter(), len(piece.tokens)))
                with lock:
                    samples.add(moments, started)

    with ThreadPoolExecutor(concurrency) as pool:
        for future in [pool.submit(work) for _ in range(concurrency)]:
            future.result()
    spent = time.perf_counter() - begun
    length = int(np.median([len(one) for one in prompts]))
    return samples.figures(spent).with_(concurrency=concurrency, prompt_tokens=length, answer_tokens=tokens)


def quantiles(seconds: Sequence[float]) -> Percentiles:
    """Returns p50, p90 and p99 in milliseconds; None where there are too few samples."""
    if not seconds:
        return Percentiles(p50=None, p90=None, p99=None)
    p50, p90, p99 = (round(1e3 * float(value), 4) for value in np.percentile(seconds, QUANTILES))
    return Percentiles(p50=p50, p90=p90, p99=p99 if len(seconds) >= MIN_FOR_P99 else None)


def _piece(result: InferResult) -> Piece:
    piece = Piece(result.as_numpy("TEXT")[0].decode("utf-8"), result.as_numpy("TOKENS").tolist(), int(result.as_numpy("INDEX")[0]))
    reason = result.as_numpy("FINISH_REASON")
    if reason is None:
        return piece
    read, written = (int(result.as_numpy(name)[0]) for name in ("PROMPT_TOKENS", "COMPLETION_TOKENS"))
    return replace(piece, finish_reason=reason[0].decode("utf-8"), prompt_tokens=read, completion_tokens=written)
