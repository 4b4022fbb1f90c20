"""On-policy distillation: the student writes, the teacher corrects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from distill.distill import Distill
from distill.on_policy import OnPolicy, Sampling
from distill.student import take_layers
from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.next_token import IGNORED, labels_of
from foundation.machine.parallel import Team
from foundation.models.checkpoint import load
from foundation.models.forward import forward, freeze
from foundation.stage.context import Context
from foundation.standalone.preprocess import TokenPair
from foundation.training.distillation.capture import Capture
from foundation.training.distillation.objective import Objective
from foundation.training.distillation.teacher import Pair, Teacher
from foundation.training.losses.distillation.loss import Setting, Shape
from foundation.training.losses.distillation.soft_target import SoftTarget
from foundation.training.rows import Rows
from foundation.training.train import Batch
from tests.export.generation.tiny_encoder_decoders import EOS, checkpoint, preprocessor, sources
from tests.foundation import tiny_gpt
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

LENGTH = tiny_gpt.LENGTH


def blocks(count: int = 6, step: int = 0) -> Batch:
    data = tiny_gpt.data().train.take(range(count))
    rows = Rows.prepare(data.rows, tiny_gpt.prepared())
    return Batch(rows.batch(np.arange(count)), torch.from_numpy(data.labels.array), np.arange(count), step, 100)


def pairs(count: int = 5, width: int = 12) -> Batch:
    rows = [TokenPair(source, np.array([7, 9, EOS], np.int32)) for source in sources(tuple(3 + number % 9 for number in range(count)))]
    features = Rows.prepare(rows, preprocessor()).batch(np.arange(count))
    return Batch(features, torch.from_numpy(labels_of(rows, width).array), np.arange(count), 0, 100)


@pytest.mark.parametrize(("prompt", "given"), [(0.5, 8), (0.01, 1), (0.99, 15)])
def test_the_first_part_of_a_block_is_given_and_the_rest_is_written(prompt: float, given: int) -> None:
    model, batch = load(tiny_gpt.checkpoint()), blocks()
    found = Sampling(OnPolicy(share=1.0, prompt=prompt), 0)(model, batch)
    assert found is not None
    ids, before = found.features["input_ids"], batch.features["input_ids"]
    assert ids.shape == before.shape == (6, LENGTH)
    assert torch.equal(ids[:, :given], before[:, :given])
    assert not torch.equal(ids[:, given:], before[:, given:])
    assert (found.labels[:, : given - 1] == IGNORED).all()
    assert torch.equal(found.labels[:, given - 1 : LENGTH - 1].long(), ids[:, given:])


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tokens_come_from_the_whole_distribution_of_the_student(temperature: float) -> None:
    """The first written token of one prompt, drawn many times, against its probabilities: chi-square over the likeliest tokens."""
    model, batch = load(tiny_gpt.checkpoint()).eval(), blocks(1)
    features = {name: value.repeat(4000, 1) for name, value in batch.features.items()}
    many = replace(batch, features=features, labels=batch.labels.repeat(4000, 1), indices=np.zeros(4000, np.int64))
    found = Sampling(OnPolicy(share=1.0, prompt=0.99, temperature=temperature), 3)(model, many)
    assert found is not None
    with torch.no_grad():
        logits = forward(model, {"input_ids": batch.features["input_ids"][:, :-1]})[0, -1]
    expected = 4000 * torch.softmax(logits / temperature, dim=-1).double()
    counts = torch.bincount(found.features["input_ids"][:, -1], minlength=len(expected)).double()
    common = expected >= 5
    observed, wanted = (torch.cat([values[common], values[~common].sum()[None]]) for values in (counts, expected))
    kept = wanted > 0
    statistic, freedom = float(((observed - wanted).square() / wanted)[kept].sum()), int(kept.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_settings_of_the_model_do_not_narrow_the_distribution() -> None:
    """generation_config.json may ask for fewer tokens than there are; the losses are about all of them."""
    batch, sampling = blocks(), Sampling(OnPolicy(share=1.0), 0)
    plain, narrow = load(tiny_gpt.checkpoint()).eval(), load(tiny_gpt.checkpoint()).eval()
    own: Any = narrow
    own.generation_config = GenerationConfig(min_p=0.9, typical_p=0.1, no_repeat_ngram_size=1, suppress_tokens=list(range(200)))
    first, second = sampling(plain, batch), sampling(narrow, batch)
    assert first is not None
    assert second is not None
    assert torch.equal(first.features["input_ids"], second.features["input_ids"])


def test_a_model_without_an_end_token_writes_as_many_tokens_as_a_target_has() -> None:
    model: Any = load(checkpoint("bart"))
    model.generation_config.eos_token_id = None
    found = Sampling(OnPolicy(share=1.0), 0)(model, pairs(width=12))
    assert found is not None
    assert (found.labels != IGNORED).all()
    assert found.labels.shape == (5, 12)


def test_the_student_writes_as_in_evaluation_and_stays_in_training() -> None:
    model, batch = load(tiny_gpt.checkpoint()), blocks()
    sampling = Sampling(OnPolicy(share=1.0), 0)
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: modes.append(module.training), with_kwargs=True)
    evaluated = sampling(model.eval(), batch)
    trained = sampling(model.train(), batch)
    assert model.training
    assert modes
    assert not any(modes)
    assert evaluated is not None
    assert trained is not None
    assert torch.equal(evaluated.features["input_ids"], trained.features["input_ids"])  # no dropout; the same seed and step
    assert all(parameter.grad is None for parameter in model.parameters())


def test_steps_and_rows_draw_anew_and_the_generator_outside_is_untouched() -> None:
    model, sampling = load(tiny_gpt.checkpoint()), Sampling(OnPolicy(share=1.0), 0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (sampling(model, blocks(step=step)) for step in (0, 1))
    third = sampling(model, replace(blocks(), indices=np.arange(6) + 1))
    assert torch.equal(torch.get_rng_state(), before)
    ids = [found.features["input_ids"] for found in (first, second, third) if found is not None]
    assert len(ids) == 3
    assert not torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], ids[2])


@pytest.mark.first(1)
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_the_share_of_the_steps(share: float) -> None:
    class Counted(Sampling):
        def _blocks(self, model: Any, batch: Batch) -> Batch:
            return batch

    sampling = Counted(OnPolicy(share=share), 0)
    model, batch = load(tiny_gpt.checkpoint()), blocks(1)
    taken = sum(sampling(model, replace(batch, step=step)) is not None for step in range(800))
    assert abs(taken / 800 - share) < 0.06
    assert [sampling(model, replace(batch, step=3)) is None for _ in range(3)] == 3 * [sampling(model, replace(batch, step=3)) is None]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_targets_of_pairs_are_written_up_to_their_end_token(kind: str) -> None:
    model: Any = load(checkpoint(kind))
    batch = pairs(400)
    found = Sampling(OnPolicy(share=1.0), 0)(model, batch)
    assert found is not None
    start = model.config.decoder_start_token_id
    read, labels = found.features["decoder_input_ids"], found.labels
    assert torch.equal(found.features["input_ids"], batch.features["input_ids"])
    assert labels.shape == batch.labels.shape
    assert (read[:, 0] == start).all()
    ended = 0
    for row, label in zip(read.tolist(), labels.tolist(), strict=True):
        written = [token for token in label if token != IGNORED]
        assert written
        assert label == written + [IGNORED] * (len(label) - len(written))
        assert EOS not in written[:-1]
        assert written[-1] == EOS or len(written) == len(label)
        ended += written[-1] == EOS
        assert row[1 : len(written) + 1] == written
    assert 0 < ended < 400
    logits = forward(model, found.features)
    assert logits.shape[1] - 1 <= labels.shape[1]


def objective_of(share: float | None, hard_weight: float = 0.5) -> tuple[Any, Any, Batch, Any]:
    teacher = load(tiny_gpt.checkpoint())
    student = take_layers(teacher, [0], "stages.distill.student")
    data = tiny_gpt.data().train.take(range(6))
    rows = Rows.prepare(data.rows, tiny_gpt.prepared())
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-generation", "stages.distill.loss")
    sampling = None if share is None else Sampling(OnPolicy(share=share), 0)
    teachers = (Teacher(Capture(freeze(teacher), "x"), rows, True),)
    pair = Pair(Capture(student, "x"), teachers, rows, data.labels, 0, on_policy=sampling)
    return Objective([SoftTarget()], [setting], pair, 1.0, hard_weight, 0, "text-generation"), student, blocks(), teacher


def test_the_loss_is_the_divergence_on_what_the_student_wrote() -> None:
    objective, student, batch, teacher = objective_of(1.0)
    parts = objective(student, batch)
    found = Sampling(OnPolicy(share=1.0), 0)(student, batch)
    assert found is not None
    ours, theirs = (forward(model, found.features).detach().double() for model in (student, teacher))
    given = LENGTH // 2
    expected = torch.zeros(6, dtype=torch.float64)
    for row in range(6):
        for at in range(given - 1, LENGTH - 1):
            p, q = (torch.softmax(logits[row, at], dim=-1) for logits in (theirs, ours))
            expected[row] += (p * (p.log() - q.log())).sum() / (LENGTH - given)
    torch.testing.assert_close(parts["soft_target"].detach().double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(parts["hard_target"], torch.zeros(6))  # nobody wrote what follows
    assert parts["soft_target"].requires_grad


def test_labels_count_where_the_data_was_taken() -> None:
    objective, student, batch, _ = objective_of(0.001)
    plain, same, _, _ = objective_of(None)
    with torch.no_grad():
        found, expected = objective(student, batch), plain(same, batch)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (found["hard_target"] > 0).all()


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    data = tiny_gpt.data()
    few = replace(data, train=data.train.take(range(64)), selection=data.selection.take(range(16)))
    teacher = Artifact(tiny_gpt.checkpoint(), {"id": "baseline", "digest": "teacher", "stage": "model"})
    shared: dict[str, Any] = {"checkpoints": {"baseline": teacher}, "teachers": (teacher,)}
    return Context("text-generation", few, LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch", **shared)


def test_a_stage_learns_from_its_own_words(context: Context, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    settings: dict[str, Any] = {"losses": [{"name": "generalized_jsd", "beta": 0.9}], "on_policy": {"share": 1.0}, "keep": "last"}
    stage = Distill.model_validate({"student": {"layers": 1}, "epochs": 6, "batch_size": 16, "learning_rate": 3e-3, **settings})
    config: Any = load(tiny_gpt.checkpoint()).config
    stage.check(config, config, context)
    figures = stage.run(Artifact(tiny_gpt.checkpoint(), {}), context, tmp_path / "out")
    assert figures["losses"][-1]["generalized_jsd"] < 0.8 * figures["losses"][0]["generalized_jsd"]
    assert figures["teacher_logits"] == "live"


def test_a_stage_of_pairs_learns_from_its_own_words(told: Any, tmp_path: Path) -> None:
    rows = [TokenPair(source, np.array([7, 9, EOS], np.int32)) for source in sources(tuple(1 + number % 9 for number in range(24)))]
    split = Split(list(rows), labels_of(rows, 11))
    teacher = Artifact(checkpoint("t5"), {"id": "baseline", "digest": "teacher", "stage": "model"})
    shared: dict[str, Any] = {"checkpoints": {"baseline": teacher}, "teachers": (teacher,)}
    target = Target(sequence_lengths=(8,))
    context = Context("text-to-text", Data(split, split, split, ()), 12, target, 0, told, tmp_path / "scratch", **shared)
    (tmp_path / "out").mkdir()
    student = {"config": {"num_layers": 1, "num_decoder_layers": 1}}
    raw = {"student": student, "epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "loss": "soft_target", "on_policy": {"share": 1.0}}
    figures = Distill.model_validate(raw).run(Artifact(checkpoint("t5"), {}), context, tmp_path / "out")
    assert all(np.isfinite(entry["loss"]) for entry in figures["losses"])


def test_what_does_not_fit_is_refused(context: Context) -> None:
    config: Any = load(tiny_gpt.checkpoint()).config
    with raises_problem("stages.distill.on_policy", "text-classification", "text-generation"):
        Distill(on_policy=OnPolicy()).check(config, config, replace(context, task="text-classification"))
    with raises_problem("stages.distill.on_policy", "parallel: {strategy: fsdp2}"):
        Distill(on_policy=OnPolicy()).check(config, config, replace(context, team=Team(0, 2, "fsdp2")))
    with pytest.raises(ValueError, match=r"on_policy: loss: hard_target learns from labels alone"):
        Distill(on_policy=OnPolicy(), loss="hard_target")
