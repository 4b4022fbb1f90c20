"""What is timed in torch: the baseline, and on a GPU what int8 has to beat there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from compress.run.implicit import PREDICTIONS, Evaluate, in_torch
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.labels.classes import ClassIds
from tests.export import sentiment
from tests.told import Told

BUILDS = [("baseline", "fp32"), ("prune", "fp32"), ("quantize", "int8"), ("prune", "fp16")]


def timed(tmp_path: Path, names: tuple[str, ...], **target: Any) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Returns variant, precision and mode of what is timed in torch, and the warnings."""
    builds = [{"variant": name, "precision": precision, "folder": f"{name}-{precision}"} for name, precision in BUILDS if name in names]
    (tmp_path / "export.json").write_text(json.dumps({"builds": builds}))
    checkpoints = {name: sentiment.checkpoint() for name in names}
    context = sentiment.context(tmp_path, checkpoints, Target(engines=("torch",), **target))
    jobs = in_torch(Artifact(tmp_path, {}), context)
    assert all(spec.engine == "torch" and spec.precision == spec.float_precision for _, spec in jobs)
    return [(variant, spec.precision, spec.mode) for variant, spec in jobs], context.progress.warnings


BASELINE = [("baseline", "fp32", "eager"), ("baseline", "bf16", "eager")]


def test_on_a_cpu_the_baseline_alone(tmp_path: Path) -> None:
    assert timed(tmp_path, ("baseline", "prune", "quantize"))[0] == BASELINE


def test_on_a_gpu_the_float_model_behind_the_last_too_eager_and_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.torch.can_compile", lambda: True)
    rivals = [("prune", precision, mode) for precision in ("fp16", "bf16") for mode in ("eager", "compiled")]
    assert timed(tmp_path, ("baseline", "prune", "quantize"), device="cuda")[0] == [*BASELINE, *rivals]


def test_nothing_is_timed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.torch.can_compile", lambda: True)
    found, _ = timed(tmp_path, ("baseline", "quantize"), device="cuda")
    assert len(set(found)) == len(found) == 5
    assert {variant for variant, _, _ in found} == {"baseline"}


def test_without_a_compiler_it_is_said_that_compiled_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.torch.can_compile", lambda: False)
    found, lines = timed(tmp_path, ("baseline", "prune", "quantize"), device="cuda")
    assert "compiled" not in {mode for _, _, mode in found}
    assert any(line.startswith("torch compiled is not timed: no C++ compiler") for line in lines)


@pytest.mark.parametrize(("new", "warns"), [([], True), (["classifier.weight"], False)])
def test_a_trained_model_that_is_never_right_is_warned_of(new: list[str], warns: bool, tmp_path: Path) -> None:
    """Labels that no prediction has; a head that is new may be as wrong."""
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint()}, count=4)
    baseline = Artifact(sentiment.checkpoint(), {"id": "baseline", "metrics": {"new_weights": new}})
    predicted = load_file(_evaluated(baseline, context, tmp_path / "first") / PREDICTIONS)["logits"].argmax(axis=1)
    wrong = replace(context.data.evaluation, labels=ClassIds(1 - predicted))
    context = replace(context, data=replace(context.data, evaluation=wrong), progress=Told())
    _evaluated(baseline, context, tmp_path / "second")
    assert [line for line in context.progress.warnings if "accuracy is 0 on 4 predictions" in line] == context.progress.warnings
    assert bool(context.progress.warnings) == warns


def test_the_evaluated_rows_are_named_by_their_digest(tmp_path: Path) -> None:
    """Contents, labels and order count; what they are called does not."""
    context = sentiment.context(tmp_path / "scratch", {"baseline": sentiment.checkpoint()}, count=4)
    baseline = Artifact(sentiment.checkpoint(), {"id": "baseline", "metrics": {"new_weights": []}})
    split = context.data.evaluation
    others = [split, split.take([0, 1, 2, 3]), split.take([1, 0, 2, 3]), replace(split, labels=ClassIds(1 - split.labels.array))]
    found = []
    for number, one in enumerate(others):
        (tmp_path / str(number)).mkdir()
        judged = replace(context, data=replace(context.data, evaluation=one))
        found.append(Evaluate(id="evaluate").run(baseline, judged, tmp_path / str(number))["evaluation_rows"])
    digests = [one["sha256"] for one in found]
    assert digests[0] == digests[1] == split.digest
    assert len(set(digests)) == 3
    assert found[0] == {"left_out_of_train": 0, "in_train": 0, "sha256": split.digest}


def _evaluated(artifact: Artifact, context: Any, out: Path) -> Path:
    out.mkdir()
    Evaluate(id="evaluate").run(artifact, context, out)
    return out
