"""llama.cpp as an engine that answers prompts, in an environment of its own; speaks as `export.engines.worker` does.

    quantize    source, target, format    -> bytes; `llama_model_quantize` of the library, format such as Q4_K_M
    open        spec: file, threads       -> versions, with what the library says of the processor and of its buffers
    generate    rows (file), decoding     -> answers, peak_memory_bytes
    score       rows (file)               -> nll (sum over all tokens but the first of each row), tokens

Settings: flash attention on, keys and values in float16 (its default), weights repacked where it has kernels for that (its default), one
number of threads for prompts and for tokens, at most 2,048 tokens a call and 512 at once (its defaults). A stream is a sequence of one
context; the most likely token is taken by numpy. Nothing of this project is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as library
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
BATCH, AT_ONCE = 2048, 512
ROOM = 1024
"""A sequence has room for a multiple of so many tokens, so that a warm-up uses the context that is timed."""
STREAMS = 32
"""Prompts that are answered at once; more are answered in groups."""
SHOWN = ("buffer size", "flash_attn", "Flash Attention")
"""Lines of the log that say what the library does."""


class Log:
    """Collects the lines of the library's log that `SHOWN` names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._taken = library.llama_log_callback(self._take)  # kept: the library calls it as long as the process lives
        library.llama_log_set(self._taken, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _: object) -> None:
        line = " ".join(text.decode(errors="replace").split())
        if any(shown in line for shown in SHOWN) and line not in self.lines:
            self.lines.append(line)


