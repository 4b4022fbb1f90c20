"""What a recipe says of the stage `sparsify`: its typed keys, and what follows from them alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from compress.core.config import Config
from compress.stage.stage import ModelStage, is_model
from compress.stage.taught import Asked
from prune.recovery import Recover
from prune.sparsify.lasso import Groups
from prune.sparsify.patterns import NM, Blocks, Pattern, Unstructured

N_OF_M = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


LEARNING, RECOVERY = "learning", "recovery"  # folders of training checkpoints
ALLOWED = 'unstructured, N:M with N smaller than M, in quotes ("2:4"; without them YAML may read a number), or {block: [R, C]} is allowed'


def _text(given: Any) -> Any:
    if not isinstance(given, str):
        raise ValueError(ALLOWED)
    return given


def _known(given: str) -> str:
    found = N_OF_M.fullmatch(given)
    if given != "unstructured" and (found is None or int(found[1]) >= int(found[2])):
        raise ValueError(ALLOWED)
    return given


class BlockPattern(Config):
    """Zeros in whole blocks."""

    block: tuple[Annotated[int, Field(ge=1, le=65536)], Annotated[int, Field(ge=1, le=65536)]]
    """Outputs and inputs of a block; the last blocks of a matrix may be smaller. For lasso the blocks whose rows or columns are groups."""


class Learning(Recover):
    """How weights and zeros are learned together, for movement and lasso."""

    epochs: Annotated[float, Field(gt=0, le=1000)] = 3
    """Passes over the train split; 0.5 is half a pass."""
    keep: Literal["last"] = "last"
    """The last weights are kept: only those have all of the zeros."""


class MovementSettings(Config):
    """When movement makes zeros."""

    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the steps without zeros, at the start."""
    cooldown: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the steps with all of them, at the end; between the two their share rises, first fast, then slower."""

    @model_validator(mode="after")
    def _room(self) -> MovementSettings:
        if self.warmup + self.cooldown >= 1:
            raise ValueError(f"warmup: {self.warmup:g} and cooldown: {self.cooldown:g} leave no steps between them; give less")
        return self


class LassoSettings(Config):
    """What group lasso makes small, and what it zeroes."""

    groups: Groups = "rows"
    """What goes together: rows: a piece of an output inside of a block; columns: a piece of an input; both: either."""
    strength: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    """lambda: weight of the penalty in the loss, for each layer."""
    strengths: dict[str, Annotated[float, Field(ge=0, le=1000)]] | None = None
    """lambda of some layers, by patterns of module names with `*`; of several that match the last one counts."""
    reweight: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the steps after which the groups are weighed again, by their norms then; 1: at the start alone."""
    threshold: Literal["layer", "balanced"] = "layer"
    """layer: the smallest groups of a layer go; balanced: every block loses the same share of its rows, or columns."""


class SparsifySettings(ModelStage):
    """Puts zeros into the matrices of the blocks, without changing a shape; claims no speed."""

    NAME: ClassVar[str] = "sparsify"

    method: Literal["magnitude", "wanda", "sparsegpt", "movement", "lasso"] = "sparsegpt"
    """magnitude: the smallest weights; wanda: those that do least on real rows; sparsegpt: those that the others can make up for, which are
    updated; movement: learned in training, by where weights move; lasso: learned in training, by a penalty that makes groups small."""
    pattern: Annotated[
        Annotated[str, BeforeValidator(_text), AfterValidator(_known), Tag("str")] | Annotated[BlockPattern, Tag("BlockPattern")],
        Discriminator(lambda given: "BlockPattern" if isinstance(given, Mapping | BlockPattern) else "str"),
    ] = "unstructured"
    """Where zeros may be: unstructured; N:M in quotes, such as "2:4": at most N of each M consecutive inputs stay; a map: whole blocks."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the weights of every layer that become 0. Absent: 0.5, for N:M what it says."""
    exclude: tuple[str, ...] = ()
    """Layers that stay as they are, as patterns of module names with `*`; a pattern has to match a layer."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    """Training rows that wanda and sparsegpt look at."""
    learning: Learning = Learning()
    """How weights and zeros are learned together, for movement and lasso."""
    movement: MovementSettings = MovementSettings()
    """When movement makes zeros."""
    lasso: LassoSettings = LassoSettings()
    """What group lasso makes small, and what it zeroes."""
    recover: Recover | None = Recover()
    """How the weights that are left are trained again; zeros stay zeros. null: not at all."""
    teacher: Annotated[str, Field(min_length=1)] = "baseline"
    """Who teaches it: baseline, input (the incoming model), or the id of an earlier stage."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pattern = self.zeros
        if isinstance(pattern, NM) and self.sparsity is not None and abs(self.sparsity - self.asked) > 1e-9:
            raise ValueError(f"sparsity: {self.sparsity:g} given; {pattern} makes {self.asked:g} of the weights 0: leave it out")
        if self.method == "movement" and isinstance(pattern, NM):
            raise ValueError(f"pattern: {pattern} given; movement takes unstructured or a block")
        if self.method == "lasso" and not isinstance(pattern, Blocks):
            raise ValueError(
                f"pattern: {pattern} given; lasso takes a block, whose rows or columns are its groups, such as block: [256, 256]"
            )
        if self.lasso.threshold == "balanced" and self.lasso.groups == "both":
            raise ValueError("lasso.threshold: balanced goes with groups: rows or columns; both takes layer")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; baseline, input or the id of an earlier stage is allowed")
        return self

    @property
    def key(self) -> str:
        """Key path of this stage in the recipe."""
        return f"stages.{self.id or self.NAME}"

    @property
    def zeros(self) -> Pattern:
        """Where zeros may be."""
        if isinstance(self.pattern, BlockPattern):
            return Blocks(*self.pattern.block)
        found = N_OF_M.fullmatch(self.pattern)
        return Unstructured() if found is None else NM(int(found[1]), int(found[2]))

    @property
    def asked(self) -> float:
        """Share of the weights that has to become 0."""
        pattern = self.zeros
        if isinstance(pattern, NM):
            return 1 - pattern.kept / pattern.group
        return 0.5 if self.sparsity is None else self.sparsity

    @property
    def learns(self) -> bool:
        """Whether zeros are learned in training."""
        return self.method in ("movement", "lasso")

    def asked_in(self, phase: str) -> Asked:
        """Returns where the settings of a training are."""
        name = "learning" if phase == LEARNING else "recover"
        return Asked(self.id or self.NAME, f"{self.key}.{name}", f"{self.key}.teacher")
