"""`compress verify`: is a finished run what it was when it finished?

It hashes every file of every artifact, compares manifests, recipe and links with the chain of the run (`foundation.artifacts.chain`) and
the report with the figures of the artifacts, follows the certificate of a cascade again from the stored predictions, reloads every engine
and runs the golden rows through it, and with `live` through the server too. The logits must match the recorded ones within the limits of
`foundation.standalone.tolerance`. With a report that was kept elsewhere it also finds a run that was changed as a whole, chain and report
included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from compress.report import evaluations
from compress.report.document import Report
from compress.report.model.contents import Contents
from compress.report.report import UNCHECKED, forgeries, write
from compress.run.opened import opened
from foundation.artifacts.cascade import FILE as CASCADE
from foundation.artifacts.cascade import Cascade
from foundation.artifacts.chain import GOLDEN, changes, checked, damage, read_chain
from foundation.artifacts.document import read
from foundation.artifacts.run_folder import Run, blaming_damage, locked
from foundation.core.errors import InputError, Problem
from foundation.core.target import Target
from foundation.labels.form import Labels
from foundation.labels.tasks import Task
from foundation.labels.zero_shot import read_by
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.measure.answers import load_predictions
from foundation.standalone.adapted import as_read
from foundation.standalone.preprocess import Row

Log = Callable[[str], None]


def verify(
    folder: Path, *, live: bool = False, url: str | None = None, ca: str = "", report: Path | None = None, log: Log = print
) -> list[Problem]:
    """Checks a run, or the hashes of a folder that `compress deploy` wrote.

    Args:
        folder: A finished run.
        live: Also check the served models: in Triton, started on the model repository, or at `url`.
        url: A running server, host:port, with or without `grpc://` or `http://` before it, or with `grpcs://` or `https://`.
        ca: File of the certificates that are trusted at `url`, PEM; empty: the public ones.
        report: A `report.json` of this run that was kept elsewhere.
        log: Prints one line for each check.

    Returns:
        One line for each problem; empty if there is none.

    Raises:
        InputError: The folder holds no finished run, there is no server environment, the server cannot be reached, or the report has no
            anchor.
    """
    from triton_repo import deployment

    if url is not None and not live:
        raise InputError(f"--url {url}", "given without --live", remedy="give both to check a running server")
    if ca and url is None:
        raise InputError(f"--ca {ca}", "given without --url", remedy="give both to check a server whose certificate is not public")
    if deployment.is_deployment(folder):
        if live or report is not None:
            raise InputError(
                f"{folder}", "a deployment, of which the hashes are checked", remedy="give the run folder for --live and --report"
            )
        return deployment.problems(folder, log)
    run = opened(folder)
    kept = None if report is None else _stored_report(report)
    problems = list(damage(run, log))
    problems += _recorded(run, log) if kept is None else changes(checked(kept["integrity"]), run, str(report))
    if problems:  # engines of damaged files are not worth checking
        return problems
    problems += forgeries(run)
    problems += [] if kept is None else _report_differences(run, kept, str(report))
    problems += _certificate(run, log)
    rows, recorded = evaluations.read_golden(folder / GOLDEN)
    problems += _engines(run, rows, recorded, log)
    if live:
        problems += _served(run, rows, recorded, log) if url is None else _running(run, url, ca, rows, recorded, log)
    return problems


def rebuild(folder: Path) -> Contents:
    """Writes the report of a run again, while nothing else writes to the run; returns the contents of `report.json`.

    Raises:
        InputError: The folder holds no finished run, it is damaged, or another process writes to it.
    """
    opened(folder)  # a folder that is not a run is not locked, and so not created
    with locked(folder), blaming_damage(folder):
        return write(folder)


def _stored_report(file: Path) -> dict[str, object]:
    """Returns the contents of a report that was kept elsewhere."""
    data = dict(Report.load(file).data)
    try:
        checked(data["integrity"])
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{file}", "has no anchor, so it was written by an earlier version", remedy="give a report.json of a later run"
        ) from error
    except ValueError as error:
        raise InputError(f"{file}", f"damaged ({error})", remedy="give the report.json as it was kept") from error
    return data


def _recorded(run: Run, log: Log) -> list[Problem]:
    """Compares the run with its own chain."""
    try:
        chain = read_chain(run.folder)
    except InputError as error:
        return list(error.problems)
    log(f"anchor: {chain['anchor']}")
    return changes(chain, run, "the run finished")


def _report_differences(run: Run, expected: Mapping[str, object], source: str) -> Iterator[Problem]:
    """Yields a line if the report of the run does not say what the kept one says."""
    own = Report.load(run.folder).data
    keys = [key for key in expected if key not in (*UNCHECKED, "integrity") and expected[key] != own.get(key)]
    if expected.get("warnings") != own.get("warnings"):
        keys.append("warnings")
    if keys:
        yield Problem(f"{run.folder / 'report.json'}", f"{', '.join(keys)}: not what {source} says")


def _certificate(run: Run, log: Log) -> Iterator[Problem]:
    """Follows the certificate of a cascade again from the stored predictions."""
    made, exported = run.of_kind("cascade"), run.of_kind("engine")
    if made is None or exported is None:
        return
    from export.cascade.recheck import differences

    found = list(differences(made.path, run.variants, run.baseline, exported))
    if not found:
        certificate = read(Cascade, made.path / CASCADE).certificate
        log(
            f"{made.id}: at most {certificate.bound:g} of the answers differ, confidence {certificate.confidence:g}: "
            f"{certificate.disagreements} of {certificate.n} rows, as the stored predictions say"
        )
    yield from found


def _engines(run: Run, rows: Sequence[Row], recorded: dict[str, np.ndarray], log: Log) -> Iterator[Problem]:
    from export.engines.spec import spec_of
    from foundation.measure.engine_process import EngineError, EngineProcess

    exported = run.of_kind("engine")
    target = Target.model_validate(run.recipe["target"])
    for variant, build in evaluations.main_builds(run).items():
        for entry in build.recommended:
            key = f"{variant}.{entry.engine}"
            if not entry.runnable or key not in recorded or exported is None:
                continue
            try:
                spec = spec_of(exported.path, build, entry, target)
                with EngineProcess(spec) as process:
                    logits = process.predict(rows, spec.evaluation_batch)
            except EngineError as error:
                yield Problem(key, str(error))
            else:
                yield from compare(key, run, recorded[key], logits, log)


def _served(run: Run, rows: Sequence[Row], recorded: dict[str, np.ndarray], log: Log) -> Iterator[Problem]:
    from triton_repo import environment
    from triton_repo.client import evaluate
    from triton_repo.deployment import repository_of
    from triton_repo.live import without_limits
    from triton_repo.probe import prepared_of
    from triton_repo.service import Service

    with (
        tempfile.TemporaryDirectory(prefix="compress-verify-") as folder,
        Service(
            without_limits(repository_of(run.folder), Path(folder, "repository")), environment.check(), run.folder / "triton.log"
        ) as server,
    ):
        for model in evaluations.answering(run):
            key = f"{model.model}.triton"
            if key in recorded:
                prepared = prepared_of(repository_of(run.folder) / str(model.model))
                own = read_by(prepared.modality, rows)
                asked = as_read([rows[row] for row in own], prepared.adapters)
                answers = evaluate(server.grpc_address, str(model.model), asked, 1)
                yield from compare(key, run, recorded[key][own], answers.stored_predictions(prepared), log)


def _running(run: Run, url: str, ca: str, rows: Sequence[Row], recorded: dict[str, np.ndarray], log: Log) -> Iterator[Problem]:
    """Checks a server that somebody else runs: it has the models of the run, with their tensors, and answers the golden rows."""
    from triton_repo.deployment import models_in, repository_of
    from triton_repo.load.connection import address_of
    from triton_repo.probe import Probe, prepared_of

    repository, models = repository_of(run.folder), {model.folder: model for model in models_in(run.folder)}
    with Probe(address_of(url, None, "--url", ca)) as server:
        log(f"{server.address}: {server.about()}")
        for model in evaluations.answering(run):
            name, key = str(model.model), f"{model.model}.triton"
            if key not in recorded:
                continue
            if models[name].part is None and not server.has(name):
                log(f"{name}: not loaded there and not served; not checked")
                continue
            asked = models[name].name if server.has(models[name].name) else name
            problems = server.differences(repository / name, asked)
            yield from problems
            if not problems:
                prepared = prepared_of(repository / name)
                own = read_by(prepared.modality, rows)
                answers = server.answers(asked, as_read([rows[row] for row in own], prepared.adapters))
                yield from server.contradictions(repository / name, answers)
                yield from compare(key, run, recorded[key][own], answers.stored_predictions(prepared), log)


def compare(key: str, run: Run, recorded: np.ndarray, logits: np.ndarray, log: Log) -> Iterator[Problem]:
    """Compares logits with recorded ones; yields a line if they differ by more than rounding explains."""
    task = run.recipe["model"]["task"]
    yield from compare_golden(key, task, load_predictions(run.predictions(run.baseline), task)[1], recorded, logits, log)


def compare_golden(key: str, task: Task, labels: Labels, recorded: np.ndarray, logits: np.ndarray, log: Log) -> Iterator[Problem]:
    """The same for a task and the labels of the evaluation split."""
    if recorded.shape != logits.shape:
        yield Problem(key, f"logits of shape {logits.shape}, the golden rows have {recorded.shape}")
        return
    compared = compare_predictions(task, recorded, logits, labels)
    log(
        f"{key}: {len(recorded)} golden rows, {compared['disagreements']} flips, "
        f"median |d{compared['differs']}| {compared['median_abs']:.4f}"
    )
    reason = shortfall(compared, "those recorded in the run")
    if reason is not None:
        yield Problem(key, reason)
