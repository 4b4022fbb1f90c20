"""Settings of the stage `sparsify`: its typed recipe keys, and values derived from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from foundation.core.config import Config
from foundation.stage.context import TimedPrecision
from foundation.stage.stage import ModelStage, is_model
from foundation.training.settings import Epochs
from prune.choices import Groups, Recover

if TYPE_CHECKING:
    from prune.sparsify.patterns import Pattern

Threshold = Literal["layer", "balanced", "model"]
N_OF_M = re.compile(r"([1-9][0-9]{0,3}):([1-9][0-9]{0,3})")


LEARNING, RECOVERY = "learning", "recovery"  # folders of training checkpoints
ALLOWED = (
    'unstructured, N:M with N smaller than M, in quotes ("2:4"; without them YAML may read a number), {block: [R, C]} or {slices: K} '
    "is allowed"
)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(ALLOWED)
    return value


def _known(value: str) -> str:
    found = N_OF_M.fullmatch(value)
    if value != "unstructured" and (found is None or int(found[1]) >= int(found[2])):
        raise ValueError(ALLOWED)
    return value


def _form(given: object) -> str:
    """Returns the tag of a form of pattern."""
    if isinstance(given, SlicePattern) or (isinstance(given, Mapping) and "slices" in given):
        return "SlicePattern"
    return "BlockPattern" if isinstance(given, Mapping | BlockPattern) else "str"


class BlockPattern(Config):
    """Zeros in whole blocks."""

    block: tuple[Annotated[int, Field(ge=1, le=65536)], Annotated[int, Field(ge=1, le=65536)]]
    """Outputs and inputs of a block; blocks at the edges may be smaller. For lasso, the rows or columns of these blocks are the groups."""


class SlicePattern(Config):
    """Zeros in whole slices, which `compact` removes."""

    slices: Annotated[int, Field(ge=1, le=65536)]
    """Neurons that are zeroed together, in every matrix that reads or writes them: 16, 32 and 64 suit the kernels of engines. Heads are
    zeroed whole. Neurons are first sorted by importance, so that slices hold neurons alike."""


class Learning(Recover):
    """Training of weights and zeros together, for movement and lasso."""

    epochs: Epochs = 3
    """Passes over the training rows; 0.5 is half a pass."""
    keep: Literal["last"] = "last"
    """The last weights are kept: earlier ones do not have all zeros yet."""


class MovementSettings(Config):
    """Schedule of movement pruning."""

    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the steps at the start without zeros."""
    cooldown: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the steps at the end with all zeros; in between, the sparsity rises on a cubic schedule, fast at first."""

    @model_validator(mode="after")
    def _room(self) -> MovementSettings:
        if self.warmup + self.cooldown >= 1:
            raise ValueError(f"warmup: {self.warmup:g} and cooldown: {self.cooldown:g} leave no steps between them; give less")
        return self


class LassoSettings(Config):
    """Penalty and threshold of group lasso."""

    groups: Groups = "rows"
    """Shape of a group. rows: one output's weights inside a block; columns: one input's weights inside a block; both: rows and columns."""
    metric: Literal["curvature", "weights"] = "curvature"
    """Norm of a group. curvature: the answers hardly depend on its weights, measured on `rows` calibration rows; weights: their
    norm, as published."""
    strength: Annotated[float, Field(ge=0, le=1000)] | Literal["auto"] = "auto"
    """lambda, the weight of the penalty. auto: at every step, what takes the target share of the groups to zero in the steps left."""
    strengths: dict[str, Annotated[float, Field(ge=0, le=1000)]] | None = None
    """lambda of some layers, by name patterns with `*`; the last matching pattern wins."""
    reweight: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the steps between two updates of the group weights from the current norms; 1: only at the start."""
    threshold: Threshold | None = None
    """layer: zero the smallest groups of each layer; balanced: zero the same share of the rows (or columns) of every block; model: zero the
    smallest groups of all layers together, so that layers may differ in sparsity. Absent: model, but layer with `metric: weights`, whose
    norms differ from layer to layer."""

    @property
    def ranking(self) -> Threshold:
        """The threshold, with its default resolved."""
        return self.threshold or ("model" if self.metric == "curvature" else "layer")


