"""The stage `prune`: a smaller model of the same weights, with real changes of shape, that every later stage takes.

A run is a list of steps, each in a file of its own: cut the vocabulary (`vocabulary`), score what may go (`scores`), divide the budget
between blocks (`allocation`, `sensitivity`), choose (`selection`), let what stays make up for what goes (`least_squares`), take it out
(`surgery`), and train again (`recovery`). With `schedule: cubic` everything after the vocabulary (`steps`) is done n times, for the
sparsities

    s_i = s share(i / n),   i = 1 ... n        (`cubic`)

Scores come from calibration rows of the train split, or are learned with the weights (`learned`); `sensitivity` and the guard of the
vocabulary come from selection rows. With `measure: latency` the cost is milliseconds of an engine (`timing`), which are measured again for
what comes of it. Left out: single weights, which the stage `sparsify` takes.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from compress.artifacts.artifact import Artifact, writing
from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.models.blocks import with_layers
from compress.models.origin import Origin
from compress.models.structure import Sizes, Structure
from compress.stage.context import Context, TimedPrecision
from compress.stage.stage import ModelStage, is_model
from compress.stage.taught import Asked
from prune.allocation import uniform
from prune.cost import Cost, Costs, Measure, count_of
from prune.cubic import cubic
from prune.joint import Learn
from prune.learned import LEARNED, Learned, as_trained
from prune.recovery import Recover, check_recovery
from prune.scores import Method
from prune.selection import COMPONENTS, Granularity, Limits, Scores, Whole, lowest_share, protected_parts, select
from prune.sensitivity import SCAN_ROWS, SHARES
from prune.steps import Steps
from prune.surgery import Kept, check_shapes, shrink
from prune.timing import LatencyCost, LatencyTarget, Ruler, Timing, target_shape

if TYPE_CHECKING:
    from torch import nn

    from compress.data.splits import Data

SPARSITY = 0.5


class Prune(ModelStage):
    """Takes heads, neurons, channels, layers, experts and tokens out of the model, and trains what is left."""

    VERSION: ClassVar[int] = 4
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
    def _consistent(self) -> Prune:
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

    def depends(self, context: Context) -> Any:
        """What is timed depends on the engine and the machine."""
        if self.measure != "latency":
            return None
        settings = context.measure_latency.settings if context.measure_latency else None
        return [context.target.model_dump(mode="json"), dict(context.fingerprint), settings]

    def work(self, macs: int, data: Data) -> float:
        """Forward and backward over calibration rows, a dozen passes over selection rows for each layer of a scan, and the training."""
        rows, scanned = min(self.rows, len(data.train)), min(SCAN_ROWS, len(data.selection)) * (self.allocation == "sensitivity")
        trained = (3.0 * len(data.train) + len(data.selection)) * self.recover.epochs + len(data.train) if self.recover else 0.0
        masks = 3.0 * len(data.train) * self.learn.epochs * (self.method in LEARNED)
        return macs * (len(self.shares) * (4.0 * rows + 12 * 2 * len(SHARES) * scanned) + trained + masks)

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Finds out before the first stage runs whether this model can be pruned like that.

        Raises:
            InputError: It cannot.
        """
        key, answer = self.key, TASKS[context.task].answer
        if "vocabulary" in self.granularity and (TASKS[context.task].modality != "text" or answer == "tokens"):
            raise InputError(f"{key}.granularity: vocabulary given; {context.task} has no texts to split into fewer tokens: leave it out")
        if self.measure == "latency":
            target_shape(context, self.latency_ms, f"{key}.latency_ms")
        self._try_on_shapes(config)
        if self.recover is not None:
            after = self.config_after(config) if self.recover.named else config
            check_recovery(self.recover, self.taught, config, after, teacher, context)
            if self.method in LEARNED:  # masks are learned on the whole model
                check_recovery(as_trained(self.learn, self.recover), self.taught, config, config, teacher, context)

    def config_after(self, config: Any) -> Any:
        """The config of the pruned model, as far as it is known before. The vocabulary is kept.

        Of an allocation that depends on data it is that of a uniform one. Milliseconds count as multiply-accumulates, and of a time that is
        asked for it is not known which share it is: half, or as much as can go.
        """
        from compress.models.shapes import with_sizes

        kept, sizes = self.planned(config)
        return with_sizes(with_layers(config, kept.layers), kept.sizes(sizes), self.key)

    def planned(self, config: Any) -> tuple[Kept, Sizes]:
        """Returns what a uniform allocation keeps, by number rather than by importance, and the sizes before."""
        import torch

        from compress.models.shapes import on_meta

        model = on_meta(config)
        structure = Structure.of(model, self.key)
        sizes = structure.sizes
        parts = {(block, what): torch.zeros(count_of(sizes, block, what)) for block in range(structure.depth) for what in COMPONENTS}
        nothing = Scores(parts, torch.zeros(structure.depth), torch.zeros(sizes.hidden))
        cost, limits = self.cost(model, structure, None), self.limits(structure)
        whole, share = Whole.of(cost), 1 / self.speedup if self.speedup else self.shares[-1]
        if self.measure == "latency":
            share = max(share, lowest_share(cost, whole, limits, nothing))
        return select(cost, whole, share, limits, nothing, uniform, self.key), sizes

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

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the pruned checkpoint.

        Returns:
            `method`, `measure`, `sparsity` (what was taken away), `cost` (of the blocks), `before` and `after` (the sizes), `layers` (those
            that are left, from 0), `steps` (for each iteration its share, its losses and looks at the selection split), and where asked for
            `vocabulary` and `sensitivity` (distances by layer and share). Of a model with experts `loads`: `before` and `after`, the share
            of the tokens that every expert of every block gets (`prune.routing`). With measure latency `latency`: the table, and what was
            predicted and measured of the model before, of every shape that was tried, and of the result.

        Raises:
            InputError: Not so much can be taken away, the tokenizer cannot be cut, or training failed.
        """
        from compress.models.checkpoint import load, save

        source, cut = self._cut_vocabulary(parent, context)
        model = load(source)
        structure = Structure.of(model, self.key)
        ruler = self._ruler(model, structure, source, context)
        first = self.cost(model, structure, ruler)
        whole, origin = Whole.of(first), Origin.whole(structure.depth, structure.sizes.hidden)
        routed = self._loads(model, structure, source, context)
        sparsity = self.sparsity
        if ruler is not None:
            lowest = lowest_share(first, whole, self.limits(structure))
            sparsity = ruler.sparsity(self.sparsity, whole.cost, lowest, f"{self.key}.{self.asked}")
        steps = Steps(self, self.id or self.NAME, whole, ruler, source, context)
        figures: list[dict[str, Any]] = []
        for number, share in enumerate(self.shares_of(sparsity), 1):
            model, origin, found = steps.iterate(number, share, model, origin)
            figures.append(found)
        last = Structure.of(model, self.key)
        cost = self.cost(model, last, ruler).total()
        taken = 1 - cost / whole.cost
        context.progress.log(f"  {taken:.1%} of the {self.measure} of the blocks taken away: {_words(structure.sizes, last.sizes)}")
        routed = {"before": routed, "after": self._loads(model, last, source, context)} if routed else {}
        save(model, source, out, f"Pruned by {self.method}: {taken:.1%} of the {self.measure} of its blocks")
        scans = [step.pop("sensitivity") for step in figures if "sensitivity" in step]
        return {
            "method": self.method,
            "measure": self.measure,
            "sparsity": taken,
            "cost": {"before": whole.cost, "after": cost},
            "before": asdict(structure.sizes),
            "after": asdict(last.sizes),
            "layers": list(origin.layers),
            "steps": figures,
            **({"vocabulary": cut} if cut else {}),
            **({"sensitivity": scans[0]} if scans else {}),
            **({"latency": ruler.figures} if ruler else {}),
            **({"loads": routed} if routed else {}),
        }

    def _try_on_shapes(self, config: Any) -> None:
        """Cuts a model that has shapes and no values.

        Raises:
            InputError: Something in it does not follow what is taken away.
        """
        from compress.models.shapes import on_meta, with_sizes

        kept, sizes = self.planned(config)
        large = on_meta(config)
        small = on_meta(with_sizes(with_layers(config, kept.layers), kept.sizes(sizes), self.key))
        check_shapes(Structure.of(large, self.key), kept, large.state_dict(), small.state_dict(), config.model_type, self.key)
        try:
            Structure.of(small, self.key)  # which runs it
        except InputError as error:
            raise InputError(
                f"{self.key}: a {config.model_type} without some of its {', '.join(self.granularity)} does not run, as something in it "
                "keeps its size; it cannot be pruned like that"
            ) from error

    def _loads(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> Any:
        """Returns what share of the tokens every expert gets, by block; nothing for a model without experts."""
        from prune.calibration import calibration_batches
        from prune.routing import loads

        if not any(structure.sizes.experts):
            return []
        return loads(model, structure, calibration_batches(model, source, self.rows, context, f"{self.id or self.NAME}: routing"))

    def _ruler(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> Ruler | None:
        """Measures the model that came in and the table of its blocks; None where no milliseconds are counted."""
        if self.measure != "latency":
            return None
        shape = target_shape(context, self.latency_ms, f"{self.key}.latency_ms")
        timing = Timing(model, source, context, shape, self.precision, context.scratch / "timing")
        return Ruler.of(timing, structure.sizes, self.multiple_of, self.latency_ms, self.speedup, self.key)

    def _cut_vocabulary(self, parent: Artifact, context: Context) -> tuple[Path, dict[str, Any]]:
        """Returns the checkpoint to go on with, and the figures of the vocabulary where it was cut.

        Raises:
            InputError: Too many tokens would become unknown.
        """
        if "vocabulary" not in self.granularity:
            return parent.path, {}
        from compress.models.checkpoint import load, save
        from compress.models.preprocessor import preprocessor
        from prune.vocabulary import cut_vocabulary, write_tokenizer

        model, data = load(parent.path), context.data
        prepared = preprocessor(parent.path, context.task, context.max_length, context.target)
        cut = cut_vocabulary(parent.path, model.config, prepared, data.train.rows, data.selection.rows, self.key)
        if cut.unknown > self.max_unknown:
            raise InputError(
                f"{self.key}.max_unknown: {self.max_unknown:g} given; {cut.unknown:.2%} of the tokens of the selection rows would become "
                "unknown: raise it, or leave vocabulary out of granularity"
            )
        context.progress.log(f"  vocabulary: {len(cut.kept)} tokens are left, {cut.changed:.1%} of the selection rows are split otherwise")
        structure = Structure.of(model, self.key)
        small = shrink(model, structure, replace(Kept.everything(structure.sizes), vocabulary=cut.kept), self.key)
        folder = context.scratch / "vocabulary"
        with writing(folder) as temporary:
            save(small, parent.path, temporary, f"Vocabulary cut to {len(cut.kept)} tokens")
            write_tokenizer(parent.path, cut, temporary)
        return folder, cut.figures()


def _words(before: Sizes, after: Sizes) -> str:
    """Returns in words what is left."""
    counts = {
        "layers": (len(before.heads), len(after.heads)),
        "heads": (sum(before.heads), sum(after.heads)),
        "neurons": (sum(before.ffn), sum(after.ffn)),
        "channels": (before.hidden, after.hidden),
        "experts": (sum(before.experts), sum(after.experts)),
        "tokens": (before.vocabulary, after.vocabulary),
    }
    return ", ".join(f"{new} of {old} {name}" for name, (old, new) in counts.items() if new != old) or "nothing"
