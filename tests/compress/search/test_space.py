"""What a list in `search.space` means, what is drawn for a value, and which combinations are checked."""

import itertools
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.recipe import check
from compress.search import space
from compress.search.space import Knob, combinations, knobs_of, num_combinations, own_values, recipe_of, untried
from compress.search.study import _storage
from compress.search_settings import Choices, Range, Search
from foundation.core.errors import InputError
from tests.tiny_recipes import tiny_vit

STAGES = [{"finetune": {"epochs": 0.2}}, {"prune": {"sparsity": 0.5, "granularity": ["ffn"]}}, {"quantize": {}}]


def raw(values: dict[str, Any], **search: Any) -> dict[str, Any]:
    return {**tiny_vit("tiny"), "search": {"space": values, **search}, "stages": STAGES}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ([0.3, 0.8], Range(low=0.3, high=0.8)),
        ([2, 3, 4, 6], Choices(choices=(2, 3, 4, 6))),
        ([2, 6], Choices(choices=(2, 6))),
        ([0.3, 0.5, 0.8], Choices(choices=(0.3, 0.5, 0.8))),
        ([0.3], Choices(choices=(0.3,))),
        (["ptq", "qat"], Choices(choices=("ptq", "qat"))),
        ([False, True, None], Choices(choices=(False, True, None))),
        ([1, True], Choices(choices=(1, True))),
        ({"low": 1, "high": 9, "step": 2}, Range(low=1, high=9, step=2)),
        ({"low": 1e-5, "high": 1e-3, "log": True}, Range(low=1e-5, high=1e-3, log=True)),
        ({"choices": [0.3, 0.8]}, Choices(choices=(0.3, 0.8))),
    ],
)
def test_two_numbers_with_a_point_are_a_range_and_all_else_are_choices(written: Any, meant: Any) -> None:
    search = Search.model_validate({"space": {"prune.sparsity": written}})
    assert search.values() == {"prune.sparsity": meant}
    assert Search.model_validate(search.model_dump(mode="json")) == search


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ([0.3, 1], "one number with a decimal point and one without may be a range or choices"),
        ([0.8, 0.3], "the first number of a range must be below the second"),
        ([0.5, 0.5], "the first number of a range must be below the second"),
        (["1e-5", "1e-4"], "these numbers are text to YAML; write 1.0e-5 instead of 1e-5"),
        ([], "there must be one"),
        ([2, 2], "each choice must be given once"),
        (0.5, "a list of choices, or a range, is allowed"),
        ({"low": 3, "high": 1}, "low must be below high"),
        ({"low": 1, "high": 2.5}, "give two integers, or both with a decimal point"),
        ({"low": 0.0, "high": 1.0, "log": True}, "needs low above 0"),
        ({"low": 0.1, "high": 0.2, "step": 0.5}, "at most high - low"),
        ({"low": 0.1, "hihg": 0.2}, "unknown key; allowed: low, high, step, log, choices; did you mean 'high'?"),
        ({"choices": ["a", "a"]}, "'a' is given twice"),
    ],
)
def test_what_could_mean_two_things_is_refused_in_a_line_that_names_its_key(written: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        check(raw({"prune.sparsity": written}))
    [line] = [line for line in caught.value.lines if told in line]
    assert line.startswith("search.space.prune.sparsity")


@given(st.lists(st.one_of(st.integers(-5, 5), st.floats(0, 1), st.booleans(), st.text(max_size=3), st.none()), min_size=1, max_size=6))
def test_what_is_drawn_for_a_choice_is_that_choice(values: list[Any]) -> None:
    distinct = [value for index, value in enumerate(values) if not any(type(o) is type(value) and o == value for o in values[:index])]
    knob = Knob("a.b", Choices(choices=tuple(distinct)))
    assert sorted(map(repr, knob.samples)) == sorted(map(repr, distinct))
    for value in distinct:
        drawn = knob.drawn(value)
        assert knob.distribution._contains(knob.distribution.to_internal_repr(drawn))
        assert knob.value(drawn) == value


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 7), st.data())
def test_a_stepped_range_holds_low_plus_whole_steps(low: int, width: int, step: int, data: st.DataObject) -> None:
    if step > width:
        step = width
    knob = Knob("a.b", Range(low=low, high=low + width, step=step))
    naive = [value for value in range(low, low + width + 1) if (value - low) % step == 0]
    assert list(knob.all) == naive
    assert knob.count == len(naive)
    value = data.draw(st.integers(low - 3, low + width + 3))
    assert (knob.drawn(value) is not None) == (value in naive)