class Engine:
    """An open model."""

    def __init__(self, file: str, threads: int, log: Log) -> None:
        self._threads, self._log = threads, log
        self._model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp does not load {file}")
        self._width = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._sizes, self._context = (0, 0), None
        self._batch = library.llama_batch_init(BATCH, 0, 1)

    def versions(self) -> dict[str, str]:
        """Returns the version of the package, what it says of the processor, and of its buffers."""
        self._opened(1, ROOM)
        told = library.llama_print_system_info().decode()
        return {"llama-cpp-python": version("llama-cpp-python"), "llama.cpp": told, "log": "; ".join(self._log.lines)}

    def generate(self, prompts: Sequence[Tokens], count: int) -> list[dict[str, Any]]:
        """Returns the greedy answers to prompts that are asked at once, and when each token came."""
        self._opened(len(prompts), max(map(len, prompts)) + count)
        chosen: list[list[int]] = [[] for _ in prompts]
        seconds: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()
        streams = np.concatenate([np.full(len(prompt), stream) for stream, prompt in enumerate(prompts)])
        places = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
        last = np.concatenate([np.arange(len(prompt)) == len(prompt) - 1 for prompt in prompts])
        tokens = np.concatenate(prompts)
        while True:
            for start in range(0, len(tokens), BATCH):
                part = slice(start, start + BATCH)
                for place, token in self._decode(tokens[part], places[part], streams[part], last[part]):
                    stream = streams[start + place]
                    chosen[stream].append(token)
                    seconds[stream].append(time.perf_counter() - started)
            if len(chosen[0]) == count:
                return [
                    {"tokens": [mine], "seconds": times, "proposed": 0, "accepted": 0} for mine, times in zip(chosen, seconds, strict=True)
                ]
            streams = np.arange(len(prompts))
            places = np.array([len(prompt) + len(mine) - 1 for prompt, mine in zip(prompts, chosen, strict=True)])
            tokens, last = np.array([mine[-1] for mine in chosen]), np.ones(len(prompts), bool)

    def nll(self, row: Tokens) -> float:
        """Returns the negative log-likelihood of all tokens of a row but the first, summed."""
        count = len(row)
        self._opened(1, count)
        self._run(row, np.arange(count), np.zeros(count, int), np.ones(count, bool))
        scores_TV = np.ctypeslib.as_array(library.llama_get_logits(self._context), (count, self._width))[:-1].astype(np.float64)
        largest_T = scores_TV.max(axis=1)
        totals_T = np.exp(scores_TV - largest_T[:, None]).sum(axis=1)
        return float((np.log(totals_T) + largest_T - scores_TV[np.arange(count - 1), row[1:]]).sum())

    def _opened(self, streams: int, length: int) -> None:
        """Empties the context, or opens another where it has other sizes."""
        sizes = (streams, -(-length // ROOM) * ROOM)
        if self._context is not None and sizes == self._sizes:
            library.llama_memory_clear(library.llama_get_memory(self._context), True)
            return
        if self._context is not None:
            library.llama_free(self._context)
        params = library.llama_context_default_params()
        params.n_seq_max, params.n_ctx = streams, streams * sizes[1]
        params.n_batch, params.n_ubatch = BATCH, AT_ONCE
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._sizes, self._context = sizes, library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp opens no context of {streams} sequences of {sizes[1]} tokens")

    def _decode(self, tokens: Tokens, places: NDArray[Any], streams: NDArray[Any], asked: NDArray[Any]) -> list[tuple[int, int]]:
        """Runs tokens; returns for each of those asked its place in the batch and the most likely next token."""
        self._run(tokens, places, streams, asked)
        found = []
        for place in np.flatnonzero(asked):
            logits = np.ctypeslib.as_array(library.llama_get_logits_ith(self._context, int(place)), (self._width,))
            found.append((int(place), int(logits.argmax())))
        return found

    def _run(self, tokens: Tokens, places: NDArray[Any], streams: NDArray[Any], asked: NDArray[Any]) -> None:
        batch, count = self._batch, len(tokens)
        if count > BATCH:
            raise ValueError(f"{count} tokens in a call; at most {BATCH}")
        batch.n_tokens = count
        for field, values in ((batch.token, tokens), (batch.pos, places), (batch.n_seq_id, np.ones(count)), (batch.logits, asked)):
            np.ctypeslib.as_array(field, (count,))[:] = values
        for place, stream in enumerate(streams.tolist()):
            batch.seq_id[place][0] = stream
        status = library.llama_decode(self._context, batch)
        if status != 0:
            raise ValueError(f"llama_decode returned {status} for {count} tokens")


def quantize(request: Mapping[str, Any]) -> dict[str, Any]:
    """Quantizes a file of floats in a format of the library, with its defaults."""
    params = library.llama_model_quantize_default_params()
    params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{request['format']}")
    target = Path(request["target"])
    status = library.llama_model_quantize(request["source"].encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise ValueError(f"llama_model_quantize returned {status} for {request['format']}")
    return {"bytes": target.stat().st_size}


def read_rows(path: str) -> list[Tokens]:
    """Reads blocks of token ids from a safetensors file: `bytes` uint8 [total] and `lengths` int64 [n, 1], in bytes."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    begin, end = header["lengths"]["data_offsets"]
    lengths = np.frombuffer(data[start + begin : start + end], np.int64)
    begin, end = header["bytes"]["data_offsets"]
    ids = np.frombuffer(data[start + begin : start + end], np.int32)
    return np.split(ids, np.cumsum(lengths // ids.itemsize)[:-1])


def answer(opened: list[Engine], log: Log, request: Mapping[str, Any]) -> dict[str, Any]:
    """Does what one request asks."""
    if request["op"] == "quantize":
        return quantize(request)
    if request["op"] == "open":
        opened.append(Engine(request["spec"]["file"], request["spec"]["threads"], log))
        return {"versions": opened[0].versions()}
    rows = read_rows(request["rows"])
    if request["op"] == "score":
        return {"nll": sum(map(opened[0].nll, rows)), "tokens": sum(len(row) - 1 for row in rows)}
    groups = (rows[start : start + STREAMS] for start in range(0, len(rows), STREAMS))
    answers = [one for group in groups for one in opened[0].generate(group, request["decoding"]["max_tokens"])]
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
    return {"answers": answers, "peak_memory_bytes": 1024 * int(peak)}


def replied(respond: Callable[[Mapping[str, Any]], Mapping[str, Any]], line: str) -> Mapping[str, Any]:
    """Returns the answer to a line; an error is an answer too, and its trace goes to standard error."""
    try:
        return respond(json.loads(line))
    except (ValueError, OSError, KeyError, AttributeError) as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers the requests of the input until it ends; what the library prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    opened: list[Engine] = []
    log = Log()
    library.llama_backend_init()
    for line in sys.stdin:
        channel.write(json.dumps(replied(lambda request: answer(opened, log, request), line)) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
