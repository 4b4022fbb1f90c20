"""What a recipe says of the stage `prune`: its typed keys, and what follows from them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.core.errors import InputError
from compress.models.structure import Structure
from compress.stage.context import TimedPrecision
from compress.stage.stage import ModelStage, is_model
from compress.stage.taught import Asked
from prune.cost import Cost, Costs, Measure
from prune.cubic import cubic
from prune.joint import Learn
from prune.learned import LEARNED, Learned
from prune.recovery import Recover
from prune.scores import Method
from prune.selection import Granularity, Limits, protected_parts
from prune.timing import LatencyCost, LatencyTarget, Ruler

if TYPE_CHECKING:
    from torch import nn


SPARSITY = 0.5


class PruneSettings(ModelStage):
    """Takes heads, neurons, channels, layers, experts and tokens out of the model, and trains what is left."""

    NAME: ClassVar[str] = "prune"

    method: Method | Learned = "activation"
    """How importance is measured. activation: size of what is said on real rows, without labels; taylor, fisher: first- and second-order
    change of the loss; magnitude: size of the weights. Or learned in a training of its own, by masks: joint: L0 masks over heads,
    neurons, channels and layers at once, as far as they are in `granularity`; movement: whether weights move to 0, heads and neurons."""
    learn: Learn = Learn()
    """How joint and movement are trained, before anything is taken away; `recover` follows."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = SPARSITY
    """Share of the blocks that is taken away, counted by `measure`."""
    latency_ms: LatencyTarget | None = None
    """In place of it, for measure latency: what the whole model may take."""
    speedup: Annotated[float, Field(gt=1, le=1000)] | None = None
    """In place of it, for measure latency: how many times faster the whole model is to be, at the largest shape of the target."""
    measure: Measure = "macs"
    """macs: multiply-accumulates of the linear layers in the blocks; parameters: their weights; latency: milliseconds of the first engine
    of the target, measured."""
    precision: TimedPrecision = "int8"
    """What that engine is timed in. int8: as the recipe quantizes."""
    granularity: Annotated[tuple[Granularity, ...], Field(min_length=1)] = ("heads", "ffn")
    """What is taken away: heads (groups that share keys and values whole), ffn (neurons), hidden (channels of the residual stream), layers,
    experts; vocabulary: tokens that the train rows do not use, whatever the sparsity. [vocabulary] alone is sparsity: 0, recover: null."""
    multiple_of: Annotated[int, Field(ge=1, le=1024)] = 32
    """Neurons and channels are kept in multiples of it: what the kernels of the engines like."""
    protect: tuple[str, ...] = ()
    """Modules that keep their size, as patterns of names with `*`, such as *.layer.0 or *.layer.0.attention.*; a pattern has to match."""
    allocation: Literal["uniform", "global", "sensitivity"] = "sensitivity"
    """uniform: the same share of every layer; global: the least important of all layers first; sensitivity: by the distance from the
    incoming model that cuts of each layer cost, measured on selection rows. Unused by joint and movement, which learn it."""
    schedule: Literal["one_shot", "cubic"] = "one_shot"
    """one_shot: all at once; cubic: in iterations, the first ones the largest, each followed by its part of the training."""
    iterations: Annotated[int, Field(ge=2, le=100)] = 4
    """How many iterations `cubic` has."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Training rows that importance is measured on."""
    least_squares: bool = True
    """Whether the columns that are left are updated to give what the layer gave before, as well as they can on those rows."""
    max_unknown: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of the tokens of the selection rows that may become unknown with a smaller vocabulary."""
    recover: Recover | None = Recover()
    """How the pruned model is trained again; null: not at all."""
    teacher: Annotated[str, Field(min_length=1)] = "baseline"
    """Who teaches it: baseline, input (the incoming model), or the id of an earlier stage."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_alone(cls, given: Any) -> Any:
        # A smaller vocabulary answers the text of its tokens as before: nothing is taken from the blocks, nothing has to recover.
        alone = isinstance(given, dict) and given.get("granularity") in (["vocabulary"], ("vocabulary",))
        return {"sparsity": 0.0, "recover": None, **given} if alone and not {"latency_ms", "speedup"} & given.keys() else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.granularity)) < len(self.granularity):
            raise ValueError("granularity: something is given twice; give each once")
        asked = [name for name in ("latency_ms", "speedup") if getattr(self, name) is not None]
        if len(asked) > 1 or (asked and self.sparsity != SPARSITY):
            raise ValueError(f"{asked[0]}: given beside {asked[1] if len(asked) > 1 else 'sparsity'}; give one of them")
        if asked and self.measure != "latency":
            raise ValueError(f"{asked[0]}: given with measure: {self.measure}; give measure: latency")
        beyond = [name for name in ("hidden", "experts") if name in self.granularity]
        if self.measure == "latency" and beyond:
            raise ValueError(f"measure: latency given; {beyond[0]} are not in its table: give macs or parameters")
        if self.method in LEARNED and "experts" in self.granularity:
            raise ValueError(f"method: {self.method} given; it has no masks for experts: give activation, taylor, fisher or magnitude")
        if self.method == "movement" and not {"heads", "ffn", "vocabulary"} >= set(self.granularity):
            raise ValueError("method: movement given; it scores heads and neurons: give joint, or granularity: [heads, ffn]")
        if self.method in LEARNED and self.schedule == "cubic":
            raise ValueError(f"schedule: cubic given; {self.method} takes away bit by bit in its own training: give one_shot")
        if (self.sparsity or asked) and set(self.granularity) == {"vocabulary"}:
            raise ValueError(
                f"sparsity: {self.sparsity:g} given; the vocabulary is no part of the blocks: give sparsity: 0, or add heads, ffn"
            )
        if self.protect and set(self.granularity) <= {"hidden", "vocabulary"}:
            raise ValueError(
                "protect: given where nothing is taken out of single modules; channels and tokens run through all of them: leave it out"
            )
        if "experts" in self.granularity and self.measure != "parameters":
            raise ValueError("measure: macs given; a token goes to as many experts as before, whatever their number: give parameters")
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; baseline, input or the id of an earlier stage is allowed")
        if self.schedule == "cubic" and self.recover is None:
            raise ValueError("schedule: cubic trains between its iterations; give recover, or one_shot")
        return self

    @property
    def key(self) -> str:
        """Key path of this stage in the recipe."""
        return f"stages.{self.id or self.NAME}"

    @property
    def taught(self) -> Asked:
        """Where it says what the pruned model learns."""
        return Asked(self.id or self.NAME, f"{self.key}.recover", f"{self.key}.teacher")

    @property
    def asked(self) -> str:
        """The field that says how much is to go."""
        return "speedup" if self.speedup else "latency_ms" if self.latency_ms else "sparsity"

    @property
    def shares(self) -> list[float]:
        """Shares of the cost that are left after every iteration."""
        return self.shares_of(self.sparsity)

    def shares_of(self, sparsity: float) -> list[float]:
        """Returns the same for another sparsity."""
        count = self.iterations if self.schedule == "cubic" else 1
        return [1 - sparsity * cubic(number / count) for number in range(1, count + 1)]

    def limits(self, structure: Structure) -> Limits:
        """Returns what may be taken away of a model.

        Raises:
            InputError: It has no experts, or nothing but experts; or a pattern of `protect` matches nothing.
        """
        experts = any(structure.sizes.experts)
        if "experts" in self.granularity and not experts:
            raise InputError(f"{self.key}.granularity: experts given; this model has none: leave it out")
        if self.measure == "latency" and experts:
            raise InputError(
                f"{self.key}.measure: latency given; the FFNs of this model are experts, which its table does not have: give macs"
            )
        if "ffn" in self.granularity and experts:
            raise InputError(f"{self.key}.granularity: ffn given; the FFNs of this model are experts, which go whole: give experts")
        protected, blocks = protected_parts(structure, self.protect, f"{self.key}.protect")
        return Limits(self.granularity, self.multiple_of, protected, blocks, self.asked)

    def cost(self, model: nn.Module, structure: Structure, ruler: Ruler | None) -> Costs:
        """Returns what the blocks of a model cost, by `measure`; multiply-accumulates in place of milliseconds where there is no ruler."""
        if ruler is not None:
            return LatencyCost(structure, ruler.table)
        return Cost.of(model, structure, "parameters" if self.measure == "parameters" else "macs")
