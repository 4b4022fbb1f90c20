"""Layers that are shared in two dimensions."""

from __future__ import annotations

from typing import Any

import pytest

from compress.recipe import check
from foundation.core.target import Parallel
from foundation.machine.parallel import ALONE, Team
from tests.foundation.training.processes import mesh_processes
from tests.problems import raises_problem
from tests.ranks import in_ranks

RECIPE: dict[str, Any] = {
    "name": "mesh",
    "model": {"config": {"model_type": "vit"}, "init": "random", "task": "image-classification", "head": "new"},
    "data": {"path": "sklearn:digits"},
    "stages": [{"finetune": {}}],
}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(2, 2)])
def test_logits_and_gradients_are_those_of_one_process(rows: int, columns: int) -> None:
    in_ranks(rows * columns, mesh_processes.compare, rows, columns)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (4, 2)])
def test_logits_and_gradients_of_eight_are_those_of_one_process(rows: int, columns: int) -> None:
    in_ranks(rows * columns, mesh_processes.compare, rows, columns)


def test_queries_keys_and_values_sum_the_gradient_of_what_they_read_once() -> None:
    in_ranks(2, mesh_processes.count_sums)


def test_a_mesh_sets_how_processes_share_layers() -> None:
    given = Parallel(mesh=(2, 4))
    assert given.of(Team(5, 8)) == Team(5, 8, "fsdp2", 4, 1, True)
    assert given.of(ALONE) is ALONE
    assert Parallel(**given.model_dump()) == Parallel.model_validate(given.model_dump(mode="json")) == given
    assert "mesh" not in Parallel(tensor=4, sequence=True, strategy="fsdp2").model_dump()


@pytest.mark.parametrize(
    ("size", "remedy"),
    [(4, "give [2, 2]"), (16, "give [2, 8] or [4, 4] or [8, 2]"), (12, "give [2, 6] or [3, 4] or [4, 3] or [6, 2]"), (7, "a product")],
)
def test_a_mesh_has_as_many_places_as_there_are_processes(size: int, remedy: str) -> None:
    with raises_problem("parallel.mesh", "[2, 4]", f"{size} processes", remedy):
        Parallel(mesh=(2, 4)).of(Team(0, size))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tensor": 2}, "tensor: 2 given with mesh: [2, 4]"),
        ({"strategy": "ddp"}, "strategy: ddp given with mesh"),
        ({"sequence": False}, "sequence: False given with mesh"),
        ({"context": 2}, "context: 2"),
        ({"pipeline": 2}, "pipeline: 2"),
        ({"gradients": "fp16"}, "gradients: fp16"),
    ],
)
def test_what_a_mesh_sets_or_excludes_is_not_given(given: dict[str, Any], named: str) -> None:
    with raises_problem("parallel", named):
        check({**RECIPE, "parallel": {"mesh": [2, 4], **given}})


@pytest.mark.parametrize(
    ("mesh", "key"), [([2], "mesh.1"), ([2, 2, 2], "mesh"), ([1, 2], "mesh.0"), ([2, 0], "mesh.1"), ("2x2", "mesh"), (4, "mesh")]
)
def test_a_mesh_has_two_sides(mesh: object, key: str) -> None:
    with raises_problem(f"parallel.{key}"):
        check({**RECIPE, "parallel": {"mesh": mesh}})
