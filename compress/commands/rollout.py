"""`compress rollout`: rolls the models of a running `compress serve` over to those of another run.

The command asks the serving process over its control socket (`triton_repo.control`), and that process does the work: it hashes the new run,
compares the models with those that it serves, and rolls over one after the other (`triton_repo.roll_over`). Before requests go to a new
version it answers the golden rows of its run, within the limits of `compress.standalone.tolerance`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifacts.chain import GOLDEN
from compress.artifacts.run_folder import Run
from compress.commands.verify import compare
from compress.core.errors import InputError
from compress.core.forms.zero_shot import read_by
from compress.pipeline import opened
from compress.report import evaluations
from compress.standalone.preprocess import Row
from triton_repo import control, deployment
from triton_repo.config import model_names
from triton_repo.service import Service

Log = Callable[[str], None]


def rollout(served: Path, new: Path, *, model: str | None = None, log: Log = print) -> dict[str, Any]:
    """Rolls a running server over to the models of another run.

    Args:
        served: The folder that `compress serve` was given.
        new: A finished run with the new versions.
        model: Name of the model; None: every served one that the new run has.
        log: Prints one line.

    Returns:
        `models`: for each, `model`, `before`, `after` (versions), `load_s`, `check_s` and `seconds`.

    Raises:
        InputError: The folder is not being served, or a model was not rolled over: it then still answers as before.
    """
    opened(new)
    request = {"run": str(new.resolve()), "model": model}
    return control.ask(served, request, log)


def answer(service: Service, request: dict[str, Any], log: Log) -> dict[str, Any]:
    """Does what `rollout` asks for, in the process that serves."""
    new, wanted = Path(str(request["run"])), request["model"]
    run, repository = opened(new), deployment.repository_of(new)
    names = [name for name in service.models if name in model_names(repository) and wanted in (None, name)]
    if not names:
        wanted = wanted or " and ".join(service.models)
        raise InputError(f"{new}: has {' and '.join(model_names(repository))}, and {wanted} is to be rolled over; give a run that has it")
    rows, recorded = evaluations.read_golden(new / GOLDEN)
    done = []
    for name in names:
        rolled = service.roll_over(name, repository / name, _check(run, repository / name, rows, recorded, log))
        log(f"{name}: version {rolled.before} -> {rolled.after}, loaded in {rolled.load_s:.2f} s, checked in {rolled.check_s:.2f} s")
        done.append(asdict(rolled))
    return {"models": done}


def _check(run: Run, model: Path, rows: list[Row], recorded: dict[str, np.ndarray], log: Log) -> Callable[[str, str], None]:
    """Returns the check of a new version: its answers to the golden rows are those that the run recorded."""
    from triton_repo.client import RequestError, evaluate
    from triton_repo.probe import prepared_of

    name, key = model.name, f"{model.name}.triton"
    if key not in recorded:
        raise InputError(f"{run.folder}: {name} was not evaluated in the server, so there is nothing to check it with; `serve: true` does")

    def check(address: str, version: str) -> None:
        try:
            prepared = prepared_of(model)
            own = read_by(prepared.modality, rows)
            logits = evaluate(address, name, [rows[row] for row in own], 1, version=version).kept(prepared)
        except RequestError as error:
            raise InputError(f"{name}: version {version} does not answer: {error}; the version before is served as it was") from error
        problems = list(compare(key, run, recorded[key][own], logits, log))
        if problems:
            raise InputError(*(f"{line}; the version before is served as it was" for line in problems))

    return check
