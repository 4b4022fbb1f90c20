"""Families in a recipe: what a stage with a list of speed-ups expands to, against a naive walk over the stages."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe import check, dump, written
from foundation.core.errors import InputError
from foundation.stage.stage import lines

START: dict[str, Any] = {
    "name": "family",
    "model": {"path": "owner/model", "task": "text-classification"},
    "data": {"path": "owner/data"},
}


def stages_of(*stages: dict[str, Any]) -> list[Any]:
    """Returns the checked stages of a recipe."""
    return list(check({**START, "stages": list(stages)}).stages)


def test_a_family_is_a_chain_of_members_and_each_has_its_own_int8() -> None:
    stages = stages_of({"prune": {"family": [1, 2, 3.5], "recover": {"epochs": 3, "batch_size": 8}}}, {"quantize": {}}, {"export": {}})
    told = [(stage.id, getattr(stage, "input", None)) for stage in stages]
    assert told == [
        ("prune-2x", "baseline"),
        ("prune-3_5x", "prune-2x"),
        ("quantize-1x", "baseline"),
        ("quantize-2x", "prune-2x"),
        ("quantize-3_5x", "prune-3_5x"),
        ("export", None),
    ]
    first, second = stages[:2]
    assert (first.speedup, second.speedup, first.measure, first.family) == (2, 3.5, "latency", None)
    assert (first.recover.epochs, second.recover.epochs, first.recover.batch_size) == (1.5, 1.5, 8)
    assert [(stage.over, stage.member.number, stage.member.count) for stage in (first, second)] == [("baseline", 1, 2), ("baseline", 2, 2)]


@given(
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 5.0, 8.0]), min_size=2, max_size=5, unique=True).map(sorted),
    st.lists(st.sampled_from(["sparsify", "compact", "distill"]), max_size=3),
    st.lists(st.sampled_from(["sparsify", "distill"]), max_size=2),
    st.booleans(),
)
def test_every_member_goes_through_all_that_follows(speedups: list[float], after: list[str], before: list[str], finetuned: bool) -> None:
    """The chain of each last model is what comes before, the smaller speed-ups, and one of each stage that follows."""
    recipe = [{"finetune": {}}] * finetuned
    recipe += [{name: {"id": f"before{number}"}} for number, name in enumerate(before)]
    recipe += [{"prune": {"id": "p", "family": speedups}}]
    recipe += [{name: {"id": f"after{number}"}} for number, name in enumerate(after)]
    found = check({**START, "stages": [*recipe, {"quantize": {"id": "q"}}, {"export": {}}]})
    chains = lines(found.stages)
    ends = {f"q-{speedup:g}x".replace(".", "_"): speedup for speedup in speedups}
    assert [stage.id for stage in found.stages if stage.NAME == "quantize"] == list(ends)
    start = ["finetune"] * finetuned + [f"before{number}" for number in range(len(before))]
    for end, speedup in ends.items():
        suffix = end[2:]
        members = [f"p-{other:g}x".replace(".", "_") for other in speedups if 1 < other <= speedup]
        chain = [*start, *members, *(f"after{number}-{suffix}" for number in range(len(after))), end]
        assert [stage.id for stage in chains[end]] == chain
    reference = f"before{len(before) - 1}" if before else "baseline"
    pruned = [stage for stage in found.stages if stage.NAME == "prune"]
    assert {stage.over for stage in pruned} == {reference}
    assert sum(stage.recover.epochs for stage in pruned) == pytest.approx(1)
    assert sorted(stage.speedup for stage in pruned) == [speedup for speedup in speedups if speedup > 1]


def test_what_is_expanded_reads_back() -> None:
    recipe = check({**START, "stages": [{"prune": {"family": [2, 3], "granularity": ["heads"]}}, "quantize", "export"]})
    for plain in (dump(recipe), written(recipe)):
        assert check(yaml.safe_load(yaml.safe_dump(plain))) == recipe


def test_other_branches_are_not_repeated_and_teachers_are_the_members_own() -> None:
    stages = stages_of(
        {"prune": {"family": [2, 4]}},
        {"sparsify": {"teacher": "prune"}},
        {"quantize": {"id": "whole", "input": "baseline"}},
        {"quantize": {"id": "last", "input": "sparsify"}},
        {"quantize": {"id": "third", "input": "prune-4x"}},
    )
    told = [(stage.id, stage.input, getattr(stage, "teacher", None)) for stage in stages[2:]]
    assert told == [
        ("sparsify-2x", "prune-2x", "prune-2x"),
        ("sparsify-4x", "prune-4x", "prune-4x"),
        ("whole", "baseline", "input"),
        ("last-2x", "sparsify-2x", "input"),
        ("last-4x", "sparsify-4x", "input"),
        ("third", "prune-4x", "input"),
    ]


@pytest.mark.parametrize(
    ("settings", "hidden_weight"),
    [
        ({}, 1.0),
        ({"granularity": ["layers", "heads"]}, 0.0),
        ({"recover": {"hidden_weight": 0}}, 0.0),
        ({"recover": {"soft_weight": 0.5}}, 0.0),
        ({"recover": {"distill": False}}, 0.0),
        ({"recover": {"learning_rate": 1e-4}}, 1.0),
    ],
    ids=str,
)
def test_states_of_every_token_teach_unless_other_losses_are_named(settings: dict[str, Any], hidden_weight: float) -> None:
    first, *_ = stages_of({"prune": {"family": [2], **settings}})
    assert first.recover.hidden_weight == hidden_weight


def test_a_family_of_a_family_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        stages_of({"prune": {"family": [2, 3]}}, {"prune": {"id": "again", "family": [4, 5]}})
    assert [line.split(":")[0] for line in caught.value.lines] == ["stages.again-2x.family", "stages.again-3x.family"]


def test_a_family_without_training() -> None:
    assert [stage.recover for stage in stages_of({"prune": {"family": [2, 3], "recover": None}})] == [None, None]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"family": [2, 2]}, ["each speed-up once"]),
        ({"family": [3, 2]}, ["from the smallest"]),
        ({"family": [1]}, ["1 is the incoming model"]),
        ({"family": []}, ["at least 1"]),
        ({"family": [0.5]}, ["0.5", "greater than or equal to 1"]),
        ({"family": [2], "sparsity": 0.3}, ["family", "sparsity"]),
        ({"family": [2], "speedup": 3}, ["family", "speedup"]),
        ({"family": [2], "measure": "macs"}, ["measure: macs", "latency"]),
        ({"member": {"number": 1}}, ["member", "speedup"]),
        ({"speedup": 2, "measure": "latency", "member": {"number": 3, "count": 2}}, ["1 to 2"]),
        ({"over": "baseline"}, ["over", "speedup"]),
        ({"speedup": 2, "measure": "latency", "over": "nothing"}, ["nothing", "baseline"]),
    ],
    ids=str,
)
def test_what_is_no_family_is_said(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        stages_of({"prune": settings})
    line, *_ = caught.value.lines
    assert line.startswith("stages.prune")
    assert all(word in line for word in words), line
