"""Selection by learned probabilities: as many layers and channels as are likely, and the budget is kept whatever they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.structure import Structure
from prune.allocation import by_worth
from prune.cost import Cost, count_of
from prune.selection import Granularity, Limits, Scores, Whole, lowest_share, select

KEY = "stages.prune"


def chances(structure: Structure, draw: torch.Generator, layers: list[float] | None = None) -> Scores:
    sizes = structure.sizes
    components: Any = {
        (block, what): torch.rand(count_of(sizes, block, what), generator=draw)
        for block in range(structure.depth)
        for what in ("heads", "ffn")
    }
    found = torch.rand(structure.depth, generator=draw) if layers is None else torch.tensor(layers)
    return Scores(components, found, torch.rand(sizes.hidden, generator=draw))


def test_the_budget_is_kept_and_used(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = Cost.of(model, structure, "macs")

    @settings(max_examples=40)
    @given(
        st.floats(0.34, 1.0),
        st.integers(0, 999),
        st.sampled_from([("layers",), ("hidden",), ("layers", "hidden")]),
        st.booleans(),
        st.sampled_from([frozenset[int](), frozenset({1})]),
    )
    def check(share: float, seed: int, outside: tuple[Granularity, ...], inside: bool, blocks: frozenset[int]) -> None:
        granularity: tuple[Granularity, ...] = (*outside, "heads", "ffn") if inside else outside
        limits, scores = Limits(granularity, 4, frozenset(), blocks), chances(structure, torch.Generator().manual_seed(seed))
        kept = select(cost, Whole.of(cost), share, limits, scores, by_worth(scores.components), KEY, learned=True)
        sizes = kept.sizes(structure.sizes)
        total = sum(4 * sizes.hidden * heads * 4 + 2 * sizes.hidden * ffn for heads, ffn in zip(sizes.heads, sizes.ffn, strict=True))
        assert total <= share * cost.total() * (1 + 1e-9)
        assert total > (share - 0.34) * cost.total()  # a layer is a third
        assert blocks <= set(kept.layers)
        assert len(kept.hidden) % 4 == 0
        assert ("layers" in outside) or len(kept.layers) == 3
        assert ("hidden" in outside) or len(kept.hidden) == 16

    check()


def test_as_many_layers_as_are_likely(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = Cost.of(model, structure, "macs")
    limits = Limits(("layers", "heads", "ffn"), 4, frozenset(), frozenset())
    for layers, share, expected in (
        ([0.9, 0.1, 0.8], 0.5, [0, 2]),
        ([0.9, 0.8, 0.7], 0.5, [0, 1, 2]),
        ([0.1, 0.2, 0.9], 0.5, [1, 2]),  # one layer alone cannot use the budget
        ([0.9, 0.8, 0.7], 0.1, [0]),  # nor do three fit
    ):
        scores = chances(structure, torch.Generator().manual_seed(0), layers)
        kept = select(cost, Whole.of(cost), share, limits, scores, by_worth(scores.components), KEY, learned=True)
        assert list(kept.layers) == expected, (layers, share)


def test_the_lowest_share_is_that_of_the_least_of_everything(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = Cost.of(model, structure, "macs")
    found = lowest_share(cost, Whole.of(cost), Limits(("heads", "ffn"), 4, frozenset({(0, "ffn")}), frozenset()))
    smallest = 3 * 4 * 16 * 4 + 2 * 16 * (24 + 4 + 4)
    assert found == smallest / cost.total()
