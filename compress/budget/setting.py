"""The settings of trainings: those that are tried, and those that a plan compares.

A short training differs from the recipe's in its rows, its epochs and, for a student that keeps some layers of its teacher, in its layers.
With k layers in the recipe of n rows, and n_0 = min(4,000, n / 2):

    rows    n_0, n_0 / 2, n_0 / 4, n_0 / 8        the smaller ones are parts of the larger ones
    epochs  1, 2, 4
    layers  k, k / 2, 2 k                         where the teacher has as many

`DESIGN` lists the combinations: the level and slope of each effect, most of them cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.recipe import Recipe
from distill.distill import Distill
from foundation.core.errors import InputError
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune

MOST_ROWS, FEWEST_ROWS = 4000, 64
"""Rows of the largest and of the smallest short training."""
DESIGN = ((8, 1, "k"), (8, 4, "k"), (4, 1, "k"), (4, 2, "k"), (2, 1, "k"), (2, 4, "k"), (1, 1, "k"), (1, 2, "k"))
"""Short trainings: what n_0 is divided by, epochs, layers."""
SIZES = ((4, 2, "less"), (2, 4, "less"), (1, 2, "less"), (4, 2, "more"), (2, 2, "more"))
"""Those of other sizes."""


@dataclass(frozen=True, order=True)
class Setting:
    """What a training is given."""

    rows: int
    """Train rows."""
    epochs: float
    layers: int | None = None
    """Layers of the student; None where the recipe sets no number of them."""

    @property
    def name(self) -> str:
        """Name of its run folder."""
        size = "" if self.layers is None else f"-{self.layers}-layers"
        return f"{self.rows}-rows-{self.epochs:g}-epochs{size}"


@dataclass(frozen=True)
class Alternative:
    """A setting that a plan compares with the recipe's."""

    name: str
    setting: Setting
    missing: int = 0
    """Rows that the data do not have."""


@dataclass(frozen=True)
class Studied:
    """The training of a recipe that is studied: the first student, else the finetuning."""

    recipe: Recipe
    stage: Finetune | Distill
    setting: Setting
    """The setting of the recipe."""
    train_rows: int
    """Rows that the data have."""
    depth: int
    """Layers of the model that a student is made of."""

    @classmethod
    def of(cls, recipe: Recipe, train_rows: int, depth: int) -> Studied:
        """Finds the training.

        Args:
            recipe: A checked recipe.
            train_rows: Rows of its train split.
            depth: Layers of its model.

        Raises:
            InputError: It has none, or none whose rows can be divided, or too few rows.
        """
        stage = studied_stage(recipe)
        rows = round(stage.fraction * train_rows)
        found = cls(recipe, stage, Setting(rows, stage.epochs, _layers(stage)), train_rows, depth)
        if found.most_rows // max(divisor for divisor, *_ in DESIGN) < FEWEST_ROWS:
            least = 2 * FEWEST_ROWS * max(divisor for divisor, *_ in DESIGN)
            raise InputError("--budget", f"{stage.key} trains on {rows} rows", f"at least {least} are needed to learn what rows are worth")
        return found

    @property
    def most_rows(self) -> int:
        """Rows of the largest short training, n_0."""
        return min(MOST_ROWS, self.setting.rows // 2)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Layers of short trainings: those of the recipe, half of them, and twice as many."""
        layers = self.setting.layers
        if layers is None:
            return {"k": None}
        found = {"less": max(1, layers // 2), "more": min(self.depth, 2 * layers)}
        return {"k": layers, **{name: number for name, number in found.items() if number != layers}}

    def short(self) -> list[Setting]:
        """Returns the settings of the short trainings, the cheapest first."""
        sizes = self.sizes
        chosen = [*DESIGN, *(one for one in SIZES if one[2] in sizes)]
        settings = {Setting(self.most_rows // divisor, epochs, sizes[size]) for divisor, epochs, size in chosen}
        return sorted(settings, key=lambda one: (one.rows * one.epochs * (one.layers or 1), one.rows))

    def alternatives(self) -> list[Alternative]:
        """Returns what a plan compares: the recipe first, then more and less of each."""
        mine = self.setting
        twice = Alternative("twice the rows", replace(mine, rows=2 * mine.rows), max(0, 2 * mine.rows - self.train_rows))
        found = [Alternative("the recipe", mine), twice, Alternative("twice the epochs", replace(mine, epochs=2 * mine.epochs))]
        if mine.layers is not None:
            more = range(mine.layers + 1, min(self.depth, mine.layers + 2) + 1)
            found += [Alternative(f"{number} layers", replace(mine, layers=number)) for number in more]
        found.append(Alternative("half the rows", replace(mine, rows=mine.rows // 2)))
        found.append(Alternative("half the epochs", replace(mine, epochs=mine.epochs / 2)))
        if mine.layers is not None and mine.layers > 1:
            found.append(Alternative(f"{_layer(mine.layers - 1)}", replace(mine, layers=mine.layers - 1)))
        return found

    def recipe_of(self, setting: Setting) -> Recipe:
        """Returns the recipe of one training: the stages up to it, and no goals or engines.

        Args:
            setting: Its setting, of at most `train_rows` rows.
        """
        place = [str(stage.id) for stage in self.recipe.stages].index(str(self.stage.id))
        stages = (*self.recipe.stages[:place], self._changed(setting))
        goals = type(self.recipe.goals)(metric=self.recipe.goals.metric)
        name = f"{self.recipe.name[:30]}-{setting.name}"
        return self.recipe.model_copy(
            update={"name": name, "goals": goals, "stages": stages, "search": None, "track": None, "profile": False}
        )

    def _changed(self, setting: Setting) -> Stage:
        settings = self.stage.model_dump(mode="json")
        settings |= {"fraction": setting.rows / self.train_rows, "epochs": setting.epochs}
        if setting.layers is not None:
            settings["student"] = {**settings["student"], "layers": setting.layers}
        return type(self.stage).model_validate(settings)


def studied_stage(recipe: Recipe) -> Finetune | Distill:
    """Returns the training of a recipe that is studied.

    Raises:
        InputError: It has none.
    """
    kinds: Sequence[type[Finetune | Distill]] = (Distill, Finetune)
    found = next((stage for kind in kinds for stage in recipe.stages if isinstance(stage, kind)), None)
    if found is None:
        given = ", ".join(stage.NAME for stage in recipe.stages)
        raise InputError("--budget", f"the stages are {given}", "it studies a finetune or distill stage", "add one, or leave --budget out")
    if isinstance(found, Distill) and found.corpus is not None:
        raise InputError("--budget", f"{found.key}.corpus given", "a training on plain text has no metric", "leave --budget out")
    return found


def _layers(stage: Finetune | Distill) -> int | None:
    """Returns the number of layers that a student keeps; None where that is no setting."""
    if not isinstance(stage, Distill) or isinstance(stage.student.init, tuple):
        return None
    return stage.student.layers if isinstance(stage.student.layers, int) else None


def _layer(number: int) -> str:
    return f"{number} layer{'s' * (number > 1)}"


def cost(setting: Setting) -> float:
    """Returns what a training takes beside others: rows times epochs times layers."""
    return math.prod((setting.rows, setting.epochs, setting.layers or 1))
