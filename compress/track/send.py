"""Brings a tracking server up to what `track.json` says: it sends what is missing, in an order that can be broken off anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from compress.report.evaluations import exported
from compress.report.model.contents import Contents
from compress.report.report import FILE, PAGE
from compress.track.names import figures
from compress.track.note import MlflowNote, Tracked
from compress.track.server import Server
from foundation.artifacts import artifact, document
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.run_folder import REPOSITORY, Run, open_run

MODEL = "model"
"""Folder of the artifacts with the served model."""


def send(server: Server, note: MlflowNote, folder: Path, save: Callable[[], None]) -> None:
    """Creates the runs that the server lacks, and sends settings, figures, report and model that it does not have.

    Args:
        server: The server.
        note: What the run came to, and what of it the server has; changed as parts are sent.
        folder: The run folder.
        save: Called after each part, so that a run that is killed sends no part twice.

    Raises:
        TrackingFailure: The server did not take a part; the parts before it are saved.
    """
    experiment = None if note.run.id and all(step.id for step in note.steps.values()) else server.experiment(note.experiment)
    _describe(server, note.run, note.name, None, experiment, save)
    for name, step in note.steps.items():
        _describe(server, step, name, note.run.id, experiment, save)
        _end(server, step, save)
    if note.run.status == "FINISHED":
        _send_report(server, note, folder, save)
    _end(server, note.run, save)


def _describe(server: Server, tracked: Tracked, name: str, parent: str | None, experiment: str | None, save: Callable[[], None]) -> None:
    if tracked.id is None:
        assert experiment is not None, "looked up for a run that the server lacks"
        tracked.id, tracked.sent = server.create(experiment, name, tracked.started_ms, parent), "RUNNING"
        save()
    if not tracked.described and (tracked.numbers or tracked.settings):
        server.describe(tracked.id, tracked.numbers, settings=tracked.settings)
        tracked.described = True
        save()


def _end(server: Server, tracked: Tracked, save: Callable[[], None]) -> None:
    """Sends the status of a run that the server has."""
    if tracked.sent == tracked.status:
        return
    assert tracked.id is not None, "created before"
    if tracked.ended_ms is None:
        server.set_running(tracked.id)
    else:
        server.end(tracked.id, tracked.status, tracked.ended_ms)
    tracked.sent = tracked.status
    save()


def _send_report(server: Server, note: MlflowNote, folder: Path, save: Callable[[], None]) -> None:
    """Sends every figure of report.json, the figures of each variant to the step that made it, the report itself, and the served model."""
    assert note.run.id is not None, "created before"
    digest = artifact.file_digest(folder / FILE)
    contents = document.read(Contents, folder / FILE)
    if note.report != digest:
        flat = figures(contents)
        server.describe(note.run.id, flat.numbers, flat.texts)
        for variant in contents.variants:
            step = note.steps.get(variant.id)
            if step is not None and step.id is not None:
                own = figures(variant)
                server.describe(step.id, own.numbers, own.texts)
        for name in (FILE, PAGE):
            server.upload(note.run.id, folder / name)
        note.report = digest
        save()
    if note.model:
        _send_model(server, note, open_run(folder), contents, save)


def _send_model(server: Server, note: MlflowNote, run: Run, contents: Contents, save: Callable[[], None]) -> None:
    assert note.run.id is not None, "created before"
    files = served_files(run, contents)
    digest = artifact.digest({place: file.sha256 for place, file in files.items()})
    if not files or note.served == digest:
        return
    for place, file in files.items():
        server.upload(note.run.id, file.path, f"{MODEL}/{place}".rpartition("/")[0])
    note.served = digest
    save()


class ServedFile(NamedTuple):
    """A file of the served model."""

    path: Path
    sha256: str


def served_files(run: Run, contents: Contents) -> dict[str, ServedFile]:
    """Returns the files of the served model by their place below `model`; empty where nothing is served.

    They are its models in the model repository; without a repository the build that is served, without the predictions of its engines.
    """
    served, repository, made = contents.served, run.of_kind("model_repository"), run.of_kind("engine")
    if served is None or made is None:
        return {}
    if repository is not None:
        names = [model.model for model in contents.triton.models if (model.variant, model.precision) == (served.variant, served.precision)]
        return _below(repository, REPOSITORY, tuple(f"{name}/" for name in names))
    build = next(one for one in exported(run).builds if (one.variant, one.precision) == (served.variant, served.precision))
    predictions = {engine.predictions for engine in build.engines}
    found = _below(made, ".", (f"{build.folder}/",))
    return {place: file for place, file in found.items() if place not in predictions}


def _below(made: Artifact, root: str, beginnings: tuple[str, ...]) -> dict[str, ServedFile]:
    """Returns the files of an artifact below a folder whose path there has one of these beginnings."""
    inside = "" if root == "." else f"{root}/"
    files = {name.removeprefix(inside): (name, entry) for name, entry in made.manifest["files"].items() if name.startswith(inside)}
    return {
        place: ServedFile(made.path / name, entry["sha256"])
        for place, (name, entry) in files.items()
        if beginnings and place.startswith(beginnings)
    }
