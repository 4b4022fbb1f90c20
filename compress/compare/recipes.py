"""The structural difference of resolved recipes: the keys whose values differ, by their paths.

Every recipe is resolved by this version first, so a key that an earlier version lacks is compared by its default. Stages are named by
their ids: `stages.quantize.scheme`. A stage that some runs lack is one entry, with the settings that differ from their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compress.recipe import Recipe, check, dump
from foundation.stage.stage import Stage

ORDER = "stages"
"""Path of the list of stage ids, where it differs."""

Values = Mapping[str, Any]
"""A value by the key of each run that has it."""


def differences(recipes: Mapping[str, Mapping[str, object]]) -> list[dict[str, object]]:
    """Returns the differences between recipes.

    Args:
        recipes: Recipes as plain data, by the key of the run.

    Returns:
        `path`, and `values` by the key of the run; a run without this key is not listed there.

    Raises:
        InputError: One of them is not a valid recipe of this version.
    """
    checked = {key: check(recipe) for key, recipe in recipes.items()}
    plain = {key: dump(recipe) for key, recipe in checked.items()}
    rows = list(_maps({key: {name: value for name, value in recipe.items() if name != "stages"} for key, recipe in plain.items()}, ""))
    rows += _stages(checked)
    return [{"path": path, "values": dict(values)} for path, values in rows]


def defaulted(recipe: Mapping[str, object]) -> list[str]:
    """Returns the paths of keys that a stored recipe does not have and this version fills with their defaults."""
    whole, stored = check(recipe), recipe.get("stages")
    pairs = [({**recipe, "stages": None}, {**dump(whole), "stages": None}, "")]
    for given, stage in zip(stored if isinstance(stored, list) else [], whole.stages, strict=False):
        settings = given.get(stage.NAME)
        pairs.append(({} if settings is None else settings, stage.model_dump(mode="json"), f"stages.{stage.id}"))
    return [path for given, filled, above in pairs for path in _missing(given, filled, above)]


def _missing(stored: Mapping[str, object], filled: Mapping[str, object], above: str) -> Iterator[str]:
    for key, value in filled.items():
        if key not in stored:
            yield _join(above, key)
        elif isinstance(value, Mapping) and isinstance(inner := stored[key], Mapping):
            yield from _missing(inner, value, _join(above, key))


def _stages(checked: Mapping[str, Recipe]) -> Iterator[tuple[str, Values]]:
    """Yields the order of the stages, the stages that not every run has, and the settings that differ."""
    set_by_user = {
        key: {str(stage.id): {stage.NAME: _without_defaults(stage)} for stage in recipe.stages} for key, recipe in checked.items()
    }
    settings = {
        key: {str(stage.id): {"stage": stage.NAME, **stage.model_dump(mode="json")} for stage in recipe.stages}
        for key, recipe in checked.items()
    }
    order = {key: list(stages) for key, stages in settings.items()}
    if _differ(order):
        yield ORDER, order
    for name in dict.fromkeys(name for names in order.values() for name in names):
        having = {key: stages[name] for key, stages in settings.items() if name in stages}
        if len(having) < len(settings):
            yield f"stages.{name}", {key: set_by_user[key][name] for key in having}
        if len(having) > 1:
            yield from _maps(having, f"stages.{name}")


def _without_defaults(stage: Stage) -> dict[str, object]:
    return stage.model_dump(mode="json", exclude_defaults=True, exclude={"id"})


def _maps(values: Values, path: str) -> Iterator[tuple[str, Values]]:
    """Yields the paths below `path` whose values differ."""
    for key in dict.fromkeys(key for value in values.values() for key in value):
        within = {run: value[key] for run, value in values.items() if key in value}
        yield from _compared(within, _join(path, key), len(values))


def _compared(values: Values, path: str, runs: int) -> Iterator[tuple[str, Values]]:
    if len(values) == runs and not _differ(values):
        return
    if len(values) == runs and all(isinstance(value, Mapping) for value in values.values()):
        yield from _maps(values, path)
    elif len(values) == runs and _are_lists_of_maps(values):
        for place in range(len(next(iter(values.values())))):
            yield from _compared({run: value[place] for run, value in values.items()}, f"{path}[{place}]", runs)
    else:
        yield path, values


def _are_lists_of_maps(values: Values) -> bool:
    """Whether all values are lists of equal length whose entries are maps."""
    lists = all(isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value) for value in values.values())
    return lists and len({len(value) for value in values.values()}) == 1


def _differ(values: Values) -> bool:
    first, *others = values.values()
    return any(_typed(other) != _typed(first) for other in others)


def _typed(value: object) -> object:
    """Returns a value that is equal to others of the same kind alone: `true` is not 1."""
    if isinstance(value, Mapping):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_typed(item) for item in value]
    return (isinstance(value, bool), value)


def _join(above: str, key: str) -> str:
    return f"{above}.{key}" if above else str(key)
