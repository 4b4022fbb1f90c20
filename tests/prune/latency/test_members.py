"""Members of a family: each is as fast as asked, against the model that the family started from. Engines are made up; no clock is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundation.artifacts.artifact import Artifact
from foundation.models.architecture.blocks import with_layers
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.choices import Member
from prune.prune import Prune
from prune.steps import recovery_job
from tests.problems import raises_problem
from tests.prune.latency.test_timing import QUICK, WHOLE, Engine, _configs_alone, _own_cache, blocks_in

__all__ = ["_configs_alone", "_own_cache"]
pytestmark = pytest.mark.whole


def artifact(folder: Path, name: str) -> Artifact:
    """Returns an artifact of a folder; its digest is its name."""
    return Artifact(folder, {"id": name, "digest": name.ljust(64, "0")})


@pytest.mark.first(1)
@pytest.mark.parametrize("caches", [0.0, 0.15])
def test_each_member_is_as_fast_as_asked_and_one_table_serves_all(
    caches: float, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    engine, folder = Engine(caches), checkpoint("bert")
    checkpoints = {"first": artifact(folder, "first")}
    for number, speedup in enumerate((1.3, 1.5, 1.7), 1):
        stage = Prune(**QUICK, speedup=speedup, over="first", member=Member(number=number, count=3), id=f"prune-{number}")
        context = replace(make_context(), measure_latency=engine, checkpoints=checkpoints, scratch=tmp_path / f"scratch{number}")
        parent, out = list(checkpoints.values())[-1], tmp_path / f"out{number}"
        out.mkdir()
        config = Checkpoint(parent.path).config
        stage.among({"first": Checkpoint(folder).config}, config).check(config, None, context)
        figures = stage.run(parent, context, out)
        made = engine.time(blocks_in(out))
        assert 0.9 * WHOLE / speedup <= made <= WHOLE / speedup
        assert figures["latency"]["after"]["measured_ms"] == pytest.approx(made)
        assert figures["latency"]["after"]["speedup"] == pytest.approx(WHOLE / made)
        assert figures["latency"]["asked_ms"] == pytest.approx(WHOLE / speedup)
        assert figures["latency"]["before"]["measured_ms"] == pytest.approx(engine.time(blocks_in(parent.path)))
        assert [ours <= theirs for ours, theirs in zip(blocks_in(out), blocks_in(parent.path), strict=True)]
        checkpoints[str(stage.id)] = artifact(out, str(stage.id))
    assert [number for number, *_ in engine.asked].count(12) == 1  # the table


def test_a_student_is_cut_to_a_multiple_of_the_speed_of_its_teacher(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    """One block of three: two of its own times faster, and the blocks of both are timed once. A neuron more than the teacher has is in the
    table too."""
    engine, whole = Engine(), checkpoint("bert")
    sizes = {"num_hidden_layers": 1, "intermediate_size": 2 * Checkpoint(whole).config.intermediate_size}
    student = checkpoint("bert", **sizes)
    start, own = engine.time(blocks_in(whole)), engine.time(blocks_in(student))
    stage = Prune(**QUICK, speedup=2 * start / own, over="baseline")
    context = replace(make_context(), measure_latency=engine, checkpoints={"baseline": artifact(whole, "baseline")}, scratch=tmp_path / "s")
    out = tmp_path / "out"
    out.mkdir()
    figures = stage.run(artifact(student, "student"), context, out)
    made = engine.time(blocks_in(out))
    assert 0.45 * own <= made <= 0.5 * own
    assert figures["latency"]["reference_ms"] == pytest.approx(start)
    assert figures["latency"]["ffn"]["counts"][-1] == sizes["intermediate_size"]
    assert figures["latency"]["before"]["predicted_ms"] == pytest.approx(own)


def test_a_member_depends_on_the_model_that_its_speedup_refers_to(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context]
) -> None:
    stage = Prune(**QUICK, speedup=2.0, over="first")
    keys = [
        stage.depends(replace(make_context(), checkpoints={"first": artifact(checkpoint("bert"), name)})) for name in ("one", "another")
    ]
    assert keys[0] != keys[1]


def test_members_train_on_one_pass_after_the_other(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    """Three members of a third of a pass each see every row once, as the three iterations of one stage do."""
    context = make_context()
    context = replace(context, teachers=(artifact(checkpoint("bert"), "teacher"),))
    settings: dict[str, Any] = {**QUICK, "speedup": 2.0, "recover": {"epochs": 1 / 3, "batch_size": 8}}
    seen = []
    for number in (1, 2, 3):
        stage = Prune.model_validate({**settings, "member": {"number": number, "count": 3}})
        assert stage.recover is not None
        job = recovery_job(stage, stage.recover, 1, checkpoint("bert"), None, context)
        assert job.settings.epochs == 1
        seen.append([str(row) for row in job.context.data.train.rows])
    drawn = [row for rows in seen for row in rows]
    assert set(drawn) == {str(row) for row in context.data.train.rows}
    assert len(drawn) < len(context.data.train) + 3 * 8
    seeds = [
        recovery_job(
            Prune.model_validate({**settings, "recover": {"epochs": 2.0}, "member": {"number": number, "count": 3}}),
            stage.recover.model_copy(update={"epochs": 2.0}),
            1,
            checkpoint("bert"),
            None,
            context,
        ).context.seed
        for number in (1, 2, 3)
    ]
    assert len(set(seeds)) == 3
    assert np.ptp(seeds) == 2


def test_a_family_is_for_recipes(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    config = Checkpoint(checkpoint("bert")).config
    with raises_problem("stages.prune.family", "outside of a recipe"):
        Prune(family=(2.0, 3.0)).check(config, config, make_context())


def test_a_plan_counts_the_speedup_that_the_incoming_model_has(make_model: Callable[..., Any]) -> None:
    config = make_model("bert", num_hidden_layers=4).config
    half = with_layers(config, [0, 1])
    alone = Prune(**QUICK, speedup=1.5).config_after(half)
    further = Prune(**QUICK, speedup=3.0, over="whole").among({"whole": config}, half)
    assert alone.to_dict() == further.config_after(half).to_dict()
    assert Prune(**QUICK, speedup=3.0).config_after(half).to_dict() != alone.to_dict()
    assert further.model_dump() == Prune(**QUICK, speedup=3.0, over="whole").model_dump()  # what the cache key is made of


def test_a_speedup_over_a_model_with_other_blocks_is_refused(make_model: Callable[..., Any]) -> None:
    narrow, wide, few = (
        make_model("bert", hidden_size=width, num_attention_heads=heads, intermediate_size=64).config
        for width, heads in ((32, 4), (64, 8), (32, 2))
    )
    shorter = Prune(tokens=0.5, sparsity=0).config_after(narrow)
    for other, told in ((wide, "64 channels"), (few, "heads of 16"), (shorter, "which tokens leave")):
        with raises_problem("stages.prune.over", told, "32 channels and heads of 8;"):
            Prune(**QUICK, speedup=3.0, over="whole").among({"whole": other}, narrow)
