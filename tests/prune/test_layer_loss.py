"""Layers ranked by the loss without them: against models without the layer written out, and through the stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from foundation.artifacts.artifact import Artifact
from foundation.core.target import Target
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.stage.context import Context
from foundation.training.supervised import supervised
from foundation.training.train import Batch
from prune.layer_loss import losses_without
from prune.methods import Scoring, scores_of
from prune.prune import Prune
from tests.export.generation.tiny_encoder_decoders import checkpoint as pair_checkpoint
from tests.foundation import tiny_gpt
from tests.prune.conftest import GENERATES, task_of_kind
from tests.prune.small_runs import pruned
from tests.prune.test_encoder_decoder import DECODER, ENCODER, features, without_layers
from tests.seldom import seldom

KEY = "stages.prune"
LISTS = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "vit": "vit.layers", "llama": "model.layers", "mixtral": "model.layers"}


def batch_of(kind: str, made: dict[str, torch.Tensor]) -> Batch:
    rows = len(next(iter(made.values())))
    labels = made["input_ids"].roll(-1, dims=1)[:, :-1].int() if kind in GENERATES else torch.arange(rows) % 2
    return Batch(made, labels, np.arange(rows), 0, 1)


def naive(models: list[Any], batches: list[Batch], task: Any) -> list[float]:
    """Written out: the mean over all rows of the loss of each model."""
    found = []
    for model in models:
        with torch.no_grad():
            rows = [float(value) for batch in batches for value in next(iter(supervised(task)(model, batch).values()))]
        found.append(sum(rows) / len(rows))
    return found


@pytest.mark.parametrize("kind", seldom(LISTS, ("vit", "llama")))
def test_it_is_the_loss_without_the_layer(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model(kind)
    batches = [batch_of(kind, make_features(kind, rows, seed=rows)) for rows in (4, 1)]  # a row counts as much as any other
    shorter = []
    for gone in range(3):
        shorter.append(copy.deepcopy(model))
        blocks = shorter[-1].get_submodule(LISTS[kind])
        del blocks[gone]
    task = task_of_kind(kind)
    found = losses_without(model, Structure.of(model, KEY), lambda: batches, supervised(task))
    assert found.tolist() == pytest.approx(naive(shorter, batches, task), rel=1e-4)
    assert len({round(value, 4) for value in found.tolist()}) == 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_layers_of_either_side_are_left_out(kind: str) -> None:
    model: Any = load(pair_checkpoint(kind))
    made = features()
    labels = torch.full(made["decoder_input_ids"].shape, -100, dtype=torch.int32)
    labels[:, :3] = torch.tensor([5, 8, 9])
    batch = Batch(made, labels, np.arange(3), 0, 1)
    shorter = []
    for side, depth in (("encoder", ENCODER), ("decoder", DECODER)):
        for gone in range(depth):
            shorter.append(copy.deepcopy(model))
            without_layers(shorter[-1], kind, side, [layer for layer in range(depth) if layer != gone])
    found = losses_without(model, Structure.of(model, KEY), lambda: [batch], supervised("text-to-text"))
    assert found.tolist() == pytest.approx(naive(shorter, [batch], "text-to-text"), rel=1e-4)


def test_a_method_ranks_layers_as_it_is_asked_to(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure, batch = Structure.of(model, KEY), batch_of("bert", make_features("bert"))
    given = Scoring(model, structure, lambda: [batch], supervised("text-classification"), hidden=False)
    norms, asked = scores_of("magnitude", given), scores_of("magnitude", given, "influence")
    assert torch.equal(asked.layers, scores_of("activation", given).layers)
    assert not torch.equal(asked.layers, norms.layers)
    assert all(torch.equal(score, asked.components[part]) for part, score in norms.components.items())
    assert torch.equal(scores_of("fisher", given, "loss").layers, losses_without(model, structure, given.batches, given.objective))


@pytest.fixture
def context(told: Any, tmp_path: Path) -> Context:
    baseline = Artifact(tiny_gpt.checkpoint(), {"id": "baseline", "stage": "model", "digest": "0" * 64})
    return Context(
        "text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(sequence_lengths=(8,)), 0, told, tmp_path / "scratch",
        {"baseline": baseline}, teachers=(baseline,),
    )  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize(("layer_score", "left"), [("loss", [0]), ("influence", [1])])
def test_the_loss_sees_what_norms_take_back(layer_score: Any, left: list[int], context: Context, told: Any, tmp_path: Path) -> None:
    """The first block favours common tokens; the second moves all channels alike, which turns the states, but a norm takes it back."""
    model: Any = load(tiny_gpt.checkpoint())
    tokens = torch.from_numpy(np.concatenate(context.data.train.rows).astype(np.int64))
    with torch.no_grad():
        common = model.lm_head.weight[tokens].mean(dim=0) - model.lm_head.weight.mean(dim=0)
        for block, bias in ((0, 0.2 * common / common.norm()), (1, torch.full_like(common, 30.0))):
            for layer in (model.transformer.h[block].attn.c_proj, model.transformer.h[block].mlp.c_proj):
                layer.weight.zero_()
                layer.bias.zero_()
            layer.bias.copy_(bias)
    folder = tmp_path / "moved"
    folder.mkdir()
    save(model, tiny_gpt.checkpoint(), folder, "its second block moves all channels")
    stage = Prune(granularity=("layers",), layer_score=layer_score, rows=40, recover=None, least_squares=False)
    small, figures = pruned(stage, folder, context, tmp_path / "out")
    assert figures["layers"] == left
    assert small.config.n_layer == 1
    losses = figures["steps"][0].get("layer_losses")
    assert (losses is not None) == (layer_score == "loss")
    if losses is not None:
        assert losses[0] > losses[1]
        assert told.lines.count(f"  loss without each layer: {losses[0]:.4g}, {losses[1]:.4g}") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"loss given; granularity \[heads, ffn\] keeps all layers: add layers, or leave it out"),
        (
            {"granularity": ["layers"], "method": "joint"},
            r"loss given; joint learns what stays: leave it out, or give magnitude,",
        ),
        ({"granularity": ["layers"], "layer_score": "perplexity"}, r"Input should be 'influence' or 'loss'"),
    ],
    ids=["no layers", "learned", "unknown"],
)
def test_it_is_refused_where_no_layer_is_ranked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**{"layer_score": "loss", **settings})


def test_a_run_that_does_not_ask_for_it_keeps_its_cache_key() -> None:
    assert "layer_score" not in Prune().model_dump(mode="json", exclude={"input"})
    asked = Prune(granularity=("layers",), layer_score="loss").model_dump(mode="json")
    assert asked["layer_score"] == "loss"
    assert Prune(**asked).layer_score == "loss"