class SparsifySettings(ModelStage):
    """Sets weights in the blocks' matrices to zero; shapes stay the same. Of whole slices `compact` makes speed; others claim none."""

    NAME: ClassVar[str] = "sparsify"
    LATER: ClassVar[tuple[str, ...]] = ("speedup", "precision")

    method: Literal["magnitude", "wanda", "sparsegpt", "movement", "lasso"] = "sparsegpt"
    """magnitude: the smallest weights; wanda: the smallest weight times input norm; sparsegpt: those whose removal the other weights
    compensate best, which are updated; movement: learned in training, weights that move towards 0; lasso: learned with a group penalty."""
    pattern: Annotated[
        Annotated[str, BeforeValidator(_text), AfterValidator(_known), Tag("str")]
        | Annotated[BlockPattern, Tag("BlockPattern")]
        | Annotated[SlicePattern, Tag("SlicePattern")],
        Discriminator(_form),
    ] = "unstructured"
    """Sparsity pattern. unstructured; N:M in quotes, such as "2:4": at most N of every M consecutive inputs stay; a map: whole blocks
    (`block: [R, C]`), or whole heads and slices of neurons (`slices: 32`), which `compact` turns into speed."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of every layer's weights to set to 0. Absent: 0.5; N:M patterns determine it."""
    speedup: Annotated[float, Field(gt=1, le=1000)] | None = None
    """Smallest speed-up of the model after `compact`, at the largest shape of the target on its first engine, instead of sparsity: the
    slices that the loss pays least for per measured millisecond go, over all layers together. For slices."""
    precision: TimedPrecision = "int8"
    """Precision in which that engine is timed. int8: as the recipe quantizes."""
    exclude: tuple[str, ...] = ()
    """Layers that stay dense, as name patterns with `*`; each must match a layer."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    """Number of calibration rows of wanda, sparsegpt and the curvature of lasso, from the train split."""
    learning: Learning = Learning()
    """Training of weights and zeros together, for movement and lasso."""
    movement: MovementSettings = MovementSettings()
    """Schedule of movement pruning."""
    lasso: LassoSettings = LassoSettings()
    """Penalty and threshold of group lasso."""
    recover: Recover | None = Recover()
    """Fine-tuning of the remaining weights, zeros stay zero; null: none."""
    teacher: Annotated[str, Field(min_length=1)] = "baseline"
    """Teacher of the fine-tuning: baseline, input (the incoming model), or the id of an earlier stage."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from prune.sparsify.patterns import NM, Blocks, Slices

        pattern = self.zeros
        for name, settings in (("learning", self.learning), ("recover", self.recover)):
            if settings is not None and settings.lora is not None:
                raise ValueError(f"{name}.lora: given; adapters would fill the zeros: leave it out")
        if isinstance(pattern, NM) and self.sparsity is not None and abs(self.sparsity - self.target) > 1e-9:
            raise ValueError(f"sparsity: {self.sparsity:g} given; {pattern} sets it to {self.target:g}: leave it out")
        if self.method == "movement" and isinstance(pattern, NM):
            raise ValueError(f"pattern: {pattern} given; movement supports unstructured or a block")
        if isinstance(pattern, Slices) and self.method not in ("magnitude", "lasso"):
            raise ValueError(f"method: {self.method} given with {pattern}; give magnitude or lasso")
        if self.speedup is not None and not isinstance(pattern, Slices):
            given = f"speedup: {self.speedup:g} given with pattern: {pattern}"
            raise ValueError(f"{given}, whose zeros make no engine faster: give pattern: {{slices: 32}}")
        if self.speedup is not None and self.sparsity is not None:
            raise ValueError(f"speedup: given together with sparsity: {self.sparsity:g}; give only one of them")
        if self.speedup is not None and self.lasso.threshold == "layer":
            raise ValueError("lasso.threshold: layer given with speedup, which compares the slices of all layers: leave it out")
        if isinstance(pattern, Slices) and self.lasso.threshold == "balanced":
            raise ValueError(f"lasso.threshold: balanced given with {pattern}; give layer or model")
        if self.method == "lasso" and not isinstance(pattern, Blocks | Slices):
            raise ValueError(
                f"pattern: {pattern} given; lasso needs a block, whose rows or columns are its groups, such as block: [256, 256], or slices"
            )
        if self.lasso.threshold == "balanced" and self.lasso.groups == "both":
            raise ValueError("lasso.threshold: balanced given with groups: both; give groups: rows or columns, or threshold: layer")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; allowed are baseline, input or the id of an earlier stage")
        return self

    @property
    def zeros(self) -> Pattern:
        """The sparsity pattern."""
        from prune.sparsify.patterns import NM, Blocks, Slices, Unstructured

        if isinstance(self.pattern, BlockPattern):
            return Blocks(*self.pattern.block)
        if isinstance(self.pattern, SlicePattern):
            return Slices(self.pattern.slices)
        found = N_OF_M.fullmatch(self.pattern)
        return Unstructured() if found is None else NM(int(found[1]), int(found[2]))

    @property
    def target(self) -> float:
        """Target sparsity: the share of each layer's weights to set to 0."""
        from prune.sparsify.patterns import NM

        pattern = self.zeros
        if isinstance(pattern, NM):
            return 1 - pattern.kept / pattern.group
        return 0.5 if self.sparsity is None else self.sparsity

    @property
    def learns(self) -> bool:
        """Whether zeros are learned in training."""
        return self.method in ("movement", "lasso")

    def training_key(self, phase: str) -> str:
        """Returns the key path of the settings of a training phase, for messages."""
        return f"{self.key}.{'learning' if phase == LEARNING else 'recover'}"
