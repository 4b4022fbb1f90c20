from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.models.architecture.structure import Structure
from foundation.models.size import count
from prune.cost import ShapeCost, count_of, with_count
from prune.surgery import KeptUnits, shrink
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KEY = "stages.prune"
LENGTH = 8


def products(sizes: Any, tokens: int) -> int:
    """Multiply-accumulates of Q K^T and P V for one row."""
    return sum(2 * tokens * tokens * heads * sizes.head_dim for heads in sizes.heads)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kind", seldom(["bert", "roberta", "distilbert", "gpt2", "vit", "llama", "mixtral"], ["roberta", "distilbert", "gpt2", "vit"])
)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99))
def test_the_difference_is_that_of_the_counted_models(kind: str, seed: int, make_model: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    sizes = structure.sizes
    everything = KeptUnits.everything(sizes)
    kept = KeptUnits(
        range(structure.depth),
        [range(1 + (seed + block) % count) for block, count in enumerate(sizes.key_value_heads)],
        [range(24) if kind == "mixtral" else range(4 + (seed * block) % 20) for block in range(structure.depth)],
        [range(2 + seed % 3) if count else () for count in sizes.experts],
        everything.hidden,
        everything.vocabulary,
    )
    small = shrink(model, structure, kept, KEY)
    task: Any = (
        "image-classification" if kind == "vit" else "text-generation" if kind in ("gpt2", "llama", "mixtral") else "text-classification"
    )
    before, after = (count(each, task, LENGTH) for each in (model, small))
    tokens = structure.attentions[0].tokens if kind == "vit" else LENGTH
    for measure, difference in (("macs", before.macs - after.macs), ("parameters", before.parameters - after.parameters)):
        cost: Any = ShapeCost.of(model, structure, measure)  # type: ignore[arg-type]
        left = ShapeCost.of(small, Structure.of(small, KEY), measure).total()  # type: ignore[arg-type]
        assert cost.total(kept.sizes(sizes)) == pytest.approx(left)
        expected = tokens * (cost.total() - left) + products(sizes, tokens) - products(kept.sizes(sizes), tokens)
        assert difference == (expected if measure == "macs" else cost.total() - left)


@pytest.mark.parametrize("kind", ["bert", "llama", "mixtral"])
def test_units_cost_alike(kind: str, make_model: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "parameters")
    for what in ("heads", "ffn", "experts"):
        number = count_of(structure.sizes, 1, what)  # type: ignore[arg-type]
        if not number:
            continue
        unit = cost.unit(1, what, structure.sizes)  # type: ignore[arg-type]
        for left in range(number):
            fewer = with_count(structure.sizes, 1, what, left)  # type: ignore[arg-type]
            assert cost.block(1, structure.sizes) - cost.block(1, fewer) == pytest.approx(unit * (number - left))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_blocks_and_head_are_all_that_there_is(kind: str, make_model: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    sizes = structure.sizes
    expected = LENGTH * (ShapeCost.of(model, structure, "macs").total() + sizes.hidden * sizes.vocabulary) + products(sizes, LENGTH)
    assert count(model, "text-generation", LENGTH).macs == expected


@pytest.mark.parametrize("measure", ["macs", "parameters"])
def test_whole_numbers_are_expected_to_cost_what_they_cost(make_model: Callable[..., Any], measure: Any) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, measure)

    @settings(max_examples=12)
    @given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 16), st.integers(0, 2))
    def check(heads: int, ffn: int, hidden: int, gone: int) -> None:
        sizes = with_count(with_count(replace(structure.sizes, hidden=hidden), 1, "heads", heads), 1, "ffn", ffn)
        counts: Any = {(1, "heads"): torch.tensor(float(heads)), (1, "ffn"): torch.tensor(float(ffn))}
        present_L = torch.ones(3)
        present_L[gone] = 0
        found = cost.expected(counts, torch.tensor(float(hidden)), present_L)
        assert float(found) == pytest.approx(cost.total(sizes, [block for block in range(3) if block != gone]))

    check()
