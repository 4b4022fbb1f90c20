"""The stage with learned masks on a tiny checkpoint: the budget is met, nothing depends on a kill, weights hold the gates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.machine.parallel import Team
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.training import train as training
from prune.cost import ShapeCost
from prune.masks.learned import check_learned
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from tests.problems import raises_problem
from tests.prune.small_runs import pruned
from tests.seldom import seldom

pytestmark = pytest.mark.whole

QUICK: dict[str, Any] = {"multiple_of": 4, "rows": 32, "recover": None, "least_squares": False}
LEARN = {"epochs": 3, "learning_rate": 1e-3, "mask_learning_rate": 0.2, "batch_size": 16}


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"method": "joint"}, 0.5),
        ({"method": "movement"}, 0.5),
        ({"method": "joint", "granularity": ["layers", "hidden", "heads", "ffn"], "recover": {"epochs": 0.3}}, 0.5),
        pytest.param({"method": "joint", "granularity": ["layers"]}, 0.6, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_budget_is_met(
    settings: dict[str, Any], least: float, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    model, figures = pruned(Prune(**{**QUICK, "learn": LEARN, **settings}), checkpoint("bert"), make_context(), tmp_path / "out")
    assert least <= figures["sparsity"] <= least + 0.1
    structure = Structure.of(model, "out")
    assert ShapeCost.of(model, structure, "macs").total() == figures["cost"]["after"]
    learned = figures["steps"][0]["learned"]
    assert learned["steps"] == 9
    assert {"cross_entropy", "teacher"} <= learned["losses"][0].keys()
    assert all(size % 4 == 0 for size in structure.sizes.ffn)
    if settings["method"] == "joint":
        assert 0 < learned["sparsity"] < 1
        assert "sparsity" in learned["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", seldom([["heads", "ffn"], ["hidden", "heads", "ffn"]], [["heads", "ffn"]]), ids=str)
def test_gates_end_where_the_budget_is(
    granularity: list[str], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    learn = {"epochs": 20, "learning_rate": 1e-3, "batch_size": 16}
    settings = {**QUICK, "method": "joint", "granularity": granularity, "learn": learn, "multiple_of": 1}
    model, figures = pruned(Prune(**settings), checkpoint("bert"), make_context(), tmp_path / "out")
    assert figures["steps"][0]["learned"]["sparsity"] == pytest.approx(0.5, abs=0.05)
    read = [module.weight for name, module in model.named_modules() if name.endswith("output.dense")]
    closed = [bool(column.abs().max() < 1e-4) for weight in read for column in weight.T]
    assert sum(closed) <= 0.1 * len(closed)


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("method", seldom(["joint", "movement"], ["movement"]))  # joint draws its gates
def test_a_kill_costs_no_bit(
    method: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Prune(**{**QUICK, "method": method, "learn": {**LEARN, "epochs": 2}})
    context = make_context()
    whole, figures = pruned(stage, checkpoint("bert"), replace(context, scratch=tmp_path / "whole"), tmp_path / "out")
    monkeypatch.setattr(training.TrainConfig.model_fields["checkpoint_seconds"], "default", 0.0)
    training.TrainConfig.model_rebuild(force=True)
    step, steps = training._Loop._step, []

    def dies(self: Any, indices: Any) -> None:
        steps.append(self.history.steps)
        if len(steps) == 5:
            raise Killed
        step(self, indices)

    monkeypatch.setattr(training._Loop, "_step", dies)
    killed = replace(context, scratch=tmp_path / "killed")
    with pytest.raises(Killed):
        pruned(stage, checkpoint("bert"), killed, tmp_path / "first")
    resumed, again = pruned(stage, checkpoint("bert"), killed, tmp_path / "second")
    monkeypatch.undo()
    training.TrainConfig.model_rebuild(force=True)
    assert steps == [0, 1, 2, 3, 4, 4, 5]
    assert again == figures
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "movement", "granularity": ["layers"]}, "movement given; it only scores heads and ffn"),
        ({"method": "joint", "granularity": ["experts"], "measure": "parameters"}, "joint given; it has no masks for experts"),
        ({"method": "joint", "schedule": "cubic", "recover": {}}, "schedule: cubic given; joint prunes gradually"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune(**{**QUICK, **settings})


def test_the_weights_hold_the_gates_that_were_learned(
    checkpoint: Callable[..., Path],
    make_context: Callable[..., Context],
    make_features: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the gates on, right after the training, the model answers as it does later without them."""
    from prune import steps
    from prune.masks import learned

    recover, learn, features = learned.recover, steps.learn, make_features("bert")
    answers: list[torch.Tensor] = []

    def trained(model: Any, *args: Any) -> Any:
        history = recover(model, *args)
        with torch.no_grad():
            answers.append(model.eval()(**features).logits)
        return history

    def learns(method: Any, model: Any, *args: Any) -> Any:
        scores = learn(method, model, *args)
        with torch.no_grad():
            answers.append(model(**features).logits)
        return scores

    monkeypatch.setattr(learned, "recover", trained)
    monkeypatch.setattr(steps, "learn", learns)
    stage = Prune(**{**QUICK, "learn": LEARN, "method": "joint", "granularity": ["hidden", "heads", "ffn"]})
    pruned(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    torch.testing.assert_close(answers[1], answers[0], atol=1e-5, rtol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("method", ["joint", "movement"])
@pytest.mark.parametrize(
    "settings",
    [
        {"sparsity": 0, "granularity": ["vocabulary"], "max_unknown": 1.0},
        {"sparsity": 0, "protect": ["*"]},
        {"sparsity": 0},
    ],
    ids=str,
)
def test_nothing_is_learned_where_nothing_goes(
    method: str, settings: dict[str, Any], checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    folder = checkpoint("bert")
    model, figures = pruned(Prune(**{**QUICK, "learn": LEARN, "method": method, **settings}), folder, make_context(), tmp_path / "out")
    assert "learned" not in figures["steps"][0]
    before = load(folder).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "word_embeddings" not in name)


def test_a_fraction_of_a_step_is_a_step(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Prune(**{**QUICK, "method": "joint", "learn": {"epochs": 1e-10}})
    _, figures = pruned(stage, checkpoint("bert"), make_context(), tmp_path / "out")
    assert figures["steps"][0]["learned"]["steps"] <= 1
    assert figures["sparsity"] >= 0.5


def test_what_was_closed_and_stays_can_be_learned_again_where_zeros_are_held(
    checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context()
    sparse = tmp_path / "sparse"
    sparse.mkdir()
    Sparsify(method="magnitude", sparsity=0.3, recover=None).run(Artifact(checkpoint("bert"), {"digest": "0" * 64}), context, sparse)
    monkeypatch.setattr("prune.masks.joint.fixed", torch.zeros_like)  # all are closed, of which selection keeps a half
    stage = Prune(**{**QUICK, "learn": LEARN, "method": "joint", "recover": {"epochs": 1, "learning_rate": 1e-2}})
    model, _ = pruned(stage, sparse, context, tmp_path / "out")
    outputs = [module.weight for name, module in model.named_modules() if name.endswith(("output.dense", "attention.output.dense"))]
    assert all(float((weight.abs() > 1e-4).float().mean()) > 0.5 for weight in outputs)


@pytest.mark.parametrize(
    ("team", "told"),
    [
        (Team(size=2, pipeline=2), "parallel.pipeline: 2, which divides the blocks; give pipeline: 1, or another method"),
        (Team(size=2, tensor=2, sequence=True), "parallel.sequence: true, which divides the tokens that they scale; give sequence: false"),
    ],
)
@pytest.mark.parametrize("method", ["joint", "movement"])
def test_masks_are_refused_where_blocks_or_tokens_are_divided(
    method: str, team: Team, told: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context]
) -> None:
    stage = Prune(method=method, sparsity=0.2, divisible_by=2, multiple_of=2)  # type: ignore[arg-type]
    config = Checkpoint(checkpoint("bert"), "model.path").config
    with pytest.raises(InputError, match=re.escape(told)):
        stage.check(config, config, replace(make_context(), team=team))


def test_masks_are_refused_where_experts_are_spread() -> None:
    with raises_problem("stages.prune.method", "parallel.experts: 2, which spreads experts", "give experts: 1, or another method"):
        check_learned(Team(size=2, experts=2), "stages.prune")