def natural_ranges() -> list[tuple[Range, list[float]]]:
    """Returns every range between two twentieths of 1 whose step leads from one to the other, with its values as literals."""
    found = []
    for first, last in itertools.combinations(range(21), 2):
        for step in (step for step in range(1, last - first + 1) if (last - first) % step == 0):
            low, high, between = (float(f"{5 * number}e-2") for number in (first, last, step))
            literals = [float(f"{5 * number}e-2") for number in range(first, last + 1, step)]
            found.append((Range(low=low, high=high, step=between), literals))
    return found


@pytest.mark.whole
def test_a_grid_holds_the_numbers_that_a_recipe_would_give(tmp_path: Path) -> None:
    natural = natural_ranges()
    assert len(natural) == 600
    knobs = {f"{place}": Knob(f"{place}", given) for place, (given, _) in enumerate(natural)}
    for knob, (_, literals) in zip(knobs.values(), natural, strict=True):
        assert list(knob.all) == literals
        assert (knob.count, knob.samples) == (len(literals), (literals[0], literals[-1]))
        distribution: Any = knob.distribution
        assert (distribution.low, distribution.high) == (literals[0], literals[-1])  # what Optuna itself makes of the ends
        assert knob.drawn(literals[-1] - 1e-9) is None
        for place, literal in enumerate(literals):
            assert (
                knob.drawn(literal)
                == knob.value(knob.drawn(literal))
                == knob.value(distribution.low + place * distribution.step)
                == literal
            )
    ends = [{name: knob.all[place] for name, knob in knobs.items()} for place in (0, -1)]
    study = optuna.create_study(storage=_storage(tmp_path / "log"), study_name="ends")
    for values in ends:
        study.enqueue_trial({name: knobs[name].drawn(value) for name, value in values.items()})
        study.ask({name: knob.distribution for name, knob in knobs.items()})
    again = optuna.load_study(storage=_storage(tmp_path / "log"), study_name="ends")
    assert [{name: knobs[name].value(drawn) for name, drawn in trial.params.items()} for trial in again.trials] == ends


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 300), st.integers(0, 6), st.data())
def test_each_draw_is_a_number_of_the_grid(low: int, width: int, step: int, places: int, data: st.DataObject) -> None:
    step = min(step, width)
    low_number, high_number, step_number = (float(f"{number}e-{places}") for number in (low, low + width, step))
    knob = Knob("a.b", Range(low=low_number, high=high_number, step=step_number))
    literals = [float(f"{number}e-{places}") for number in range(low, low + width + 1, step)]
    assert knob.samples == (literals[0], literals[-1])
    assert knob.count == len(literals)
    sampler = optuna.samplers.RandomSampler(seed=data.draw(st.integers(0, 9)))
    study = optuna.create_study(sampler=sampler)
    for _ in range(3):
        assert knob.value(study.ask({"a.b": knob.distribution}).params["a.b"]) in literals


def test_a_step_that_leads_past_high_ends_before_it_and_one_that_is_too_small_is_refused() -> None:
    assert Knob("a.b", Range(low=0.3, high=0.9, step=0.4)).all == (0.3, 0.7)
    assert Knob("a.b", Range(low=0.0, high=4.5, step=2)).all == (0.0, 2.0, 4.0)
    for step, part in ((1e-30, "leave step out"), (0.2000001, "high - low = 0.2"), (0.0, "more than 0")):
        with pytest.raises(InputError, match=r"search\.space\.prune\.sparsity") as caught:
            check(raw({"prune.sparsity": {"low": 0.1, "high": 0.3, "step": step}}))
        assert any(part in line for line in caught.value.lines)


