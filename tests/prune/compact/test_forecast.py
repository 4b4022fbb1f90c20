"""The forecast of `compact`: next to a run, over architectures and shares, and for models and patterns without a forecast."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.forecast import predicted
from compress.pipeline import run
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.models.architecture.shapes import on_meta
from foundation.models.architecture.structure import Sizes, Structure
from foundation.models.folder import Checkpoint
from prune.compact.compact import Compact
from prune.sparsify.sparsify import Sparsify
from tests.export import sentiment
from tests.export.generation import tiny_encoder_decoders
from tests.prune import small_runs

pytestmark = pytest.mark.whole

KEY = "stages.compact"
SLICES: dict[str, Any] = {"method": "magnitude", "recover": None}


def weights(config: Any) -> int:
    """Returns the number of weights in the matrices of the blocks."""
    model = on_meta(config)
    blocks = [model.get_submodule(name) for name in Structure.of(model, KEY).blocks]
    return sum(parameter.numel() for block in blocks for parameter in block.parameters() if parameter.ndim == 2)


def sizes_of(config: Any) -> Sizes:
    """Returns the sizes of a config."""
    return Structure.of(on_meta(config), KEY).sizes


def config_of(kind: str, make_model: Callable[..., Any]) -> Any:
    """Returns the config of a tiny model."""
    return Checkpoint(tiny_encoder_decoders.checkpoint(kind)).config if kind in ("t5", "bart") else make_model(kind).config


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit", "t5", "bart"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_every_block_loses_the_share(kind: str, share: float, make_model: Callable[..., Any]) -> None:
    config = config_of(kind, make_model)
    sparse = Sparsify(**SLICES, pattern={"slices": 2}, sparsity=share).config_after(config)
    assert sizes_of(sparse) == sizes_of(config)
    assert Compact().config_after(config) is config
    after = Compact().config_after(sparse)
    before, left = sizes_of(config), sizes_of(after)
    assert left.ffn == tuple(2 * round((1 - share) * math.ceil(neurons / 2)) for neurons in before.ffn)
    if kind != "t5":
        heads, cross = (
            tuple(number and max(1, round((1 - share) * number)) for number in had) for had in (before.key_value_heads, before.cross)
        )
        assert (left.key_value_heads, left.cross) == (heads, cross)
    same = ["ffn"] if kind == "t5" else ["ffn", "heads", "key_value_heads", "cross"]
    assert replace(left, **{name: getattr(before, name) for name in same}) == before
    assert Compact().config_after(after) is after


def test_a_speedup_is_a_share_of_the_products(make_model: Callable[..., Any]) -> None:
    config = make_model("bert").config
    by_speed = Sparsify(**SLICES, pattern={"slices": 1}, speedup=2.0)
    by_share = Sparsify(**SLICES, pattern={"slices": 1}, sparsity=0.5)
    fast, sparse = (sizes_of(Compact().config_after(stage.config_after(config))) for stage in (by_speed, by_share))
    assert fast == sparse != sizes_of(config)


@pytest.mark.parametrize("settings", [{"sparsity": 0.0}, {"sparsity": 0.999}, {"sparsity": 0.5, "pattern": {"slices": 65536}}], ids=str)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_any_share_is_forecast(kind: str, settings: dict[str, Any], make_model: Callable[..., Any]) -> None:
    config = make_model(kind).config
    stage = Sparsify(**{**SLICES, "pattern": {"slices": 32}, **settings})
    after, before = sizes_of(Compact().config_after(stage.config_after(config))), sizes_of(config)
    assert all(0 < left <= had for left, had in zip(after.ffn + after.heads, before.ffn + before.heads, strict=True))
    if settings["sparsity"] == 0:
        assert after == before


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", {"block": [4, 4]}], ids=str)
def test_other_zeros_are_not_forecast(pattern: Any, make_model: Callable[..., Any]) -> None:
    config = make_model("bert").config
    after = Sparsify(**SLICES, pattern=pattern).config_after(config)
    assert Compact().config_after(after) is config


def test_the_last_slice_may_be_smaller(make_model: Callable[..., Any]) -> None:
    config = make_model("bert").config
    (neurons,) = set(sizes_of(config).ffn)
    slices = {"slices": neurons - 1}
    for share, left in ((0.2, neurons), (0.4, neurons - 1)):
        stage = Sparsify(**SLICES, pattern=slices, sparsity=share)
        assert set(sizes_of(Compact().config_after(stage.config_after(config))).ffn) == {left}


def test_experts_stay(make_model: Callable[..., Any]) -> None:
    config = make_model("mixtral").config
    after = Compact().config_after(Sparsify(**SLICES, pattern={"slices": 1}, sparsity=0.5).config_after(config))
    assert sizes_of(after) == sizes_of(config)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside", "no_clocks")
def test_the_plan_of_a_run(tmp_path: Path) -> None:
    """The forecast is off by less than a tenth of the blocks, and no checkpoint has the note."""
    stages: list[dict[str, Any]] = [
        {"sparsify": {**SLICES, "pattern": {"slices": 8}, "sparsity": 0.5}},
        {"compact": {}},
        {"quantize": {"calibration": {"rows": 8}}},
    ]
    recipe = small_runs.recipe(tmp_path, "slices", sentiment.rows(40), ["openvino"], stages)
    planned = {str(entry.step.id): entry for entry in predicted(recipe, prepare(recipe, tmp_path / "run", ConsoleProgress("quiet")))}
    outcome = run(recipe, tmp_path / "run", progress=ConsoleProgress("quiet"))
    made = {variant["id"]: variant["parameters"] for variant in outcome.report["variants"]}
    sizes: dict[str, Any] = {name: entry.size for name, entry in planned.items() if entry.size is not None}
    assert sizes["baseline"].parameters == made["baseline"] == sizes["sparsify"].parameters
    assert sizes["compact"].parameters == sizes["quantize"].parameters
    blocks = weights(planned["baseline"].config)
    assert abs(sizes["compact"].parameters - made["compact"]) < 0.1 * blocks
    assert made["baseline"] - made["compact"] > 0.3 * blocks
    assert not [path for path in (tmp_path / "run").rglob("config.json") if "expected" in path.read_text()]
