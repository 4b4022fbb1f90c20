"""The steps of quantizing a model in memory: each calls a method's module and returns figures for the report.

    equalize_and_smooth   equalize and smooth the float model      `equalization`, `smoothquant`
    weights               scales of the weights                    `schemes`, `awq`
    calibrator            the calibration method for activations   `calibration`, compared by `trial`
    rounded               round the weights                        `rounding`
    correct               correct the biases                       `bias_correction`
    scan                  sensitivity of each layer                `sensitivity`
    choose_float_layers   layers that return to float              `mixed_precision`
    train                 quantization-aware training              `qat`
    sites                 attention and residuals in int8          `products`

`quantize.in_memory` calls them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor, nn

from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.machine.device import computing_device
from foundation.measure.closeness import bounds, closer, in_words
from foundation.models.checkpoint import load
from foundation.models.forward import forward, linears
from foundation.models.layers.experts import with_separate_experts
from foundation.models.layers.routed import experts_of, on_all_tokens
from foundation.schemes.int8 import LayerScales
from foundation.schemes.scales import Grid, Layer, Scales
from foundation.schemes.sites import Sites
from foundation.schemes.table import SCHEMES
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row
from quantize.answers import calibration_rows
from quantize.awq import awq
from quantize.awq import describe as describe_awq
from quantize.batch_norm import fold_batch_norms
from quantize.bias_correction import correct_biases
from quantize.budget import Budget
from quantize.calibration import Histogram, LayerFigures, Observed, collect, threshold
from quantize.choices import Method, calibrators, default_calibrator
from quantize.constant import CONSTANT, UNUSED, constant_layers, unused_layers
from quantize.convolutions import convolutions, float_convolutions
from quantize.equalization import equalize
from quantize.experts import Routing, rare, rare_warning, tokens_routed
from quantize.folding import Fold, find_folds, groups
from quantize.group_scales import GroupMoments, Groups
from quantize.mixed_precision import choose as choose_floats
from quantize.products import SiteSettings, add_sites
from quantize.ptq import SELECTION_ROWS, choose_layers, compare_ranges, feature_batches, range_warnings
from quantize.rotation.learned import Learning, Memory, learn
from quantize.rotation.rotation import Rotations, rotate
from quantize.rotation.rotation import describe as describe_rotation
from quantize.rotation.simulated import Rounding
from quantize.rounding.autoround import Options
from quantize.rounding.blockwise import round_blocks
from quantize.rounding.rounding import IntegerScales, round_layers, summarized
from quantize.schemes import weight_grids
from quantize.sensitivity import SCAN_ROWS, Part, passes, quantized_part, summary
from quantize.sensitivity import scan as scan_layers
from quantize.settings import QuantizeSettings
from quantize.smoothquant import Channels, describe, smooth
from quantize.training.qat import learn as train_in_integers
from quantize.trial import Trial, in_int8

TRACED_ROWS = 4
Feed = Callable[[str], Iterator[dict[str, Tensor]]]
"""Starts a pass over the calibration rows with a progress bar of that label; no bar if it is empty."""
Layers = Mapping[str, Layer]


@dataclass(frozen=True)
class Steps:
    """The state that all steps share."""

    settings: QuantizeSettings
    source: Path
    """The float checkpoint."""
    model: nn.Module
    """The float model; steps change it in place."""
    rows: Sequence[Row]
    """Calibration rows."""
    feed: Feed
    context: Context
    trial: Trial | None
    """The float logits; None if no step compares a quantized model with the float one."""
    budget: Budget | None
    """The float predictions for mixed precision; None without it."""
    routing: Routing
    """Where the calibration tokens went; empty for models without experts."""
    rotation: Mapping[str, object]
    """The figures of the rotation; empty without."""

    @classmethod
    def prepare(cls, settings: QuantizeSettings, source: Path, context: Context, memory: Memory | None = None) -> Self:
        """Loads the model, draws the calibration rows, and computes the float references that later steps need.

        Args:
            settings: The settings.
            source: The float checkpoint.
            context: Data, target, teacher, progress.
            memory: Rotations that an earlier attempt at this model learned, or room for them; None: there is no other attempt.
        """
        model = load(source, computing_device())
        rows = calibration_rows(settings, source, lambda: model, context)
        feed = partial(feature_batches, source, rows, context)
        rotation: dict[str, object] = {}
        if settings.rotation != "none":  # before the float references: they are of the rotated model, whose states teach too
            few = {name: values[:TRACED_ROWS] for name, values in next(feed("")).items()}
            learning = partial(_learn_rotations, settings, source, rows, context, Memory() if memory is None else memory)
            further = learning if settings.rotation == "learned" else None
            rotation = rotate(model, few, context.seed, f"{settings.key}.rotation", further)
            context.progress.log(f"  {describe_rotation(rotation)}")
        with_separate_experts(model)
        routing = tokens_routed(model, feed(f"{settings.title}: routing"), forward)
        trial = Trial.prepare(model, source, rows, context) if settings.compares else None
        budget = Budget.prepare(model, source, rows, context) if settings.mixed_precision else None
        modules = experts_of(model)
        for name, experts in rare(routing.tokens, settings.calibration.expert_tokens).items():
            modules[name].everywhere = frozenset(experts)
        return cls(settings, source, model, rows, feed, context, trial, budget, routing, {"rotation": rotation} if rotation else {})

    @property
    def name(self) -> str:
        """The id of the stage, for messages and progress bars."""
        return self.settings.title

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.settings.bits(self.context)

    def choose_layers(self) -> tuple[dict[str, Layer], dict[str, str]]:
        """Returns the layers to quantize, and for every other linear layer and convolution the reason why it stays float."""
        settings, rows = self.settings, self._few_rows()
        with on_all_tokens(self.model):  # a few rows do not reach every expert
            return self._choose_layers(settings, rows)

    def _choose_layers(self, settings: QuantizeSettings, rows: dict[str, Tensor]) -> tuple[dict[str, Layer], dict[str, str]]:
        floating = float_convolutions(self.model, settings.scheme, settings.convolutions, rows, forward)
        layers: dict[str, Layer] = {**linears(self.model), **convolutions(self.model)}
        chosen, kept = choose_layers(self.model, layers, settings.exclude, f"stages.{self.name}.exclude", floating)
        constant = dict.fromkeys(constant_layers(self.model, chosen, rows, forward), CONSTANT)
        unused = dict.fromkeys(unused_layers(self.model, chosen, rows, forward), UNUSED)
        idle = {**unused, **constant}
        return {name: layer for name, layer in chosen.items() if name not in idle}, {**kept, **idle}

    def release_experts(self) -> list[str]:
        """Makes all experts run only on their own tokens from now on; returns at most one warning about experts that saw few."""
        for module in experts_of(self.model).values():
            module.everywhere = ()
        return rare_warning(self.routing.tokens, self.settings.calibration.expert_tokens)

    def fold_batch_norms(self, layers: Layers) -> dict[str, str]:
        """Folds batch norms into the convolutions among the layers, in place; returns the norm of each convolution that had one."""
        if len(_linears(layers)) == len(layers):
            return {}
        pairs = fold_batch_norms(self.model, layers, self._few_rows(), forward)
        self.context.progress.log(f"  batch norms: {len(pairs)} folded into convolutions")
        return pairs

    def observe(self, layers: Layers, smoothed: Mapping[str, Tensor]) -> Observed[Histogram]:
        """Returns histograms of the layers' inputs over the calibration rows."""
        return collect(self.model, layers, self.feed(f"{self.name}: observing"), forward, Histogram, smoothed)

    def range_warnings(self, unreached: Sequence[str]) -> list[str]:
        """Returns warnings about layers that the calibration rows do not reach, and about few rows if anything is chosen by them."""
        return range_warnings(self.rows, unreached, chosen_by=self.settings.learns_of_rows)

    def compare_ranges(self, figures: Sequence[LayerFigures], layers: Layers, smoothed: Mapping[str, Tensor]) -> list[str]:
        """Adds input ranges on selection rows to the figures of each layer; returns a warning if calibration does not cover them."""
        split = self.context.data.selection
        selection = [split.rows[row] for row in split.labels.first(SELECTION_ROWS)]
        highest = SCHEMES[self.settings.scheme].largest_activation
        if not selection or highest is None:
            return []
        batches = feature_batches(self.source, selection, self.context, f"{self.name}: checking")
        observed = collect(self.model, layers, batches, forward, Histogram, smoothed)
        return compare_ranges(figures, observed, highest)

    def train(
        self, scales: Mapping[str, Scales], group: Mapping[str, str], uncorrected: nn.Module | None
    ) -> tuple[dict[str, Scales], dict[str, object]]:
        """Trains the model in int8, in place.

        Args:
            scales: Initial scales.
            group: The group of each layer: layers that read the same tensor.
            uncorrected: The float model with its original biases; None if they were not corrected.

        Returns:
            The learned scales, and the figures of the training.
        """
        # If the teacher is the incoming model, use it as it is now: smoothing rescaled its hidden states, which losses may compare.
        named = self.context.teacher
        teacher = named.path if named and named.path != self.source else uncorrected
        team = self.context.team  # every process calibrated; they start from what the first one found
        scales, group = team.broadcast_object((dict(scales), dict(group)))
        for model in (self.model, *([] if uncorrected is None else [uncorrected])):
            team.align(model)
        start = cast("Mapping[str, LayerScales]", scales)
        learned, history = train_in_integers(self.model, start, group, self.settings.qat, self.context, self.source, self.name, teacher)
        looks = {"selection": history.selection, "best_step": history.best_step}
        return dict(learned), {"qat": {"losses": history.losses, **looks, "steps": history.steps}}

    def equalize_and_smooth(self, layers: Layers) -> tuple[dict[str, Tensor], dict[str, object]]:
        """Equalizes and smooths the float model; returns the factors that inputs must be divided by, and the figures of both."""
        smoothing = self.settings.smoothing
        if not self.settings.equalization and smoothing is None:
            return {}, {}
        layers = _linears(layers)
        vectors: dict[str, Tensor] = {}
        figures: dict[str, object] = {}
        folds = self._folds()
        if self.settings.equalization:
            figures["equalization"] = pairs = equalize(self.model, layers, folds)
            self.context.progress.log(f"  equalization: {len(pairs)} pairs of layers")
        if smoothing is not None:
            channels = collect(self.model, layers, self.feed(f"{self.name}: smoothing"), forward, Channels)
            how = smoothing.alpha, smoothing.prescale, SCHEMES[self.settings.scheme].activations == "dynamic"
            vectors, smoothed = smooth(self.model, layers, folds, channels, self.bits, *how)
            figures["smoothquant"] = smoothed
            self.context.progress.log(f"  smoothquant: {describe(smoothed)}")
        return vectors, figures

    def weights(
        self, layers: Layers, smoothed: Mapping[str, Tensor], observed: Observed[Histogram]
    ) -> tuple[dict[str, Grid], dict[str, object]]:
        """Returns scales and zero points of the weights, and the figures of AWQ, which folds factors into the float model."""
        how = self.settings.groups
        if how.range_by != "outputs":
            return weight_grids(self.settings.scheme, layers, self.bits, how, smoothed), {}
        linear = _linears(layers)
        assert len(linear) == len(layers), "schemes with groups have no convolutions"
        if not self.settings.awq:
            seen = collect(self.model, linear, self.feed(f"{self.name}: ranges"), forward, partial(GroupMoments, how.size))
            return {name: how.grid(layer.weight.detach(), seen.of(name).blocks_Ggg) for name, layer in linear.items()}, {}
        found = groups(layers, self._folds(), observed)
        batches = partial(self.feed, f"{self.name}: awq")
        scales, figures = awq(self.model, linear, found, batches, forward, how)
        self.context.progress.log(f"  awq: {describe_awq(figures)}")
        return {name: scales[name].grid for name in layers}, {"awq": figures}

    def calibrator(self, choose: Callable[[Method | None], dict[str, Scales]], layers: Layers) -> tuple[Method | None, dict[str, object]]:
        """Returns the calibration method, None for a scheme without one, and the figures of `auto`."""
        methods, method = calibrators(self.settings.scheme), self.settings.calibrator
        if method != "auto":
            return method, {}
        assert self.trial is not None
        default = self.settings.default_method
        apart = {
            tried: self.trial.distances(layers, choose(tried))
            for tried in self.context.progress.track(methods, f"{self.name}: calibrators")
        }
        groups, rows, measure = self.trial.groups, len(self.trial.rows), self.trial.measure
        best = closer(apart, default, groups)
        differences = {tried: apart[tried] - apart[default] for tried in methods if tried != default}
        for tried, difference in differences.items():
            self.context.progress.log(f"  calibrator {tried}: {measure} {in_words(difference, groups)} more than {default}")
        self.context.progress.log(f"  calibrator: {best}, with {measure} {in_words(apart[best], groups)} from float on {rows} rows")
        figures = {
            "measure": measure,
            "rows": rows,
            "distances": {tried: float(values.mean()) for tried, values in apart.items()},
            "intervals": {tried: bounds(values, groups) for tried, values in apart.items()},
            "default": default,
            "more_than_default": {tried: bounds(values, groups) for tried, values in differences.items()},
        }
        return best, {"calibrators": figures}

    def rounded(
        self, layers: Layers, scales: dict[str, Scales], observed: Observed[Histogram]
    ) -> tuple[Layers, dict[str, Scales], dict[str, object]]:
        """Returns the layers with rounded weights, their scales, and the figures.

        Layers rounded to nearest, as all convolutions are, are unchanged; autoround alone changes scales.
        """
        method = self.settings.rounding
        if method == "nearest":
            return layers, scales, {}
        linear = _linears(layers)
        units = [group.layers for group in groups(linear, [], observed)]
        each, batches = partial(self.context.progress.track, label=f"{self.name}: {method}"), partial(self.feed, f"{self.name}: moments")
        given = {name: cast("IntegerScales", scales[name]) for name in linear}
        if method == "autoround":
            options = Options(self.settings.autoround.steps, self.settings.autoround.batch_size, self.context.seed)
            batches = partial(feature_batches, self.source, self.rows, self.context, "", options.batch_size)
            rounded, learned, figures = round_blocks(self.model, linear, given, options, units, batches, forward, each)
            given |= learned
        else:
            rounded, figures = round_layers(self.model, linear, given, method, units, batches, forward, each)
        self.context.progress.log(f"  {summarized(method, figures)}")
        return {**layers, **rounded}, {**scales, **given}, {"rounding": {"method": method, "layers": figures}}

    def correct(self, layers: Layers, rounded: Layers, scales: Mapping[str, Scales], observed: Observed[Histogram]) -> dict[str, object]:
        """Corrects the biases if asked to, and undoes it if the model moved further from float; returns the figures."""
        if not self.settings.bias_correction:
            return {}
        assert self.trial is not None
        trial = self.trial
        biases = [(bias, bias.data) for layer in layers.values() if (bias := layer.bias) is not None]
        before_n = trial.distances(rounded, scales)
        each = partial(self.context.progress.track, label=f"{self.name}: correcting biases")
        moved = correct_biases(self.model, layers, scales, observed.group, partial(self.feed, ""), forward, each, rounded)
        after_n = trial.distances(rounded, scales)
        before, after = float(before_n.mean()), float(after_n.mean())
        first, then, more = (in_words(values, trial.groups) for values in (before_n, after_n, after_n - before_n))
        told = f"{trial.measure} from float {first} before, {then} after, on {len(trial.rows)} rows"
        self.context.progress.log(f"  bias correction: {told}; difference {more}")
        if after > before:
            reason = f"bias correction increases {trial.measure} from float from {before:.2g} to {after:.2g}; undone"
            self.context.progress.warn(f"{self.name}: {reason}")
            for bias, bias_O in biases:
                bias.data = bias_O
        compared = {"before": before_n, "after": after_n, "difference": after_n - before_n}
        figures = {
            "measure": trial.measure,
            "rows": len(trial.rows),
            "before": before,
            "after": after,
            "kept": after <= before,
            "intervals": {name: bounds(values, trial.groups) for name, values in compared.items()},
            "shifts": moved,
        }
        return {"bias_correction": figures}

    def scan(self, layers: Layers, rounded: Layers, scales: Mapping[str, Scales]) -> dict[str, Any]:
        """Returns the sensitivity of every layer, most sensitive first."""
        if not (self.settings.sensitivity or self.settings.mixed_precision):
            return {}
        assert self.trial is not None
        few = self.trial.fewer(SCAN_ROWS)
        whole: list[Array] = []

        def measure(names: Collection[str], part: Part) -> float:
            source = layers if part == "inputs" else rounded
            apart = few.distances_of({name: quantized_part(name, source[name], scales[name], part) for name in names})
            if not whole:  # the first measurement has all layers in int8
                whole.append(apart)
            return float(apart.mean())

        with self.context.progress.bar(f"{self.name}: sensitivity", passes(list(layers))) as advance:
            found = scan_layers(list(layers), measure, advance)
        told = f"{few.measure} {in_words(whole[0], few.groups)} from float with all layers quantized, on {len(few.rows)} rows"
        self.context.progress.log(f"  sensitivity: {told}; most sensitive: {', '.join(layer.name for layer in found[:3])}")
        total = {"distance": float(whole[0].mean()), "interval": bounds(whole[0], few.groups)}
        return {"sensitivity": {**summary(found, few.measure, len(few.rows)), **total}}

    def choose_float_layers(
        self, layers: dict[str, Layer], rounded: Layers, scales: Mapping[str, Scales], scan: Mapping[str, Any]
    ) -> tuple[dict[str, Layer], dict[str, str], dict[str, object]]:
        """Returns the layers that stay quantized, those that return to float with the reason, and the figures."""
        if self.settings.mixed_precision is None:
            return layers, {}, {}
        assert self.budget is not None
        budget, ranking = self.budget, [layer["name"] for layer in scan["sensitivity"]["layers"]]

        def loss(names: Collection[str]) -> float:
            with in_int8(self.model, {name: rounded[name] for name in names}, scales):
                return budget.loss(self.model)

        limit = self.settings.mixed_precision.max_drop
        choice = choose_floats(ranking, loss, limit, int(self.settings.mixed_precision.max_float * len(ranking)))
        kept = [name for name in ranking if name not in choice.floating]
        if not kept:
            raise InputError(f"stages.{self.name}.mixed_precision", "no layer is left in int8", remedy=f"raise max_drop ({limit:g} given)")
        self.context.progress.log(
            f"  mixed precision: {len(choice.floating)} layers return to float; loss {choice.before:.4f} before, {choice.loss:.4f} after"
        )
        reasons = dict.fromkeys(choice.floating, f"mixed precision: {budget.measure} has to stay within {limit:g}")
        figures = {
            "measure": budget.measure,
            "before": choice.before,
            "after": choice.loss,
            "met": choice.met,
            "floating": list(choice.floating),
        }
        return {name: layer for name, layer in layers.items() if name in kept}, reasons, {"mixed_precision": figures}

    def sites(self, scales: Mapping[str, Scales], calibrator: Method | None, scan: Mapping[str, Any]) -> tuple[Sites, dict[str, object]]:
        """Returns the attention products and residuals in int8, and the figures; a sensitivity scan is extended by their rows."""
        if not (self.settings.attention or self.settings.residual):
            return Sites(), {}
        assert calibrator is not None, self.settings.scheme
        unsmoothed = calibrator if self.settings.calibration.method else default_calibrator(self.settings.scheme)
        sites, figures, found = add_sites(
            self.model,
            cast("Mapping[str, LayerScales]", scales),
            SiteSettings(
                attention=self.settings.attention,
                residual=self.settings.residual,
                limit=partial(threshold, method=unsmoothed, percentile=self.settings.calibration.percentile),
                scan=bool(scan),
                stage=self.name,
            ),
            self.feed,
            forward,
            self.trial,
            self.context.progress,
        )
        if scan:
            rows = [*scan["sensitivity"]["layers"], *(site.as_row() for site in found)]
            rows.sort(key=lambda row: (-row["gain"], -row["alone"]))
            figures["sensitivity"] = {**scan["sensitivity"], "layers": rows}
        return sites, figures

    def _folds(self) -> list[Fold]:
        return find_folds(self.model, self._few_rows(), forward)

    def _few_rows(self) -> dict[str, Tensor]:
        """Returns the features of a few calibration rows."""
        return {key: value[:TRACED_ROWS] for key, value in next(self.feed("")).items()}


def _learn_rotations(
    settings: QuantizeSettings,
    source: Path,
    rows: Sequence[Row],
    context: Context,
    memory: Memory,
    model: nn.Module,
    rotations: Rotations,
) -> dict[str, object]:
    """Turns a rotated model by learned rotations, in place; returns the figures."""
    if memory.learned is not None:
        return memory.learned.turn(model, rotations)
    how = settings.learned_rotation
    rounding = Rounding(settings.scheme, settings.bits(context), Groups(settings.group_size, settings.symmetric, "minmax"))
    chosen, _ = choose_layers(model, linears(model), settings.exclude, f"stages.{settings.title}.exclude")
    batches = list(feature_batches(source, rows, context, "", how.batch_size))
    learning = Learning(how.steps, how.learning_rate, context.seed, by_kl=context.facts.answer.DISTANCE == "kl")
    track = partial(context.progress.track, label=f"{settings.title}: learning rotations")
    memory.learned = learn(model, rotations, batches, dict.fromkeys(chosen, rounding), learning, track)
    return memory.learned.turn(model, rotations)


def _linears(layers: Layers) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
