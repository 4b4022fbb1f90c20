"""What can be done with a finished run: verify it, serve it, clean it.

`verify` hashes every file of every artifact, reloads every engine and asks it the golden rows, and with `live` asks the server too. An
answer has to be the one that was recorded: as many flips and as large a difference as the parity gate of export allows, no more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifacts import artifact
from compress.artifacts.run_folder import REPOSITORY, Run, locked, open_run
from compress.core.errors import InputError
from compress.core.target import Target
from compress.core.tasks import TASKS
from compress.measure.metrics import differences
from compress.report import hops

Log = Callable[[str], None]
MEDIAN_ABS = 0.02


def verify(folder: Path, *, live: bool = False, log: Log = print) -> list[str]:
    """Checks a run.

    Args:
        folder: A finished run.
        live: Also start Triton on its model repository and ask the served models.
        log: Told one line for each thing that was checked.

    Returns:
        One line for each problem; empty where all is well.

    Raises:
        InputError: The folder holds no finished run, or there is no server environment.
    """
    run = open_run(folder)
    problems = list(_files(run, log))
    if problems:  # an engine of damaged files proves nothing
        return problems
    rows, recorded = hops.read_golden(folder / "golden.safetensors")
    problems += _engines(run, rows, recorded, log)
    if live:
        problems += _served(run, rows, recorded, log)
    return problems


def repository(folder: Path) -> Path:
    """Returns the model repository of a run.

    Raises:
        InputError: The folder holds no finished run, or the run has no model repository.
    """
    if open_run(folder).of_kind("model_repository") is None:
        raise InputError(f"{folder}: has no model repository; add `- triton_repo: {{}}` to the stages of the recipe and run it")
    return folder / REPOSITORY


def serve(folder: Path, log: Log = print) -> None:
    """Runs Triton on the model repository of a run, in the foreground, until it is interrupted.

    Raises:
        InputError: The run has no model repository, or there is no server environment.
    """
    from triton_repo.triton_repo import serve as serve_repository

    serve_repository(repository(folder), folder / "triton.log", log)


def clean(folder: Path) -> list[Path]:
    """Removes every stage that the last recipe does not reference; returns the folders that are gone."""
    with locked(folder):
        run = open_run(folder)
        kept = {found.path.resolve() for found in run.artifacts.values()}
        gone = [path for path in sorted((folder / "stages").iterdir()) if path.resolve() not in kept]
        for path in gone:
            shutil.rmtree(path)
    return gone


def _files(run: Run, log: Log) -> Iterator[str]:
    for name, found in run.artifacts.items():
        problems = artifact.verify(found)
        log(f"{name}: {len(found.manifest['files'])} files, {'damaged' if problems else 'as written'}")
        yield from problems
        recorded = next(stage["digest"] for stage in run.stages if stage["id"] == name)
        if not problems and recorded != found.digest:
            yield f"{found.path}: digest {found.digest[:12]}, but the run was finished with {recorded[:12]}"


def _engines(run: Run, rows: list[Any], recorded: dict[str, np.ndarray], log: Log) -> Iterator[str]:
    from compress.measure.engine_process import EngineError, EngineProcess
    from export.engines.spec import spec_of

    exported = run.of_kind("engine")
    target = Target.model_validate(run.recipe["target"])
    for variant, build in hops.main_builds(run).items():
        for entry in hops.recommended(build):
            key = f"{variant}.{entry['engine']}"
            if not entry["runnable"] or key not in recorded or exported is None:
                continue
            try:
                spec = spec_of(exported.path, build, entry, target)
                with EngineProcess(spec) as process:
                    logits = process.predict(rows, spec.evaluation_batch)
            except EngineError as error:
                yield f"{key}: {error}"
            else:
                yield from _compare(key, run, recorded[key], logits, log)


def _served(run: Run, rows: list[Any], recorded: dict[str, np.ndarray], log: Log) -> Iterator[str]:
    from triton_repo import environment
    from triton_repo.client import evaluate
    from triton_repo.server import TritonServer

    with TritonServer(repository(run.folder), environment.check(), run.folder / "triton.log") as server:
        for model in hops.served(run):
            key = f"{model['model']}.triton"
            if key in recorded:
                yield from _compare(key, run, recorded[key], evaluate(server.grpc_address, model["model"], rows).logits, log)


def _compare(key: str, run: Run, recorded: np.ndarray, answered: np.ndarray, log: Log) -> Iterator[str]:
    changed, distance = differences(run.recipe["model"]["task"], recorded, answered)
    flips, median, allowed = int(changed.sum()), float(np.median(distance)), max(1, len(changed) // 1000)
    told = f"median |d{'nll' if TASKS[run.recipe['model']['task']].answer == 'tokens' else 'logit'}| {median:.4f}"
    log(f"{key}: {len(recorded)} golden rows, {flips} flips, {told}")
    if flips > allowed or median > MEDIAN_ABS:
        yield f"{key}: {flips} of {len(changed)} golden answers differ (at most {allowed}), {told}"
