"""What a pipeline of processes is asked and refuses, without processes; `tests/distill/test_processes.py` trains with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.recipe import check
from compress.run.prepare import prepare
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Parallel
from foundation.machine.parallel import Team
from foundation.training.processes.pipeline import Pipeline, _names_of_each, pipelined
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

IMAGES = {
    "config": {
        "model_type": "vit",
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "init": "random",
    "task": "image-classification",
    "head": "new",
}


def checked(stage: str, settings: dict[str, Any], folder: Path, parallel: dict[str, Any] | None = None) -> None:
    """Checks a recipe that ends in a stage for a pipeline of two processes; nothing runs."""
    section = {"pipeline": 2, **(parallel or {})}
    raw = {
        "name": "tiny",
        "model": IMAGES,
        "data": {"path": "sklearn:digits"},
        "parallel": section,
        "stages": [*([] if stage == "finetune" else [{"finetune": {}}]), {stage: settings}],
    }
    prepare(check(raw), folder, ConsoleProgress("silent"), Parallel(**section).of(Team(0, 2))).count_macs()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("finetune", {"lora": {}}, r"finetune\.lora: given with parallel\.pipeline: 2; adapters are not divided"),
        ("finetune", {"batch_size": 1}, r"finetune\.batch_size: 1 given for 2 micro-batches of a pipeline; give at least 2"),
        ("finetune", {"micro_batch_size": 1}, r"finetune\.micro_batch_size: 1 given for 2 micro-batches of a pipeline; give at least 2"),
        ("quantize", {"mode": "qat"}, r"quantize\.mode: qat given with parallel\.pipeline: 2; layers .* are not divided into stages"),
        ("prune", {"sparsity": 0.5, "recover": {"hidden_weight": 0.5}}, r"prune\.recover\.hidden_weight: 0\.5 given .*pipeline: 2"),
        ("distill", {"student": {"layers": 1}, "loss": "soft_target"}, r"distill: parallel\.pipeline: given; .* 1 blocks for 2 stages"),
        ("distill", {"student": {"layers": 2}, "loss": "minilmv2"}, r"distill\..*: minilmv2 compares more than the answers of a row"),
        ("distill", {"student": {"layers": 2}, "losses": [{"name": "hidden"}]}, r"distill\..*: hidden compares more than the answers"),
        ("distill", {"student": {"layers": 2}, "loss": "relational"}, r"distill\..*: relational compares more than the answers of a row"),
    ],
)
def test_what_does_not_work_in_stages_is_told_before_the_run(stage: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^stages\.{message}") as caught:
        checked(stage, settings, tmp_path)
    assert len(caught.value.lines) == 1


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("finetune", {}),
        ("finetune", {"optimizer": {"name": "adafactor"}}),
        ("prune", {"sparsity": 0.5}),
        ("distill", {"student": {"layers": 2}, "loss": "soft_target"}),
        ("quantize", {}),
    ],
)
def test_what_works_in_stages_is_not_refused(stage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    checked(stage, settings, tmp_path)


def test_interleaved_stages_need_two_blocks_for_each_process(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 3 blocks for 4 stages: give a smaller pipeline"):
        checked("finetune", {}, tmp_path, {"schedule": "interleaved"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": 2, "strategy": "fsdp2"}, "strategy: fsdp2 given with pipeline: 2, whose stages have whole weights"),
        ({"pipeline": 2, "tensor": 2}, "tensor: 2 given with pipeline: 2"),
        ({"pipeline": 2, "gradients": "fp16"}, "gradients: fp16 given with pipeline: 2"),
        ({"pipeline": 4, "microbatches": 6}, "microbatches: 6 given, no multiple of pipeline: 4; give 4 or 8"),
        ({"pipeline": 4, "microbatches": 3}, "microbatches: 3 given, no multiple of pipeline: 4; give 4"),
        ({"microbatches": 4}, "microbatches: 4 given without pipeline"),
        ({"schedule": "interleaved"}, "schedule: interleaved given without pipeline"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Parallel(**settings)


def test_processes_are_a_multiple_of_the_stages() -> None:
    with raises_problem("parallel.pipeline", "3", "4 processes", "give 1 or 2 or 4"):
        Parallel(pipeline=3).of(Team(0, 4))
    assert Parallel(pipeline=3).of(Team(0, 1)).pipeline == 1  # without a launcher it has no effect


def test_neighbours_hold_one_model_and_take_the_same_rows() -> None:
    teams = [Parallel(pipeline=2).of(Team(rank, 4)) for rank in range(4)]
    assert [team.data_rank for team in teams] == [0, 0, 1, 1]
    assert [team.pipeline_rank for team in teams] == [0, 1, 0, 1]
    assert [team.stream for team in teams] == [0, 1, 2, 3]  # each stage draws its own dropout
    assert {team.data_size for team in teams} == {2}
    assert all(team.shards and not team.without_pipeline.shards for team in teams)
    assert [team.without_pipeline.data_rank for team in teams] == [0, 1, 2, 3]  # a teacher is whole in each process


@pytest.mark.parametrize(
    ("rows", "given", "parts"),
    [(64, None, 8), (8, None, 8), (7, None, 6), (3, None, 2), (2, None, 2), (1, None, 2), (64, 4, 4), (2, 4, 4)],
)
def test_rows_go_in_four_parts_for_each_stage_where_there_are_enough(rows: int, given: int | None, parts: int) -> None:
    assert Parallel(pipeline=2, **({} if given is None else {"microbatches": given})).parts(rows) == parts


@pytest.mark.parametrize(("rows", "parts"), [(1, 4), (4, 4), (5, 4), (8, 2)])
def test_rows_that_fill_up_micro_batches_come_last(rows: int, parts: int) -> None:
    pipeline = Pipeline.__new__(Pipeline)
    pipeline.parts = parts
    indices = np.arange(10, 10 + rows)
    filled = pipeline.filled(indices)
    assert len(filled) % parts == 0
    assert len(filled) - rows < parts
    assert filled[:rows].tolist() == indices.tolist()
    assert set(filled[rows:].tolist()) <= {10}


def test_a_loss_with_weights_of_its_own_is_refused() -> None:
    objective: Any = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"finetune: parallel\.pipeline given .* trains a projection"):
        pipelined(nn.Linear(2, 2), objective, None, 4, Team(0, 2, pipeline=2), Parallel(pipeline=2), "finetune")  # type: ignore[arg-type]


def test_tied_weights_are_one_with_all_their_names() -> None:
    model: Any = nn.Module()
    model.table, model.body, model.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False)
    model.head.weight = model.table.weight
    assert _names_of_each(model) == [["table.weight", "head.weight"], ["body.weight"], ["body.bias"]]
    assert torch.equal(model.head.weight, model.table.weight)
