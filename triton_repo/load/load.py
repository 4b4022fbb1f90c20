"""Measures a running Triton server under load: the caller's side.

    examine                     load_test
    server --> Model            server, rows, loads --> figures of each load

Each load runs in a process of its own (`triton_repo.load.process`), one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foundation.core.errors import InputError, Problem
from foundation.machine.process import environment, spawn
from foundation.measure.engine_process import write_rows
from foundation.standalone.preprocess import Row
from triton_repo.load.connection import Address, Model, check_rows
from triton_repo.load.figures import Measured
from triton_repo.load.process import Described, Job
from triton_repo.load.settings import Load


class GeneratorError(RuntimeError):
    """The process of the generator died; a one-line message."""


def examine(address: Address, model: str | None = None) -> Model:
    """Returns the model of a server to measure: the one of this name, or the only ready one.

    Raises:
        InputError: The server cannot be reached, there is no such model, or its inputs differ from our models'.
    """
    found: Described = _ask(_job(address, model))
    return Model(found["model"], tuple(found["inputs"]))


def load_test(
    address: Address,
    model: Model,
    rows: Sequence[Row],
    loads: Sequence[Load],
    on_result: Callable[[Measured], None] = lambda found: None,
) -> list[Measured]:
    """Sends each load to a server, one after the other.

    Args:
        address: The server.
        model: The model, from `examine`.
        rows: n rows to send: texts, pairs of texts encoded images or sounds, as the model reads them.
        loads: The loads.
        on_result: Called with the figures of each load as it ends.

    Returns:
        The figures of each load.

    Raises:
        InputError: The rows do not fit the model, or the server does not answer a first request.
        GeneratorError: The generator died.
    """
    check_rows(rows, model)
    results: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="compress-load-") as folder:
        file = Path(folder, "rows.safetensors")
        write_rows(file, rows)
        for load in loads:
            results.append(_ask({**_job(address, model.name), "rows": str(file), "load": asdict(load)}))
            on_result(results[-1])
    return results


def _job(address: Address, model: str | None) -> Job:
    return {"server": address.place, "protocol": address.protocol, "tls": address.tls, "ca": address.ca, "model": model}


def _ask(job: Job) -> Any:
    """Runs the process of the generator and returns its answer."""
    command = [sys.executable, "-m", "triton_repo.load.process", json.dumps(job)]
    variables = {**environment(), "GRPC_VERBOSITY": "NONE"}
    process = spawn(command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate()
    finally:
        process.kill()  # after Ctrl-C; it has ended otherwise
        process.wait()
    if process.returncode:
        last = errors.decode("utf-8", "replace").strip().splitlines()
        raise GeneratorError(f"the load generator exited with status {process.returncode}{f': {last[-1][:300]}' if last else ''}")
    answer = json.loads(output)
    if "problems" in answer:
        raise InputError.of(Problem(**problem) for problem in answer["problems"])
    return answer
