"""A run in Weights & Biases: one run with keys such as `stages/quantize/seconds`, as W&B has no nested runs, and compares whole runs.

By default nothing is sent: a session is written to the folder `wandb` of the run folder, and `wandb sync` sends it. Every session has the
same id and `resume="allow"`, which wandb writes into the session, so that `wandb sync` adds it to the run that the server has. A session
says everything again, and as summary alone: steps of a history would be added once for each session.

A session is written when the run ends, however it does. wandb starts a process of its own, and none may run while engines are timed.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, cast

from compress.report.model.contents import Contents
from compress.report.report import FILE, PAGE
from compress.track.names import figures
from compress.track.note import Status, WandbNote, write_note
from compress.track.send import served_files
from compress.track.server import TrackingFailure
from foundation.artifacts import artifact, document
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.shown import pasted, reason

INSTALL = "pip install 'compress-transformers[wandb]'"
FOLDER = "wandb"
"""Where wandb writes sessions, below the run folder."""
MODE, KEY = "WANDB_MODE", "WANDB_API_KEY"
MODES = ("offline", "online", "disabled")
EXIT_CODES: Mapping[Status, int] = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}
"""Exit codes of a run: W&B shows 255 as killed."""
INIT_SECONDS, UPLOAD_SECONDS = 30.0, 600.0
"""Seconds for the server to answer, and to take everything; online alone."""
REPORT, MODEL = "report", "model"
"""Types of the artifacts."""


class WandbArtifact(Protocol):
    """The part of `wandb.Artifact` that is used."""

    def add_file(self, local_path: str, name: str | None = None, *, policy: str) -> object:
        """Adds a file; with the policy immutable it is read from its place when it is sent."""


class WandbRun(Protocol):
    """The part of `wandb.Run` that is used."""

    dir: str
    summary: dict[str, object]

    def log_artifact(self, artifact_or_path: WandbArtifact) -> object:
        """Adds an artifact."""

    def finish(self, exit_code: int) -> None:
        """Ends the session."""


class WandbRuns:
    """The run of a run folder in W&B.

    Args:
        folder: The run folder.
        note: What the run came to, and what of it W&B has.
    """

    def __init__(self, folder: Path, note: WandbNote) -> None:
        self.note = note
        self._folder = folder
        check_wandb()

    @property
    def name(self) -> str:
        """W&B."""
        return "Weights & Biases"

    @property
    def shown(self) -> str:
        """Run and project, and how it is sent."""
        how = f"`{pasted('wandb', 'sync', self._folder / FOLDER)}` sends it" if mode() == "offline" else mode()
        return f"run {self.note.run.id} of the project {self.note.wandb}, {self.name}: {how}"

    def resume(self) -> str | None:
        """Gives the run its id; which runs W&B has is not looked up."""
        self.note.run.id = self.note.run.id or secrets.token_hex(4)
        return None

    def send(self) -> None:
        """Writes a session if the run has ended, and W&B does not have how."""
        note = self.note
        if note.run.status == "RUNNING":
            note.run.sent = None
            return
        report = artifact.file_digest(self._folder / FILE) if note.run.status == "FINISHED" else None
        if mode() == "disabled" or (note.run.sent, note.report) == (note.run.status, report):
            return
        self._write()
        note.run.sent, note.report = note.run.status, report
        self.save()

    def save(self) -> None:
        """Writes the note."""
        write_note(self._folder, self.note)

    def refusal(self, failure: TrackingFailure) -> InputError:
        """Returns the error of a W&B that takes nothing."""
        remedy = f"check {KEY} and the connection, or unset {MODE}: the run is then written for `wandb sync`"
        return InputError("track.wandb", f"{self.note.wandb} does not take what is sent ({failure})", remedy=remedy)

    def _write(self) -> None:
        """Writes a session with all that there is to send.

        Raises:
            TrackingFailure: wandb, the network or the disk failed.
        """
        wandb = _imported()
        try:
            run = wandb.init(**_arguments(self.note, self._folder))
            try:
                run.summary.update(_summary(self.note))
                if self.note.run.status == "FINISHED":
                    self._add_report(run, wandb.Artifact)
            finally:
                run.finish(exit_code=EXIT_CODES[self.note.run.status])
        except (wandb.Error, OSError, TimeoutError) as error:
            raise TrackingFailure(reason(error)) from error
        finally:
            wandb.teardown()

    def _add_report(self, run: WandbRun, artifact_of: Callable[..., WandbArtifact]) -> None:
        """Adds figures, report and served model."""
        contents = document.read(Contents, self._folder / FILE)
        flat = figures(contents)
        run.summary.update({**flat.numbers, **flat.texts})
        kept = Path(run.dir).parent / "artifacts"  # wandb would copy to the user's data folder; and the next run writes another report
        kept.mkdir(exist_ok=True)
        made = artifact_of(f"{self.note.name}-{REPORT}", type=REPORT)
        for name in (FILE, PAGE):
            made.add_file(str(shutil.copy(self._folder / name, kept)), name, policy="immutable")
        run.log_artifact(made)
        files = served_files(open_run(self._folder), contents) if self.note.model else {}
        if files:
            made = artifact_of(f"{self.note.name}-{MODEL}", type=MODEL)
            for place, file in files.items():
                made.add_file(str(file.path.absolute()), place, policy="immutable")
            run.log_artifact(made)


class Wandb(Protocol):
    """The part of the package wandb that is used."""

    Artifact: Callable[..., WandbArtifact]
    Error: type[Exception]

    def init(self, **arguments: object) -> WandbRun:
        """Starts a session."""

    def teardown(self) -> None:
        """Ends the process of wandb."""


def _imported() -> Wandb:
    """Returns the package, with its reports of errors to its makers off."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return cast(Wandb, wandb)


def _arguments(note: WandbNote, folder: Path) -> dict[str, object]:
    """Returns the arguments of a session: of the machine, the code and the console nothing is read."""
    entity, _, project = note.wandb.rpartition("/")
    quiet = {
        "console": "off",
        "silent": True,
        "disable_code": True,
        "disable_git": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "host": "",
        "init_timeout": INIT_SECONDS,
        "finish_timeout": UPLOAD_SECONDS,
        "finish_timeout_raises": True,
    }
    return {
        "entity": entity or None,
        "project": project,
        "name": note.name,
        "id": note.run.id,
        "resume": "allow",
        "mode": mode(),
        "dir": str(folder.absolute()),
        "config": note.run.settings,
        "reinit": "create_new",  # a run of a program that calls us goes on
        "settings": quiet,
    }


def _summary(note: WandbNote) -> dict[str, object]:
    """Returns seconds and peak memory of each step, as report.json names them."""
    return {f"stages/{step}/{name}": value for step, tracked in note.steps.items() for name, value in tracked.numbers.items()}


def mode() -> str:
    """Returns how wandb sends: as `WANDB_MODE` says, by default not at all."""
    return os.environ.get(MODE) or "offline"


def check_wandb() -> None:
    """Checks that a run can be written, or sent, from here; sends nothing.

    Raises:
        InputError: The package is not installed, the mode is unknown, or a key is missing.
    """
    if importlib.util.find_spec("wandb") is None:
        raise InputError("track.wandb", "given, but the package wandb is not installed", remedy=INSTALL)
    if mode() not in MODES:
        raise InputError(MODE, f"{mode()} given", f"{', '.join(MODES)} are allowed")
    if mode() == "online" and not os.environ.get(KEY):  # wandb would ask for one
        raise InputError(MODE, f"online given without {KEY}", remedy=f"set {KEY}, or unset {MODE}: `wandb sync` sends the run later")
