"""Trainings whose micro-batches are compared with each other come to what whole batches come to, resume, and fit in with the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distill.distill import Distill
from foundation.core.target import Parallel
from foundation.data.splits import Data, Split
from foundation.labels import text_groups, vectors
from foundation.labels.value import Numbers
from foundation.machine.parallel import ALONE
from foundation.models.size import Passes
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from tests.distill import processes, rows_together
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

STEADY = {"learning_rate": 2e-3, "epochs": 1}
Trained = tuple[dict[str, Any], dict[str, Tensor]]
Train = Callable[..., Trained]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Runs a stage in float32 on one of the kinds of rows; returns its figures and weights."""
    written: set[str] = set()

    def run(name: str, kind: str, stage: Stage, scratch: str = "", checkpointing: Any = "none") -> Trained:
        if kind not in written:
            rows_together.write(tmp_path / kind, kind)
            written.add(kind)
        scratched = tmp_path / (scratch or f"{name}-scratch")
        found = processes.run(tmp_path, kind, stage, tmp_path / name, scratched, ALONE, Parallel(checkpointing=checkpointing))
        return found, load_file(tmp_path / name / "model.safetensors")

    patched = processes.train.autocast_dtype, processes.teacher_logits.autocast_dtype
    yield run  # type: ignore[misc]
    processes.train.autocast_dtype, processes.teacher_logits.autocast_dtype = patched


def same(one: Trained, other: Trained) -> None:
    """Whether two trainings took the same steps but for rounding."""
    assert one[0]["norms"] == pytest.approx(other[0]["norms"], rel=1e-3)
    for mine, theirs in zip(one[0]["losses"], other[0]["losses"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    for name, weight in one[1].items():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding
            assert float((weight - other[1][name]).abs().mean()) < 1e-5, name


def parted(stage: Stage, rows: int) -> Stage:
    """The stage with micro-batches."""
    return stage.model_copy(update={"micro_batch_size": rows})


STAGES = {
    "negatives": ("mined", 12, 4, lambda rows: Finetune(**STEADY, batch_size=rows)),
    "scored pairs": ("scored", 6, 4, lambda rows: Finetune(**STEADY, batch_size=rows, loss="ranking")),
    "hardest": ("pairs", 6, 2, lambda rows: Finetune(**STEADY, batch_size=rows, loss="triplet")),
    "adapters": ("pairs", 6, 2, lambda rows: Finetune(**STEADY, batch_size=rows, lora={"rank": 4})),
    "similar": ("scored", 6, 2, lambda rows: Distill(**STEADY, batch_size=rows, student={"layers": 1}, loss="similarity")),
    "labels too": (
        "pairs",
        6,
        4,
        lambda rows: Distill(
            **STEADY, batch_size=rows, student={"layers": 1}, hard_weight=0.5,
            losses=[{"name": "soft_target", "steps": [0, 0.4]}, {"name": "similarity", "steps": [0.6, 1]}],
        ),
    ),
}  # fmt: skip

QUICK = ("negatives", "similar")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STAGES])
def test_micro_batches_come_to_what_whole_batches_come_to(name: str, train: Train) -> None:
    kind, rows, at_once, made = STAGES[name]
    stage = made(rows)  # type: ignore[no-untyped-call]
    whole = train("whole", kind, stage)
    same(train("parted", kind, parted(stage, at_once)), whole)
    if name == "negatives":  # what would be wrong: losses of each micro-batch by itself
        smaller = train("smaller", kind, made(at_once))  # type: ignore[no-untyped-call]
        assert smaller[0]["losses"][0]["loss"] < 0.9 * whole[0]["losses"][0]["loss"]


@pytest.mark.slow
def test_a_killed_training_with_dropout_continues_to_equal_bits(train: Train) -> None:
    stage = Finetune(**STEADY, batch_size=12, micro_batch_size=4)  # type: ignore[arg-type]
    whole = train("whole", "mined dropping", stage)
    with processes.dying(4), contextlib.suppress(processes.Killed):
        train("killed", "mined dropping", stage, scratch="again")
    torch.manual_seed(99)
    resumed = train("resumed", "mined dropping", stage, scratch="again")
    assert len(resumed[0]["norms"]) == 6
    assert all(torch.equal(weight, resumed[1][name]) for name, weight in whole[1].items())


@pytest.mark.slow
def test_blocks_that_are_computed_again_draw_the_same(train: Train) -> None:
    stage = Finetune(**STEADY, batch_size=12, micro_batch_size=4)  # type: ignore[arg-type]
    same(train("again", "mined dropping", stage, checkpointing="full"), train("kept", "mined dropping", stage))


def test_a_loss_that_is_no_number_is_told_as_ever(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.training.losses.text_groups.SCALE", float("nan"))
    with raises_problem("finetune", "ranking", "nan in step 1 of 10", "lower learning_rate"):
        train("nan", "pairs", Finetune(**STEADY, batch_size=6, micro_batch_size=2))  # type: ignore[arg-type]


def test_rows_that_run_forward_twice_are_more_work() -> None:
    groups = [(f"a {number}", f"b {number}") for number in range(20)]
    split, none = Split([""] * 40, text_groups.labels_of(groups)), Split([], Numbers(np.zeros(0, np.float32)))
    scored = Split([""] * 40, vectors.labels_of(np.ones(20)))
    data, of_scores = Data(split, none, none, ("score",)), Data(scored, none, none, ("score",))
    one = Passes(before=1, after=1, layers=2)
    assert Finetune(epochs=1, batch_size=8).work(one, data) == 120
    assert Finetune(epochs=1, batch_size=8, micro_batch_size=4).work(one, data) == 160
    assert Finetune(epochs=1, batch_size=8, micro_batch_size=8).work(one, data) == 120
    assert Finetune(epochs=1, batch_size=8, micro_batch_size=4).work(one, of_scores) == 120
    student, soft = cast("Any", {"layers": 1}), cast("Any", {"name": "soft_target"})
    assert Distill(student=student, epochs=1, batch_size=8, loss="similarity").work(one, data) == 160  # with the teacher's pass
    assert Distill(student=student, epochs=1, batch_size=8, micro_batch_size=4, loss="similarity").work(one, data) == 200
    assert Distill(student=student, epochs=1, batch_size=8, micro_batch_size=4, losses=[soft]).work(one, data) == 160
    assert Distill(student=student, epochs=1, batch_size=8, micro_batch_size=4, losses=[soft], hard_weight=1).work(one, data) == 200
