"""Selection by learned probabilities: as many layers and channels as are likely, and the budget is kept whatever they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.core.errors import InputError
from foundation.models.architecture.structure import Structure
from prune.allocation import by_worth, uniform
from prune.choices import Granularity
from prune.cost import ShapeCost, count_of
from prune.prune import Prune
from prune.selection import Incoming, Limits, Scores, lowest_share, select
from tests.problems import raises_problem

pytestmark = pytest.mark.whole

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
    cost = ShapeCost.of(model, structure, "macs")

    @settings(max_examples=20)
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
        kept = select(cost, Incoming.of(cost), share, limits, scores, by_worth(scores.components), KEY, learned=True)
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
    cost = ShapeCost.of(model, structure, "macs")
    limits = Limits(("layers", "heads", "ffn"), 4, frozenset(), frozenset())
    for layers, share, expected in (
        ([0.9, 0.1, 0.8], 0.5, [0, 2]),
        ([0.9, 0.8, 0.7], 0.5, [0, 1, 2]),
        ([0.1, 0.2, 0.9], 0.5, [1, 2]),  # one layer alone cannot use the budget
        ([0.9, 0.8, 0.7], 0.1, [0]),  # nor do three fit
    ):
        scores = chances(structure, torch.Generator().manual_seed(0), layers)
        kept = select(cost, Incoming.of(cost), share, limits, scores, by_worth(scores.components), KEY, learned=True)
        assert list(kept.layers) == expected, (layers, share)


def test_the_lowest_share_is_that_of_the_least_of_everything(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    found = lowest_share(cost, Incoming.of(cost), Limits(("heads", "ffn"), 4, frozenset({(0, "ffn")}), frozenset()))
    smallest = 3 * 4 * 16 * 4 + 2 * 16 * (24 + 4 + 4)
    assert found == smallest / cost.total()


def test_layers_go_where_what_is_inside_does_not_suffice(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    scores = chances(structure, torch.Generator().manual_seed(0))
    for learned in (False, True):
        limits = Limits(("layers", "heads", "ffn"), 16, frozenset(), frozenset())
        kept = select(cost, Incoming.of(cost), 0.26, limits, scores, by_worth(scores.components), KEY, learned)
        assert len(kept.layers) == 1
        assert kept.heads[kept.layers[0]]
        # one layer of one head and 16 of 24 neurons: 768 of 3 times 1,792
        with raises_problem("sparsity", "0.9", "layers, heads, ffn", "at most 0.8571", "add hidden"):
            select(cost, Incoming.of(cost), 0.1, limits, scores, by_worth(scores.components), KEY, learned)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(("layers", "hidden", "heads", "ffn")), min_size=1, max_size=4, unique=True),
    st.floats(0, 1),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from((4, 8, 16)),
    st.sampled_from([frozenset[int](), frozenset({1})]),
)
def test_whatever_is_above_the_lowest_share_is_feasible_and_nothing_below(
    make_model: Callable[..., Any], granularity: list[Granularity], part: float, seed: int, learned: bool, step: int, blocks: frozenset[int]
) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "parameters")
    incoming, scores = Incoming.of(cost), chances(structure, torch.Generator().manual_seed(seed))
    limits = Limits(tuple(granularity), step, frozenset((block, "heads") for block in blocks), blocks)
    lowest = lowest_share(cost, incoming, limits, scores)
    assert lowest == pytest.approx(lowest_share(cost, incoming, limits))  # all layers cost the same
    share = lowest + part * (1 - lowest)
    allocate = by_worth(scores.components)
    kept = select(cost, incoming, share, limits, scores, allocate, KEY, learned)
    sizes = replace(kept, layers=range(3)).sizes(structure.sizes)
    assert cost.total(sizes, kept.layers) <= share * incoming.cost * (1 + 1e-6)
    if lowest > 0.01:
        with pytest.raises(InputError, match="can remove at most"):
            select(cost, incoming, lowest * 0.99, limits, scores, allocate, KEY, learned)


def test_a_message_names_the_key_that_was_given(make_model: Callable[..., Any]) -> None:
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    scores = chances(structure, torch.Generator().manual_seed(0))
    assert (Prune(measure="latency", speedup=3.0).target_key, Prune(sparsity=0.2).target_key) == ("speedup", "sparsity")
    limits = Prune(measure="latency", speedup=3.0).limits(structure)
    with raises_problem("stages.prune.speedup", "0.95 removed", "heads, ffn", "at most"):
        select(cost, Incoming.of(cost), 0.05, limits, scores, by_worth(scores.components), KEY)


@settings(max_examples=20)
@given(st.floats(0, 1), st.integers(0, 99), st.sampled_from((2, 4)), st.sampled_from((1, 3, 4)), st.sampled_from((uniform, None)))
def test_what_stays_divides_among_devices(
    make_model: Callable[..., Any], part: float, seed: int, devices: int, step: int, allocation: Any
) -> None:
    """Heads and FFN neurons of each block are multiples of the number of devices, neurons of the step too."""
    model = make_model("bert")
    structure = Structure.of(model, KEY)
    cost = ShapeCost.of(model, structure, "macs")
    incoming, scores = Incoming.of(cost), chances(structure, torch.Generator().manual_seed(seed))
    limits = Limits(("heads", "ffn"), step, frozenset(), frozenset(), divisible_by=devices)
    lowest = lowest_share(cost, incoming, limits, scores)
    share = lowest + part * (1 - lowest)
    sizes = select(cost, incoming, share, limits, scores, allocation or by_worth(scores.components), KEY).sizes(structure.sizes)
    assert cost.total(sizes, range(structure.depth)) <= share * incoming.cost * (1 + 1e-6)
    for heads, neurons, whole in zip(sizes.key_value_heads, sizes.ffn, structure.sizes.ffn, strict=True):
        assert heads % devices == neurons % devices == 0
        assert heads > 0
        assert neurons % step == 0 or neurons == whole


def test_a_model_that_does_not_divide_is_refused_with_what_does(make_model: Callable[..., Any]) -> None:
    structure = Structure.of(make_model("bert"), KEY)
    heads = structure.sizes.key_value_heads[0]
    with raises_problem("stages.prune.divisible_by", "3", f"block 0 has {heads} head groups", "give 2 or 4"):
        Prune(divisible_by=3).limits(structure)
    assert Prune(divisible_by=2).limits(structure).step_of("ffn") == 32
    assert Prune(divisible_by=2).limits(structure).step_of("heads") == 2
    assert "divisible_by" not in Prune().model_dump()
