"""Losses of the stage `distill` in quantization-aware training, and its teachers."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from foundation.artifacts.artifact import Artifact, write_json
from foundation.core.errors import InputError
from foundation.data.splits import Split
from foundation.models.architecture.origin import Origin, same_shape
from foundation.models.checkpoint import load, save
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.forward import forward
from foundation.models.importing import import_model
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distillation, distillation_objective
from foundation.training.losses.distillation.presets import LossName
from foundation.training.train import Batch
from quantize.choices import Qat
from quantize.in_memory import quantize_in_memory
from quantize.quantize import Quantize
from quantize.steps import Steps
from quantize.training.linear import QatLinear
from quantize.training.qat import insert, key_of, learn
from tests.problems import raises_problem
from tests.quantize.training.test_qat_training import features, group_of, start_of

pytestmark = pytest.mark.whole

OF_OTHERS = ("logit_standardization", "similarity", "projected", "margin_mse")
NAMES: list[LossName] = [name for name in get_args(LossName) if name not in OF_OTHERS]
"""Without the one that is a setting, and those for vectors or candidates alone."""
QUICK: dict[str, Any] = {"epochs": 0.1, "batch_size": 8, "learning_rate": 1e-3, "keep": "last"}


@pytest.fixture
def run(context: Context, bert: Artifact) -> Context:
    teacher = Artifact(bert.path, {"id": "baseline", "digest": "0" * 64})
    return replace(context, checkpoints={"baseline": teacher}, teachers=(teacher,))


@pytest.mark.first(1)
@pytest.mark.parametrize("loss", NAMES)
def test_every_preset_trains_in_int8(loss: Any, bert: Artifact, run: Context) -> None:
    model, scales = start_of(bert.path, run)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learned, history = learn(model, scales, group_of(scales), Qat(**QUICK, loss=loss), run, bert.path, "quantize")
    assert list(learned) == list(scales)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {"attention_relation", "cosine", "soft_target", "mixed_answers", "distance", "hidden", "embedding", "key_relation"} & set(
        history.losses[0]
    )
    assert model.config._attn_implementation == "sdpa"


def test_nobody_but_the_model_holds_the_layers_that_train(bert: Artifact, run: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded training replaces their weights, and a reference from elsewhere would keep whole ones in every process."""
    left: list[str] = []

    def train(self: Steps, scales: Any, group: Any, uncorrected: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        held = {name: weakref.ref(self.model.get_submodule(name)) for name in scales}
        for name in scales:
            owner, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(owner), child, torch.nn.Identity())
        gc.collect()
        left.extend(name for name, layer in held.items() if layer() is not None)
        raise InputError("seen", "")

    monkeypatch.setattr(Steps, "train", train)
    with pytest.raises(InputError, match="seen"):
        quantize_in_memory(Quantize(mode="qat", qat=Qat(**QUICK)), bert.path, run)
    assert left == []


def test_a_model_that_differs_from_stage_to_stage_trains_too(image_context: Context, tmp_path: Path) -> None:
    """Its config has no one width, and no number of heads: parts of it have no origin."""
    config = {"model_type": "convnext", "num_channels": 1, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64}
    import_model(ModelConfig(config=config, init="random", task="image-classification"), ("dark", "bright"), 0, tmp_path)
    made = Artifact(tmp_path, {"id": "baseline", "digest": "0" * 64})
    run = replace(image_context, teachers=(made,), scratch=tmp_path / "scratch")
    found: Any = load(made.path).config
    assert not same_shape(found, found)
    for loss in (None, "soft_target"):
        stage = Quantize(mode="qat", qat={**QUICK, "loss": loss}, calibration={"rows": 8})
        stage.check(found, found, run)
        quantize_in_memory(stage, made.path, replace(run, scratch=tmp_path / str(loss)))


