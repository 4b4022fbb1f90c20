"""An engine in its own process, controlled through JSON lines.

The thread pools of torch, ONNX Runtime and OpenVINO slow each other down several times if they share a process, so each engine gets its
own. This module only knows a command and the map that opens the engine (`export.engines.worker` implements it). A request is one line
{"op": ..., ...}, a response one line, {"error": "..."} on failure. Arrays and rows are passed in files.

Libraries fall back in silence: ONNX Runtime to the CPU where it has no CUDA, OpenVINO to float32 where the processor has no bf16. Every
prediction and measurement therefore brings the `placement` that the engine itself reports, and one that was not asked for is an error.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from foundation.core.arrays import Array
from foundation.core.decoding import Answer, Decoding, TokenCallback
from foundation.machine.process import environment, spawn
from foundation.machine.waits import bounded_spin
from foundation.standalone.adapted import AdaptedPair, AdaptedText, adapter_of, plain, with_adapter
from foundation.standalone.preprocess import Row, TokenPair
from foundation.standalone.windows import Window

if TYPE_CHECKING:
    from foundation.stage.context import Job

KINDS: Mapping[str, type | UnionType] = {
    "image": bytes,
    "block": np.ndarray | TokenPair,
    "window": Window,
    "adapted": AdaptedText | AdaptedPair,
}
"""Kinds of rows in a file other than text."""
MIXED = "mixed"
"""Images and texts, each after the name of its type."""


class EngineError(RuntimeError):
    """An engine failed; a one-line message with the engine and its error."""


class EngineProcess:
    """A running engine; a context manager.

    Args:
        job: The engine.
        wait: Whether to wait until it is open. If not, call `await_open` before anything else.

    Raises:
        EngineError: The engine could not be opened.
    """

    def __init__(self, job: Job, *, wait: bool = True) -> None:
        self.job = job
        self.versions: dict[str, str] = {}
        self.peak_memory_bytes = 0
        self._files = tempfile.TemporaryDirectory(prefix="compress-engine-")
        threads = str(job.threads)
        env = environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, HF_HUB_OFFLINE="1", **bounded_spin())
        self._errors = Path(self._files.name, "stderr")
        with self._errors.open("wb") as errors:
            self._process = spawn(job.command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        try:
            self._send("open", spec=job.message())
            if wait:
                self.await_open()
        except BaseException:
            self.close()
            raise

    def await_open(self) -> None:
        """Waits until the engine is open.

        Raises:
            EngineError: It could not be opened.
        """
        self.versions = self._read("open")["versions"]

    def ask(self, op: str, **fields: object) -> dict[str, Any]:
        """Sends a request and waits for the response.

        Raises:
            EngineError: The engine reported an error, runs elsewhere than it was asked to, or its process exited.
        """
        self._send(op, **fields)
        return self._read(op)

    def _send(self, op: str, **fields: object) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._gone(op) from error

    def _read(self, op: str) -> dict[str, Any]:
        """Waits for the next line of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone(op)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self._name}: {answer['error']}")
        if "placement" in answer:
            self._check(answer["placement"])
        return answer

    def predict(self, rows: Sequence[Row], batch_size: int, on_rows: Callable[[int], None] | None = None) -> Array:
        """Returns the logits of `rows`, float32 [n, C] ([n, T, 2] for generation), in row order; rows are padded to their bucket.

        Args:
            rows: The rows.
            batch_size: Most rows of a batch.
            on_rows: Called after each batch with its number of rows.

        Raises:
            EngineError: The engine failed, or returned NaN or infinity.
        """
        given, answered = (Path(self._files.name, name) for name in ("rows.safetensors", "logits.safetensors"))
        write_rows(given, rows)
        line = self.ask("predict", rows=str(given), out=str(answered), batch_size=batch_size, stream=on_rows is not None)
        while "done" in line:
            assert on_rows is not None
            on_rows(line["done"])
            line = self._read("predict")
        logits: Array = load_file(answered)["logits"]
        bad = np.flatnonzero(~np.isfinite(logits.reshape(len(logits), -1)).all(axis=1))
        if len(bad):
            raise EngineError(f"{self._name}: the logits of {len(bad)} of {len(rows)} rows are NaN or infinite, the first in row {bad[0]}")
        return logits

    def probe(self, tensors: Sequence[str], rows: Sequence[Row], length: int | None) -> dict[str, Array]:
        """Returns internal tensors of the graph by name, for `rows` in one batch padded to `length` tokens.

        Raises:
            EngineError: The engine failed.
        """
        given, answered = (Path(self._files.name, name) for name in ("probed.safetensors", "tensors.safetensors"))
        write_rows(given, rows)
        self.ask("probe", rows=str(given), out=str(answered), tensors=list(tensors), length=length)
        found: dict[str, Array] = load_file(answered)
        return found

    def generate(self, prompts: Sequence[NDArray[np.int32]], decoding: Decoding, on_tokens: TokenCallback | None = None) -> list[Answer]:
        """Returns the answer to each prompt, token ids int32 [length]; as many prompts run at once as the engine can.

        Args:
            prompts: Token ids.
            decoding: How tokens are chosen.
            on_tokens: Called with the tokens of each prompt as they come.

        Raises:
            EngineError: The engine failed.
        """
        given = Path(self._files.name, "prompts.safetensors")
        write_rows(given, prompts)
        line = self.ask("generate", rows=str(given), decoding=decoding.message(), stream=on_tokens is not None)
        while "answers" not in line:
            assert on_tokens is not None
            on_tokens(line["prompt"], line["tokens"])
            line = self._read("generate")
        self.peak_memory_bytes = int(line["peak_memory_bytes"])
        return [Answer.from_message(one) for one in line["answers"]]

    def close(self) -> None:
        """Stops the process and removes its files; a second call does nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()  # it exits at the end of its input
            except BrokenPipeError:
                self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._files.cleanup()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def _check(self, placement: Mapping[str, str]) -> None:
        """Raises EngineError if the engine runs elsewhere than it was asked to."""
        for fact in ("device", "float_precision"):
            asked, found = self.job.labels[fact], placement[fact]
            if found != asked:
                provider = placement["provider"]
                raise EngineError(f"{self._name}: {fact} {asked} was asked for, but the engine reports {found} ({provider}); give {found}")

    def _gone(self, op: str) -> EngineError:
        return EngineError(f"{self._name}: its process exited with status {self._process.wait()} during {op!r}{self._last_words()}")

    @property
    def _name(self) -> str:
        labels = self.job.labels
        return f"{labels['engine']} {labels['mode']} {labels['precision']}"

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f": {' '.join(lines[-1].split())[:300]}" if lines else ""


def write_rows(path: Path, rows: Sequence[Row], more: Mapping[str, Array] | None = None) -> None:
    """Writes rows of one type, or images and texts, to a safetensors file: `bytes` uint8 [total], `lengths` int64 [n, parts of a row], and
    `more`."""
    kinds = {next((kind for kind, types in KINDS.items() if isinstance(row, types)), "text") for row in rows} or {"text"}
    kind = kinds.pop() if len(kinds) == 1 else MIXED
    parts = [[type(row).__name__.encode(), *_encode(row)] if kind == MIXED else _encode(row) for row in rows]
    data = np.frombuffer(b"".join(part for row in parts for part in row), dtype=np.uint8)
    lengths = np.array([[len(part) for part in row] for row in parts], dtype=np.int64)
    save_file({"bytes": data, "lengths": lengths, **(more or {})}, path, {"kind": kind})


def read_rows(path: Path) -> list[Row]:
    """Reads a file written by `write_rows`."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        kind = file.metadata()["kind"]
        data, lengths = file.get_tensor("bytes").tobytes(), file.get_tensor("lengths")
    ends = lengths.cumsum().reshape(lengths.shape)
    rows: list[Row] = []
    for row_ends, row_lengths in zip(ends, lengths, strict=True):
        parts = [data[end - size : end] for end, size in zip(row_ends, row_lengths, strict=True)]
        if kind == MIXED:
            rows.append(parts[1] if parts[0] == b"bytes" else parts[1].decode())
        elif kind == "image":
            rows.append(parts[0])
        elif kind == "window":
            rows.append(Window(parts[0].decode(), parts[1].decode(), *np.frombuffer(parts[2], np.int64).tolist()))
        elif kind == "adapted":
            name, *texts = (part.decode() for part in parts)
            rows.append(with_adapter((texts[0], texts[1]) if len(texts) == 2 else texts[0], name))
        elif kind == "block":
            ids = [np.frombuffer(part, np.int32) for part in parts]
            rows.append(TokenPair(*ids) if len(ids) == 2 else ids[0])
        else:
            rows.append((parts[0].decode(), parts[1].decode()) if len(parts) == 2 else parts[0].decode())
    return rows


def _encode(row: Row) -> list[bytes]:
    if isinstance(row, bytes):
        return [row]
    if isinstance(row, np.ndarray):
        return [row.tobytes()]
    if isinstance(row, TokenPair):
        return [row.source.tobytes(), row.target.tobytes()]
    if isinstance(row, Window):
        return [row.question.encode(), row.context.encode(), np.array([row.start, row.stop], np.int64).tobytes()]
    assert isinstance(row, str | tuple), type(row)
    if (adapter := adapter_of(row)) is not None:
        return [adapter.encode(), *_encode(plain(row))]
    return [part.encode() for part in (row if isinstance(row, tuple) else (row,))]
