"""The stage on tiny checkpoints: what it keeps, what it writes, what a kill costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.data.splits import Split
from foundation.labels.classes import ClassIds
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.library import with_class
from foundation.stage.context import Context
from prune.prune import Prune
from tests.problems import raises_problem
from tests.prune.small_runs import pruned

pytestmark = pytest.mark.whole

QUICK: dict[str, Any] = {"method": "taylor", "allocation": "global", "multiple_of": 4, "rows": 32, "recover": None}
TRAINED = {"epochs": 0.5, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "magnitude"},
        pytest.param({"method": "taylor"}, marks=pytest.mark.slow),  # test_scores and test_encoder_decoder_stages take every method
        {"method": "fisher"},
        pytest.param({"method": "activation"}, marks=pytest.mark.slow),
        pytest.param({"allocation": "uniform"}, marks=pytest.mark.slow),  # test_pipeline plans it
        {"allocation": "sensitivity"},
        {"granularity": ["layers"]},
        pytest.param({"granularity": ["hidden"]}, marks=pytest.mark.slow),
        {"granularity": ["layers", "hidden", "heads", "ffn"], "measure": "parameters"},
    ],
    ids=str,
)
def test_the_sparsity_is_reached(
    settings: dict[str, Any], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    model, figures = pruned(Prune(**{**QUICK, **settings}), checkpoint("bert"), make_context(), tmp_path / "out")
    assert 0.5 <= figures["sparsity"] <= 0.7
    sizes = Structure.of(model, "out").sizes
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in vars(sizes).items()} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in figures["after"].items()
    }
    inside = settings.get("granularity", ["heads", "ffn"])
    assert (sizes.hidden < 16) == ("hidden" in inside)
    assert (len(sizes.ffn) < 3) == ("layers" in inside)
    assert all(size % 4 == 0 for size in sizes.ffn)
    assert ("sensitivity" in figures) == (settings.get("allocation") == "sensitivity")


def test_protected_layers_keep_their_size(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Prune(**QUICK, sparsity=0.3, protect=("*.layer.1", "*.layer.2.attention.*"))
    sizes = pruned(stage, checkpoint("bert"), make_context(), tmp_path / "out")[1]["after"]
    assert (sizes["heads"][1:], sizes["ffn"][1]) == ((4, 4), 24)
    assert sizes["heads"][0] < 4 or sizes["ffn"][0] < 24
    layers = Prune(**{**QUICK, "granularity": ["layers"], "protect": ["*.layer.1.*"]})
    assert 1 in pruned(layers, checkpoint("bert"), make_context(), tmp_path / "layers")[1]["layers"]


@pytest.mark.slow
def test_nothing_taken_away_is_the_model_itself(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder = checkpoint("bert")
    model, figures = pruned(Prune(**QUICK, sparsity=0), folder, make_context(), tmp_path / "out")
    assert figures["sparsity"] == 0
    assert all(torch.equal(value, load(folder).state_dict()[name]) for name, value in model.state_dict().items())
    assert isinstance(transformers.AutoModel.from_pretrained(tmp_path / "out"), torch.nn.Module)


def test_equal_heads_go_from_the_end(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    model = load(checkpoint("bert"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    folder = tmp_path / "equal"
    folder.mkdir()
    from foundation.models.checkpoint import save

    save(model, checkpoint("bert"), folder, "all alike")
    stage = Prune(**{**QUICK, "method": "magnitude", "least_squares": False, "allocation": "uniform"})
    small, _ = pruned(stage, folder, make_context(), tmp_path / "out")
    assert Structure.of(small, "out").sizes.heads == (2, 2, 2)
    again, _ = pruned(stage, folder, make_context(), tmp_path / "again")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in small.state_dict().items())


def test_least_squares_keeps_more_of_the_answers(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    from foundation.measure.closeness import Trial

    folder, distances = checkpoint("bert"), []
    context = make_context()
    trial = Trial.prepare(load(folder), folder, [], context)
    for updated in (True, False):
        small, _ = pruned(Prune(**{**QUICK, "method": "magnitude", "least_squares": updated}), folder, context, tmp_path / str(updated))
        distances.append(replace(trial, model=small).distance_now())
    assert distances[0] < distances[1]


def test_training_brings_answers_back(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Prune(
        **{**QUICK, "recover": {**TRAINED, "epochs": 3, "hidden_weight": 0.1}, "granularity": ["heads", "ffn", "hidden", "layers"]}
    )
    model, figures = pruned(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    losses = figures["steps"][0]["losses"]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert {"cross_entropy", "teacher", "hidden"} <= losses[0].keys()
    assert not model.training


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_kill_costs_no_finished_iteration_and_no_bit(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prune import steps as module

    stage = Prune(
        **{**QUICK, "recover": TRAINED, "schedule": "cubic", "iterations": 3, "granularity": ["heads", "ffn", "hidden", "layers"]}
    )
    assert stage.shares == pytest.approx([1 - 0.5 * (1 - (2 / 3) ** 3), 1 - 0.5 * (1 - (1 / 3) ** 3), 0.5])
    context = make_context()
    whole, figures = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "whole"), tmp_path / "out")
    assert [len(step["losses"]) for step in figures["steps"]] == [1, 1, 1]
    calls, recover = [], module.recover

    def dies(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return recover(*args, **kwargs)

    monkeypatch.setattr(module, "recover", dies)
    killed = replace(context, scratch=tmp_path / "killed")
    with pytest.raises(Killed):
        pruned(stage, checkpoint("bert"), killed, tmp_path / "first")
    resumed, again = pruned(stage, checkpoint("bert"), killed, tmp_path / "second")
    assert len(calls) == 4
    assert again == figures
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.slow
def test_the_teacher_of_whole_epochs_runs_once_for_all_runs_of_a_store(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foundation.training import teacher_logits as module
    from foundation.training.distillation.distilled import Distilled

    context = replace(make_context(), shared=tmp_path / "run" / "stages")
    stage = Prune(**{**QUICK, "recover": {**TRAINED, "epochs": 2}})
    first, _ = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "first"), tmp_path / "a")
    monkeypatch.setattr(module, "_computed", None)  # nothing is left to compute,
    monkeypatch.setattr(Distilled, "features", None)  # in batches neither
    again, _ = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "again"), tmp_path / "b")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    with pytest.raises(TypeError):  # part of an epoch asks for the rows that it sees
        pruned(Prune(**{**QUICK, "recover": TRAINED}), checkpoint("bert"), replace(context, scratch=tmp_path / "part"), tmp_path / "c")


def test_a_vocabulary_of_which_too_little_is_left_is_refused(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    context = make_context()
    data = replace(context.data, train=Split(["good film", "bad film"] * 8, ClassIds(np.array([1, 0] * 8))))
    stage = Prune(**QUICK, sparsity=0, granularity=("vocabulary",))
    with raises_problem("stages.prune.max_unknown", "0.001", "selection rows", "unknown"):
        pruned(stage, checkpoint("bert"), replace(context, data=data), tmp_path / "out")
    stage = Prune(**QUICK, sparsity=0, granularity=("vocabulary",), max_unknown=1)
    model, figures = pruned(stage, checkpoint("bert"), replace(context, data=data), tmp_path / "cut")
    assert figures["vocabulary"]["vocabulary"] == model.config.vocab_size == 5 + 3


def test_a_smaller_vocabulary_learns_from_a_teacher_with_the_whole(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    """With nothing else cut the teacher's answers, given in its own tokens, are the model's own: there is nothing to learn from it."""
    context = make_context()
    rows = [row.replace("very", "good") for row in context.data.train.rows]
    data = replace(context.data, train=Split(list(rows), context.data.train.labels))
    recover = {"epochs": 0.25, "learning_rate": 1e-9, "soft_weight": 1.0}
    stage = Prune(**{**QUICK, "recover": recover}, sparsity=0, granularity=("vocabulary",), max_unknown=1)
    _, figures = pruned(
        stage,
        checkpoint("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        replace(
            context,
            data=data,
            teachers=(Artifact(checkpoint("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), {"digest": "1"}),),
        ),
        tmp_path / "out",
    )
    assert figures["vocabulary"]["vocabulary"] == 19
    assert figures["steps"][0]["losses"][0]["teacher"] < 1e-4


def test_a_model_that_mixes_its_heads_is_refused(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bert import modeling_bert

    forward = modeling_bert.BertSelfAttention.forward

    def mixing(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = forward(self, *args, **kwargs)
        return output / (1 + output.abs().mean(dim=-1, keepdim=True)), weights

    monkeypatch.setattr(modeling_bert.BertSelfAttention, "forward", mixing)
    with pytest.raises(InputError, match="bert without some of its heads or neurons gives other"):
        pruned(Prune(**QUICK), checkpoint("bert"), make_context(), tmp_path / "out")


def test_tokens_alone_leave_the_blocks_as_they_are() -> None:
    stage = Prune.model_validate({"granularity": ["vocabulary"]})
    assert (stage.sparsity, stage.recover) == (0, None)
    assert Prune.model_validate(stage.model_dump()) == stage
    assert Prune.model_validate({"granularity": ["vocabulary"], "recover": {}}).recover is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": ["heads", "heads"]}, "an entry is repeated"),
        ({"granularity": ["vocabulary"], "sparsity": 0.5}, "sparsity: 0.5 given; the vocabulary is not part of the blocks"),
        ({"granularity": ["experts"]}, "measure: macs given"),
        ({"schedule": "cubic", "recover": None}, "schedule: cubic fine-tunes between its iterations"),
        ({"teacher": "owner/name"}, "teacher: 'owner/name' given"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**settings)


def test_experts_go_whole(checkpoint: Callable[..., Path], make_model: Callable[..., Any]) -> None:
    config = make_model("mixtral").config
    stage = Prune(granularity=("experts", "heads"), measure="parameters", sparsity=0.4, recover=None)
    after = stage.config_after(config)
    assert after.num_local_experts < 4
    with pytest.raises(InputError, match=r"granularity: ffn given; .* experts, which are pruned whole"):
        Prune(granularity=("ffn",)).config_after(config)
    with raises_problem("sparsity", "0.9", "experts, heads"):
        stage.model_copy(update={"sparsity": 0.9}).config_after(config)


@pytest.mark.slow
def test_iterations_of_a_schedule_see_all_rows_once(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prune import steps as module

    recover, seen = module.recover, []

    def recorded(model: Any, job: Any) -> Any:
        seen.append(list(job.context.data.train.rows))
        return recover(model, job)

    monkeypatch.setattr(module, "recover", recorded)
    context = make_context()
    stage = Prune(**{**QUICK, "recover": {"epochs": 1, "batch_size": 4}, "schedule": "cubic", "iterations": 3})
    pruned(stage, checkpoint("bert"), context, tmp_path / "out")
    assert [len(rows) for rows in seen] == [16, 16, 16]
    assert sorted(row for rows in seen for row in rows) == sorted(context.data.train.rows)


def test_scores_of_a_unit_of_their_own_are_worth_the_same_per_cost() -> None:
    """Heads cost ten times as much as neurons and are a tenth more important than the mean: neurons go."""
    from prune.allocation import Part
    from prune.selection import Scores
    from prune.steps import Steps

    heads, neurons = Part(0, "heads", 4, 10.0, 4), Part(0, "ffn", 8, 1.0, 8)
    scores = Scores({(0, "heads"): torch.full((4,), 1.1), (0, "ffn"): torch.ones(8)}, torch.ones(1), torch.ones(1))
    for method, expected in (("magnitude", (4, 4)), ("taylor", (3, 8))):
        nothing: Any = None
        steps = Steps(Prune(method=method, allocation="global"), "prune", nothing, None, nothing, nothing)  # type: ignore[arg-type]
        counts = steps.allocation(nothing, nothing, scores, {})([heads, neurons], 44.0)
        assert (counts[heads], counts[neurons]) == expected, method


def test_what_stays_whole_is_not_scanned(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Prune(**{**QUICK, "allocation": "sensitivity"}, sparsity=0.3, protect=("*.layer.1", "*.layer.2.attention.*"))
    figures = pruned(stage, checkpoint("bert"), make_context(), tmp_path / "out")[1]
    assert [(entry["name"], entry["what"]) for entry in figures["sensitivity"]["layers"]] == [
        ("bert.encoder.layer.0.attention.output.dense", "heads"),
        ("bert.encoder.layer.0.output.dense", "ffn"),
        ("bert.encoder.layer.2.output.dense", "ffn"),
    ]
    assert figures["after"]["heads"][1:] == (4, 4)


SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, int]] = {"Qwen2MoeConfig": {"shared_expert_intermediate_size": 24}, "Qwen3MoeConfig": {"head_dim": 8}}


@pytest.mark.parametrize(
    ("config", "granularity", "message"),
    [
        (
            lambda: transformers.Olmo2Config(**SMALL),
            ["heads"],
            "self_attn.q_norm.weight of this olmo2 does not shrink with the pruned units",
        ),
        (
            lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
            ["heads"],
            "self_attn.sinks of this gpt_oss does not shrink with the pruned units; it cannot be pruned like that",
        ),
        (
            lambda: transformers.Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 3}, **EXPERTS, head_dim=12, mlp_only_layers=[1]),
            ["heads"],
            "layer 1 of this qwen3_moe lacks the FFN that other layers have",
        ),
    ],
    ids=["olmo2", "gpt_oss", "qwen3_moe"],
)
def test_a_model_that_cannot_be_cut_is_refused_before_anything_runs(
    config: Callable[[], Any], granularity: Any, message: str, make_context: Callable[..., Context]
) -> None:
    made = with_class(config(), "text-generation")
    stage = Prune(granularity=granularity, sparsity=0.1, protect=("*.layers.0",) if made.model_type == "qwen3_moe" else (), recover=None)
    with pytest.raises(InputError, match=message) as caught:
        stage.check(made, made, replace(make_context(), task="text-generation"))
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("granularity", [["heads"], ["experts"], ["layers", "heads", "experts"]], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_experts_of_a_width_of_their_own_are_planned(kind: str, granularity: Any, make_context: Callable[..., Context]) -> None:
    config = with_class(getattr(transformers, kind)(**SMALL, **EXPERTS, **KINDS[kind]), "text-generation")
    stage = Prune(granularity=granularity, measure="parameters", sparsity=0.2, recover=None)
    stage.check(config, config, replace(make_context(), task="text-generation"))
    after = stage.config_after(config)
    assert after.num_experts < 4 or "experts" not in granularity
    assert after.moe_intermediate_size == 16


def test_channels_run_through_all_modules() -> None:
    with pytest.raises(ValidationError, match="protect: given, but channels and tokens"):
        Prune(granularity=("hidden",), protect=("*.layer.0",))
    assert Prune(granularity=("hidden", "heads"), protect=("*.layer.0",)).protect
