"""The first steps of the trainings of shipped recipes, as one process or several take them; run by `test_recipes_in_processes.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from compress.recipe import read
from compress.run.advance import advance
from compress.run.implicit import Evaluate, is_variant
from compress.run.prepare import prepare
from compress.run.state import RunState
from compress.run.steps import plan_steps
from distill.distill import Distill
from foundation.core.progress import ConsoleProgress
from foundation.machine.parallel import Team, joined
from foundation.training import teacher_logits, train
from foundation.training.finetune import Finetune

MOST = 50
"""Steps of each training that are compared."""
PATCHED: tuple[tuple[Any, str], ...] = (
    (train._Loop, "_gradients"),
    (train._Loop, "__init__"),
    (train, "autocast_dtype"),
    (teacher_logits, "autocast_dtype"),
)


class Steps:
    """Notes the loss and the norm of the gradient of every step, and lets trainings end after `MOST` steps."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> Steps:
        self.before = [(place, name, getattr(place, name)) for place, name in PATCHED]
        (_, _, gradients), (_, _, init), *_ = self.before
        found = self.found

        def noted(loop: Any, indices: Any, dtype: Any) -> Any:
            sums, norm = gradients(loop, indices, dtype)
            found.setdefault(loop.label, []).append((sum(sums.values()) / len(indices), norm))
            return sums, norm

        def shortened(loop: Any, *args: Any) -> None:
            init(loop, *args)
            loop.num_steps = min(loop.num_steps, MOST)

        for (place, name), value in zip(PATCHED, (noted, shortened, *[lambda device: torch.float32] * 2), strict=True):
            setattr(place, name, value)
        return self

    def __exit__(self, *error: object) -> None:
        for place, name, value in self.before:
            setattr(place, name, value)


def steps_of(path: Path, settings: list[str], folder: Path, team: Team) -> dict[str, list[tuple[float, float]]]:
    """Runs the stages of a recipe up to the last one that trains; returns loss and norm of each step by the label of the training."""
    recipe = read(path, settings)
    folder.mkdir(parents=True, exist_ok=True)
    team.broadcast(None)  # the folder exists
    context = prepare(recipe, folder, ConsoleProgress("silent"), team)
    trained = [number for number, stage in enumerate(recipe.stages) if trains(stage)]
    state = RunState(context)
    with Steps() as steps:
        planned = plan_steps(recipe.model_copy(update={"stages": recipe.stages[: trained[-1] + 1]}))
        for step in [step for step in planned if not isinstance(step, Evaluate)]:
            state = state.before(step)
            made, _, _ = advance(step, state, folder, False)
            state = state.after(step, made, variant=is_variant(step, planned))
    return steps.found


def trains(stage: Any) -> bool:
    """Whether a stage takes steps of an optimizer."""
    return isinstance(stage, Finetune | Distill) or bool(getattr(stage, "recover", None)) or getattr(stage, "mode", None) == "qat"


def together(path: Path, settings: list[str], where: Path) -> None:
    """What several processes do; writes `several.json`."""
    with joined() as processes:
        steps = steps_of(path, settings, where / "several", processes)
        if processes.is_first:
            (where / "several.json").write_text(json.dumps(steps))
