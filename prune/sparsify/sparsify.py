"""The stage `sparsify`: sets weights inside the matrices of the blocks to zero; shapes stay the same (the stage `prune` changes shapes).

No speed-up is claimed: engines multiply zeros like any other number, and files keep their size. The exception is 2:4, for which NVIDIA GPUs
have kernels from Ampere on; TensorRT uses them if a setting lets it try them and they are faster. The stage `compact` removes neurons and
heads that zeros have disconnected, and every engine is faster by that.

    magnitude, wanda, sparsegpt    choose the zeros in one shot                   `prune.sparsify.one_shot`
    movement                       train weights and their scores together        `prune.sparsify.movement`
    lasso                          train with a penalty, zero the smallest groups `prune.sparsify.lasso`
    recover                        fine-tune with the zeros held                  `prune.recovery`, `foundation.training.kept_zeros`

The patterns are in `prune.sparsify.patterns`; slices, which the stage `compact` turns into speed, in `prune.sparsify.slices`. Every linear
layer of the blocks gets the same sparsity, unless lasso ranks the groups of all layers, or magnitude all slices. The checkpoint is marked
so that every later training holds its zeros; rounding to symmetric integer grids keeps them anyway.
Calibration rows come from the train split. Whole blocks cannot reach every sparsity: a layer that ends far from the target is an error
before anything is trained.

Several processes learn zeros together on rows that are dealt out; each has the whole model meanwhile, whatever the section `parallel` says.
Not supported: a sparsity per layer; experts stored as one stacked tensor; models too large for memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from foundation.artifacts.artifact import Artifact, write_json, writing
from foundation.core.errors import InputError
from foundation.machine.parallel import ALONE, Team
from foundation.models.architecture.origin import Origin
from foundation.training.history import History
from prune.sparsify.settings import SlicePattern, SparsifySettings

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from foundation.data.splits import Data
    from foundation.models.size import Passes
    from foundation.stage.context import Context
    from foundation.training.train import Objective
    from prune.choices import Recover
    from prune.forward_order import Features
    from prune.latency.budget import LatencyBudget
    from prune.sparsify.curvature import Curvature
    from prune.sparsify.lasso import Penalty
    from prune.sparsify.patterns import Blocks
    from prune.sparsify.slice_budget import SliceBudget
    from prune.sparsify.slices import Bundle

ZEROED, FIGURES = "zeroed", "zeroed.json"
NO_SPEED = "engines multiply zeros like any other number: no speed is claimed"
SLICES = "compact removes these slices, and every engine is faster by that"
TWO_FOUR = "TensorRT alone multiplies 2:4 faster, on NVIDIA GPUs from Ampere on, where it is told to and finds it so: no speed is claimed"


class Sparsify(SparsifySettings):
    """Sets weights in the blocks' matrices to zero; shapes stay the same. Of whole slices `compact` makes speed; others claim none."""

    VERSION: ClassVar[int] = 5

    def depends(self, context: Context) -> object:
        """Measured latency depends on the engine and the machine."""
        from prune.latency.timing import depends_on

        return None if self.speedup is None else depends_on(context)

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The config as it was, with a note of the slices that `compact` is expected to remove."""
        from prune.compact.forecast import with_empty_slices

        if not isinstance(self.pattern, SlicePattern):
            return config
        return with_empty_slices(config, self.target if self.speedup is None else 1 - 1 / self.speedup, self.pattern.slices)

    def work(self, passes: Passes, data: Data) -> float:
        """A few passes over calibration rows, and the trainings."""
        epochs = (self.learning.epochs if self.learns else 0.0) + (self.recover.epochs if self.recover else 0.0)
        looked = 6.0 * min(self.rows, len(data.train)) * (self.method in ("wanda", "sparsegpt"))
        return passes.before * (looked + (3.0 * len(data.train) + len(data.selection)) * epochs)

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks before the first stage runs whether this model can be sparsified with these settings.

        Raises:
            InputError: The model is not a stack of blocks, a name pattern matches nothing, blocks cannot reach the target sparsity, or the
                teacher does not fit.
        """
        from foundation.models.architecture.shapes import on_meta
        from prune.recovery import check_recovery
        from prune.sparsify.settings import LEARNING, RECOVERY
        from prune.sparsify.target_layers import check_reachable, target_layers

        model = on_meta(config)
        check_reachable(self, target_layers(self, model))
        if self.speedup is not None:
            self._check_timed(model, context)
        for name, settings in ((LEARNING, self.learning if self.learns else None), (RECOVERY, self.recover)):
            if settings is not None:
                check_recovery(settings, self.training_key(name), config, config, teacher, context)

    def _check_timed(self, model: nn.Module, context: Context) -> None:
        """Raises if the latency table does not cover a model of this kind."""
        from foundation.models.architecture.structure import Structure
        from prune.latency.timing import target_shape

        target_shape(context, None, f"{self.key}.speedup")
        structure = Structure.of(model, self.key)
        beyond = "experts" if any(structure.sizes.experts) else "tokens that leave" if structure.sizes.tokens else ""
        beyond = "two stacks of layers" if len(structure.stacks) > 1 else beyond
        if beyond:
            why = f"the latency table does not cover the {beyond} of this model"
            raise InputError(f"{self.key}.speedup", f"{self.speedup:g} given", why, "give sparsity")

    def team(self, processes: Team) -> Team:
        """The first process chooses the zeros; all of them learn and fine-tune."""
        return processes if self.recover is not None or self.learns else ALONE

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, object]:
        """Writes the sparse checkpoint.

        Returns:
            `method`; `pattern`; `asked` and `sparsity` (target and actual sparsity over all sparse layers); `speed` (what is claimed);
            `layers` (for each its name, `weights`, `zeros`, `sparsity`, numbers of all-zero `outputs` and `inputs`, and for block patterns
            `blocks` and `zero_blocks`); `unread` (number of heads and neurons that are never read; null with a `reason` if unknown);
            `unreached` (layers that stay dense, since no calibration row reaches them); `learning` and `recovery` (losses, values on the
            selection split and steps of each training that ran); for lasso `groups` (its metric, and quantiles of the groups' root
            mean squares in it by layer, before and after training); with `speedup` the `latency` of the compacted model (the table, and
            predicted and measured latency of every shape tried).

        Raises:
            InputError: The model is not a stack of blocks, blocks cannot reach the target sparsity, an input of a layer is not finite, or
                training failed.
        """
        from foundation.models.checkpoint import save
        from prune.sparsify.figures import layer_figures, unread_figures
        from prune.sparsify.patterns import NM, Slices
        from prune.sparsify.settings import RECOVERY
        from prune.sparsify.target_layers import target_layers, warn_of_dense_weights
        from prune.together import Cut, broadcast_cut

        if not context.team.is_first:
            self._take_part(context)
            return {}
        model, figures = self._zeroed(parent.path, context)
        warn_of_dense_weights(self, model, target_layers(self, model), context.progress)
        if self.recover is not None:
            broadcast_cut(context.team, Cut(model, parent.path, None), context.scratch)
            history = self._train(model, self.recover, parent.path, context, RECOVERY)
            figures |= {"recovery": _history_figures(history)}
        layers = target_layers(self, model)  # after the training, which replaces the modules of a sharded model
        rows = [layer_figures(name, layer.weight.detach(), self.zeros) for name, layer in layers.items()]
        zeros, weights = (sum(row[key] for row in rows) for key in ("zeros", "weights"))
        unread = unread_figures(model, self.key)
        speed = TWO_FOUR if self.zeros == NM(2, 4) else SLICES if isinstance(self.zeros, Slices) else NO_SPEED
        share = f"{zeros / weights:.2%} of the weights of {len(rows)} layers are 0 ({self.zeros})"
        dead = f"{unread['heads']} heads and {unread['neurons']} neurons are never read; " if unread.get("heads") is not None else ""
        context.progress.log(f"  {share}; {dead}{speed}")
        save(model, parent.path, out, f"Zeros by {self.method}: {share}; shapes are as before, and {speed}")
        return {
            "method": self.method,
            "pattern": str(self.zeros),
            "asked": self.target,
            "sparsity": zeros / weights,
            "speed": speed,
            "layers": rows,
            "unread": unread,
            **figures,
        }

    def _take_part(self, context: Context) -> None:
        """Learns and fine-tunes with the first process, which chooses the zeros."""
        from prune.sparsify.settings import RECOVERY
        from prune.together import received

        if self.learns and (dense := received(context.team)) is not None:
            self._learn(dense.model, dense.source, context)
        if self.recover is not None and (sparse := received(context.team)) is not None:
            self._train(sparse.model, self.recover, sparse.source, context, RECOVERY)

    def _zeroed(self, source: Path, context: Context) -> tuple[nn.Module, dict[str, Any]]:
        """Returns the sparse model before its fine-tuning, and its figures; a finished one is loaded from the scratch folder."""
        from foundation.models.checkpoint import load, save
        from foundation.training.kept_zeros import keep_zeros
        from prune.sparsify.patterns import Slices
        from prune.sparsify.target_layers import check_reachable, target_layers
        from prune.together import Cut, broadcast_cut

        folder = context.scratch / ZEROED
        if (folder / FIGURES).is_file():
            context.progress.log(f"  {self.title}: the zeros are already chosen")
            if self.learns:
                broadcast_cut(context.team, None, context.scratch)
            found: dict[str, Any] = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
            return load(folder), found
        model = load(source)
        check_reachable(self, target_layers(self, model))  # an earlier stage may have made layers smaller than `check` could know
        if isinstance(self.zeros, Slices):
            model = self._with_neurons_sorted(model, source, context)
        latency = self._latency(model, source, context) if self.speedup is not None else None
        if self.learns:
            broadcast_cut(context.team, Cut(model, source, None), context.scratch)
            movement = self.method == "movement"
            figures = self._by_movement(model, source, context) if movement else self._by_lasso(model, source, context, latency)
        else:
            figures = self._in_one_go(model, source, context, latency)
        keep_zeros(model)
        with writing(folder) as temporary:
            save(model, source, temporary, "Zeros chosen")
            write_json(temporary / FIGURES, figures)
        return model, figures

    def _in_one_go(self, model: nn.Module, source: Path, context: Context, latency: LatencyBudget | None) -> dict[str, object]:
        """Chooses zeros by a method that does not train."""
        from foundation.machine.device import computing_device
        from prune.calibration import calibration_batches
        from prune.sparsify.one_shot import zero_weights
        from prune.sparsify.patterns import Slices
        from prune.sparsify.target_layers import target_layers

        assert not self.learns, self.method
        if isinstance(self.zeros, Slices):
            weights = {name: layer.weight.detach() for name, layer in target_layers(self, model).items()}
            return {"unreached": [], **self._zero_slices(model, weights, latency)}
        layers, pattern = target_layers(self, model.to(computing_device())), self.zeros

        def features() -> list[Features]:
            return [batch.features for batch in calibration_batches(model, source, self.rows, context, "")]

        with context.progress.bar(f"{self.title}: {self.method}", len(layers)) as advance:
            unreached = zero_weights(self.method, model, layers, pattern, self.target, features, self.key, advance)  # type: ignore[arg-type]
        model.cpu()
        if unreached:
            context.progress.warn(
                f"{self.title}: {len(unreached)} layers are reached by no calibration row and stay dense, first {unreached[0]}"
            )
        return {"unreached": unreached}

    def _by_movement(self, model: nn.Module, source: Path, context: Context) -> dict[str, object]:
        """Learns the zeros together with the weights."""
        from prune.sparsify.movement import extract

        history = self._learn(model, source, context)
        extract(model, self.target)
        return {"unreached": [], "learning": _history_figures(history)}

    def _by_lasso(self, model: nn.Module, source: Path, context: Context, latency: LatencyBudget | None) -> dict[str, object]:
        """Trains with the penalty, then zeroes the smallest groups."""
        from prune.sparsify.lasso import QUANTILES, balanced_mask, layer_mask, model_masks, pieces, quantiles
        from prune.sparsify.one_shot import zero_gone
        from prune.sparsify.patterns import Blocks, Slices
        from prune.sparsify.target_layers import target_layers

        blocks, settings = self.zeros, self.lasso
        if isinstance(blocks, Slices):
            history = self._learn(model, source, context, latency)
            layers = target_layers(self, model)
            zeroed = self._zero_slices(model, self._in_metric(model, layers, self._measure(layers, source, context)), latency)
            return {"unreached": [], "learning": _history_figures(history), **zeroed}
        assert isinstance(blocks, Blocks), blocks
        layers, shapes = target_layers(self, model), pieces(blocks, settings.groups)
        measure = self._measure(layers, source, context)
        before = quantiles(self._in_metric(model, layers, measure), shapes)
        history = self._learn(model, source, context)
        weights = self._in_metric(model, layers, measure)
        after = quantiles(weights, shapes)
        match settings.ranking:
            case "layer":
                masks = {name: layer_mask(weight_OI, shapes, self.target) for name, weight_OI in weights.items()}
            case "balanced":
                masks = {name: balanced_mask(weight_OI, blocks, settings.groups, self.target) for name, weight_OI in weights.items()}
            case "model":
                masks = model_masks(weights, shapes, self.target)
        for name, layer in layers.items():
            zero_gone(layer, masks[name])
        groups = {"metric": settings.metric, "quantiles": list(QUANTILES), "before": before, "after": after}
        return {"unreached": [], "learning": _history_figures(history), "groups": groups}

    def _zero_slices(self, model: nn.Module, weights: Mapping[str, Tensor], latency: LatencyBudget | None) -> dict[str, object]:
        """Zeroes the smallest slices of the model in place, given its weights in the metric; returns the figures of the latency."""
        from prune.sparsify.slices import slice_masks, zero_slices
        from prune.sparsify.target_layers import target_layers

        layers, found = target_layers(self, model), self._bundles(model, weights)
        if latency is None:
            together = self.method == "magnitude" or self.lasso.ranking == "model"
            zero_slices(layers, found, slice_masks(weights, found, self.target, together))
            return {}
        budget = self._slice_budget(model, weights, latency)
        stays = budget.fit(weights, latency, self._share(budget, latency), model, self.key)
        zero_slices(layers, found, stays)
        return {"asked": budget.share_of_zeros(weights, stays), "latency": latency.figures}

    def _latency(self, model: nn.Module, source: Path, context: Context) -> LatencyBudget:
        """Measures the model and the latency table of its blocks."""
        from foundation.models.architecture.structure import Structure
        from prune.latency.budget import LatencyBudget, Shaped
        from prune.latency.timing import Timing, target_shape
        from prune.sparsify.patterns import Slices

        assert isinstance(self.zeros, Slices), self.zeros
        shape = target_shape(context, None, f"{self.key}.speedup")
        timing = Timing(model, source, context, shape, self.precision, context.scratch / "timing")
        shaped = Shaped(model.config, Structure.of(model, self.key).sizes)
        return LatencyBudget.of(timing, shaped, shaped, self.zeros.lines, None, self.speedup, self.key)

    def _slice_budget(self, model: nn.Module, layers: Collection[str], latency: LatencyBudget) -> SliceBudget:
        """Returns the slices of the model with what they cost."""
        from foundation.models.architecture.structure import Structure
        from prune.latency.cost import LatencyCost
        from prune.sparsify.patterns import Slices
        from prune.sparsify.slice_budget import SliceBudget

        assert isinstance(self.zeros, Slices), self.zeros
        return SliceBudget(LatencyCost(Structure.of(model, self.key), latency.table), self._bundles(model, layers), self.zeros.lines)

    def _share(self, budget: SliceBudget, latency: LatencyBudget) -> float:
        """Returns the share of the milliseconds of the blocks that remains, as predicted by the table."""
        total = budget.cost.total()
        return 1 - latency.sparsity(0.0, total, budget.least_ms / total, f"{self.key}.speedup")

    def _bundles(self, model: nn.Module, layers: Collection[str]) -> Sequence[Bundle]:
        """Returns the slices of a model."""
        from foundation.models.architecture.structure import Structure
        from prune.sparsify.patterns import Slices
        from prune.sparsify.slices import bundles

        assert isinstance(self.zeros, Slices), self.zeros
        return bundles(model, Structure.of(model, self.key), layers, self.zeros.lines)

    def _with_neurons_sorted(self, model: nn.Module, source: Path, context: Context) -> nn.Module:
        """Returns the model with the neurons of each block sorted by size in the metric of the method."""
        from foundation.models.architecture.structure import Structure
        from prune.sparsify.slices import with_neurons_sorted
        from prune.sparsify.target_layers import target_layers

        layers = target_layers(self, model)
        measure = self._measure(layers, source, context) if self.method == "lasso" else None
        return with_neurons_sorted(model, Structure.of(model, self.key), self._in_metric(model, layers, measure), self.key)

    def _learn(self, model: nn.Module, source: Path, context: Context, latency: LatencyBudget | None = None) -> History:
        """Trains the model in place, with all processes: with scores for its weights (movement), or with the penalty (lasso).

        Only the first process has measured the latency.
        """
        from prune.sparsify.lasso import Lasso, pieces
        from prune.sparsify.movement import Movement, insert
        from prune.sparsify.patterns import NM, Blocks, Slices
        from prune.sparsify.settings import LEARNING
        from prune.sparsify.target_layers import target_layers

        context = replace(context, team=Team(context.team.rank, context.team.size))
        layers, pattern = target_layers(self, model), self.zeros
        measure = self._measure(layers, source, context) if self.method == "lasso" else None
        wrap_objective: Callable[[Objective], Objective]
        if self.method == "movement":
            assert not isinstance(pattern, NM | Slices), pattern
            insert(model, layers, pattern)
            wrap_objective = partial(Movement, sparsity=self.target, warmup=self.movement.warmup, cooldown=self.movement.cooldown)
        else:
            assert isinstance(pattern, Blocks | Slices), pattern
            shapes = pieces(pattern, self.lasso.groups) if isinstance(pattern, Blocks) else ()
            penalty = self._penalty(layers, shapes, measure)
            if isinstance(pattern, Slices):
                penalty = replace(penalty, bundles=self._bundles(model, layers))
            if self.speedup is not None:
                planned = self.target if latency is None else self._planned_share(model, layers, measure, latency)
                penalty = replace(penalty, target=context.team.broadcast_object(planned))  # measured by the first process alone
            wrap_objective = partial(Lasso, layers=layers, penalty=penalty, model=model, team=context.team)
        return self._train(model, self.learning, source, context, LEARNING, wrap_objective)

    def _planned_share(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Linear],
        measure: Callable[[nn.Module], Mapping[str, Curvature]] | None,
        latency: LatencyBudget,
    ) -> float:
        """Returns the share of the weights that would go before the training, for the speed that is asked for."""
        weights = self._in_metric(model, layers, measure)
        budget = self._slice_budget(model, layers, latency)
        return budget.share_of_zeros(weights, budget.within(weights, self._share(budget, latency)))

    def _penalty(
        self,
        layers: Mapping[str, nn.Linear],
        shapes: Sequence[Blocks],
        measure: Callable[[nn.Module], Mapping[str, Curvature]] | None,
    ) -> Penalty:
        """Returns the settings of the penalty on some layers."""
        from prune.sparsify.lasso import Penalty, strengths

        settings = self.lasso
        usual = None if settings.strength == "auto" else settings.strength
        return Penalty(
            strengths=strengths(list(layers), usual, settings.strengths or {}),
            shapes=shapes,
            reweight=settings.reweight,
            target=self.target,
            together=settings.ranking == "model",
            rate=self._learning_rate,
            measure=measure,
        )

    def _measure(
        self, layers: Mapping[str, nn.Linear], source: Path, context: Context
    ) -> Callable[[nn.Module], Mapping[str, Curvature]] | None:
        """Returns the curvature estimator of the layers; None where the penalty is in the metric of the weights."""
        return partial(self._curvature, layers=layers, source=source, context=context) if self.lasso.metric == "curvature" else None

    def _curvature(self, model: nn.Module, layers: Mapping[str, nn.Linear], source: Path, context: Context) -> dict[str, Curvature]:
        """Returns the curvature of the layers on calibration rows."""
        from prune.calibration import calibration_batches
        from prune.sparsify.curvature import curvatures

        return curvatures(model, layers, calibration_batches(model, source, self.rows, context, ""), context.task, context.seed)

    @staticmethod
    def _in_metric(
        model: nn.Module, layers: Mapping[str, nn.Linear], measure: Callable[[nn.Module], Mapping[str, Curvature]] | None
    ) -> dict[str, Tensor]:
        """Returns the weights of the layers in the metric of the penalty, float32 `[O, I]` each."""
        from prune.sparsify.curvature import in_metric, metrics

        weights = {name: layer.weight.detach() for name, layer in layers.items()}
        if measure is None:
            return weights
        factors = metrics(weights, measure(model))
        return {name: in_metric(weight_OI, factors[name]) for name, weight_OI in weights.items()}

    def _learning_rate(self, step: int, num_steps: int) -> float:
        """Returns the learning rate of a step of `learning`."""
        from foundation.training.schedule import learning_rate

        return learning_rate(step, num_steps, self.learning.learning_rate, self.learning.warmup, self.learning.schedule)

    def _train(
        self,
        model: nn.Module,
        settings: Recover,
        source: Path,
        context: Context,
        phase: str,
        wrap_objective: Callable[[Objective], Objective] = lambda objective: objective,
    ) -> History:
        """Trains the model in place, with checkpoints in a subfolder of the scratch folder; leaves it on the CPU."""
        from prune.recovery import RecoveryJob, recover

        config: PreTrainedConfig = model.config
        assert context.teacher is not None, "the pipeline provides the teacher"
        job = RecoveryJob(
            settings=settings,
            source=source,
            origin=Origin.of_config(config),
            key=self.training_key(phase),
            context=context,
            scratch=context.scratch / phase,
            label=self.title,
            depends={"stage": self.model_dump(mode="json"), "teacher": context.teacher.digest, "phase": phase},
        )
        return recover(model, job, wrap_objective)


def _history_figures(history: History) -> dict[str, object]:
    looks = {"selection": history.selection, "best_step": history.best_step}
    return {"losses": history.losses, **looks, "steps": history.steps, **history.of_experts}