def test_what_int8_changes_inside_is_seen(bert: Artifact, run: Context) -> None:
    """A model in int8 is as far from its float self inside as hidden states written out say."""
    model, scales = start_of(bert.path, run)
    teacher, inputs = load(bert.path), features(bert.path, run, 8)
    prepared = Checkpoint(bert.path).preprocessor(run.task, run.max_length, run.target)
    insert(model, scales, group_of(scales))
    settings = Qat(losses=({"name": "hidden"},))
    distillation = Distillation(settings, key_of("quantize"), model, bert.path, prepared, teacher, prepared, Origin.whole(2, 32))
    objective: Any = distillation_objective(distillation, run)
    labels = torch.from_numpy(run.data.train.labels.array[:8])
    with torch.no_grad():
        found = objective(model.eval(), Batch(inputs, labels, range(8), 0, 10))["hidden"]  # type: ignore[arg-type]
        ours, theirs = (one(**inputs, output_hidden_states=True).hidden_states for one in (model, teacher))
    mask = inputs["attention_mask"].bool()
    expected = [
        sum(float((mine[row][mask[row]] - its[row][mask[row]]).square().mean()) for mine, its in zip(ours[1:], theirs[1:], strict=True))
        for row in range(8)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-3, atol=1e-7)
    assert float(found.min()) > 0
    assert any(isinstance(module, QatLinear) for module in model.modules())


def answered_as_itself(student: Path, teacher: Path, context: Context) -> bool:
    """Whether the teacher's answers that a student learns from are those to the teacher's own inputs."""
    prepared, theirs = (Checkpoint(folder).preprocessor(context.task, context.max_length, context.target) for folder in (student, teacher))
    model, split = load(teacher), context.data.train
    objective: Any = distillation_objective(
        Distillation(Qat(), key_of("quantize"), load(student), student, prepared, model, theirs, None), context
    )
    given, own = ({name: torch.from_numpy(value) for name, value in each.encode(split.rows[:4], 0).items()} for each in (prepared, theirs))
    found = objective.answers(Batch(given, torch.from_numpy(split.labels.array[:4]), np.arange(4), 0, 1))
    return torch.allclose(found, forward(model, own).detach(), atol=1e-5)


