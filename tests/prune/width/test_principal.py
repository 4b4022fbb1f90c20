"""The residual stream in principal components: exact in all of them and in a subspace that holds the stream, beside the plain formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from compress.pipeline import run
from compress.recipe import check
from foundation.core.progress import ConsoleProgress
from foundation.models.architecture.structure import Structure
from foundation.models.forward import forward
from foundation.models.layers.low_rank_embedding import low_rank_tables
from prune.embeddings.low_rank import in_low_rank
from prune.hook_points import HookPoints
from prune.prune import Prune
from prune.surgery import KeptUnits, shrink
from prune.width.principal import Basis, principal, project, prove_width, summing_to_zero, try_width
from tests.problems import raises_problem
from tests.tiny_recipes import tiny_vit

pytestmark = pytest.mark.whole
KEY = "stages.prune"
PRE_NORM = ["vit", "llama"]


class Rows:
    """A batch as the calibration gives it."""

    def __init__(self, features: dict[str, Tensor]) -> None:
        self.features = features


def random_basis(model: nn.Module, seed: int) -> Basis:
    """Returns a basis in random directions."""
    norms = [model.get_submodule(name) for name in HookPoints.of(model, Structure.of(model, KEY)).norms]
    centred, width = isinstance(norms[0], nn.LayerNorm), Structure.of(model, KEY).sizes.hidden
    space_DN = summing_to_zero(width) if centred else torch.eye(width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(space_DN.shape[1], space_DN.shape[1], generator=generator, dtype=torch.float64)).Q
    return Basis(space_DN @ turn, torch.ones(width), centred)


@given(st.integers(1, 40))
def test_a_basis_of_vectors_that_sum_to_zero(size: int) -> None:
    basis = summing_to_zero(size)
    assert basis.shape == (size, size - 1)
    torch.testing.assert_close(basis.T @ basis, torch.eye(size - 1, dtype=torch.float64))
    assert float(basis.sum(dim=0).abs().max() if size > 1 else 0.0) < 1e-12


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", PRE_NORM)
@given(seed=st.integers(0, 1000))
def test_all_components_change_no_output(make_model: Callable[..., Any], make_features: Callable[..., Any], kind: str, seed: int) -> None:
    model, features = make_model(kind), make_features(kind)
    structure = Structure.of(model, KEY)
    turned = copy.deepcopy(model)
    project(turned, structure, random_basis(model, seed), structure.sizes.hidden, features)
    with torch.no_grad():
        torch.testing.assert_close(forward(turned, features), forward(model, features), rtol=1e-3, atol=1e-4)
    changed = [name for name, value in turned.named_parameters() if not torch.equal(value, model.get_parameter(name))]
    norms = {name for name in changed if any(name.startswith(f"{norm}.") for norm in HookPoints.of(model, structure).norms)}
    assert len(changed) - len(norms) > len(structure.blocks)


@given(seed=st.integers(0, 1000))
def test_embeddings_in_low_rank_are_projected(make_model: Callable[..., Any], make_features: Callable[..., Any], seed: int) -> None:
    """Their projection writes the stream, the narrow table does not."""
    features = make_features("llama")
    model, _ = in_low_rank(make_model("llama"), torch.ones(20, dtype=torch.float64), 5, KEY)
    structure, turned = Structure.of(model, KEY), copy.deepcopy(model)
    project(turned, structure, random_basis(model, seed), structure.sizes.hidden, features)
    with torch.no_grad():
        torch.testing.assert_close(forward(turned, features), forward(model, features), rtol=1e-3, atol=1e-4)
    ((name, words),) = low_rank_tables(model).items()
    after: Any = turned.get_submodule(name)
    assert torch.equal(after.table.weight, words.table.weight)
    assert not torch.equal(after.projection.weight, words.projection.weight)
    half = structure.sizes.hidden // 2
    small = shrink(turned, structure, replace(KeptUnits.everything(structure.sizes), hidden=range(half)), KEY)
    assert Structure.of(small, KEY).sizes.embedding_rank == 5
    assert tuple(small.get_submodule(name).projection.weight.shape) == (half, 5)


@pytest.mark.parametrize("kind", PRE_NORM)
@pytest.mark.parametrize("rank", [1, 5, 9])
def test_a_stream_within_a_subspace_loses_nothing(
    rank: int, kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    """All that writes the stream writes into `rank` directions: as many channels, and one more where norms centre, hold it."""
    model, features = make_model(kind), make_features(kind)
    structure = Structure.of(model, KEY)
    basis = random_basis(model, 1)
    inside_DD = basis.components_DN[:, :rank] @ basis.components_DN[:, :rank].T
    readers = {
        name for name, axis in structure.residual if axis == 1 and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
    }
    norms = {f"{name}.{part}" for name in HookPoints.of(model, structure).norms for part in ("weight", "bias")}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, axis in structure.residual:
            if name not in norms and not (name in readers and axis == 1):
                written = torch.tensordot(parameters[name].double(), inside_DD, dims=([axis], [0])).movedim(-1, axis)
                parameters[name].copy_(written)
    found = principal(model, structure, [Rows(features)], KEY)  # type: ignore[list-item]
    width = rank + found.centred
    expected = forward(model, features).detach()
    prove_width(model, structure, found, features, KEY)
    project(model, structure, found, width, features)
    small = shrink(model, structure, replace(KeptUnits.everything(structure.sizes), hidden=range(width)), KEY)
    assert Structure.of(small, KEY).sizes.hidden == width
    with torch.no_grad():
        answer = forward(small, features)
    assert float((answer - expected).abs().max() / expected.abs().max()) < 2e-3  # the epsilon of a norm is added to another mean


@pytest.mark.parametrize("kind", PRE_NORM)
def test_components_are_of_the_normalized_states(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    """Beside a matrix that is added up token by token."""
    model, features = make_model(kind), make_features(kind)
    structure = Structure.of(model, KEY)
    seen: list[Tensor] = []
    for name in HookPoints.of(model, structure).norms:
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().double()))
    found = principal(model, structure, [Rows(features)], KEY)  # type: ignore[list-item]
    seen = seen[: len(HookPoints.of(model, structure).norms)]
    mask = features.get("attention_mask")
    total = torch.zeros(structure.sizes.hidden, structure.sizes.hidden, dtype=torch.float64)
    for states in seen:
        for row in range(states.shape[0]):
            for token in range(states.shape[1]):
                if mask is None or bool(mask[row, token]):
                    x = states[row, token] - (states[row, token].mean() if found.centred else 0)
                    x = x / x.square().mean().sqrt()
                    total += torch.outer(x, x)
    for width in (2, 5, 11):
        projection = found.projection(width)
        rank = width - found.centred
        assert torch.linalg.svdvals(projection)[:rank].tolist() == pytest.approx([1.0] * rank)
        captured = float(torch.trace(projection.T @ total @ projection))
        assert captured == pytest.approx(float(torch.linalg.eigvalsh(total)[-rank:].sum()), rel=1e-6)
        if found.centred:
            assert float(projection.sum(dim=1).abs().max()) < 1e-9
    assert found.variances_D.tolist() == sorted(found.variances_D.tolist(), reverse=True)
    assert len(set(found.variances_D.tolist())) > 1


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "gpt2"])
def test_a_model_that_cannot_be_projected_is_refused_before_anything_runs(kind: str, make_model: Callable[..., Any]) -> None:
    with raises_problem("stages.prune.granularity", "width", "give hidden"):
        try_width(make_model(kind).config, KEY)


@pytest.mark.parametrize("kind", PRE_NORM)
def test_a_model_that_can_be_projected_is_not(kind: str, make_model: Callable[..., Any]) -> None:
    try_width(make_model(kind).config, KEY)


@pytest.mark.first(1)
@pytest.mark.usefixtures("engines_inside")
@pytest.mark.parametrize("schedule", ["one_shot", "cubic"])
def test_a_run(schedule: str, tmp_path: Path) -> None:
    """A ViT of scikit-learn's digits becomes narrower in all of its parts, and what comes out is a checkpoint like any other."""
    stage: dict[str, Any] = {"granularity": ["width", "ffn"], "multiple_of": 8, "sparsity": 0.4, "rows": 64, "allocation": "uniform"}
    stage |= {"schedule": schedule, "iterations": 2, "recover": {"epochs": 0.1}} if schedule == "cubic" else {"recover": None}
    recipe = check({**tiny_vit("narrow"), "stages": [{"finetune": {"epochs": 1}}, {"prune": stage}]})
    outcome = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet"))
    before, after = outcome.report["variants"]
    figures = after["pruning"]
    assert figures["before"]["hidden"] == 32
    assert figures["after"]["hidden"] in (16, 24)
    assert figures["sparsity"] == pytest.approx(0.4, abs=0.12)
    assert after["parameters"] < before["parameters"]
    assert after["accuracy"]["torch"]["n"] == before["accuracy"]["torch"]["n"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"granularity": ["width", "hidden"]}, "hidden and width given"),
        ({"method": "joint"}, "method: joint given with width"),
        ({"recover": {"hidden_weight": 1.0}}, "losses on states given with width"),
        ({"recover": {"losses": [{"name": "hidden"}]}}, "losses on states given with width"),
        ({"measure": "latency", "speedup": 2}, "does not cover width"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Prune.model_validate({"granularity": ["width"], **settings})
