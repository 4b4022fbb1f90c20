"""The engine of a divided model in the server: a process for each rank, which answer every batch together.

Copied into the folder of the model with the modules that its ranks import. This process itself needs numpy and safetensors; the ranks need
torch, transformers, pydantic and psutil. All ranks get the features of a batch; rank 0 sends the logits back. Where one fails, all are
ended, the batch gets the error, and the next one starts them again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from safetensors.numpy import load, save

from export.divided.frames import ASK, ERROR, receive, send

WORKER = Path(__file__).resolve().parent / "export" / "divided" / "worker.py"
"""Beside the copy of this file that is the engine of a model."""
SECONDS_TO_END = 10


class Engine:
    """The ranks of one model.

    Args:
        folder: Holds the folders of the ranks.
        mode: dynamic: every shape runs.
        batch_sizes: Not used: no shape is compiled.
        properties: `ranks`: their number; `threads`: CPU threads of each, where they run on the CPU.
    """

    def __init__(self, folder: Path, mode: str, batch_sizes: Sequence[int], properties: Mapping[str, str]) -> None:
        self.folder, self.ranks, self.threads = folder, int(properties["ranks"]), properties["threads"]
        self.worker = WORKER if WORKER.exists() else Path(__file__).resolve().with_name("worker.py")
        self.processes: list[subprocess.Popen[bytes]] = []

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Starts the ranks, and waits until all have loaded their parts.

        Raises:
            RuntimeError: One of them failed.
        """
        self.close()
        with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
            for rank in range(self.ranks):
                command = [_python(), "-P", str(self.worker), str(self.folder), str(rank), str(self.ranks), f"{scratch}/store"]
                environment = {**os.environ, "OMP_NUM_THREADS": self.threads}
                self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
            self._answers()

    def predict(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, float32 [n, C], of rows of the same shape.

        Raises:
            RuntimeError: A rank failed; the next batch starts all of them again.
        """
        if not self.processes:
            self.prepare(())
        body = save({name: np.ascontiguousarray(values) for name, values in features.items()})
        try:
            for process in self.processes:
                send(_pipe(process.stdin), ASK, body)
        except OSError as error:
            self.close()
            raise RuntimeError(f"a rank of this model has ended ({type(error).__name__}); the next request starts all of them") from error
        logits: np.ndarray = load(self._answers()[0])["logits"]
        return logits

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(SECONDS_TO_END)
            for pipe in (process.stdin, process.stdout):
                _closed(pipe)
        self.processes = []

    def _answers(self) -> list[bytes]:
        """Returns the answer of each rank; if one fails, ends all of them."""
        found: list[bytes] = [b""] * self.ranks
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                waiting.register(_pipe(process.stdout), selectors.EVENT_READ, rank)
            while waiting.get_map():
                for key, _ in waiting.select():
                    answer = receive(_pipe(self.processes[key.data].stdout))
                    if answer is None or answer[0] == ERROR:
                        self.close()
                        told = "ended without an answer" if answer is None else answer[1].decode()
                        raise RuntimeError(f"rank {key.data} of {self.ranks}: {told}")
                    found[key.data] = answer[1]
                    waiting.unregister(key.fileobj)
        return found


def _python() -> str:
    """Returns the interpreter of the ranks: this one, or, in a program that embeds it, the first on PATH."""
    own = Path(sys.executable or "")
    return str(own) if own.name.startswith("python") else shutil.which("python3") or "python3"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "ranks are started with pipes"
    return pipe


def _closed(pipe: IO[bytes] | None) -> None:
    with contextlib.suppress(OSError):  # what was not sent yet cannot be sent any more
        _pipe(pipe).close()
