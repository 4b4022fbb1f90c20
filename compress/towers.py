"""Checks a recipe for a model with two towers (`foundation.models.heads.towers`) before anything runs; one line for each problem.

Pruning, sparsifying and distillation look for one stack of blocks, and quantization-aware training learns from a teacher of one: they would
treat one tower and leave the other as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foundation.core.engines import REFERENCE, served_on
from foundation.core.errors import Problem
from foundation.core.named import one_of
from foundation.core.target import Target
from foundation.labels.tasks import Task

ONE_STACK = ("distill", "prune", "sparsify", "compact")
SEARCHED = Problem("search", "given", "its candidates are models of one tower", "leave it out")


def refused(task: Task, stages: Sequence[Any], target: Target, *, new_head: bool, searches: bool) -> list[Problem]:
    """Returns a problem for each setting of a recipe that a model with two towers cannot have.

    Args:
        task: The task, which has two towers.
        stages: The stages of the recipe.
        target: Its target.
        new_head: Whether it asks for a new head.
        searches: Whether it asks for a search.
    """
    able = "finetune, quantize with mode: ptq, export and triton_repo"
    problems = [
        Problem(f"stages.{stage.id}", f"{stage.NAME} given", f"models of {task} have two towers, which {able} take", "leave it out")
        for stage in stages
        if stage.NAME in ONE_STACK
    ]
    problems += [
        Problem(
            f"stages.{stage.id}.mode",
            f"{stage.mode} given",
            f"models of {task} have two towers, which are quantized after training",
            "give mode: ptq",
        )
        for stage in stages
        if stage.NAME == "quantize" and stage.mode != "ptq"
    ]
    engines = [*served_on("cpu"), REFERENCE]
    problems += [
        Problem("target.engines", f"{engine} given", f"{task} runs in {one_of(engines)}", "leave it out")
        for engine in target.engines
        if engine not in engines
    ]
    if target.device != "cpu" and any(stage.NAME == "triton_repo" for stage in stages):
        problems.append(
            Problem(
                "stages",
                f"triton_repo given with target.device {target.device}",
                f"it serves {task} on the cpu alone",
                "give target.device: cpu, or leave triton_repo out",
            )
        )
    if new_head:
        problems.append(Problem("model.head", "new given", f"models of {task} have none, and would lose all weights", "leave it out"))
    return [*problems, SEARCHED] if searches else problems
