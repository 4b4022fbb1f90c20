"""The stage `quantize`: quantizes the linear layers of a float checkpoint to int8, int4 or FP8.

    in memory        `in_memory`: choose layers, smooth, calibrate, round, correct biases, add attention products and residuals
    mode: auto       `escalation`: tries methods from cheap to expensive until one meets the accuracy goal
    layer by layer   `streaming`: for models too large for memory

All write weights on their grids together with the scales (`foundation.schemes.checkpoint`). Every choice is made on calibration and
selection rows. Not supported: quantizing a quantized checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from foundation.artifacts.artifact import Artifact, digest
from foundation.core.engines import ENGINES
from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.data.splits import Data
from foundation.labels.tasks import tasks_with
from foundation.machine.parallel import ALONE, Team
from foundation.models.architecture.origin import same_shape
from foundation.schemes.table import SCHEMES
from quantize.settings import QuantizeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.models.size import Passes
    from foundation.stage.context import Context

PASSES_PER_SCAN = 25  # for each layer of the model, which has 6 quantized ones
PASSES_PER_SITES = 8  # for each layer: 2 products, 2 residuals
TOKEN_BY_TOKEN = 4  # a row that is written by the model reads its weights for every token


class Quantize(QuantizeSettings):
    """Quantizes the linear layers and convolutions of the blocks to true int8, or the linear layers to int4 or FP8."""

    VERSION: ClassVar[int] = 13

    def team(self, processes: Team) -> Team:
        """All processes train in int8, after each has calibrated the whole model; without training only the first one calibrates."""
        return processes if self.mode != "ptq" else ALONE

    def depends(self, context: Context) -> object:
        """The resolved weight bits, which depend on the processor, for mode `auto` the accuracy goal, the metric of `goals.metric`
        where losses are counted in it, and the digest of the questions that the model answers for its calibration."""
        from quantize.escalation import budget_of

        goal = {"max_drop": budget_of(context)} if self.mode == "auto" else {}
        counted = self.mode == "auto" or self.mixed_precision is not None
        metric = {"metric": context.goals.metric} if counted and context.goals.metric is not None else {}
        questions = self.questions()
        asked = {"questions": digest(questions)} if questions else {}
        return {"weight_bits": self.bits(context), **goal, **metric, **asked}

    def questions(self) -> tuple[str, ...]:
        """Returns the questions that the model answers for its calibration; none if it is not asked any.

        Raises:
            InputError: They cannot be read.
        """
        from foundation.models.inputs.questions import read_questions
        from quantize.answers import questions_key

        answers = self.calibration.answers
        return () if answers is None or answers.questions is None else read_questions(answers.questions, questions_key(self))

    def work(self, passes: Passes, data: Data) -> float:
        """Forward passes over calibration rows (one for ranges, one for smoothing, some for rounding, two per layer for biases) and over
        selection rows (one per trial), plus forward and backward passes (1 : 2) for training."""
        from foundation.measure.closeness import TRIAL_ROWS
        from quantize.choices import METHODS
        from quantize.ptq import SELECTION_ROWS
        from quantize.sensitivity import SCAN_ROWS

        rows, selection = min(self.calibration.rows, len(data.train)), len(data.selection)
        learned = {"nearest": 0, "gptq": 9, "adaround": 36, "autoround": self._rounds(rows)}[self.rounding]
        learned += self._turns(rows)
        learned += 3 if self.awq else self.range_by == "outputs"
        learned += TOKEN_BY_TOKEN * self.calibration.answers.share if self.calibration.answers else 0
        calibrated = 1 + (self.smoothing is not None) + learned + bool(self.attention or self.residual)
        calibrated += 2 * passes.layers * self.bias_correction
        trials = (1 + len(METHODS)) * (self.calibration.method == "auto") + 2 * self.bias_correction
        scanned = passes.layers * SCAN_ROWS * PASSES_PER_SCAN * self.scans
        scanned += passes.layers * SCAN_ROWS * PASSES_PER_SITES * ("auto" in (self.attention, self.residual))
        trained = 3.0 * self.qat.epochs * len(data.train) * (self.mode != "ptq")
        tried = min(selection, SELECTION_ROWS) + min(selection, TRIAL_ROWS) * trials
        return float(passes.before) * (rows * calibrated + tried + scanned + trained)

    def _rounds(self, rows: int) -> float:
        """Returns the work of AutoRound in passes over calibration rows: the steps, forward and backward, and looks at all rows."""
        return 3 * self.autoround.steps * self.autoround.batch_size / max(1, rows) + 9

    def _turns(self, rows: int) -> float:
        """Returns the work of learned rotations in passes over calibration rows: of a step one of the float model, two of the rounded one,
        as its layers are computed again, and a backward pass; each rotates the weights, which takes about as long as a thousand tokens."""
        how = self.learned_rotation
        return 6 * how.steps * how.batch_size / max(1, rows) + 4 if self.rotation == "learned" else 0

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that the model can be streamed if asked to, and that the losses fit the models."""
        from foundation.training.allowed import check_training
        from foundation.training.distillation.distilled import plan_of
        from foundation.training.supervised import check_label_weight, check_labelled, check_loss
        from quantize.rotation.rotation import try_rotation
        from quantize.streaming import check_streamed
        from quantize.training.qat import key_of

        if self.embeddings and not context.facts.generates:
            tasks = tasks_with(lambda row: row.generates)
            raise InputError(f"stages.{self.title}.embeddings", f"true given for {context.task}", f"it is for {tasks}", "leave it out")
        if self.calibration.answers is not None and (not context.facts.generates or context.facts.encoder_decoder):
            where, tasks = f"{self.key}.calibration.answers", tasks_with(lambda row: row.generates and not row.encoder_decoder)
            raise InputError(where, f"given for {context.task}", f"it is for {tasks}", "leave it out")
        self.questions()
        if self.stream is True:
            check_streamed(self, config, context)
        if self.rotation != "none":
            try_rotation(config, f"{self.key}.rotation", self.rotation)
        if self.mode != "ptq" and context.team.sequence:
            given = f"{self.mode} given with parallel.sequence: true"
            raise InputError(f"stages.{self.title}.mode", given, "layers that compute in integers read all tokens", "give sequence: false")
        if self.mode != "ptq" and context.team.pipeline > 1:
            raise InputError(
                f"stages.{self.title}.mode",
                f"{self.mode} given with parallel.pipeline: {context.team.pipeline}",
                "layers that train in integers are not divided into stages",
                "give pipeline: 1, and strategy: ddp or fsdp2",
            )
        if self.mode != "ptq" and context.team.experts > 1:
            given = f"{self.mode} given with parallel.experts: {context.team.experts}"
            raise InputError(
                f"stages.{self.title}.mode", given, "experts that train in integers are not spread", "give experts: 1, or mode: ptq"
            )
        key = key_of(self.title)
        if self.mode != "ptq":
            check_training(self.qat, config, context, key)
            if not self.qat.distill:
                check_labelled(context.task, context.data, key)
            check_label_weight(self.qat, context.data, key)
            if not self.qat.distill or (not self.qat.named and self.qat.soft_weight < 1):
                check_loss(config, context, key, self.qat.micro_batch_size)
        if self.mode != "ptq" and teacher is not None and self.qat.named:
            plan_of(self.qat, key, same_shape(config, teacher)).check(config, teacher, context, self.qat.micro_batch_size)

    def config_after(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Returns the config of the output model: a rotated one has a head of its own."""
        if self.rotation == "none" or not getattr(config, "tie_word_embeddings", False):
            return config
        changed = copy.deepcopy(config)
        changed.tie_word_embeddings = False
        return changed

    def doubts(self, context: Context) -> Iterator[str]:
        """Yields why an engine of the target may not compute the integers of the quantized model on this processor, or slowly, one line
        each."""
        from foundation.schemes.int8 import has_vnni

        saturate = any(ENGINES[engine].products_saturate for engine in context.target.engines)
        products = self.attention and context.target.device == "cpu" and saturate
        if products and not has_vnni():
            yield (
                f"stages.{self.title}.attention: without VNNI or AMX, OpenVINO's products of two int8 activations saturate at 16 bits on "
                "this processor; export refuses the engine if answers change. Leave attention out, or openvino out of target.engines"
            )
        scheme = SCHEMES[self.scheme]
        slow = [engine for engine in context.target.engines if ENGINES[engine].multiplies_blocks]
        if slow and scheme.grouped and scheme.activations == "float":
            yield (
                f"stages.{self.title}.scheme: {self.scheme} multiplies by floats, which is slow in {one_of(slow)}; w4a8-block rounds "
                "the inputs to int8 in blocks, and is faster there"
            )

        without = [engine for engine in context.target.engines if not ENGINES[engine].offsets]
        if without and self.group_scales == "k_quant":
            able = one_of([engine for engine, row in ENGINES.items() if row.offsets])
            yield (
                f"stages.{self.title}.group_scales: {one_of(without)} multiplies by no real offsets, and is not built of k_quant; "
                f"{able} does, and GGUF files hold them. Give two_level for the others"
            )

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, object]:
        """Quantizes the model and writes the checkpoint.

        Returns:
            `scheme`, `weight_bits`, `calibrator`, `rows`, `warnings`, `float_layers`, and `layers`: for each layer its input scale, the
            largest input on calibration and selection rows, the clipped share of inputs and the signal-to-noise ratios of its codes (dB).
            Depending on model and settings: `rotation` (its size, and the weights that a head which is no longer tied adds), `group_size`,
            `symmetric` (false: weights have zero points or offsets), `group_scales` (where they are not floats), `bits_per_weight` (of
            grouped weights: codes, scales, zero points and offsets), `experts` (calibration tokens of each), `batch_norms` (the folded norm
            of a convolution), `calibrators` (the distance for each method tried by auto), `equalization`, `smoothquant`, `bias_correction`,
            `sensitivity`, `mixed_precision`, `qat`, `sites` (attention products and residuals: whether they are int8, the distance each
            adds, its tensors), `sites_choice`, `tables` (embeddings and head: the signal-to-noise ratio, dB), `awq`, `rounding` (the method
            and the output error of each layer, or of each block for autoround), and `attempts` of the mode auto.

        Raises:
            InputError: A pattern of `exclude` matches nothing, no layer is left to quantize, an input holds NaN or infinity, or training
                failed.
        """
        from foundation.schemes.sites import save_sites
        from foundation.schemes.tables import save_tables, table_modules
        from quantize.embeddings import quantize_tables
        from quantize.escalation import escalate
        from quantize.in_memory import quantize_in_memory
        from quantize.ptq import write_checkpoint
        from quantize.streaming import quantize_streamed, worth_streaming

        for doubt in self.doubts(context):
            context.progress.warn(doubt)
        if self.stream is True or (self.stream == "auto" and worth_streaming(self, parent.path, context)):
            figures, kept, warnings = quantize_streamed(self, parent.path, out, context)
        else:
            made = escalate(self, parent.path, context) if self.mode == "auto" else quantize_in_memory(self, parent.path, context)
            if not context.team.is_first:
                return {}
            figures, kept, warnings = made.figures, made.float_layers, made.warnings
            tables, noise = quantize_tables(made.model) if self.embeddings else ({}, {})
            if tables:  # a tied head is one of them
                held = {module.weight for module in table_modules(made.model).values()}
                kept = {name: reason for name, reason in kept.items() if made.model.get_submodule(name).weight not in held}
            write_checkpoint(made.model, parent.path, out, made.scales, kept, f"{SCHEMES[self.scheme].numbers} ({self.scheme})")
            if tables:
                save_tables(out, tables)
                figures = {**figures, "tables": noise}
            if made.sites.names:
                save_sites(out, made.sites)
        for warning in warnings:
            context.progress.warn(f"{self.title}: {warning}")
        settings = {"mode": self.mode, "scheme": self.scheme, "weight_bits": self.bits(context)}
        settings |= {"group_size": self.group_size} if SCHEMES[self.scheme].grouped else {}
        settings |= {} if self.symmetric else {"symmetric": False}
        settings |= {} if self.group_scales == "float" else {"group_scales": self.group_scales}
        return {**settings, **figures, "float_layers": kept, "warnings": warnings}
