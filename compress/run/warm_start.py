"""A run that starts from a stage of another one: `model: {run: RUN, stage: ID}` names a checkpoint by what made it.

    runs/first/recipe.lock.yaml     stages: finetune -> stages/finetune-1a2b3c4d
    model.path                      runs/first/stages/finetune-1a2b3c4d

The path is looked up where a recipe is planned or run, and is written to its lock file: the lock file leads to the same weights whatever
the other run does later, as long as they are there. The cache key holds the digest of the files and neither run, stage nor path, so that a
run whose folder was moved is found again.
"""

from __future__ import annotations

from pathlib import Path

from compress.recipe import Recipe
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError, nearest
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint


def started(recipe: Recipe) -> Recipe:
    """Returns a recipe whose `model.path` is the checkpoint that `model.run` and `model.stage` name; others stay as they are.

    Raises:
        InputError: There is no such run, it has not finished, or it has no such checkpoint.
    """
    model = recipe.model
    if model.run is None or model.path is not None:
        return recipe
    return recipe.model_copy(update={"model": model.model_copy(update={"path": str(_checkpoint(model))})})


def _checkpoint(model: ModelConfig) -> Path:
    """Returns the folder of the checkpoint that a model section names."""

    run, stage = Path(str(model.run)), str(model.stage)
    try:
        artifacts = open_run(run.expanduser()).artifacts
    except InputError as error:
        raise InputError.of(problem.within("model.run") for problem in error.problems) from error
    checkpoints = {name: found.path for name, found in artifacts.items() if found.kind == "checkpoint"}
    fit = [name for name, path in checkpoints.items() if not Checkpoint(path).is_quantized]
    if stage in checkpoints and stage not in fit:
        raise InputError("model.stage", f"{stage} given, whose weights are quantized already", f"{' or '.join(fit)} of {run} is allowed")
    if stage not in fit:
        raise InputError("model.stage", f"{stage} given", f"{run} has {', '.join(fit)}{nearest(stage, fit)}")
    return checkpoints[stage].resolve()


def check_intact(model: ModelConfig) -> None:
    """Checks that the checkpoint of another run is what that run wrote.

    Raises:
        InputError: It is not; a line for each file.
    """
    if model.run is None or model.path is None:
        return
    try:
        problems = artifact.verify(artifact.load(Path(model.path)))
    except artifact.DamagedArtifact as error:
        problems = [error.problem]
    if problems:
        raise InputError.of(problem.within("model.run").advise(f"run {model.run} again to make it anew") for problem in problems)
