"""Why a step runs although its folder holds artifacts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.run.cache import DEPENDS_ON, depends_on, explain_miss
from compress.run.implicit import Evaluate
from compress.run.state import RunState
from foundation.artifacts import artifact
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Parallel, Target
from foundation.machine.parallel import ALONE, Team
from foundation.stage.context import Context
from foundation.training.finetune import Finetune
from tests.foundation import tiny_gpt
from tests.told import Told
from triton_repo.triton_repo import TritonRepo

STEP = Finetune(id="finetune", epochs=3)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,), threads=1), 0, Told(), tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    def make(step: Any, inputs: Any) -> Path:
        folder = tmp_path / f"{step.id}-{artifact.digest(inputs)[:8]}"
        with artifact.writing(folder) as temporary:
            fields: dict[str, Any] = {
                "stage": step.NAME,
                "config": {},
                "seed": 0,
                "versions": {},
                "hardware": {},
                "metrics": {},
                "seconds": 1.0,
            }
            fields |= {"peak_memory_bytes": 1, DEPENDS_ON: inputs}
            artifact.seal(temporary, id=step.id, kind=step.PRODUCES, key=artifact.digest(inputs), parents=[], fields=fields)
        return folder

    return make


def test_the_nearest_artifact_is_named_with_what_differs(context: Context, made: Callable[..., Path], tmp_path: Path) -> None:
    wanted = depends_on(STEP, None, context)
    assert explain_miss(STEP, tmp_path, wanted) is None  # nothing to compare with
    far = Finetune(id="finetune", epochs=5, learning_rate=1e-4)
    made(far, depends_on(far, None, context))
    near = made(STEP, depends_on(STEP, None, replace(context, target=Target(sequence_lengths=(8,), threads=2))))
    assert explain_miss(STEP, tmp_path, wanted) == f"unlike {near.name}: threads 1, was 2"


def test_three_differences_are_told(context: Context, made: Callable[..., Path], tmp_path: Path) -> None:
    step = Finetune(id="finetune", epochs=5, learning_rate=1e-4)
    other = made(step, depends_on(step, None, replace(context, seed=3, data=replace(context.data, train=context.data.train.take([0, 1])))))
    assert explain_miss(STEP, tmp_path, depends_on(STEP, None, context)) == (
        f"unlike {other.name}: config.epochs 3.0, was 5.0; config.learning_rate 3e-05, was 0.0001; data has other contents; and 1 more"
    )


def test_what_an_earlier_step_changed_is_not_told_again(context: Context, made: Callable[..., Path], tmp_path: Path) -> None:
    wanted = depends_on(STEP, None, context)
    made(STEP, {**wanted, "parent": "a" * 64, "threads": 2})
    assert explain_miss(STEP, tmp_path, wanted) is None


def test_a_training_depends_on_saved_activations_that_change_its_gradients(context: Context) -> None:
    def key(kind: Any, step: Any) -> object:
        return depends_on(step, None, replace(context, parallel=Parallel(checkpointing=kind)))

    assert key("full", STEP) == key("none", STEP) != key("int8", STEP)
    evaluation = Evaluate(id="evaluate-finetune")
    assert key("int8", evaluation) == key("none", evaluation)


def test_a_training_of_several_processes_depends_on_the_capacity_of_experts(context: Context) -> None:
    def key(team: Team, capacity: float | None) -> object:
        parallel = Parallel(experts=2, expert_capacity=capacity)
        return depends_on(STEP, None, replace(context, parallel=parallel, team=parallel.of(team)))

    assert key(ALONE, 1.25) == key(ALONE, None) == key(Team(0, 2), None)
    assert len({str(key(Team(0, 2), capacity)) for capacity in (None, 1.0, 1.25)}) == 3


def test_what_is_served_depends_on_the_cascade(context: Context, tmp_path: Path) -> None:
    made = RunState(context).after(STEP, Artifact(tmp_path, {"id": "cascade", "kind": "cascade", "digest": "d"}), variant=False)
    assert made.parent is None  # the engines stay what the next step starts from
    step = TritonRepo(id="triton_repo", serve=False)
    with_cascade, without = (depends_on(step, None, one) for one in (made.context, context))
    assert with_cascade == {**without, "cascade": "d"}
    assert depends_on(STEP, None, made.context) == depends_on(STEP, None, context)


def test_other_steps_and_unreadable_folders_are_passed_over(context: Context, made: Callable[..., Path], tmp_path: Path) -> None:
    evaluate, longer = Evaluate(id="evaluate"), Evaluate(id="evaluate-baseline")
    made(longer, depends_on(longer, None, replace(context, seed=3)))
    (tmp_path / "evaluate-00000000").mkdir()
    (tmp_path / "evaluate-11111111").mkdir()
    (tmp_path / "evaluate-11111111" / artifact.MANIFEST).write_text("{", encoding="utf-8")
    assert explain_miss(evaluate, tmp_path, depends_on(evaluate, None, context)) is None


def test_tuples_are_lists_in_a_manifest(context: Context, made: Callable[..., Path], tmp_path: Path) -> None:
    inputs = {**depends_on(STEP, None, context), "more": (1, (2, 3)), "by_number": {1: 2}}
    made(STEP, {**inputs, "seed": 9})
    assert str(explain_miss(STEP, tmp_path, inputs)).endswith(": seed 0, was 9")
