"""The stage as a whole: the scan, mixed precision, training, and the ladder that tries one after the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foundation.artifacts.artifact import Artifact
from foundation.core.goals import Goals
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int8 import Int8Linear
from foundation.stage.context import Context
from quantize import escalation
from quantize.escalation import escalate, ladder
from quantize.in_memory import quantize_in_memory
from quantize.quantize import Quantize
from quantize.rotation.learned import Learned, _distinct, learn
from quantize.settings import MixedPrecision

pytestmark = pytest.mark.whole


def run(bert: Artifact, context: Context, out: Path, **settings: Any) -> dict[str, Any]:
    out.mkdir()
    return Quantize(id="quantize", **settings).run(bert, context, out)


def test_a_scan_ranks_every_layer_and_changes_nothing(bert: Artifact, context: Context, tmp_path: Path) -> None:
    plain = run(bert, context, tmp_path / "plain")
    figures = run(bert, context, tmp_path / "scanned", sensitivity=True)
    layers = figures["sensitivity"]["layers"]
    assert sorted(layer["name"] for layer in layers) == sorted(layer["name"] for layer in plain["layers"])
    assert [layer["gain"] for layer in layers] == sorted((layer["gain"] for layer in layers), reverse=True)
    assert all(layer["alone"] > 0 for layer in layers)
    for file in ("model.safetensors", "quantization.safetensors"):
        assert (tmp_path / "scanned" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_mixed_precision_keeps_costly_layers_in_float(bert: Artifact, context: Context, tmp_path: Path, monkeypatch: Any) -> None:
    costly = "bert.encoder.layer.1.output.dense"

    def loss(self: Any, model: Any) -> float:
        return float(isinstance(model.get_submodule(costly), Int8Linear))

    monkeypatch.setattr("quantize.budget.Budget.loss", loss)
    figures = run(bert, context, tmp_path / "out", mixed_precision={"max_drop": 0.5, "max_float": 1.0})
    assert figures["mixed_precision"]["floating"] == [costly]
    assert (figures["mixed_precision"]["before"], figures["mixed_precision"]["after"], figures["mixed_precision"]["met"]) == (
        1.0,
        0.0,
        True,
    )
    scales, kept = load_quantization(tmp_path / "out")
    assert costly not in scales
    assert "mixed precision" in kept[costly]
    before, after = (load(path).get_submodule(costly) for path in (bert.path, tmp_path / "out"))
    np.testing.assert_array_equal(before.weight.detach(), after.weight.detach())


@pytest.mark.parametrize("distill", [True, False])
def test_training_writes_a_checkpoint_that_loads_and_says_what_happened(
    bert: Artifact, context: Context, tmp_path: Path, distill: bool
) -> None:
    figures = run(bert, context, tmp_path / "out", mode="qat", qat={"epochs": 1, "distill": distill})
    assert (figures["mode"], figures["qat"]["steps"]) == ("qat", 7)
    assert ("teacher" in figures["qat"]["losses"][0]) == distill
    model = load(tmp_path / "out")
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == len(figures["layers"])
    processor = Checkpoint(tmp_path / "out").preprocessor(context.task, context.max_length, context.target)
    assert np.isfinite(predict(model, processor, context.data.evaluation.rows, 16)).all()


def test_the_ladder_goes_from_cheap_to_dear() -> None:
    steps = ladder(Quantize(id="quantize", mode="auto"), 0.02)
    assert list(steps) == ["ptq", "smoothing and bias correction", "mixed precision", "qat", "qat with distillation"]
    assert [step.mode for step in steps.values()] == ["ptq", "ptq", "ptq", "qat", "qat"]
    assert [step.mixed_precision for step in steps.values()] == [None, None, MixedPrecision(max_drop=0.02), None, None]
    assert [step.qat.distill for step in steps.values()][-2:] == [False, True]
    assert [step.bias_correction for step in steps.values()][:3] == [False, True, True]


@pytest.mark.first(1)
@pytest.mark.parametrize(("losses", "taken"), [([0.005], "ptq"), ([0.5, 0.4, 0.01], "mixed precision"), ([0.5, 0.4, 0.3, 0.2, 0.3], "qat")])
def test_the_first_that_keeps_within_the_goal_is_taken_else_the_best(
    bert: Artifact, context: Context, monkeypatch: Any, losses: list[float], taken: str
) -> None:
    left = iter(losses)
    monkeypatch.setattr(escalation, "_loss", lambda made, budget: next(left))
    stage = Quantize(id="quantize", mode="auto", qat={"epochs": 0.2})
    made = escalate(stage, bert.path, replace(context, goals=Goals(max_drop=0.01)))
    attempts = made.figures["attempts"]
    assert [attempt["value"] for attempt in attempts] == losses
    assert [attempt["name"] for attempt in attempts if attempt["kept"]] == [taken]
    assert any("no quantization method meets" in warning for warning in made.warnings) == (losses[-1] > 0.01)
    assert next(left, None) is None


def test_the_goal_is_part_of_the_key_of_auto_alone(context: Context) -> None:
    keys = [Quantize(id="quantize", mode=mode).depends(replace(context, goals=Goals(max_drop=0.02))) for mode in ("ptq", "qat", "auto")]
    assert [key.get("max_drop") for key in keys] == [None, None, 0.02]


def test_rotations_are_learned_once_for_all_attempts(
    vit: Artifact, image_context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, losses = [], iter([0.5, 0.0, 0.0])

    def counted(*given: Any) -> Learned:
        """Exchanges two channels, whether that is better or not; norms that subtract the mean allow it."""
        found = learn(*given)
        turned = [torch.eye(rotation.size, dtype=torch.float64) for rotation in _distinct(given[1]).values()]
        for matrix in turned:
            matrix[:2, :2] = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        learned.append(replace(found, matrices=tuple(turned)))
        return learned[-1]

    monkeypatch.setattr("quantize.steps.learn", counted)
    monkeypatch.setattr(escalation, "_loss", lambda made, budget: next(losses))
    stage = Quantize(id="quantize", mode="auto", rotation="learned", learned_rotation={"steps": 4, "batch_size": 16})
    made = escalate(stage, vit.path, image_context)
    assert len(made.figures["attempts"]) == 2  # type: ignore[arg-type]
    assert len(learned) == 1
    alone = quantize_in_memory(ladder(stage, 0.01)["smoothing and bias correction"], vit.path, image_context)
    assert len(learned) == 2
    assert made.figures["rotation"] == alone.figures["rotation"]
    for name, weight in alone.model.state_dict().items():
        assert torch.equal(weight, made.model.state_dict()[name]), name
