"""Compressed gradients of two processes: how far they are from the sum, that nothing is lost over time, and that trainings converge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from compress.run.cache import cache_key
from foundation.core.target import Parallel, Target
from foundation.machine.parallel import Team
from foundation.stage.context import Context
from foundation.training.finetune import Finetune
from foundation.training.processes.gradients import whole_steps
from tests.foundation import tiny_gpt
from tests.foundation.training.processes.gradient_processes import RANK, SIZE, STEPS, WAYS, together, whole
from tests.ranks import in_ranks
from tests.told import Told


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("gradients")
    in_ranks(2, together, folder)
    gradients: dict[str, Tensor] = torch.load(folder / "found.pt")
    return gradients


@pytest.mark.slow
def test_float32_is_the_sum(found: dict[str, Tensor]) -> None:
    for gradient in found[f"float32 {SIZE}"]:
        torch.testing.assert_close(gradient, whole(SIZE))


@pytest.mark.slow
def test_fp16_is_the_sum_up_to_rounding(found: dict[str, Tensor]) -> None:
    """Each process rounds its part to 11 bits, and so does the sum."""
    expected, gradient = whole(SIZE), found[f"fp16 {SIZE}"][0]
    assert 0 < float((gradient - expected).abs().max()) < 3 * 2.0**-11 * float(expected.abs().max())


@pytest.mark.slow
def test_powersgd_gives_gradients_of_low_rank_back(found: dict[str, Tensor]) -> None:
    for gradient in found[f"powersgd {RANK}"]:
        torch.testing.assert_close(gradient, whole(RANK), rtol=1e-3, atol=1e-4 * float(whole(RANK).abs().max()))


@pytest.mark.slow
def test_powersgd_leaves_the_first_steps_whole_and_then_sends_narrow_matrices(found: dict[str, Tensor]) -> None:
    steps = found[f"powersgd {SIZE}"]
    start = whole_steps(STEPS)
    torch.testing.assert_close(steps[:start], whole(SIZE).expand(start, -1, -1))
    assert {int(torch.linalg.matrix_rank(gradient, rtol=1e-4)) for gradient in steps[start:]} == {RANK}


@pytest.mark.slow
def test_what_powersgd_leaves_out_comes_later(found: dict[str, Tensor]) -> None:
    """Error feedback: the mean over steps is near the gradient, which no single step is."""
    steps, expected = found[f"powersgd {SIZE}"][whole_steps(STEPS) :], whole(SIZE)
    single = float((steps[0] - expected).norm() / expected.norm())
    mean = float((steps.mean(dim=0) - expected).norm() / expected.norm())
    assert single > 0.5
    assert mean < 0.25 * single


@pytest.mark.slow
def test_trainings_converge(found: dict[str, Tensor]) -> None:
    ends = {way: float(found[f"{way} losses"][-1]) for way in WAYS}
    assert float(found["float32 losses"][0]) > 0.1
    assert ends["float32"] < 1e-3
    assert ends["fp16"] < 1.1 * ends["float32"] + 1e-5
    assert ends["powersgd"] < 2e-3
    assert not torch.equal(found["powersgd losses"], found["float32 losses"])


def test_steps_that_stay_whole() -> None:
    assert [whole_steps(count) for count in (1, 20, 21, 1000)] == [2, 2, 3, 100]


@pytest.mark.parametrize("gradients", ["fp16", "powersgd"])
def test_shards_are_not_compressed(gradients: Any) -> None:
    with pytest.raises(ValidationError, match=f"gradients: {gradients} .* fsdp2, .*: give strategy: ddp"):
        Parallel(strategy="fsdp2", gradients=gradients)
    with pytest.raises(ValidationError, match=f"gradients: {gradients} .* tensor: 2; .*: give tensor: 1"):
        Parallel(tensor=2, gradients=gradients)
    assert Parallel(gradients=gradients).powersgd_rank == 4


def test_what_they_change_has_another_cache_key(told: Told, tmp_path: Path) -> None:
    step = Finetune(id="finetune")
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path)
    compressed = replace(context, parallel=Parallel(gradients="powersgd"))
    assert cache_key(step, None, context) == cache_key(step, None, compressed)  # one process sends nothing
    two = replace(context, team=Team(0, 2))
    assert cache_key(step, None, two) == cache_key(step, None, context)
    assert cache_key(step, None, replace(compressed, team=Team(0, 2))) != cache_key(step, None, two)
