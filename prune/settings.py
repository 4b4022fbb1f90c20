"""Settings of the stage `prune`: its typed recipe keys, and values derived from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from foundation.core.errors import InputError
from foundation.stage.context import TimedPrecision
from foundation.stage.stage import ModelStage, is_model
from prune.choices import Granularity, Learn, Member, Recover
from prune.cost import Measure
from prune.cubic import cubic
from prune.latency.timing import LatencyTarget
from prune.methods import LayerScore, Method

if TYPE_CHECKING:
    from torch import nn

    from foundation.models.architecture.structure import Structure
    from prune.cost import CostModel
    from prune.latency.budget import LatencyBudget
    from prune.selection import Limits


SPARSITY = 0.5
Share = Annotated[float, Field(gt=0, le=1)]
Speedup = Annotated[float, Field(ge=1, le=1000)]
UNITS = {"heads": "head groups", "cross": "head groups that read the encoder", "ffn": "FFN neurons", "experts": "experts"}


class PruneSettings(ModelStage):
    """Removes heads, FFN neurons, channels, layers, experts and tokens from the model, then fine-tunes the rest."""

    NAME: ClassVar[str] = "prune"
    LATER: ClassVar[tuple[str, ...]] = (
        "layer_score",
        "divisible_by",
        "tokens",
        "family",
        "over",
        "member",
        "token_reduction",
        "embedding_rank",
    )

    method: Method = "activation"
    """Importance score. activation: activation magnitude on training rows, needs no labels; taylor, fisher: first- and second-order change
    of the loss; magnitude: weight norm. Or learned by training masks: joint: L0 gates on heads, FFN neurons, channels and layers together,
    as far as `granularity` names them; movement: whether training moves the weights of heads and FFN neurons towards 0."""
    learn: Learn = Learn()
    """Training of the masks of joint and movement, before anything is removed; `recover` follows."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = SPARSITY
    """Share of the blocks' cost to remove; `measure` defines the cost."""
    latency_ms: LatencyTarget | None = None
    """Largest latency of the whole model, instead of sparsity; needs measure: latency. The largest measured shape within it is kept; a
    warning says so if none was."""
    speedup: Annotated[float, Field(gt=1, le=1000)] | None = None
    """Smallest speedup of the whole model at the largest shape of the target, instead of sparsity; needs measure: latency."""
    family: Annotated[tuple[Speedup, ...], Field(min_length=1, max_length=16)] | None = None
    """Speed-ups of a family of models, such as [2, 3, 5], instead of sparsity; implies measure: latency. In the recipe, one stage for each
    takes the place of this one, with the ids prune-2x, prune-3x, ...; each starts from the one before it, and the passes of `recover` are
    divided among them. Stages that follow are repeated for each member. 1 stands for the incoming model, which is not pruned."""
    over: Annotated[str, Field(min_length=1)] | None = None
    """The model that `speedup` or `family` refers to: baseline or the id of an earlier stage; by default the incoming model. After
    `distill`, `over: baseline` includes the speed-up of the student."""
    member: Member | None = None
    """Place of this stage in a family, whose members share one training. `family` sets it."""
    measure: Measure = "macs"
    """Cost of the blocks. macs: multiply-accumulates of their linear layers; parameters: their weights; latency: measured milliseconds on
    the first engine of the target."""
    precision: TimedPrecision = "int8"
    """Precision in which that engine is timed. int8: as the recipe quantizes."""
    granularity: Annotated[tuple[Granularity, ...], Field(min_length=1)] = ("heads", "ffn")
    """Units to prune: heads (whole groups that share keys and values), ffn (neurons), hidden (channels of the residual stream), width (the
    same, projected onto the principal components of its activations first; for models whose norms lie in the branches), layers, experts;
    vocabulary: tokens that no training row uses, whatever the sparsity. [vocabulary] alone implies sparsity: 0, and recover: null unless
    `embedding_rank` is given."""
    multiple_of: Annotated[int, Field(ge=1, le=1024)] = 32
    """FFN neurons and channels are kept in multiples of this, which suits the engines' kernels."""
    divisible_by: Annotated[int, Field(ge=2, le=1024)] | None = None
    """Heads (groups that share keys and values), FFN neurons and experts of each block are kept in multiples of this number of devices, so
    that tensor parallelism can divide the pruned model among them."""
    protect: tuple[str, ...] = ()
    """Modules that keep their size, as name patterns with `*`, such as *.layer.0 or *.layer.0.attention.*; each must match a module."""
    layer_score: LayerScore | None = None
    """How layers are ranked, if `granularity` names them. influence: by how far a layer turns the hidden states of training rows; loss: by
    the loss on them with the layer skipped (of a language model the log of the perplexity), a pass for each layer. Absent: weight norm with
    magnitude, learned gates with joint, else influence."""
    allocation: Literal["uniform", "global", "sensitivity"] = "sensitivity"
    """How the budget is split between layers. uniform: the same share of every layer; global: lowest scores first, across layers;
    sensitivity: by how far pruning each layer moves the outputs, measured on selection rows. joint and movement learn it instead."""
    schedule: Literal["one_shot", "cubic"] = "one_shot"
    """one_shot: all at once; cubic: in iterations, largest cuts first, each followed by its part of the fine-tuning."""
    iterations: Annotated[int, Field(ge=2, le=100)] = 4
    """Number of iterations of `cubic`."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    """Number of training rows used for importance scores and least squares."""
    least_squares: bool = True
    """Update the remaining weights by least squares so that each layer's output on those rows changes as little as possible."""
    max_unknown: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Largest share of the tokens of the selection rows that may become unknown with the smaller vocabulary."""
    tokens: Annotated[float, Field(gt=0, lt=1)] | Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """Share of the tokens of a row that remain after each layer, whatever the sparsity: falling shares after the first layers, or a number,
    the share that reaches the last layer. `token_reduction` says how the others go."""
    token_reduction: Literal["drop", "merge"] = "drop"
    """What happens to the other tokens. drop: they are left out, for models whose head reads only the first token, as most classifiers do.
    merge: each joins the one most like it (ToMe), also for models whose head reads a mean of all tokens, such as embeddings; a first token
    that the head reads alone never merges. Each share is then at least 0.6 of the one before it."""
    embedding_rank: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Rank of the embeddings of tokens, whatever the sparsity: the table of tokens becomes a narrow one, this wide, and a projection to the
    width of the model, fitted to the tokens by how often they occur in the train rows. For models whose table nothing else reads, such as
    encoders. With sparsity: 0 nothing else is removed."""
    recover: Recover | None = Recover()
    """Fine-tuning of the pruned model; null: none."""
    teacher: Annotated[str, Field(min_length=1)] = "baseline"
    """Teacher of the fine-tuning: baseline, input (the incoming model), or the id of an earlier stage."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_alone(cls, values: object) -> object:
        # A smaller vocabulary does not change the outputs for texts that it covers: the blocks stay, so there is nothing to recover.
        if not isinstance(values, dict) or values.get("granularity") not in (["vocabulary"], ("vocabulary",)):
            return values
        if {"latency_ms", "speedup"} & values.keys():
            return values
        exact = {} if values.get("embedding_rank") is not None else {"recover": None}
        return {"sparsity": 0.0, **exact, **values}

    @model_validator(mode="before")
    @classmethod
    def _families_are_timed(cls, values: object) -> object:
        timed = isinstance(values, dict) and values.get("family") is not None
        return {"measure": "latency", **values} if timed and isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from prune.methods import is_learned, scored

        if len(set(self.granularity)) < len(self.granularity):
            raise ValueError("granularity: an entry is repeated; give each entry once")
        targets = [name for name in ("family", "latency_ms", "speedup") if getattr(self, name) is not None]
        if len(targets) > 1 or (targets and self.sparsity != SPARSITY):
            raise ValueError(f"{targets[0]}: given together with {targets[1] if len(targets) > 1 else 'sparsity'}; give only one of them")
        if targets and self.measure != "latency":
            raise ValueError(f"{targets[0]}: given with measure: {self.measure}; give measure: latency")
        beyond = [name for name in ("hidden", "width", "experts") if name in self.granularity]
        if self.measure == "latency" and beyond:
            raise ValueError(f"measure: latency given; the latency table does not cover {beyond[0]}: give macs or parameters")
        if is_learned(self.method) and "experts" in self.granularity:
            raise ValueError(f"method: {self.method} given; it has no masks for experts: give {scored()}")
        if self.method == "movement" and not {"heads", "ffn", "vocabulary"} >= set(self.granularity):
            raise ValueError("method: movement given; it only scores heads and ffn: give joint, or granularity: [heads, ffn]")
        if is_learned(self.method) and self.schedule == "cubic":
            raise ValueError(f"schedule: cubic given; {self.method} prunes gradually in its own training: give one_shot")
        if self.layer_score is not None and is_learned(self.method):
            raise ValueError(f"layer_score: {self.layer_score} given; {self.method} learns what stays: leave it out, or give {scored()}")
        if self.layer_score is not None and "layers" not in self.granularity:
            named = ", ".join(self.granularity)
            raise ValueError(f"layer_score: {self.layer_score} given; granularity [{named}] keeps all layers: add layers, or leave it out")
        if (self.sparsity or targets) and set(self.granularity) == {"vocabulary"}:
            raise ValueError(
                f"sparsity: {self.sparsity:g} given; the vocabulary is not part of the blocks: give sparsity: 0, or add heads, ffn"
            )
        if self.protect and set(self.granularity) <= {"hidden", "width", "vocabulary"}:
            raise ValueError("protect: given, but channels and tokens run through all modules, so none can be protected: leave it out")
        if "experts" in self.granularity and self.measure != "parameters":
            raise ValueError("measure: macs given; pruning experts does not change how many a token visits: give parameters")
        self._check_tokens()
        self._check_width()
        self._check_family()
        if is_model(self.teacher):
            raise ValueError(f"teacher: {self.teacher!r} given; allowed are baseline, input or the id of an earlier stage")
        if self.schedule == "cubic" and self.recover is None:
            raise ValueError("schedule: cubic fine-tunes between its iterations; give recover, or schedule: one_shot")
        return self

    def _check_width(self) -> None:
        """Raises if the residual stream is projected in a way that something else does not follow."""
        from prune.methods import is_learned, scored

        if "width" not in self.granularity:
            return
        if "hidden" in self.granularity:
            raise ValueError("granularity: hidden and width given; both make the residual stream narrower: give one of them")
        if is_learned(self.method):
            raise ValueError(f"method: {self.method} given with width, which needs no masks: give {scored()}, or hidden")
        if self.recover is not None and (self.recover.hidden_weight or self.recover.named):
            raise ValueError("recover: losses on states given with width, whose channels are none of the teacher's: leave them out")

    def _check_family(self) -> None:
        """Raises if the members of a family cannot be told apart, or a member has no target."""
        for name in ("member", "over"):
            if getattr(self, name) is not None and self.speedup is None and self.family is None:
                raise ValueError(f"{name}: given without speedup, which it says more about: give speedup, or leave it out")
        if self.family is None:
            return
        if self.embedding_rank is not None:
            raise ValueError("embedding_rank: given together with family, whose members follow each other: give it in a stage of its own")
        given = f"family: {[*self.family]} given"
        if list(self.family) != sorted(set(self.family)):
            raise ValueError(f"{given}; give each speed-up once, from the smallest to the largest")
        if self.family == (1,):
            raise ValueError(f"{given}; 1 is the incoming model itself: give a larger speed-up")

    def _check_tokens(self) -> None:
        """Raises if tokens cannot leave the model as they are asked to."""
        if self.tokens is None:
            if self.token_reduction != "drop":
                raise ValueError(f"token_reduction: {self.token_reduction} given without tokens, of which it says more: give tokens")
            return
        if isinstance(self.tokens, tuple) and list(self.tokens) != sorted(self.tokens, reverse=True):
            raise ValueError(f"tokens: {list(self.tokens)} given; tokens that left do not come back: give falling shares")
        if self.measure == "latency":
            raise ValueError("measure: latency given together with tokens; the latency table holds layers that see all tokens: give macs")
        if self.recover is not None and self.recover.hidden_weight:
            raise ValueError("recover.hidden_weight: given together with tokens; layers then have fewer tokens than the teacher's: give 0")

    @property
    def target_key(self) -> str:
        """Name of the field that sets the target."""
        return "speedup" if self.speedup else "latency_ms" if self.latency_ms else "sparsity"

    @property
    def shares(self) -> list[float]:
        """Share of the cost that remains after each iteration."""
        return self.shares_of(self.sparsity)

    def shares_of(self, sparsity: float) -> list[float]:
        """Returns the share of the cost that remains after each iteration, for a given final sparsity."""
        count = self.iterations if self.schedule == "cubic" else 1
        return [1 - sparsity * cubic(number / count) for number in range(1, count + 1)]

    def limits(self, structure: Structure) -> Limits:
        """Returns the prunable components of a model.

        Raises:
            InputError: `granularity` or `measure` does not fit a model with (or without) experts; a pattern of `protect` matches nothing.
        """
        from prune.selection import Limits, protected_parts

        experts = any(structure.sizes.experts)
        if "experts" in self.granularity and not experts:
            raise InputError(f"{self.key}.granularity", "experts given", "this model has none", "leave it out")
        if self.measure == "latency" and experts:
            raise InputError(
                f"{self.key}.measure",
                "latency given",
                "the latency table does not cover the experts of this model",
                "give macs or parameters",
            )
        if "ffn" in self.granularity and experts:
            raise InputError(
                f"{self.key}.granularity", "ffn given", "the FFNs of this model are experts, which are pruned whole", "give experts"
            )
        if self.measure == "latency" and len(structure.stacks) > 1:
            raise InputError(
                f"{self.key}.measure",
                "latency given",
                "the latency table does not cover the two stacks of an encoder-decoder",
                "give macs or parameters",
            )
        if "heads" in self.granularity and structure.tables:
            raise InputError(
                f"{self.key}.granularity",
                "heads given",
                f"{structure.tables[0]} has an entry for each head; such tables, which T5 shares between all layers "
                "of a side, keep their size",
                "leave heads out",
            )
        readers = [[name for name, axis in ffn if axis == 1 and name.endswith(".weight")] for ffn in structure.ffn]
        if "ffn" in self.granularity and not experts and max(map(len, readers), default=0) > 1:
            raise InputError(
                f"{self.key}.granularity",
                "ffn given",
                f"a block of this model has {max(map(len, readers))} FFNs of one size, which cannot be pruned apart",
                "leave ffn out",
            )
        protected, blocks = protected_parts(structure, self.protect, f"{self.key}.protect")
        units: tuple[Granularity, ...] = tuple("hidden" if name == "width" else name for name in self.granularity)
        limits = Limits(units, self.multiple_of, protected, blocks, self.target_key, self.divisible_by or 1)
        self._check_divisible(structure, limits)
        return limits

    def _check_divisible(self, structure: Structure, limits: Limits) -> None:
        """Raises if a component of the model as it is cannot be divided: the largest number of units that may stay is all of them."""
        from prune.cost import count_of

        kinds = limits.inside if self.divisible_by else ()
        for block, what in ((block, what) for block in range(structure.depth) for what in kinds):
            count = count_of(structure.sizes, block, what)
            if count % limits.divisible_by:
                fits = [str(number) for number in range(2, count + 1) if count % number == 0][:8]
                given = f"block {block} has {count} {UNITS[what]}"
                raise InputError(
                    f"{self.key}.divisible_by", f"{self.divisible_by} given", given, f"give {' or '.join(fits) or 'no number'}"
                )

    def cost(self, model: nn.Module, structure: Structure, latency: LatencyBudget | None) -> CostModel:
        """Returns the cost of a model's blocks by `measure`; in multiply-accumulates if `latency` is not measured yet."""
        from prune.cost import ShapeCost
        from prune.latency.cost import LatencyCost

        if latency is not None:
            return LatencyCost(structure, latency.table)
        return ShapeCost.of(model, structure, "parameters" if self.measure == "parameters" else "macs")
