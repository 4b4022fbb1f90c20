"""Losses of the stage `distill` in recovery and in sparse training: every part of a pruned model learns from the part that it was."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.architecture.origin import Origin, same_shape
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.training.distillation.distilled import Distillation, distillation_objective
from foundation.training.distillation.settings import DistillationSettings
from foundation.training.losses.distillation.presets import PRESETS, LossName
from foundation.training.train import Batch
from prune.choices import Recover
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from prune.surgery import KeptUnits, shrink
from tests.problems import raises_problem
from tests.prune.conftest import WORDS
from tests.prune.small_runs import pruned
from tests.word_tokenizer import write_tokenizer

pytestmark = pytest.mark.whole

KEY = "stages.prune"
SECTION = f"{KEY}.recover"
OF_OTHERS = ("logit_standardization", "similarity", "projected", "margin_mse")
NAMES: list[LossName] = [name for name in get_args(LossName) if name not in OF_OTHERS]
"""Without the one that is a setting, and those for vectors or candidates alone."""
QUICK: dict[str, Any] = {"rows": 16, "multiple_of": 4, "allocation": "global", "sparsity": 0.4}


@pytest.fixture
def context(make_context: Callable[..., Context]) -> Context:
    return make_context()


def objective_of(settings: DistillationSettings, student: nn.Module, folder: Path, origin: Origin | None, context: Context) -> Any:
    prepared = Checkpoint(folder).preprocessor(context.task, context.max_length, context.target)
    return distillation_objective(Distillation(settings, SECTION, student, folder, prepared, load(folder), prepared, origin), context)


def batch_of(folder: Path, context: Context, num: int = 4) -> Batch:
    prepared = Checkpoint(folder).preprocessor(context.task, context.max_length, context.target)
    features = {name: torch.from_numpy(value) for name, value in prepared.encode(context.data.train.rows[:num]).items()}
    return Batch(features, torch.from_numpy(context.data.train.labels.array[:num]), np.arange(num), 0, 10)


def test_the_names_are_those_of_the_presets() -> None:
    assert {*get_args(LossName), "hard_target"} == set(PRESETS)


@pytest.mark.first(1)
@pytest.mark.parametrize("loss", NAMES)
def test_every_preset_trains_a_pruned_model(loss: Any, checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    recover = {"epochs": 1, "batch_size": 8, "loss": loss}
    _, figures = pruned(Prune(**QUICK, recover=recover), checkpoint("bert"), context, tmp_path / "out")
    given, taken = figures["before"], figures["after"]
    assert taken["heads"] != given["heads"]
    parts = set().union(*figures["steps"][0]["losses"])
    names = {name for one in PRESETS[loss].losses for name in PARTS[one.name]}
    assert parts - {"loss", "epoch"} == names | ({"hard_target"} if PRESETS[loss].hard_weight else set())


PARTS = {
    "soft_target": {"soft_target"},
    "gatekeeper": {"gatekeeper"},
    "cosine": {"cosine"},
    "hidden": {"hidden"},
    "tinybert": {"embedding", "attention", "hidden"},
    "minilm": {"attention_relation", "value_relation"},
    "minilmv2": {"query_relation", "key_relation", "value_relation"},
    "mixkd": {"mixed_labels", "mixed_answers"},
    "relational": {"distance", "angle"},
}


@pytest.mark.first(1)
@pytest.mark.parametrize("loss", ["tinybert", "minilm", "minilmv2"])
def test_blocks_that_are_gone_are_not_looked_for(loss: Any, checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    stage = Prune(**{**QUICK, "sparsity": 0.6}, granularity=["layers", "heads"], recover={"epochs": 0.5, "loss": loss})
    _, figures = pruned(stage, checkpoint("bert"), context, tmp_path / "out")
    assert len(figures["layers"]) < 3


def test_a_kept_head_learns_from_the_head_that_it_was(checkpoint: Callable[..., Path], context: Context) -> None:
    """Heads that are taken out of the first block leave what the others of it see, so that their scores and relations stay equal."""
    folder = checkpoint("bert")
    large = load(folder)
    structure = Structure.of(large, KEY)
    kept = replace(KeptUnits.everything(structure.sizes), heads=((1, 3), (0, 1, 2, 3), (0, 1, 2, 3)))
    small = shrink(large, structure, kept, KEY)
    origin = Origin.whole(3, 16).after(kept.layers, kept.hidden, kept.query_heads(structure.sizes))
    assert origin.heads == ((1, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    batch, settings = batch_of(folder, context), Recover(losses=({"name": "tinybert", "layers": [1]},))
    with torch.no_grad():
        found = objective_of(settings, small, folder, origin, context)(small, batch)
        wrong = objective_of(settings, small, folder, replace(origin, heads=((0, 2), *origin.heads[1:])), context)(small, batch)
    assert float(found["attention"].max()) < 1e-9
    assert float(found["embedding"].max()) < 1e-9
    assert float(wrong["attention"].min()) > 1e-3


def test_heads_that_share_keys_are_all_their_queries(make_model: Callable[..., Any]) -> None:
    sizes = Structure.of(make_model("llama"), KEY).sizes
    assert (sizes.heads[0], sizes.key_value_heads[0]) == (6, 3)
    kept = replace(KeptUnits.everything(sizes), layers=(0, 2), heads=((0, 2), (1,), (1, 2)))
    assert kept.query_heads(sizes) == [[0, 1, 4, 5], [2, 3, 4, 5]]


def test_minilm_on_what_is_left_is_the_divergence_written_out(checkpoint: Callable[..., Path], context: Context) -> None:
    folder = checkpoint("bert", num_hidden_layers=1)
    large = load(folder)
    structure = Structure.of(large, KEY)
    kept = replace(KeptUnits.everything(structure.sizes), heads=((0, 3),), hidden=range(1, 16))
    small = shrink(large, structure, replace(kept, hidden=range(16)), KEY)
    with torch.no_grad():  # so that it differs from what it was
        for parameter in small.parameters():
            parameter.mul_(1.2)
    origin = Origin.whole(1, 16).after((0,), range(16), kept.query_heads(structure.sizes))
    batch = batch_of(folder, context)
    with torch.no_grad():
        found = objective_of(Recover(losses=({"name": "minilm"},)), small, folder, origin, context)(small, batch)
    expected = []
    for row in range(4):
        tokens = int(batch.features["attention_mask"][row].sum())
        total = 0.0
        for ours, theirs in ((0, 0), (1, 3)):
            p, q = (relations(model, batch, row, head, tokens) for model, head in ((large, theirs), (small, ours)))
            total += float((p * (p / q).log()).sum()) / tokens
        expected.append(total / 2)
    np.testing.assert_allclose(found["attention_relation"].numpy(), expected, rtol=1e-3, atol=1e-6)


def relations(model: Any, batch: Batch, row: int, head: int, tokens: int) -> torch.Tensor:
    """Softmax of Q K^T / sqrt(d) of one head of the first layer."""
    with torch.no_grad():
        ids = batch.features["input_ids"][row : row + 1, :tokens]
        types = batch.features.get("token_type_ids", torch.zeros_like(batch.features["input_ids"]))[row : row + 1, :tokens]
        hidden = model.bert.embeddings(input_ids=ids, token_type_ids=types)[0]
        attention = model.bert.encoder.layer[0].attention.self
        q, k = (layer(hidden)[:, 4 * head : 4 * head + 4] for layer in (attention.query, attention.key))
        return torch.softmax(q @ k.T / math.sqrt(4), dim=1).double()


@pytest.mark.parametrize("name", ["hidden", "tinybert", "minilm", "minilmv2", "cosine", "relational", "soft_target"])
def test_a_model_that_lost_nothing_has_nothing_to_learn(name: str, checkpoint: Callable[..., Path], context: Context) -> None:
    folder = checkpoint("bert")
    student, batch = load(folder), batch_of(folder, context)
    parts = objective_of(Recover(losses=({"name": name},)), student, folder, Origin.whole(3, 16), context)(student, batch)
    assert all(float(part.detach().abs().max()) < 1e-5 for part in parts.values()), parts


def test_layers_that_are_left_learn_from_themselves(checkpoint: Callable[..., Path], context: Context) -> None:
    """Without its last layers and some channels a model computes what the large one did, channel by channel."""
    folder = checkpoint("bert")
    large = load(folder)
    structure = Structure.of(large, KEY)
    small = shrink(large, structure, replace(KeptUnits.everything(structure.sizes), layers=(0, 2)), KEY)
    batch = batch_of(folder, context)
    losses: Any = ({"name": "hidden", "layers": [1]},)
    origin = Origin.whole(3, 16).after((0, 2), range(16), [None, None])
    with torch.no_grad():
        assert float(objective_of(Recover(losses=losses), small, folder, origin, context)(small, batch)["hidden"].max()) < 1e-9
        both = objective_of(Recover(losses=({"name": "hidden"},)), small, folder, origin, context)
        assert both.pair.teacher.origin == origin
        assert len(both.pair.teacher(batch, both.wanted[0][1]).hidden) == 3
    narrow = shrink(large, structure, replace(KeptUnits.everything(structure.sizes), hidden=range(0, 16, 2)), KEY)
    origin = Origin.whole(3, 16).after(range(3), range(0, 16, 2), [None] * 3)
    objective = objective_of(Recover(losses=({"name": "hidden"}, {"name": "cosine"})), narrow, folder, origin, context)
    assert not list(objective.parameters())  # no projection: every channel has its like
    assert set(objective(narrow, batch)) == {"hidden", "cosine"}


def test_a_cut_vocabulary_does_not_keep_a_teacher_from_being_looked_into(
    checkpoint: Callable[..., Path], context: Context, tmp_path: Path
) -> None:
    stage = Prune(**{**QUICK, "granularity": ["heads", "vocabulary"]}, max_unknown=1, recover={"epochs": 0.5, "loss": "minilm"})
    data = replace(context.data, train=context.data.train.take([i for i, row in enumerate(context.data.train.rows) if "very" not in row]))
    model, figures = pruned(stage, checkpoint("bert"), replace(context, data=data), tmp_path / "out")
    assert model.config.vocab_size == figures["after"]["vocabulary"] < load(checkpoint("bert")).config.vocab_size
    assert "attention_relation" in figures["steps"][0]["losses"][0]


def test_a_teacher_of_other_tokens_is_called_by_its_name(checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    folder, other = checkpoint("bert"), tmp_path / "other"
    shutil.copytree(folder, other)
    write_tokenizer(other, [word for word in WORDS if word != "great"])
    student, theirs = (Checkpoint(each).preprocessor(context.task, context.max_length, context.target) for each in (folder, other))
    teacher = Artifact(other, {"id": "distill", "digest": "1" * 64})
    settings, run = Recover(losses=({"name": "minilm"},)), replace(context, teachers=(teacher,))
    with raises_problem("stages.prune.teacher", "distill", "differently than the student"):
        distillation_objective(Distillation(settings, SECTION, load(folder), folder, student, load(other), theirs, None), run)


@pytest.mark.slow
def test_masks_and_zeros_are_learned_from_them_too(checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    recover = {"epochs": 0.5, "losses": [{"name": "tinybert", "weight": 0.1}, {"name": "soft_target"}], "hard_weight": 0.5}
    stage = Prune(**QUICK, method="joint", learn={"epochs": 0.5, "batch_size": 8}, recover=recover)
    _, figures = pruned(stage, checkpoint("bert"), context, tmp_path / "out")
    assert {"attention", "soft_target", "hard_target"} <= set(figures["steps"][0]["learned"]["losses"][0])
    sparse = Sparsify(method="magnitude", recover={"epochs": 0.5, "loss": "distilbert"})
    (tmp_path / "sparse").mkdir()
    config = load(checkpoint("bert")).config
    sparse.check(config, config, context)
    told = sparse.run(context.baseline, replace(context, scratch=tmp_path / "scratch2"), tmp_path / "sparse")
    assert {"cosine", "soft_target"} <= set(told["recovery"]["losses"][0])


def test_attention_goes_its_old_way_afterwards(checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    from prune import steps as module

    seen = []

    def told(model: Any, *args: Any) -> Any:
        before = model.config._attn_implementation
        history = RECOVER(model, *args)
        seen.append((before, model.config._attn_implementation))
        return history

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "recover", told)
        pruned(Prune(**QUICK, recover={"epochs": 0.5, "loss": "minilm"}), checkpoint("bert"), context, tmp_path / "out")
    assert seen == [("sdpa", "sdpa")]


def test_a_teacher_of_another_shape_is_seen_whole(checkpoint: Callable[..., Path], context: Context, tmp_path: Path) -> None:
    deep = checkpoint("bert", num_hidden_layers=4)
    assert not same_shape(load(deep).config, load(checkpoint("bert")).config)
    assert same_shape(load(deep).config, load(deep).config)
    teachers = (replace(context.baseline, path=deep),)
    stage, config, teacher = Prune(**QUICK, recover={"epochs": 0.5, "loss": "minilm"}), load(checkpoint("bert")).config, load(deep).config
    with raises_problem("stages.prune.recover.loss", "minilm", "the student has", "heads, the teacher 4"):
        stage.check(config, teacher, replace(context, teachers=teachers))
    fits = stage.model_copy(update={"recover": Recover(epochs=0.5, loss="minilmv2")})
    fits.check(config, teacher, replace(context, teachers=teachers))
    (tmp_path / "out").mkdir()
    figures = fits.run(replace(context.baseline, path=checkpoint("bert")), replace(context, teachers=teachers), tmp_path / "out")
    assert "query_relation" in figures["steps"][0]["losses"][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "minilm", "losses": [{"name": "minilm"}]}, "give either loss"),
        ({"loss": "minilm", "distill": False}, "loss: given with distill: false"),
        ({"loss": "minilm", "soft_weight": 0.5}, "soft_weight: 0.5 given with loss; give hard_weight instead"),
        ({"hard_weight": 0.5}, "hard_weight: 0.5 given without loss or losses"),
        ({"losses": [{"name": "minilm"}], "hidden_weight": 1}, "hidden_weight: 1 given together with loss or losses"),
        ({"loss": "minilmm"}, "minilmm"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recover(**given)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            [{"name": "hidden", "layers": [1, 7]}],
            r"stages.prune.recover.losses\[0\].layers: \[1, 7\] given; give at most 3 layers, each from 1 to 3",
        ),
        ([{"name": "relational", "steps": [0.5, 1.0]}], r"stages.prune.recover.losses: no loss is active from 0 of the steps on"),
    ],
    ids=str,
)
def test_a_loss_that_does_not_fit_is_told_before_the_run(
    losses: Any, message: str, checkpoint: Callable[..., Path], context: Context
) -> None:
    config = load(checkpoint("bert")).config
    with pytest.raises(InputError, match=message):
        Prune(**QUICK, recover={"losses": losses}).check(config, config, context)


def test_rows_that_are_compared_need_the_whole_batch(checkpoint: Callable[..., Path], context: Context) -> None:
    config = load(checkpoint("bert")).config
    stage = Prune(**QUICK, recover={"loss": "relational", "micro_batch_size": 4})
    with raises_problem("stages.prune.recover.loss", "relational", "remove micro_batch_size (4 given)"):
        stage.check(config, config, context)


def test_what_masks_are_learned_on_is_checked_too(checkpoint: Callable[..., Path], context: Context) -> None:
    """The training of the masks has rows in memory of its own, and a model of which nothing is gone yet."""
    config, shallow = load(checkpoint("bert")).config, load(checkpoint("bert", num_hidden_layers=2)).config
    stage = Prune(**QUICK, method="joint", learn={"micro_batch_size": 4}, recover={"loss": "relational"})
    with pytest.raises(InputError, match=r"rows of a batch; remove micro_batch_size \(4 given\)"):
        stage.check(config, config, context)
    stage = Prune(**{**QUICK, "sparsity": 0.6}, granularity=["layers"], method="joint", recover={"losses": [{"name": "hidden"}]})
    assert stage.config_after(config).num_hidden_layers <= 2
    with pytest.raises(InputError, match="the student has 3 layers, the teacher 2"):
        stage.check(config, shallow, context)


def recover_of_steps() -> Any:
    from prune import steps

    return steps.recover


RECOVER = recover_of_steps()
