"""`compress rollout`: replaces the models of a running `compress serve` by the models of another run or deployment.

The command asks the serving process over its control socket (`triton_repo.control`), and that process does the work: it hashes the new run,
compares the models with those that it serves, and rolls over one after the other (`triton_repo.roll_over`). What is served goes over to
what the new run serves, under the name that clients know, whatever variant or precision that is. Before requests go to a new version it
answers the golden rows of its run, within the limits of `foundation.standalone.tolerance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from compress.commands.verify import compare_golden
from compress.report import evaluations
from compress.report.document import Report
from compress.report.summary import missed_goals
from compress.run.opened import opened
from foundation.artifacts.artifact import read_json
from foundation.artifacts.chain import GOLDEN
from foundation.core.errors import InputError
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.labels.zero_shot import read_by
from foundation.measure.answers import load_predictions
from foundation.standalone.adapted import as_read
from foundation.standalone.preprocess import Row
from triton_repo import control, deployment
from triton_repo.served_models import ServedModel
from triton_repo.service import Service

Log = Callable[[str], None]
BEFORE = "the version before is served as it was"


@dataclass(frozen=True)
class _New:
    """The new versions, and what they are checked with."""

    models: list[ServedModel]
    repository: Path
    rows: list[Row]
    recorded: dict[str, np.ndarray]
    """The run's recorded answers to the golden rows."""
    labels: Labels
    """Labels of its evaluation split."""
    task: Task


def rollout(served: Path, new: Path, *, model: str | None = None, log: Log = print) -> dict[str, object]:
    """Rolls a running server over to the models of another run.

    Args:
        served: The folder that `compress serve` was given.
        new: A finished run with the new versions, or a deployment of one.
        model: Name of the model; None: every served one that the new run has.
        log: Prints one line.

    Returns:
        `models`: for each, `model`, `before`, `after` (versions), `load_s`, `check_s` and `seconds`.

    Raises:
        InputError: The folder is not being served, or a model was not rolled over: it then still answers as before.
    """
    missed = deployment.missed_goals(new) if deployment.is_deployment(new) else missed_goals(Report.load(opened(new).folder).contents)
    for line in missed:
        log(f"warning: {new}: {line}")
    request = {"run": str(new.resolve()), "model": model}
    return control.ask(served, request, log)


def answer(service: Service, served: Sequence[ServedModel], request: Mapping[str, object], log: Log) -> dict[str, object]:
    """Does what `rollout` asks for, in the process that serves.

    Args:
        service: The server.
        served: Its models, as it was started with them.
        request: What `rollout` sends.
        log: Says a line to it.
    """
    folder, wanted = Path(str(request["run"])), None if request["model"] is None else str(request["model"])
    new = _opened(folder)
    roles = {model.role: model for model in new.models}
    name = None if wanted is None else service.name_of(wanted)
    pairs = [(model.name, roles[model.role]) for model in served if model.role in roles and name in (None, model.name)]
    if not pairs:
        wanted = wanted or " and ".join(service.models)
        has = " and ".join(model.folder for model in new.models)
        raise InputError(f"{folder}", f"has {has}, and {wanted} is to be rolled over", remedy="give a run that has it")
    done = []
    for present, model in pairs:
        rolled = service.roll_over(present, new.repository / model.folder, _check(folder, new, present, model, log))
        log(f"{present}: version {rolled.before} -> {rolled.after}, loaded in {rolled.load_s:.2f} s, checked in {rolled.check_s:.2f} s")
        done.append(asdict(rolled))
    return {"models": done}


def _opened(folder: Path) -> _New:
    """Returns the new versions of a run or a deployment, whose files have been hashed."""
    if deployment.is_deployment(folder):
        repository = deployment.repository_of(folder)
        task = read_json(folder / deployment.MANIFEST).get(deployment.TASK)
        if task not in TASKS:
            raise InputError(
                f"{folder / deployment.MANIFEST}", f"task: {task!r}, which this version does not know", remedy="deploy the run again"
            )
        labels = TASKS[task].answer.read(deployment.golden_labels(folder))
    else:
        run = opened(folder)
        repository, task = deployment.repository_of(folder), run.recipe["model"]["task"]
        _, labels = load_predictions(run.predictions(run.baseline), task)
    rows, recorded = evaluations.read_golden(folder / GOLDEN)
    return _New(deployment.models_in(folder), repository, rows, recorded, labels, task)


def _check(folder: Path, new: _New, name: str, model: ServedModel, log: Log) -> Callable[[str, str], None]:
    """Returns the check of a new version of the model `name`: its answers to the golden rows are those that the run recorded."""
    from triton_repo.client import RequestError, evaluate
    from triton_repo.probe import prepared_of

    key = f"{model.build}.triton"
    if key not in new.recorded:
        raise InputError(
            f"{folder}", f"{model.build} was not evaluated in the server, so there is nothing to check it with", "`serve: true` does"
        )

    def check(address: str, candidate: str) -> None:
        try:
            prepared = prepared_of(new.repository / model.folder)
            own = read_by(prepared.modality, new.rows)
            asked = as_read([new.rows[row] for row in own], prepared.adapters)
            logits = evaluate(address, candidate, asked, 1).stored_predictions(prepared)
        except RequestError as error:
            raise InputError(name, f"the new version does not answer: {error}", remedy=BEFORE) from error
        problems = list(compare_golden(key, new.task, new.labels, new.recorded[key][own], logits, log))
        if problems:
            raise InputError.of(problem.advise(BEFORE) for problem in problems)

    return check
