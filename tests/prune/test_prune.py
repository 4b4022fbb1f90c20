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

from compress.artifact import Artifact
from compress.errors import InputError
from compress.model import load
from compress.splits import Split
from compress.stage import Context
from compress.structure import Structure
from prune.prune import Prune
from tests.prune.small_runs import pruned

QUICK: dict[str, Any] = {"method": "taylor", "allocation": "global", "multiple_of": 4, "rows": 32, "recover": None}
TRAINED = {"epochs": 0.5, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "magnitude"},
        {"method": "taylor"},
        {"method": "fisher"},
        {"method": "activation"},
        {"allocation": "uniform"},
        {"allocation": "sensitivity"},
        {"granularity": ["layers"]},
        {"granularity": ["hidden"]},
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
    from compress.model import save

    save(model, checkpoint("bert"), folder, "all alike")
    stage = Prune(**{**QUICK, "method": "magnitude", "least_squares": False, "allocation": "uniform"})
    small, _ = pruned(stage, folder, make_context(), tmp_path / "out")
    assert Structure.of(small, "out").sizes.heads == (2, 2, 2)
    again, _ = pruned(stage, folder, make_context(), tmp_path / "again")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in small.state_dict().items())


def test_least_squares_keeps_more_of_the_answers(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    from compress.trial import Trial

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


def test_a_vocabulary_of_which_too_little_is_left_is_refused(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    context = make_context()
    data = replace(context.data, train=Split(["good film", "bad film"] * 8, np.array([1, 0] * 8)))
    stage = Prune(**QUICK, sparsity=0, granularity=("vocabulary",))
    with pytest.raises(
        InputError, match=r"stages.prune.max_unknown: 0.001 given; .* of the tokens of the selection rows would become unknown"
    ):
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
    with pytest.raises(InputError, match="a bert without some of its heads or neurons answers other than with them silent"):
        pruned(Prune(**QUICK), checkpoint("bert"), make_context(), tmp_path / "out")


def test_tokens_alone_leave_the_blocks_as_they_are() -> None:
    stage = Prune.model_validate({"granularity": ["vocabulary"]})
    assert (stage.sparsity, stage.recover) == (0, None)
    assert Prune.model_validate(stage.model_dump()) == stage
    assert Prune.model_validate({"granularity": ["vocabulary"], "recover": {}}).recover is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": ["heads", "heads"]}, "given twice"),
        ({"granularity": ["vocabulary"], "sparsity": 0.5}, "sparsity: 0.5 given; the vocabulary is no part of the blocks"),
        ({"granularity": ["experts"]}, "measure: macs given"),
        ({"schedule": "cubic", "recover": None}, "schedule: cubic trains between its iterations"),
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
    with pytest.raises(InputError, match="granularity: ffn given; the FFNs of this model are experts, which go whole"):
        Prune(granularity=("ffn",)).config_after(config)
    with pytest.raises(InputError, match=r"sparsity: 0\.9 given; experts, heads can take at most"):
        stage.model_copy(update={"sparsity": 0.9}).config_after(config)
