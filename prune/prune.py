"""The stage `prune`: structured pruning to a physically smaller model, which every later stage takes like any other.

Each step has a file of its own: cut the vocabulary (`vocabulary`), compute importance scores (`scores`), split the budget between blocks
(`allocation`, `sensitivity`), choose what stays (`selection`), compensate in the remaining weights (`least_squares`), remove (`surgery`)
and fine-tune (`recovery`). With `schedule: cubic`, all steps after the vocabulary (`steps`) run n times, for the sparsities

    s_i = s share(i / n),   i = 1 ... n        (`cubic`)

Stages can follow each other: depth, then width, each scored on what the last one left and recovered from the teacher's logits alone, is
Minitron (Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679, sections 2 and 3). As there, importance is estimated once in a step.
Left out: its search, which trains many shapes briefly and takes the best; its hidden losses after deep cuts, which `losses` gives.

Scores come from calibration rows of the train split, or are learned together with the weights (`learned`). `sensitivity` and the check of
the vocabulary use selection rows. With `measure: latency`, the cost is milliseconds on an engine (`timing`), and the latency of the pruned
model is measured again (`latency_budget`). Not supported: single weights; the stage `sparsify` zeroes those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import PrivateAttr

from foundation.artifacts.artifact import Artifact, writing
from foundation.core.errors import InputError
from foundation.machine.parallel import ALONE, Team
from foundation.models.architecture.origin import Origin
from prune.settings import PruneSettings

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.data.splits import Data
    from foundation.models.architecture.structure import Sizes, Structure
    from foundation.models.size import Passes
    from foundation.stage.context import Context
    from prune.latency.budget import LatencyBudget
    from prune.surgery import KeptUnits


class Plan(NamedTuple):
    """What pruning is expected to leave of a model."""

    model: nn.Module
    """The model before, on the meta device."""
    structure: Structure
    """Its structure."""
    kept: KeptUnits
    """Units that stay."""


class Prune(PruneSettings):
    """Removes heads, FFN neurons, channels, layers, experts and tokens from the model, then fine-tunes the rest."""

    VERSION: ClassVar[int] = 7

    _so_far: float = PrivateAttr(default=1.0)
    """How many times the multiply-accumulates of the incoming model that of `over` has, as planned (`among`)."""

    def team(self, processes: Team) -> Team:
        """The first process prunes; all of them learn masks and fine-tune."""
        from prune.methods import is_learned

        return processes if self.recover is not None or is_learned(self.method) else ALONE

    def depends(self, context: Context) -> object:
        """Measured latency depends on the engine and the machine."""
        from prune.latency.timing import depends_on

        if self.measure != "latency":
            return None
        reference = [] if self.over is None else [context.checkpoint(self.over).digest]
        return [*depends_on(context), *reference]

    def among(self, models: Mapping[str, PreTrainedConfig], config: PreTrainedConfig) -> Self:
        """Takes the part of the speed-up that the incoming model already has from the multiply-accumulates of both models.

        Raises:
            InputError: They have no blocks in common, whose latency could be measured once for both.
        """
        if self.over is None:
            return self
        reference, reference_kind = self._planned_cost(models[self.over])
        own, kind = self._planned_cost(config)
        if reference_kind != kind:
            given = f"{self.over} given, a {reference_kind}, and the incoming model is a {kind}"
            raise InputError(f"{self.key}.over", given, "blocks of one kind are timed for both", "leave it out, and give another speed-up")
        placed = self.model_copy()
        placed._so_far = reference / own
        return placed

    def _planned_cost(self, config: PreTrainedConfig) -> tuple[float, str]:
        """Returns the cost of the blocks of a model, and in words what blocks it has."""
        from foundation.models.architecture.shapes import on_meta
        from foundation.models.architecture.structure import Structure

        model = on_meta(config)
        structure = Structure.of(model, self.key)
        sizes = structure.sizes
        tokens = ", which tokens leave" if sizes.tokens else ""
        kind = f"{config.model_type} with {sizes.hidden} channels and heads of {sizes.head_dim}{tokens}"
        return self.cost(model, structure, None).total(), kind

    def work(self, passes: Passes, data: Data) -> float:
        """Forward and backward passes over calibration rows, passes for skipped and scanned layers, and the training of what is left."""
        from prune.methods import is_learned
        from prune.sensitivity import SCAN_ROWS, SHARES

        rows, scanned = min(self.rows, len(data.train)), min(SCAN_ROWS, len(data.selection)) * (self.allocation == "sensitivity")
        trained = (3.0 * len(data.train) + len(data.selection)) * self.recover.epochs if self.recover else 0.0
        teacher = len(data.train) if self.recover else 0
        masks = 3.0 * len(data.train) * self.learn.epochs * (is_learned(self.method))
        skipped = passes.layers * rows * (self.layer_score == "loss")
        looked = len(self.shares) * (4.0 * rows + skipped + passes.layers * 2 * len(SHARES) * scanned)
        return passes.before * (looked + masks + teacher) + passes.after * trained

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks before the first stage runs whether this model can be pruned with these settings.

        Raises:
            InputError: It cannot.
        """
        from foundation.training.supervised import check_known
        from prune.choices import Recover
        from prune.latency.timing import target_shape
        from prune.masks.learned import as_trained, check_learned
        from prune.methods import METHODS, is_learned
        from prune.recovery import check_recovery
        from prune.width.principal import try_width

        key, facts = self.key, context.facts
        if self.family is not None:
            raise InputError(f"{key}.family", "given outside of a recipe", "a recipe replaces it by its members", "give speedup")
        if "vocabulary" in self.granularity and (facts.modality != "text" or facts.answer.PER_TOKEN):
            told = f"the rows of {context.task} are token ids" if facts.generates else "labels belong to tokens"
            tokens = f"{told} of the incoming model, on which all variants are compared"
            reason = tokens if facts.answer.PER_TOKEN and facts.modality == "text" else f"{context.task} has no text to tokenize"
            raise InputError(f"{key}.granularity", "vocabulary given", reason, "leave it out")
        if self.measure == "latency":
            target_shape(context, self.latency_ms, f"{key}.latency_ms")
        config = self._in_low_rank(config, context)
        if METHODS[self.method].reads_labels:
            check_known(context.data, f"{key}.method", "give activation or magnitude", self.method)
        if self.layer_score == "loss":
            check_known(context.data, f"{key}.layer_score", "give influence", "loss")
        plan = self._planned(config)
        self._try_on_shapes(config, plan)
        if self.measure == "latency" and plan.structure.sizes.tokens:
            raise InputError(
                f"{key}.measure",
                "latency given",
                "tokens leave the incoming model, and the latency table holds layers which see all of them",
                "give macs, or let tokens leave in this stage or a later one",
            )
        if self.tokens is not None:
            self._check_tokens_leave(config, context, plan)
        if self.embedding_rank is not None and self.embedding_rank >= len(plan.kept.hidden):
            left = f"{len(plan.kept.hidden)} channels of the residual stream are expected to stay; a lower rank is needed"
            raise InputError(f"{key}.embedding_rank", f"{self.embedding_rank} given", left, "lower it, or remove fewer channels")
        if "width" in self.granularity:
            try_width(config, key)
        if self.recover is not None:
            self._check_shared(context.team.tensor, {"heads", "ffn"}, "processes share the heads and neurons of each block", "tensor")
            self._check_shared(context.team.experts, {"experts"}, "processes spread the experts of each block", "experts")
            after = self._after(config, plan) if self.recover.named or self.tokens else config
            check_recovery(self.recover, f"{self.key}.recover", config, after, teacher, context)
        if is_learned(self.method):  # masks are learned on the unpruned model
            check_learned(context.team, key)
            check_recovery(as_trained(self.learn, self.recover or Recover()), f"{self.key}.recover", config, config, teacher, context)

    def _check_tokens_leave(self, config: PreTrainedConfig, context: Context, plan: Plan) -> None:
        """Raises if tokens cannot leave a model of this kind, which is tried on one with two layers and random weights."""
        import torch

        from foundation.models.architecture.attention import probe
        from foundation.models.architecture.blocks import with_layers
        from foundation.models.architecture.shapes import on_meta, remade
        from prune.tokens.tokens import check_tokens, prove_merging, prove_tokens, shares_of, with_tokens

        team = context.team
        if team.pipeline > 1 or team.sequence or team.context > 1:
            what = "pipeline" if team.pipeline > 1 else "sequence" if team.sequence else "context"
            given = f"given next to parallel.{what}, which divides what layers tell each other of tokens"
            raise InputError(f"{self.key}.tokens", given, remedy="leave one of them out")
        check_tokens(plan.model, plan.structure, context.task, self.key)
        merges = self.token_reduction == "merge"
        shares_of(self.tokens or 1.0, len(plan.kept.layers), self.key, merges)
        few = with_layers(config, range(min(2, config.num_hidden_layers)))
        tried = with_tokens(remade(on_meta(few), few), (), (), self.key)
        prove = prove_merging if merges else prove_tokens
        prove(tried, probe(tried, torch.Generator().manual_seed(0)), self.key)

    def _check_shared(self, processes: int, units: set[str], how: str, setting: str) -> None:
        """Raises if what is left of some units need not divide by the processes that share them."""
        if units & set(self.granularity) and (self.divisible_by or 1) % processes:
            given = f"{self.divisible_by} given" if self.divisible_by else "not given"
            why = f"{processes} {how} while it is fine-tuned (parallel.{setting})"
            raise InputError(f"{self.key}.divisible_by", given, why, f"give {processes}")

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The expected config of the pruned model, with the vocabulary unchanged.

        It assumes a uniform allocation. Latency is approximated by multiply-accumulates. The share that a target `latency_ms` leaves is
        unknown: it assumes the default sparsity, or as much as can be removed.
        """
        config = self._in_low_rank(config)
        return self._after(config, self._planned(config))

    def _in_low_rank(self, config: PreTrainedConfig, context: Context | None = None) -> PreTrainedConfig:
        """Returns the config of the model whose blocks are pruned: with embeddings in low rank, if the stage has a rank.

        Raises:
            InputError: The model cannot have them.
        """
        from prune.embeddings.low_rank import SETTING, config_in_low_rank

        if self.embedding_rank is None:
            return config
        if context is not None and context.facts.modality != "text":
            why = f"{context.task} has no texts, whose tokens are embedded"
            raise InputError(f"{self.key}.{SETTING}", f"{self.embedding_rank} given", why, "leave it out")
        return config_in_low_rank(config, self.embedding_rank, self.key)

    def _after(self, config: PreTrainedConfig, plan: Plan) -> PreTrainedConfig:
        """The config of a plan."""
        from foundation.models.architecture.blocks import with_layers
        from foundation.models.architecture.shapes import with_sizes
        from prune.tokens.tokens import shares_of

        left = plan.kept.sizes(plan.structure.sizes)
        merged = left.merged if self.tokens is None else self.token_reduction == "merge"
        tokens = left.tokens if self.tokens is None else shares_of(self.tokens, len(plan.kept.layers), self.key, merged)
        return with_sizes(with_layers(config, plan.kept.layers), replace(left, tokens=tokens, merged=merged), self.key)

    def _planned(self, config: PreTrainedConfig) -> Plan:
        """Plans with a uniform allocation, which chooses units by index instead of importance."""
        import torch

        from foundation.models.architecture.shapes import on_meta
        from foundation.models.architecture.structure import Structure
        from prune.allocation import uniform
        from prune.cost import count_of
        from prune.selection import COMPONENTS, Incoming, Scores, lowest_share, select

        model = on_meta(config)
        structure = Structure.of(model, self.key)
        sizes = structure.sizes
        parts = {(block, what): torch.zeros(count_of(sizes, block, what)) for block in range(structure.depth) for what in COMPONENTS}
        nothing = Scores(parts, torch.zeros(structure.depth), torch.zeros(sizes.hidden))
        cost, limits = self.cost(model, structure, None), self.limits(structure)
        incoming, share = Incoming.of(cost), self._planned_share
        if self.measure == "latency":
            share = max(share, lowest_share(cost, incoming, limits, nothing))
        return Plan(model, structure, select(cost, incoming, share, limits, nothing, uniform, self.key))

    @property
    def _planned_share(self) -> float:
        """Share of the incoming cost that is expected to remain; the incoming model may have a part of the speed-up already."""
        return self.shares[-1] if self.speedup is None else min(1.0, self._so_far / self.speedup)

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, object]:
        """Writes the pruned checkpoint.

        Returns:
            `method`; `measure`; `sparsity` (share of the cost removed); `cost` of the blocks; `before` and `after` (sizes); `layers`
            (those that stay); `steps` (for each iteration: its share, losses and values on the selection split). Where they apply:
            `vocabulary`; `embeddings` (`prune.embeddings.low_rank`); `sensitivity` (distances by layer and share); `loads` with experts
            (`before` and `after`: share of the tokens that each expert gets, `prune.routing`); `latency` with measure: latency (the table,
            and predicted and measured latency of the incoming model, of every shape tried and of the result).

        Raises:
            InputError: The target cannot be reached, the tokenizer cannot be cut, or training failed.
        """
        from foundation.models.architecture.structure import Structure
        from foundation.models.checkpoint import load, save
        from prune.selection import Incoming, lowest_share
        from prune.steps import Steps, take_part
        from prune.tokens.tokens import with_tokens

        if not context.team.is_first:
            take_part(self, context)
            return {}
        source, cut = self._cut_vocabulary(parent, context)
        (model, embeddings), figures = self._lower_rank(load(source), source, context), list[dict[str, object]]()
        structure = Structure.of(model, self.key)
        latency = self._latency_budget(model, structure, source, context)
        first = self.cost(model, structure, latency)
        incoming, origin = Incoming.of(first), Origin.whole(structure.depth, structure.sizes.hidden)
        routed = self._loads(model, structure, source, context)
        sparsity = self.sparsity
        if latency is not None:
            lowest = lowest_share(first, incoming, self.limits(structure))
            sparsity = latency.sparsity(self.sparsity, incoming.cost, lowest, f"{self.key}.{self.target_key}")
        if tokens := structure.sizes.tokens:
            model = with_tokens(model, (), (), self.key)
        steps = Steps(self, self.title, incoming, latency, source, context, tokens, structure.sizes.merged)
        for number, share in enumerate(self.shares_of(sparsity), 1):
            model, origin, found = steps.iterate(number, share, model, origin)
            figures.append(found)
        last = Structure.of(model, self.key)
        cost = self.cost(model, last, latency).total()
        taken = 1 - cost / incoming.cost
        context.progress.log(f"  {taken:.1%} of the {self.measure} of the blocks removed: {_words(structure.sizes, last.sizes)}")
        routed = {"before": routed, "after": self._loads(model, last, source, context)} if routed else {}
        save(model, source, out, f"Pruned by {self.method}: {taken:.1%} of the {self.measure} of its blocks")
        scans = [step.pop("sensitivity") for step in figures if "sensitivity" in step]
        return {
            "method": self.method,
            "measure": self.measure,
            "sparsity": taken,
            "cost": {"before": incoming.cost, "after": cost},
            "before": asdict(structure.sizes),
            "after": asdict(last.sizes),
            "layers": list(origin.layers),
            "steps": figures,
            **{name: found for name, found in (("vocabulary", cut), ("embeddings", embeddings)) if found},
            **({"sensitivity": scans[0]} if scans else {}),
            **({"latency": latency.figures} if latency else {}),
            **({"loads": routed} if routed else {}),
        }

    def _try_on_shapes(self, config: PreTrainedConfig, plan: Plan) -> None:
        """Prunes a model on the meta device, which has shapes but no values.

        Raises:
            InputError: Some part of this architecture cannot be resized.
        """
        from foundation.models.architecture.blocks import with_layers
        from foundation.models.architecture.dropped_tokens import SIGNIFICANCE
        from foundation.models.architecture.shapes import on_meta, with_sizes
        from foundation.models.architecture.structure import Structure
        from prune.surgery import check_shapes

        kept = plan.kept
        small = on_meta(with_sizes(with_layers(config, kept.layers), kept.sizes(plan.structure.sizes), self.key))
        left = {name: weight for name, weight in small.state_dict().items() if not name.endswith(SIGNIFICANCE)}  # fitted again
        check_shapes(plan.structure, kept, plan.model.state_dict(), left, config.model_type, self.key)
        try:
            Structure.of(small, self.key)  # runs the model
        except InputError as error:
            raise InputError(
                self.key,
                f"a {config.model_type} without some of its {', '.join(self.granularity)} does not run: some part "
                "keeps its size, so it cannot be pruned like that",
            ) from error

    def _loads(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> Any:
        """Returns the share of the tokens that each expert gets, by block; empty for a model without experts."""
        from prune.calibration import calibration_batches
        from prune.routing import loads

        if not any(structure.sizes.experts):
            return []
        return loads(model, structure, calibration_batches(model, source, self.rows, context, f"{self.title}: routing"))

    def _latency_budget(self, model: nn.Module, structure: Structure, source: Path, context: Context) -> LatencyBudget | None:
        """Measures the incoming model and the latency table of its blocks; None if the cost is not latency."""
        from foundation.models.architecture.shapes import on_meta
        from foundation.models.architecture.structure import Structure
        from foundation.models.folder import Checkpoint
        from prune.latency.budget import LatencyBudget, Shaped
        from prune.latency.timing import Timing, target_shape

        if self.measure != "latency":
            return None
        shape = target_shape(context, self.latency_ms, f"{self.key}.latency_ms")
        incoming = reference = Shaped(model.config, structure.sizes)
        if self.over is not None:
            model = on_meta(Checkpoint(context.checkpoint(self.over).path).config)
            reference = Shaped(model.config, Structure.of(model, self.key).sizes)
        timing = Timing(model, source, context, shape, self.precision, context.scratch / "timing")
        return LatencyBudget.of(timing, reference, incoming, self.multiple_of, self.latency_ms, self.speedup, self.key)

    def _cut_vocabulary(self, parent: Artifact, context: Context) -> tuple[Path, dict[str, object]]:
        """Returns the checkpoint to prune, with its vocabulary cut if asked for, and the figures of that cut.

        Raises:
            InputError: Too many tokens would become unknown.
        """
        from foundation.models.architecture.structure import Structure
        from prune.surgery import KeptUnits, shrink

        if "vocabulary" not in self.granularity:
            return parent.path, {}
        from foundation.models.checkpoint import load, save
        from prune.embeddings.vocabulary import cut_vocabulary, write_tokenizer

        model, data = load(parent.path), context.data
        prepared = context.preprocessor(parent.path)
        cut = cut_vocabulary(parent.path, model.config, prepared, data.train.rows, data.selection.rows, self.key)
        if cut.unknown > self.max_unknown:
            raise InputError(
                f"{self.key}.max_unknown",
                f"{self.max_unknown:g} given",
                f"{cut.unknown:.2%} of the tokens of the selection rows would become unknown",
                "raise it, or leave vocabulary out of granularity",
            )
        changed = f"{cut.changed:.1%} of the selection rows are tokenized differently"
        context.progress.log(f"  vocabulary: {len(cut.kept)} tokens remain, {changed}")
        structure = Structure.of(model, self.key)
        small = shrink(model, structure, replace(KeptUnits.everything(structure.sizes), vocabulary=cut.kept), self.key)
        folder = context.scratch / "vocabulary"
        with writing(folder) as temporary:
            save(small, parent.path, temporary, f"Vocabulary cut to {len(cut.kept)} tokens")
            write_tokenizer(parent.path, cut, temporary)
        return folder, cut.figures()

    def _lower_rank(self, model: nn.Module, source: Path, context: Context) -> tuple[nn.Module, dict[str, object]]:
        """Returns the model with embeddings in low rank and their figures, if the stage has a rank; else the model and no figures."""
        from prune.embeddings.low_rank import in_low_rank, occurrences

        if self.embedding_rank is None:
            return model, {}
        sizes: Any = model.config
        counts = occurrences(context.data.train.rows, context.preprocessor(source), sizes.vocab_size)
        small, figures = in_low_rank(model, counts, self.embedding_rank, self.key)
        context.progress.log(f"  embeddings: rank {self.embedding_rank}, relative error {figures['relative_error']:.1%}")
        return small, figures


def _words(before: Sizes, after: Sizes) -> str:
    """Describes the sizes that changed, for the log."""
    counts = {
        "layers": (len(before.heads), len(after.heads)),
        "heads": (sum(before.heads) + sum(before.cross), sum(after.heads) + sum(after.cross)),
        "neurons": (sum(before.ffn), sum(after.ffn)),
        "channels": (before.hidden, after.hidden),
        "experts": (sum(before.experts), sum(after.experts)),
        "tokens of the vocabulary": (before.vocabulary, after.vocabulary),
    }
    return ", ".join(f"{new} of {old} {name}" for name, (old, new) in counts.items() if new != old) or "nothing"