def test_a_teacher_gets_images_as_it_takes_them(vit: Artifact, image_context: Context, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(vit.path, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    write_json(other / "preprocessor_config.json", {**settings, "image_mean": [0.1], "image_std": [2.0]})
    assert answered_as_itself(vit.path, other, image_context)


def test_a_teacher_is_told_which_text_of_a_pair_a_token_is_of(bert: Artifact, run: Context, tmp_path: Path) -> None:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 40}
    config = ModelConfig(config={"model_type": "distilbert", **sizes}, init="random", task=run.task)
    import_model(config, run.data.labels, 0, tmp_path, str(bert.path))
    pairs = Split([("good film", row) for row in run.data.train.rows[:8]], run.data.train.labels[:8])
    assert answered_as_itself(tmp_path, bert.path, replace(run, data=replace(run.data, train=pairs)))


@pytest.mark.slow
def test_another_teacher_is_learned_from(bert: Artifact, run: Context, tmp_path: Any) -> None:
    """With the answers of another model the weights move to those, and the weights that are kept are the nearest to them."""
    other: Any = load(bert.path)
    other.classifier.bias.data += torch.tensor([0.0, 3.0])
    (tmp_path / "other").mkdir()
    save(other, bert.path, tmp_path / "other", "shifted")
    inputs = features(bert.path, run, 32)
    target = forward(other, inputs)

    def apart(teacher: Any) -> float:
        model, scales = start_of(bert.path, run)
        settings = Qat(epochs=4, batch_size=8, learning_rate=1e-3)
        learn(
            model, scales, group_of(scales), settings, replace(run, scratch=tmp_path / str(teacher is None)), bert.path, "quantize", teacher
        )
        return float((forward(model, inputs) - target).detach().square().mean())

    assert apart(tmp_path / "other") < 0.5 * apart(None)
    told = "".join(run.progress.lines)  # type: ignore[attr-defined]
    assert "initial weights, distance to the teacher " in told
    assert "initial weights, selection " not in told


def test_the_stage_hands_its_teacher_over(bert: Artifact, run: Context, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantize import steps as module

    seen, kept = [], module.train_in_integers

    def told(*args: Any) -> Any:
        seen.append(args[7])
        return kept(*args)

    monkeypatch.setattr(module, "train_in_integers", told)
    shutil.copytree(bert.path, tmp_path / "other")
    other = Artifact(tmp_path / "other", {"id": "baseline", "digest": "1" * 64})
    stage = Quantize(mode="qat", qat=QUICK, calibration={"rows": 16}, teacher="baseline")
    quantize_in_memory(stage, bert.path, replace(run, teachers=(other,), scratch=tmp_path / "a"))
    quantize_in_memory(stage, bert.path, replace(run, scratch=tmp_path / "b"))
    quantize_in_memory(stage.model_copy(update={"teacher": "input"}), bert.path, replace(run, scratch=tmp_path / "c"))
    assert seen == [other.path, None, None]


def test_smoothing_is_nothing_to_be_unlearned(bert: Artifact, run: Context, tmp_path: Path) -> None:
    """It scales the values of attention and what reads them: those of the model that came in are compared as they are scaled too."""
    large: Any = load(bert.path)
    for layer in large.bert.encoder.layer:
        layer.attention.self.value.weight.data[::8] *= 20
    (tmp_path / "large").mkdir()
    save(large, bert.path, tmp_path / "large", "large values")
    made = Artifact(tmp_path / "large", {"id": "baseline", "digest": "1" * 64})
    qat = {**QUICK, "learning_rate": 1e-9, "losses": [{"name": "minilm"}]}
    stage = Quantize(mode="qat", teacher="baseline", qat=qat, calibration={"rows": 64})
    figures = quantize_in_memory(stage, made.path, replace(run, teachers=(made,), checkpoints={"baseline": made})).figures
    assert any(str(group["into"]).endswith("value") for group in figures["smoothquant"])
    assert figures["qat"]["losses"][0]["value_relation"] < 1e-3


def test_corrected_biases_teach_nothing(bert: Artifact, run: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantize.training import qat as module

    seen, original = [], module.distillation_objective

    def recorded(distillation: Any, *args: Any) -> Any:
        seen.append((forward(distillation.model, inputs), forward(distillation.teacher, inputs)))
        return original(distillation, *args)

    monkeypatch.setattr(module, "distillation_objective", recorded)
    inputs = features(bert.path, run, 16)
    coarse = {"rows": 16, "method": "percentile", "percentile": 90}  # so that there is something to correct
    stage = Quantize(mode="qat", qat=QUICK, calibration=coarse, bias_correction=True, smoothquant=False)
    quantize_in_memory(stage, bert.path, run)
    ((student, teacher),) = seen
    torch.testing.assert_close(teacher, forward(load(bert.path), inputs), atol=1e-5, rtol=1e-5)
    assert float((student - teacher).detach().abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher": "baseline"}, "teacher: baseline given, but mode: ptq does not train; give mode: qat or auto"),
        ({"mode": "qat", "teacher": "baseline", "qat": {"distill": False}}, "teacher: baseline given, but qat.distill: false learns from"),
        ({"mode": "qat", "teacher": "owner/model"}, "'owner/model' given; give input, baseline or the id of an earlier stage"),
        ({"mode": "qat", "qat": {"loss": "distilbert", "soft_weight": 0.5}}, "soft_weight: 0.5 given with loss"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantize(**given)


def test_losses_are_checked_before_the_run(bert: Artifact, run: Context) -> None:
    config: Any = load(bert.path).config
    stage = Quantize(mode="qat", qat={"losses": [{"name": "tinybert", "layers": [3]}]})
    with raises_problem("stages.quantize.qat.losses[0].layers", "[3]", "at most 2 layers, each from 1 to 2"):
        stage.check(config, config, run)
