"""`compress bench --server`: how a running Triton server does under load, with the rows of a file or of a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.reading.unlabelled import read_unlabelled
from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.core.files import local
from foundation.data.splits import Split
from foundation.data.tables import Table, text_lines
from foundation.labels.zero_shot import read_by
from foundation.machine import environment
from foundation.standalone.adapted import as_read
from foundation.standalone.preprocess import Row
from foundation.standalone.windows import Window
from triton_repo.load import figures
from triton_repo.load.connection import MEASURED, Address, Model, address_of
from triton_repo.load.load import examine
from triton_repo.load.load import load_test as measure
from triton_repo.load.settings import Load

SCHEMA = 1
STANDARD_INPUT = "-"
COLUMNS = {"TEXT": "text", "TEXT_PAIR": "text_pair", "QUESTION": "question", "CONTEXT": "context", "IMAGE": "image", "AUDIO": "audio"}
COLUMNS |= {"ADAPTER": "adapter"}
"""Column of each input where none is given."""
SHARED = ("model", "row_bytes")
"""Settings shared by all loads."""


@dataclass(frozen=True)
class Rows:
    """Where the rows come from: one of a run and a file."""

    run: Path | None = None
    """A run folder, whose evaluation rows are sent."""
    file: str | None = None
    """A file, or `-` for the lines of standard input."""
    columns: tuple[str, ...] = ()
    """Columns of the file, in the order of the model's inputs."""


def load_test(
    server: str,
    data: Rows,
    loads: Sequence[Load],
    *,
    model: str | None = None,
    protocol: str | None = None,
    ca: str = "",
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures a model of a running server, prints a table and returns the figures.

    Args:
        server: host:port, with or without `grpc://` or `http://` before it, or with `grpcs://` or `https://`.
        data: The rows to send.
        loads: The loads, measured one after the other.
        model: Name of the model; None takes the only one that is ready.
        protocol: grpc or http; None takes it from the URL, else gRPC.
        ca: File of the certificates that are trusted, PEM; empty: the public ones.
        out: A JSON file to write the figures to.
        say: Prints one line.

    Returns:
        `schema`, `server`, `protocol`, `model`, `inputs`, `data` (where the rows are from), `rows` (their number), `row_bytes`, `loads`
        (figures of each), `environment` (versions and hardware of this machine), `ended` (local time).

    Raises:
        InputError: The server cannot be reached, the model is unknown or not one of ours, or the rows do not fit.
        GeneratorError: The generator died.
    """
    if (data.run is None) == (data.file is None):
        raise InputError("--server", "", remedy="give the rows to send: a run folder, whose evaluation rows are sent, or --data FILE")
    if not loads:
        raise InputError("loads", "none given", remedy="give at least one")
    if out is not None and not (out := local(out, "--json")).parent.is_dir():
        raise InputError(f"--json {out}", f"there is no folder {out.parent}", remedy="make it first")
    address = address_of(server, protocol, ca=ca)
    found = examine(address, model)
    rows, source = _read(data, found)
    say(f"{address}, model {found.name}: {len(rows)} rows ({MEASURED[found.inputs]}) of {source}")
    results = _measured(address, found, rows, loads, say)
    answer = {
        "schema": SCHEMA,
        "server": address.place,
        "protocol": address.protocol,
        "model": found.name,
        "inputs": list(found.inputs),
        "data": source,
        "rows": len(rows),
        "row_bytes": results[0]["row_bytes"],
        "loads": [{key: value for key, value in one.items() if key not in SHARED} for one in results],
        "environment": environment.fingerprint(),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if out is not None:
        write_json(out, answer)
        say(f"figures: {out}")
    return answer


def _measured(
    address: Address, model: Model, rows: Sequence[Row], loads: Sequence[Load], say: Callable[[str], None]
) -> list[figures.Measured]:
    """Measures the loads; prints a line for each as it ends, and then their warnings."""
    shown: list[figures.Measured] = []

    def show(one: figures.Measured) -> None:
        if not shown:
            say(figures.header())
        shown.append(one)
        say(figures.line(one))
        if "rows_per_tier" in one:
            say(figures.tiers(one["rows_per_tier"]))

    results = measure(address, model, rows, loads, show)
    for load, one in zip(loads, results, strict=True):
        for warning in one["warnings"]:
            say(f"warning: {f'rate {load.rate:g}' if load.rate is not None else f'concurrency {load.concurrency}'}: {warning}")
    return results


def _read(data: Rows, model: Model) -> tuple[list[Row], str]:
    """Returns the rows, and where they are from."""
    modality = {"IMAGE": "image", "AUDIO": "audio"}.get(model.inputs[0], "text")
    if data.run is not None:
        rows = evaluation_rows(data.run)
        adapted = [name for name in model.inputs if name == "ADAPTER"]
        return as_read([rows[row] for row in read_by(modality, rows)], adapted), f"the evaluation split of {data.run}"
    columns = data.columns or tuple(COLUMNS[name] for name in model.inputs)
    if len(columns) != len(model.inputs):
        raise InputError(
            "--column", f"{len(columns)} given, but model {model.name} reads {' and '.join(model.inputs)}", remedy="give one for each"
        )
    if data.file == STANDARD_INPUT:
        if model.inputs != ("TEXT",):
            kind = MEASURED[model.inputs]
            raise InputError("--data -", "lines of standard input are single texts", f"model {model.name} reads {kind}", "give a file")
        return [line.removesuffix("\r") for line in text_lines(Table(Path("-"), ()), sys.stdin.buffer)], "standard input"
    rows = read_unlabelled(local(str(data.file), "--data"), modality, columns, "--column", adapted="ADAPTER" in model.inputs)
    if model.inputs == ("QUESTION", "CONTEXT"):  # the server divides contexts itself
        rows = [Window(row[0], row[1], 0, 0) for row in rows if isinstance(row, tuple)]
    return rows, str(data.file)


def evaluation_rows(folder: Path) -> list[Row]:
    """Returns the evaluation rows of a finished run, read from its data again."""
    return evaluation_split(folder).rows


def evaluation_split(folder: Path) -> Split:
    """Returns the evaluation split of a finished run, read from its data again.

    Raises:
        InputError: The rows of the run are token ids.
    """
    from compress.reading.load import load_data
    from compress.recipe import check
    from compress.run.opened import opened
    from foundation.labels.tasks import TASKS
    from foundation.models.config import label_names

    recipe = check(opened(folder).recipe)
    task = recipe.model.task
    if TASKS[task].generates:
        raise InputError(f"{folder}", f"the rows of a run of {task} are tokens", remedy="give --data FILE with what the model reads")
    tokenizer = recipe.tokenizer or recipe.model.path
    return load_data(recipe.data, task, label_names(recipe.model), lambda line: None, tokenizer).evaluation
