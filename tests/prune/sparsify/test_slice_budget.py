"""Slices under a budget of milliseconds: the choice beside a search over all choices, and the stage on made-up engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from foundation.artifacts.artifact import Artifact
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from prune.compact.compact import Compact
from prune.latency.cost import LatencyCost
from prune.latency.table import Curve, LatencyTable
from prune.sparsify.slice_budget import SliceBudget
from prune.sparsify.slices import bundles
from prune.sparsify.sparsify import Sparsify
from prune.sparsify.target_layers import target_layers
from tests.problems import raises_problem
from tests.prune.latency.test_timing import WHOLE, Engine, _configs_alone, _own_cache, blocks_in

__all__ = ["_configs_alone", "_own_cache"]
pytestmark = pytest.mark.whole
KEY = "stages.sparsify"
TABLE = LatencyTable(0.5, 0.1, Curve((1, 2, 4), (0.0, 0.1, 0.6)), Curve((8, 16, 24), (0.0, 0.3, 0.3)))


def budget_of(model: nn.Module, table: LatencyTable = TABLE, lines: int = 8) -> tuple[SliceBudget, dict[str, torch.Tensor]]:
    structure, layers = Structure.of(model, KEY), target_layers(Sparsify(method="magnitude"), model)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    return SliceBudget(LatencyCost(structure, table), bundles(model, structure, weights, lines), lines), weights


def milliseconds(budget: SliceBudget, stays: list[torch.Tensor]) -> float:
    """Returns the latency of the blocks that are left, from the sizes of the compacted model."""
    return budget.cost.table.predict(budget.kept(stays).sizes(budget.cost.structure.sizes)) - budget.cost.table.rest_ms


@given(st.floats(0.0, 1.0), st.integers(0, 10_000), st.sampled_from([4, 8, 12, 24]))
def test_a_budget_is_met_and_the_largest_slices_stay(make_model: Callable[..., Any], room: float, seed: int, lines: int) -> None:
    budget, weights = budget_of(make_model("bert"), lines=lines)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(weight.shape, generator=generator) * 10 ** (seed % 7 - 3) for name, weight in weights.items()}
    ms = budget.least_ms + room * (budget.cost.total() - budget.least_ms)
    stays = budget.stays(weights, ms)
    assert milliseconds(budget, stays) <= ms * (1 + 1e-9)
    for bundle, stays_G in zip(budget.bundles, stays, strict=True):
        squares_G = bundle.squares(weights)
        assert stays_G.any()
        assert stays_G.all() or float(squares_G[stays_G].min()) >= float(squares_G[~stays_G].max())


@pytest.mark.parametrize("lines", [5, 7, 16])
def test_the_last_slice_is_smaller_and_goes_first(lines: int, make_model: Callable[..., Any]) -> None:
    """Of 24 neurons: what is left of them is a multiple of the slice, or all."""
    budget, weights = budget_of(make_model("bert"), lines=lines)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        stays = budget.within(weights, share)
        counts = [len(units) for units in budget.kept(stays).ffn]
        assert all(count == 24 or count % lines == 0 for count in counts)
        assert min(counts) >= lines


def test_slices_go_in_the_order_of_their_loss_for_a_millisecond(make_model: Callable[..., Any]) -> None:
    """Heads that cost ten times as much as a slice of neurons go first, although they matter five times as much."""
    model = make_model("bert")
    table = LatencyTable(0.5, 0.1, Curve((1, 2, 3, 4), (0.0, 1.0, 2.0, 3.0)), Curve((8, 16, 24), (0.0, 0.1, 0.2)))
    budget, weights = budget_of(model, table)
    for bundle in budget.bundles:
        size_G = bundle.sizes(weights)
        wanted_G = torch.full((bundle.groups,), 5.0 if bundle.what == "heads" else 1.0)
        factor_G = (wanted_G / bundle.squares(weights)).sqrt()
        bundle.scale(dict(target_layers(Sparsify(method="magnitude"), model)), factor_G)
        assert (size_G > 0).all()
    weights = {name: layer.weight.detach() for name, layer in target_layers(Sparsify(method="magnitude"), model).items()}
    stays = budget.stays(weights, budget.cost.total() - 8.5)
    heads, neurons = (
        [int((~one).sum()) for b, one in zip(budget.bundles, stays, strict=True) if b.what == what] for what in ("heads", "ffn")
    )
    assert (sum(heads), sum(neurons)) == (9, 0)


def test_a_step_that_saves_no_time_is_taken_with_the_next_one(make_model: Callable[..., Any]) -> None:
    """16 neurons take as long as 24: a third of the neurons alone saves nothing, so none or two thirds go."""
    budget, weights = budget_of(make_model("bert"))
    for room in (0.3, 0.6, 0.9, 1.2, 1.5, 1.8):
        stays = budget.stays(weights, budget.cost.total() - room)
        gone = [int((~one).sum()) for bundle, one in zip(budget.bundles, stays, strict=True) if bundle.what == "ffn"]
        assert set(gone) <= {0, 1, 2}
        saved = budget.cost.total() - milliseconds(budget, stays)
        assert saved >= room - 1e-9
        last = max(range(len(gone)), key=lambda number: gone[number])
        assert gone.count(1) == 0, (room, gone, last)


def test_the_choice_loses_little_more_than_the_best_of_all(make_model: Callable[..., Any]) -> None:
    """Beside a search over all numbers of heads and slices: what goes is the cheapest up to one slice of a bundle."""
    budget, weights = budget_of(make_model("bert"), LatencyTable(0.5, 0.1, Curve((1, 4), (0.0, 0.6)), Curve((8, 24), (0.0, 0.5))))
    squares = [bundle.squares(weights).sort(descending=True).values.tolist() for bundle in budget.bundles]
    saved = [0.2 if bundle.what == "heads" else 0.25 for bundle in budget.bundles]
    for room in (0.5, 1.0, 1.7, 2.4):
        stays = budget.stays(weights, budget.cost.total() - room)
        lost = sum(float(b.squares(weights)[~one].sum()) for b, one in zip(budget.bundles, stays, strict=True))
        choices = itertools.product(*(range(bundle.groups) for bundle in budget.bundles))
        best = min(
            sum(sum(values[len(values) - gone :]) for values, gone in zip(squares, counts, strict=True) if gone)
            for counts in choices
            if sum(count * ms for count, ms in zip(counts, saved, strict=True)) >= room - 1e-9
        )
        assert best - 1e-6 <= lost <= best + max(max(values) for values in squares)


@pytest.mark.first(1)
@pytest.mark.parametrize("method", ["magnitude", "lasso"])
def test_what_is_zeroed_is_as_fast_as_asked_after_compact(
    method: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path
) -> None:
    engine, folder = Engine(0.15), checkpoint("bert")
    context = replace(make_context(), measure_latency=engine, scratch=tmp_path / "scratch")
    context = replace(context, teachers=(Artifact(folder, {"id": "baseline", "digest": "0" * 64}),))
    settings = {"learning": {"epochs": 0.3, "batch_size": 16}} if method == "lasso" else {}
    stage = Sparsify.model_validate({"method": method, "pattern": {"slices": 4}, "speedup": 1.5, "rows": 16, "recover": None, **settings})
    config = Checkpoint(folder).config
    stage.check(config, config, context)
    (tmp_path / "sparse").mkdir()
    figures = stage.run(Artifact(folder, {"id": "baseline", "digest": "0" * 64}), context, tmp_path / "sparse")
    (tmp_path / "small").mkdir()
    Compact(rows=8).run(
        Artifact(tmp_path / "sparse", {"id": "s", "digest": "1" * 64}), replace(context, scratch=tmp_path / "c"), tmp_path / "small"
    )
    made = engine.time(blocks_in(tmp_path / "small"))
    assert 0.85 * WHOLE / 1.5 <= made <= WHOLE / 1.5
    latency: Any = figures["latency"]
    assert latency["after"]["measured_ms"] == pytest.approx(made)
    zeros = sum(
        int((weight == 0).sum()) for name, weight in load(tmp_path / "sparse").named_parameters() if ".layer." in name and weight.ndim == 2
    )
    weights = sum(weight.numel() for name, weight in load(folder).named_parameters() if ".layer." in name and weight.ndim == 2)
    assert figures["asked"] == pytest.approx(zeros / weights)
    assert figures["sparsity"] == pytest.approx(figures["asked"])


def test_what_no_slices_reach_is_said(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    context = replace(make_context(), measure_latency=Engine(), scratch=tmp_path / "scratch")
    stage = Sparsify.model_validate({"method": "magnitude", "pattern": {"slices": 4}, "speedup": 20, "recover": None})
    with raises_problem("stages.sparsify.speedup", "smallest", "1.52 ms"):
        stage.run(Artifact(checkpoint("bert"), {"id": "baseline", "digest": "0" * 64}), context, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "unstructured"}, "speedup: 2 given with pattern: unstructured"),
        ({"pattern": {"block": [4, 4]}, "method": "lasso"}, "speedup: 2 given with pattern: block 4 x 4"),
        ({"sparsity": 0.5}, "speedup: given together with sparsity"),
        ({"method": "lasso", "lasso": {"threshold": "layer"}}, "threshold: layer given with speedup"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Sparsify.model_validate({"method": "magnitude", "pattern": {"slices": 4}, "speedup": 2.0, **settings})