def test_numbers_are_drawn_as_places_in_their_order() -> None:
    knob = Knob("distill.student.layers", Choices(choices=(6, 2, 3)))
    assert [knob.value(place) for place in range(3)] == [2, 3, 6]
    assert Knob("a.b", Choices(choices=(1, True))).choices == (1, True)


def test_every_combination_is_checked_or_every_pair_of_a_large_space(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = [Knob(f"a.{name}", Choices(choices=(1, 2, 3))) for name in "bcd"]
    assert len(list(combinations(knobs))) == 27
    monkeypatch.setattr(space, "MOST_COMBINATIONS", 26)
    found = list(combinations(knobs))
    for (one, first), (other, second) in itertools.combinations([(knob.path, value) for knob in knobs for value in (1, 2, 3)], 2):
        if one != other:
            assert any(values[one] == first and values[other] == second for values in found)


def test_a_value_that_a_stage_refuses_and_a_path_that_is_none_are_named() -> None:
    for values, told in (
        ({"prune.sparsity": [0.3, 1.5]}, "prune.sparsity=1.5"),
        ({"prune.sparsty": [0.3, 0.5]}, "did you mean 'sparsity'?"),
        ({"prun.sparsity": [0.3, 0.5]}, "did you mean 'prune'?"),
        ({"data.max_length": [64, 128]}, "no setting of a stage"),
        ({"quantize": [1, 2]}, "no setting of a stage"),
        ({"quantize.mode": ["ptq", "qat"], "quantize.rounding": ["nearest", "gptq"]}, "quantize.mode=qat, quantize.rounding=gptq"),
        ({"prune.sparsity": [0.3, 0.5], "stages.prune.sparsity": [0.3, 0.5]}, "also given without `stages.`"),
    ):
        with pytest.raises(InputError) as caught:
            knobs_of(check(raw(values)))
        assert any(told in line for line in caught.value.lines), (told, caught.value.lines)


def test_the_recipe_of_a_draw_has_its_values_and_no_search() -> None:
    recipe = check(raw({"prune.sparsity": [0.3, 0.8], "quantize.smoothquant": [True, {"alpha": 0.5}]}))
    made = recipe_of(space.written(recipe), {"prune.sparsity": 0.4, "quantize.smoothquant": {"alpha": 0.5}}, "tiny-0001")
    assert (made.name, made.search, made.stage("prune").sparsity) == ("tiny-0001", None, 0.4)
    assert made.stage("quantize").smoothquant.alpha == 0.5
    assert made.stage("finetune") == recipe.stage("finetune")


def test_own_values_are_those_of_the_recipe_where_it_lies_in_the_space() -> None:
    inside = check(raw({"prune.sparsity": [0.3, 0.8], "quantize.mode": ["ptq", "qat"]}))
    assert own_values(inside, knobs_of(inside)) == {"prune.sparsity": 0.5, "quantize.mode": "ptq"}
    outside = check(raw({"prune.sparsity": [0.6, 0.8], "quantize.mode": ["ptq", "qat"]}))
    assert own_values(outside, knobs_of(outside)) is None


def test_untried_are_the_combinations_that_are_left() -> None:
    knobs = [Knob("a.b", Choices(choices=(1, 2))), Knob("a.c", Range(low=0, high=1))]
    assert num_combinations(knobs) == 4
    assert list(untried(knobs, [{"a.b": 1, "a.c": 0}, {"a.b": 2, "a.c": 1}])) == [{"a.b": 1, "a.c": 1}, {"a.b": 2, "a.c": 0}]
    assert num_combinations([*knobs, Knob("a.d", Range(low=0.0, high=1.0))]) is None
