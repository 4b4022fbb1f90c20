"""`compress verify`, `serve` and `clean`: what to do with a finished run.

`verify` hashes every file of every artifact, reloads every engine and runs the golden rows through it, and with `live` through the server
too. The logits must match the recorded ones within the limits of the parity check of `export`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifacts import artifact
from compress.artifacts.run_folder import REPOSITORY, Run, blaming_damage, locked, open_run
from compress.core.errors import InputError
from compress.core.target import Target
from compress.core.tasks import TASKS
from compress.measure.metrics import differences
from compress.pipeline import opened
from compress.report import evaluations, report

Log = Callable[[str], None]
MEDIAN_ABS = 0.02


def verify(folder: Path, *, live: bool = False, log: Log = print) -> list[str]:
    """Checks a run.

    Args:
        folder: A finished run.
        live: Also start Triton on the model repository and check the served models.
        log: Prints one line for each check.

    Returns:
        One line for each problem; empty if there is none.

    Raises:
        InputError: The folder holds no finished run, or there is no server environment.
    """
    run = opened(folder)
    problems = list(_files(run, log))
    if problems:  # engines of damaged files are not worth checking
        return problems
    rows, recorded = evaluations.read_golden(folder / "golden.safetensors")
    problems += _engines(run, rows, recorded, log)
    if live:
        problems += _served(run, rows, recorded, log)
    return problems


def rebuild(folder: Path) -> dict[str, Any]:
    """Writes the report of a run again; returns the contents of `report.json`.

    Raises:
        InputError: The folder holds no finished run, or it is damaged.
    """
    opened(folder)
    with blaming_damage(folder):
        return report.write(folder)


def repository(folder: Path) -> Path:
    """Returns the model repository of a run.

    Raises:
        InputError: The folder holds no finished run, or the run has no model repository, or a damaged one.
    """
    made = opened(folder).of_kind("model_repository")
    if made is None:
        raise InputError(
            f"{folder}: this run has no model repository; add `- triton_repo: {{}}` to the stages of its recipe and run it again"
        )
    problems = artifact.verify(made)
    if (folder / REPOSITORY).resolve() != (made.path / REPOSITORY).resolve():
        problems.append(f"{folder / REPOSITORY}: does not lead to {made.path / REPOSITORY}")
    if problems:
        raise InputError(*(f"{problem}; `compress run` creates it again" for problem in problems))
    return folder / REPOSITORY


def serve(folder: Path, log: Log = print) -> None:
    """Runs Triton on the model repository of a run in the foreground until interrupted.

    Raises:
        InputError: The run has no model repository, or there is no server environment.
    """
    from triton_repo.triton_repo import serve as serve_repository

    serve_repository(repository(folder), folder / "triton.log", log)


def clean(folder: Path) -> list[Path]:
    """Removes all stages that the last recipe does not use; returns the removed folders."""
    open_run(folder)  # before a lock file is written into a folder that is none
    with locked(folder):
        run = open_run(folder)
        used = {found.path.resolve() for found in run.artifacts.values()}
        unused = [path for path in sorted((folder / "stages").iterdir()) if path.resolve() not in used]
        for path in unused:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return unused


def _files(run: Run, log: Log) -> Iterator[str]:
    for name, found in run.artifacts.items():
        problems = artifact.verify(found)
        log(f"{name}: {len(found.manifest['files'])} files, {'damaged' if problems else 'intact'}")
        yield from problems
        recorded = next(stage["digest"] for stage in run.stages if stage["id"] == name)
        if not problems and recorded != found.digest:
            yield f"{found.path}: digest {found.digest[:12]}, but the run recorded {recorded[:12]}"


def _engines(run: Run, rows: list[Any], recorded: dict[str, np.ndarray], log: Log) -> Iterator[str]:
    from compress.measure.engine_process import EngineError, EngineProcess
    from export.engines.spec import spec_of

    exported = run.of_kind("engine")
    target = Target.model_validate(run.recipe["target"])
    for variant, build in evaluations.main_builds(run).items():
        for entry in evaluations.recommended(build):
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
        for model in evaluations.served(run):
            key = f"{model['model']}.triton"
            if key in recorded:
                yield from _compare(key, run, recorded[key], evaluate(server.grpc_address, model["model"], rows).logits, log)


def _compare(key: str, run: Run, recorded: np.ndarray, logits: np.ndarray, log: Log) -> Iterator[str]:
    if recorded.shape != logits.shape:
        yield f"{key}: logits of shape {logits.shape}, the golden rows have {recorded.shape}"
        return
    changed, distance = differences(run.recipe["model"]["task"], recorded, logits)
    flips, median, allowed = int(changed.sum()), float(np.median(distance)), max(1, len(changed) // 1000)
    median_text = f"median |d{'nll' if TASKS[run.recipe['model']['task']].answer == 'tokens' else 'logit'}| {median:.4f}"
    log(f"{key}: {len(recorded)} golden rows, {flips} flips, {median_text}")
    if flips > allowed or median > MEDIAN_ABS:
        yield f"{key}: {flips} of {len(changed)} golden predictions differ (at most {allowed}), {median_text} (at most {MEDIAN_ABS})"
