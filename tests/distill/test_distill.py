"""The stage: from a checkpoint to a smaller one, alone and within a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from distill.choices import Student
from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.data.splits import chosen_rows
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.size import Passes
from foundation.stage.context import Context
from foundation.training.distillation import objective
from foundation.training.distillation.teacher import match_inputs
from foundation.training.train import Batch
from tests.distill.conftest import WORDS
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole

Contexts = Callable[..., Context]
SMALL: dict[str, Any] = {"student": Student(layers=2), "epochs": 1, "batch_size": 24, "learning_rate": 1e-3}


def distill(context: Context, out: Path, parent: Path | None = None, **changes: Any) -> dict[str, Any]:
    out.mkdir(parents=True)
    source = Artifact(parent, {}) if parent else context.baseline
    figures = Distill(**{**SMALL, **changes}).run(source, context, out)
    json.dumps(figures, allow_nan=False)
    return figures


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_student_learns_to_answer_as_the_teacher(make_context: Contexts, tmp_path: Path, told: Any) -> None:
    context = make_context()
    figures = distill(context, tmp_path / "out", epochs=12, learning_rate=5e-3, hard_weight=0)
    first, last = figures["losses"][0], figures["losses"][-1]
    assert set(first) == {"epoch", "soft_target", "loss"}
    assert last["loss"] < 0.6 * first["loss"]
    assert figures["selection"]["metric"] == "accuracy against the teacher"
    assert max(entry["value"] for entry in figures["selection"]["values"]) >= 0.9
    assert (figures["steps"], figures["rows"], figures["teacher"], figures["teacher_logits"]) == (24, 48, "baseline", "cached")


def test_the_checkpoint_is_a_stock_one(make_context: Contexts, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / "out"
    distill(make_context(), out)
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_hidden_layers == 2
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert model.config._attn_implementation == "sdpa"
    ids = AutoTokenizer.from_pretrained(out)("great movie", return_tensors="pt")
    torch.testing.assert_close(model.eval()(**ids).logits, load(out)(**ids).logits)
    assert "Distilled for 2 steps of 24 rows" in (out / "README.md").read_text()


def test_neither_parent_nor_teacher_is_written_to(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    folder = checkpoint("bert", num_labels=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    distill(make_context(), tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_labels_choose_the_weights_where_the_run_trained_the_teacher(make_context: Contexts, tmp_path: Path) -> None:
    assert distill(make_context(made_by="finetune"), tmp_path / "out")["selection"]["metric"] == "accuracy"


def test_a_regression_is_distilled(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context(num_labels=1)
    figures = distill(context, tmp_path / "out", epochs=8, learning_rate=5e-3, hard_weight=0)
    assert figures["selection"]["metric"] == "pearson against the teacher"
    assert figures["losses"][-1]["loss"] < 0.5 * figures["losses"][0]["loss"]


class Killed(Exception):
    pass


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a kill: the objective raises in one step; every step before has its checkpoint."""
    from foundation.training import train

    original = objective.Objective.forward

    def forward(self: Any, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        if batch.step == step:
            raise Killed
        return original(self, model, batch)

    monkeypatch.setattr(objective.Objective, "forward", forward)
    monkeypatch.setattr(train.TrainConfig.model_fields["checkpoint_seconds"], "default", 0.0)
    train.TrainConfig.model_rebuild(force=True)


NARROW = {"layers": 2, "hidden": 8, "heads": 2}
HALF = {"layers": 2}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("loss", "student"),
    [
        ("soft_target", HALF),  # answers kept in a file
        ("minilm", HALF),  # a look inside of both models
        ("tinybert", HALF),  # two phases
        ("mixkd", HALF),  # partners drawn in every step
        ("pkd", NARROW),  # projections trained along
    ],
)
def test_a_killed_run_continues_to_equal_bits(
    loss: str, student: Any, make_context: Contexts, tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, context = {"loss": loss, "student": student, "epochs": 2}, make_context(num_labels=3)
    whole = distill(dataclasses.replace(context, scratch=tmp_path / "a"), tmp_path / "whole", **kind)
    with monkeypatch.context() as patch:
        kill_at(3, patch)
        with pytest.raises(Killed):
            distill(dataclasses.replace(context, scratch=tmp_path / "b"), tmp_path / "killed", **kind)
    torch.manual_seed(99)  # a new process has other generators
    resumed = distill(dataclasses.replace(context, scratch=tmp_path / "b"), tmp_path / "resumed", **kind)
    assert "resumed after step 3 of 4" in "".join(told.lines)
    assert weights(tmp_path / "whole") == weights(tmp_path / "resumed")
    assert (whole["losses"], whole["selection"]) == (resumed["losses"], resumed["selection"])


def test_kept_answers_are_those_of_the_teacher(make_context: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    from foundation.training.distillation import assembly

    cached = distill(make_context(), tmp_path / "cached", epochs=2)
    [file] = (tmp_path / "scratch").glob("teacher-*/logits.safetensors")
    again = distill(make_context(), tmp_path / "again", epochs=2)
    assert f"reading cached teacher logits from {file.parent}" in "".join(told.lines)
    monkeypatch.setattr(assembly, "CACHE_BYTES", 1)
    live = distill(dataclasses.replace(make_context(), scratch=tmp_path / "other"), tmp_path / "live", epochs=2)
    assert (cached["teacher_logits"], live["teacher_logits"]) == ("cached", "live")
    assert cached["losses"] == again["losses"]
    for one, other in zip(cached["losses"], live["losses"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=5e-3)  # padded otherwise, which bf16 rounds otherwise


def test_some_of_the_rows_are_chosen_by_their_content(make_context: Contexts, tmp_path: Path) -> None:
    train = make_context().data.train
    half = chosen_rows(train, 0.5)
    assert 20 <= len(half) <= 24
    reversed_rows = chosen_rows(train.take(range(len(train) - 1, -1, -1)), 0.5)
    assert sorted(half.rows) == sorted(reversed_rows.rows)
    labels = dict(zip(train.rows, train.labels.array, strict=True))
    assert all(labels[row] == label for row, label in zip(half.rows, half.labels.array, strict=True))
    assert distill(make_context(), tmp_path / "out", fraction=0.5)["rows"] == len(half)


def test_a_teacher_with_other_tokens_serves_for_answers(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    other = checkpoint("bert", words=("poor", "great", "movie"))
    context = make_context()
    context = dataclasses.replace(context, teachers=(Artifact(other, {"id": "other", "digest": "1" * 64}),))
    figures = distill(context, tmp_path / "out", epochs=8, learning_rate=5e-3, hard_weight=0)
    assert figures["losses"][-1]["loss"] < 0.6 * figures["losses"][0]["loss"]


def test_a_teacher_from_outside_is_checked_and_imported(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    context = make_context()
    outside = dataclasses.replace(context, teachers=(Artifact(checkpoint("bert", num_labels=2), {"id": "other", "digest": "1" * 64}),))
    figures = distill(outside, tmp_path / "out", teacher=str(checkpoint("bert", num_labels=2)))
    inside = distill(dataclasses.replace(context, scratch=tmp_path / "s"), tmp_path / "inside")
    assert figures["losses"] == inside["losses"]
    renamed = dataclasses.replace(outside, data=dataclasses.replace(context.data, labels=("positive", "negative")))
    with raises_problem("stages.distill.teacher", "negative, positive", "positive", "give a model"):
        distill(renamed, tmp_path / "renamed", teacher=str(checkpoint("bert", num_labels=2)))


def test_a_student_of_another_kind_gets_the_same_tokens(make_context: Contexts, tmp_path: Path) -> None:
    """DistilBERT has no token types: teacher and student take other inputs, but the same tokens."""
    student = {"config": {"model_type": "distilbert", "n_layers": 2, "dim": 8, "n_heads": 2, "hidden_dim": 16}}
    figures = distill(make_context(), tmp_path / "out", student=student, losses=[{"name": "soft_target"}, {"name": "hidden"}])
    assert figures["teacher_logits"] == "live"
    assert set(figures["losses"][0]) == {"epoch", "soft_target", "hidden", "loss"}
    config: Any = load(tmp_path / "out").config
    assert (config.model_type, config.n_layers) == ("distilbert", 2)


def test_a_loss_that_looks_inside_needs_the_tokens_of_the_teacher(make_context: Contexts, checkpoint: Any, tmp_path: Path) -> None:
    other = checkpoint("bert", words=("poor", "great", "movie"))
    context = dataclasses.replace(make_context(), teachers=(Artifact(other, {"id": "other", "digest": "1" * 64}),))
    with raises_problem("stages.distill.teacher", "baseline", "differently than the student"):
        distill(context, tmp_path / "out", loss="minilm")


@pytest.mark.parametrize("last", ["was", "the"])
def test_tokenizers_are_compared_on_all_rows(last: str, checkpoint: Any) -> None:
    """They differ in one word, which only the last of many rows may hold."""
    other = tuple("were" if word == "was" else word for word in WORDS)
    ours, theirs, same = (
        Checkpoint(checkpoint("bert", words=words)).preprocessor("text-classification", 16, Target(sequence_lengths=(8,)))
        for words in (tuple(WORDS), other, (*WORDS[:-1], "was"))
    )
    rows = ["great movie"] * 1500 + [f"it {last}"]
    assert match_inputs(ours, theirs, rows) == ((last != "was",) * 3)
    assert match_inputs(ours, same, rows) == (True, True, True)


def test_equal_tokenizers_are_not_asked(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (
        Checkpoint(checkpoint(kind)).preprocessor("text-classification", 16, Target(sequence_lengths=(8,)))
        for kind in ("bert", "distilbert")
    )
    monkeypatch.setattr(type(ours), "encode", None)
    assert match_inputs(ours, ours, ["great movie"]) == (True, True, True)
    assert match_inputs(ours, theirs, ["great movie"]) == (True, True, ours.input_names == theirs.input_names)


def test_without_a_selection_split_the_last_weights_are_kept(make_context: Contexts, tmp_path: Path) -> None:
    context = make_context()
    empty = context.data.selection.take([])
    figures = distill(dataclasses.replace(context, data=dataclasses.replace(context.data, selection=empty)), tmp_path / "out")
    assert figures["selection"]["values"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "soft_target", "losses": [{"name": "soft_target"}]},
        {"loss": "hinton"},
        {"losses": [{"name": "hinton"}]},
        {"losses": [{"name": "cosine", "weight": 0}]},
        {"losses": [{"name": "cosine", "weight": {"start": -1, "end": 1}}]},
        {"losses": [{"name": "cosine", "steps": [0.5, 0.5]}]},
        {"temperature": 0},
        {"temperature": {"start": 2, "end": 0}},
        {"hard_weight": {"start": -1, "end": 0}},
        {"hard_weight": {"start": 0, "end": 0}},
        {"losses": [{"name": "cosine", "weight": {"start": 0, "end": 0}}]},
        {"losses": [{"name": "relational", "distance": 0, "angle": 0}]},
        {"losses": [{"name": "mixkd", "labels": 0, "answers": 0}]},
        {"loss": "hard_target", "extra_text": {"path": "x.txt"}},
        {"loss": "hard_target", "augment": {}},
        {"fraction": 0},
    ],
)
def test_contradictions_are_found_at_once(changes: Any) -> None:
    with pytest.raises(ValidationError):
        Distill(**changes)


def test_steps_that_no_loss_covers_are_an_error(make_context: Contexts, checkpoint: Any) -> None:
    config = load(checkpoint("bert", num_labels=2)).config
    gap = [{"name": "soft_target", "steps": [0.0, 0.5]}, {"name": "soft_target", "steps": [0.75, 1.0]}]
    with raises_problem("stages.distill.losses", "no loss", "0.5 of the steps"):
        Distill(losses=gap).check(config, config, make_context())
    Distill(losses=gap, hard_weight=0.1).check(config, config, make_context())
    Distill(losses=[gap[0], {"name": "soft_target", "steps": [0.5, 1.0]}]).check(config, config, make_context())


def test_rows_too_long_for_the_student_are_found(make_model: Any, make_context: Contexts) -> None:
    config, student = make_model("bert").config, {"config": {"max_position_embeddings": 12}}
    with raises_problem("data.max_length", "16", "bert", "at most 12 tokens"):
        Distill(student=student).check(config, config, make_context())


def test_work_counts_student_and_teacher(make_context: Contexts) -> None:
    data = make_context().data

    def work(**changes: Any) -> float:
        return Distill(epochs=2, fraction=0.5, **changes).work(Passes(before=10, after=4, layers=2), data)

    student = 4 * 2 * (3 * 24 + 20)
    assert work() == student + 10 * 24  # answers are kept
    assert work(loss="hard_target") == student
    assert work(teacher=("baseline", "input", "x/y")) == student + 10 * 3 * 24
    for loss in ("minilm", "pkd", "relational"):
        assert work(loss=loss) == student + 10 * 2 * 24
    assert work(loss="mixkd") == 4 * 2 * (2 * 3 * 24 + 20) + 10 * 2 * 24
    assert work(augment={}) == 4 * 2 * (3 * 48 + 20) + 10 * 2 * 48


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": "soft_target"}, "cached"),
        ({"loss": "mixkd"}, "cached"),  # mixtures are asked about anew, the rows themselves are not
        ({"losses": [{"name": "mixkd"}]}, "live"),
        ({"loss": "pkd"}, "live"),
        ({"loss": "hard_target"}, "live"),
    ],
)
def test_answers_are_kept_where_nothing_else_is_wanted(
    changes: Any, expected: str, make_context: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundation.training.distillation import assembly

    figures = distill(make_context(), tmp_path / "out", **changes)
    assert figures["teacher_logits"] == expected
    assert len(list((tmp_path / "scratch").glob("teacher-*"))) == (expected == "cached")
    monkeypatch.setattr(assembly, "CACHE_BYTES", 1)
    live = distill(dataclasses.replace(make_context(), scratch=tmp_path / "other"), tmp_path / "live", **changes)
    assert figures["losses"][0]["loss"] == pytest.approx(live["losses"][0]["loss"], rel=5e-3)


@pytest.mark.slow
def test_micro_batches_come_to_the_same(make_context: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, in float32; the losses look inside, draw partners, and have a ramp."""
    from foundation.training import train

    monkeypatch.setattr(train, "autocast_dtype", lambda device: torch.float32)
    losses = [{"name": "hidden"}, {"name": "minilmv2"}, {"name": "mixkd"}, {"name": "soft_target", "weight": {"start": 1, "end": 3}}]
    found, norms, clip = [], [], train._Loop._clip

    def noted(loop: Any) -> float:
        norms.append(clip(loop))
        return norms[-1]

    monkeypatch.setattr(train._Loop, "_clip", noted)
    for micro in (None, 5, 1):
        context = dataclasses.replace(make_context(), scratch=tmp_path / f"scratch{micro}")
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        changes = {"student": {"config": {"num_hidden_layers": 2, **still}}, "losses": losses, "hard_weight": 0.5, "epochs": 1}
        figures = distill(context, tmp_path / f"out{micro}", **changes, micro_batch_size=micro)
        found.append([value for entry in figures["losses"] for value in entry.values()])
    steps = len(norms) // 3
    for part in (1, 2):
        assert found[part] == pytest.approx(found[0], rel=1e-3)
        assert norms[part * steps : (part + 1) * steps] == pytest.approx(norms[:steps], rel=1e-2)  # AdamW would hide another scale


def test_the_config_after_is_that_of_the_student(checkpoint: Any, make_context: Contexts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    distill(make_context(), out)
    planned = Distill(**SMALL).config_after(load(checkpoint("bert", num_labels=2)).config)
    made = load(out).config
    assert planned.to_dict() == {**made.to_dict(), "_name_or_path": planned.to_dict().get("_name_or_path")}  # type: ignore[operator,union-attr]


RECIPE: dict[str, Any] = {
    **tiny_vit("tiny", layers=3),
    "stages": [
        {"finetune": {"epochs": 0.05, "learning_rate": 1e-3}},
        {"distill": {"id": "assistant", "student": {"layers": 2}, "loss": "minilm", "epochs": 0.05}},
        {"distill": {"student": {"layers": 1}, "teacher": "assistant", "epochs": 0.05}},
    ],
}


@pytest.mark.slow
def test_a_run_distills_twice_and_plans_what_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.forecast import steps_of
    from compress.pipeline import run
    from compress.recipe import check
    from compress.run.prepare import prepare
    from foundation.artifacts.run_folder import open_run
    from foundation.core.progress import ConsoleProgress

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe, quiet, folder = check(RECIPE), ConsoleProgress("quiet"), tmp_path / "run"
    context = prepare(recipe, folder, quiet)
    planned = {entry.step.id: entry for entry in steps_of(recipe, folder, context)}
    report = run(recipe, folder, progress=quiet).report
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "assistant", "distill"]
    for variant in report["variants"]:
        size = planned[variant["id"]].size
        assert size is not None
        assert (size.parameters, size.macs) == (variant["parameters"], variant["macs"])
    made = open_run(folder).artifacts
    for name in ("finetune", "assistant", "distill"):
        assert planned[name].disk_bytes == pytest.approx(made[name].size_bytes, rel=0.2)
    assert made["distill"].metrics["teacher"] == "assistant"
    again = run(recipe, folder, progress=quiet)
    assert all(stage["cached"] for stage in again.report["stages"])
    assert all(entry.cached for entry in steps_of(recipe, folder, context))
    stages = [*RECIPE["stages"][:2], {"distill": {"student": {"layers": 1}, "teacher": "baseline", "epochs": 0.05}}]
    other = {entry.step.id: entry for entry in steps_of(check({**RECIPE, "stages": stages}), folder, context)}
    assert other["assistant"].cached is not None
    assert other["distill"].cached is None  # another teacher


def images(folder: Path, labels: int) -> Path:
    """Returns the folder, with a model of that many digits."""
    from foundation.models.config import ModelConfig
    from foundation.models.importing import import_model

    model = ModelConfig(config=RECIPE["model"]["config"], init="random", task="image-classification")
    import_model(model, tuple(map(str, range(labels))), 0, folder)
    return folder


@pytest.fixture(scope="module")
def other_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits with three labels."""
    return images(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def ten_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits with the labels of the data."""
    return images(tmp_path_factory.mktemp("ten"), 10)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"student": {"layers": 4}}, "stages.distill.student.layers: 4 given; the incoming model has 3 layers"),
        (
            {"teacher": "asistant"},
            "stages.distill.teacher: 'asistant' given; assistant, baseline, finetune, input, or .*did you mean 'assistant'",
        ),
        ({"teacher": "distill"}, "stages.distill.teacher: 'distill' given"),
        ({"teacher": "/nowhere/at/all"}, "stages.distill.teacher: there is no folder /nowhere/at/all"),
        ({"student": {"path": "/nowhere"}}, "stages.distill.student.path: there is no folder /nowhere"),
        (
            {"teacher": "OTHER"},
            r"stages.distill.teacher: .* has 3 outputs; .* needs 10 \(labels of the data\): give a model that was trained for",
        ),
        (
            {"student": {"path": "OTHER", "head": "keep"}},
            r"stages.distill.student.path: .* has 3 outputs; .*: give stages.distill.student.head: new$",
        ),
        (
            {"student": {"config": {"image_size": 16}}},
            r"student.config.image_size: 16 given; a student must use the incoming model's value \(8\)",
        ),
        ({"student": {"layers": 2, "depth": 3}}, "stages.distill.student.depth: unknown key; allowed: layers"),
    ],
)
def test_mistakes_are_found_before_anything_runs(stage: Any, message: str, other_images: Path, tmp_path: Path) -> None:
    from compress.recipe import check
    from compress.run.prepare import prepare
    from foundation.core.progress import ConsoleProgress

    stage = json.loads(json.dumps(stage).replace("OTHER", str(other_images)))
    stages = [{"finetune": {}}, {"distill": {"id": "assistant", "student": {}}}, {"distill": stage}]
    with pytest.raises(InputError, match=message):
        prepare(check({**RECIPE, "stages": stages}), tmp_path, ConsoleProgress("quiet")).count_macs()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("config", "given", "warned"),
    [
        ({}, {}, True),
        ({}, {"head": "keep"}, False),
        ({}, {"head": "new"}, False),
        ({"id2label": {str(number): f"LABEL_{number}" for number in range(10)}}, {}, True),
        ({"id2label": {str(number): f"digit {number}" for number in range(10)}}, {}, False),
        ({"id2label": {str(number): str(9 - number) for number in range(10)}}, {}, False),
        ({"id2label": {str(number): str(number) for number in range(3)}}, {}, False),
        ({"architectures": ["ViTModel"]}, {}, False),
        ({"architectures": None}, {}, False),
    ],
    ids=["same labels", "keep", "new", "no names", "other names", "other order", "fewer", "without a head", "unknown"],
)
def test_a_trained_head_is_not_given_up_in_silence(
    config: Any, given: dict[str, str], warned: bool, ten_images: Path, tmp_path: Path
) -> None:
    from compress.recipe import check
    from compress.run.prepare import prepare
    from foundation.core.progress import ConsoleProgress

    folder, progress = tmp_path / "ten", ConsoleProgress("silent")
    shutil.copytree(ten_images, folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stored, **config}))
    stages = [{"finetune": {}}, {"distill": {"student": {"path": str(folder), **given}}}]
    prepare(check({**RECIPE, "stages": stages}), tmp_path / "run", progress).count_macs()
    line = (
        f"stages.distill.student.path: {folder} is a ViTForImageClassification; its trained head is replaced by a new one, "
        "as stages.distill.student.head is not given: give keep to go on with it, or new"
    )
    assert [warning for warning in progress.warnings if "head" in warning] == [line] * warned


def test_rows_keep_their_place_under_hashing(make_context: Contexts) -> None:
    train = make_context().data.train
    assert chosen_rows(train, 1.0) is train
    order = [train.rows.index(row) for row in chosen_rows(train, 0.7).rows]
    assert order == sorted(order)
    assert np.isin(chosen_rows(train, 0.25).rows, chosen_rows(train, 0.5).rows).all()
