"""Latency of float checkpoints in the first engine of the target, for stages that choose a model shape by latency.

A checkpoint becomes an engine as in `export`, but without evaluation and parity checks. For int8 it is quantized as the recipe says, with
ranges from a few rows and no search or training, because latency does not depend on scales. Each engine runs in its own process; the
processes take turns and discard their warm-up (`foundation.measure.latency`).

    T_0 = median over the groups of the median of its samples
    T_i = T_0 / r_i, r_i the ratio of T_0 to T_i over the turns of its own group (`foundation.measure.turns`)

More than `GROUP` + 1 checkpoints are timed in groups, each with the first checkpoint. So few processes are alive at once, and a slow phase
of the machine biases neither one group nor one checkpoint of a group against another. The float part of an int8 engine runs in bf16 or
fp16 wherever `export` may choose that. Not supported: layers that the recipe keeps in float, because their name patterns may not match a
model of another depth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from export.builds import HALVES
from export.engines.registry import engine_module
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.exported import Build
from foundation.core.engines import REFERENCE, EngineName
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Split
from foundation.measure.latency import Shape, measure
from foundation.measure.turns import ratio
from foundation.models.folder import Checkpoint
from foundation.schemes.table import SCHEMES, is_static_int8
from foundation.stage.context import Context, TimedPrecision

if TYPE_CHECKING:
    from export.engines.spec import EngineSpec
    from export.export import Export
    from export.half_graphs import HalfGraph
    from foundation.standalone.preprocess import Preprocessor
    from quantize.quantize import Quantize

GROUP = 4
ROWS = 8
"""Calibration rows for the int8 ranges."""
MODEL = "model.onnx"


@dataclass(frozen=True)
class Timer:
    """Times checkpoints in one run."""

    context: Context
    """Data, task and target."""
    quantizer: Quantize
    """The first quantize stage of the recipe, else one with default settings."""
    exporter: Export
    """The export stage of the recipe, else one with default settings."""

    @property
    def settings(self) -> object:
        """The recipe settings that affect the latency, apart from the target; JSON types."""
        return [self._fast_quantizer().model_dump(mode="json"), self.exporter.float_precision]

    def __call__(self, checkpoints: Sequence[Path], shape: Shape, precision: TimedPrecision | Sequence[TimedPrecision]) -> list[float]:
        """Returns the latency of each checkpoint in ms at one shape; arguments and errors as below."""
        return self.turns(checkpoints, [shape], precision)[0]

    def turns(
        self, checkpoints: Sequence[Path], shapes: Sequence[Shape], precision: TimedPrecision | Sequence[TimedPrecision]
    ) -> list[list[float]]:
        """Returns for each shape the latency of each checkpoint in ms; every checkpoint is built once.

        Args:
            checkpoints: Float checkpoints.
            shapes: (batch, sequence) each; the sequence is None for images.
            precision: int8 quantizes the checkpoints first, as in the recipe; fp32 leaves them as they are. A list has one for each.

        Raises:
            InputError: The first engine of the target does not run here.
            EngineError: An engine failed.
        """
        precisions = [precision] * len(checkpoints) if isinstance(precision, str) else precision
        with tempfile.TemporaryDirectory(dir=checkpoints[0].parent, prefix="engines-") as folder:
            tracked = enumerate(self.context.progress.track(checkpoints, "building engines to time"))
            specs = [self._built(checkpoint, precisions[number], Path(folder, str(number))) for number, checkpoint in tracked]
            groups = [specs[start : start + GROUP] for start in range(1, len(specs), GROUP)] or [[]]
            found = [self._times([specs[0], *group], shapes) for group in groups]
        return [_joined([group[number] for group in found]) for number in range(len(shapes))]

    def _times(self, specs: list[EngineSpec], shapes: Sequence[Shape]) -> list[list[float]]:
        """Returns for each shape the latency in ms of engines that take turns: the first's median, the others' by their ratios to it."""
        rows = [row for _, row in measure(specs, shapes, self.context.progress)]
        at = [[row for row in rows if row.shape == shape] for shape in shapes]
        return [[first.median_ms, *(first.median_ms / ratio(first, row).value for row in others)] for first, *others in at]

    def at(self, checkpoint: Path, shapes: Sequence[Shape], precision: TimedPrecision) -> list[float]:
        """Returns the median latency in ms of one float checkpoint at several shapes; arguments and errors as above."""
        with tempfile.TemporaryDirectory(dir=self.context.scratch.parent, prefix="engines-") as folder:
            spec = self._built(checkpoint, precision, Path(folder, "0"))
            return [times[0] for times in self._times([spec], shapes)]

    def _built(self, checkpoint: Path, precision: TimedPrecision, folder: Path) -> EngineSpec:
        """Builds the engine of a checkpoint in a new folder, in int8 quantized before."""
        folder.mkdir()
        return self._engine(self._quantized(checkpoint, folder / "int8") if precision == "int8" else checkpoint, folder)

    def _fast_quantizer(self) -> Quantize:
        """Returns a quantize stage with the scheme of the recipe, without search or training."""
        from quantize.quantize import Quantize
        from quantize.settings import Calibration, SmoothQuant

        recipe = self.quantizer
        smoothing = recipe.smoothing
        return Quantize(
            scheme=recipe.scheme,
            group_size=recipe.group_size,
            symmetric=recipe.symmetric,
            weight_bits=recipe.weight_bits,
            calibration=Calibration(method="minmax" if SCHEMES[recipe.scheme].activations == "static" else None, rows=ROWS),
            smoothquant=False if smoothing is None else SmoothQuant(alpha=0.5, prescale=smoothing.prescale),
            attention=recipe.attention is True,
            residual=recipe.residual is True,
            stream=False,
        )

    def _quantized(self, checkpoint: Path, out: Path) -> Path:
        """Quantizes a checkpoint into `out` and returns that folder."""
        context, selection = self.context, self.context.data.selection
        data = replace(context.data, selection=Split(selection.rows[:0], selection.labels[:0]))
        out.mkdir()
        silent = ConsoleProgress("silent")  # quantization for timing only is not worth a log line
        self._fast_quantizer().run(Artifact(checkpoint, {"id": "timed", "digest": ""}), replace(context, progress=silent, data=data), out)
        return out

    def _may_use_bf16(self, engine: EngineName, precision: str) -> bool:
        """Whether `export` may choose bf16 for the float part of this engine."""
        wanted = is_static_int8(precision) and self.exporter.float_precision != "fp32"
        return wanted and engine_module(engine).computes_bf16()

    def _half_graph(self, engine: EngineName, precision: str, model: Path, prepared: Preprocessor, folder: Path) -> HalfGraph | None:
        """Writes the half graph that `export` may choose for this engine; None where it has none."""
        from export.half_graphs import HalfGraphs

        if not (is_static_int8(precision) and engine_module(engine).strongly_typed()):
            return None
        graphs = HalfGraphs(self.context, self.exporter.float_precision)
        half = graphs.half_of(model, prepared)
        return None if half is None else graphs.write(model, half, prepared, folder)

    def _engine(self, checkpoint: Path, folder: Path) -> EngineSpec:
        """Builds an engine in `folder` and returns its spec in the recommended mode."""
        from export.engines.spec import BuildRequest, spec_of, torch_spec
        from export.graph.quantized import precision_of, write_graphs

        context = self.context
        engine, precision = context.target.engines[0], precision_of(Checkpoint(checkpoint))
        prepared = context.preprocessor(checkpoint)
        prepared.save(folder)
        if engine == REFERENCE:
            return torch_spec(Checkpoint(checkpoint), folder, "fp32" if precision == "fp32" else "int8", context.target)
        module, model = engine_module(engine), folder / MODEL
        if module.reads_graph():
            write_graphs(Checkpoint(checkpoint), prepared, model, context.target.engines)
        request = BuildRequest(
            engine=engine,
            checkpoint=Checkpoint(checkpoint),
            model=model,
            root=folder.parent,
            folder=folder,
            shared=folder,
            precision=precision,
            float_precision="fp32",
            bf16_float_part=self._may_use_bf16(engine, precision),
            half_graph=self._half_graph(engine, precision, model, prepared, folder),
            buckets=prepared.buckets,
            target=context.target,
            log=lambda line: None,
        )
        reason = module.refusal(precision, model)
        entries = list(module.build(request)) if reason is None else []
        entry = next((entry for entry in entries if entry.runnable), None)
        if entry is None:
            why = reason or entries[0].reason
            raise InputError(
                "target.engines", f"the first engine, {engine}, cannot be timed here: {why}", remedy="put another engine first"
            )
        same = [other for other in entries if other.mode == entry.mode and other.runnable]
        halves = next((other for other in same if other.float_precision in HALVES), entry)
        build = Build(precision=precision, float_precision="fp32", folder=folder.name)
        return spec_of(folder.parent, build, halves, context.target)


def _joined(groups: Sequence[Sequence[float]]) -> list[float]:
    """Returns the times of all checkpoints at one shape, from the times of each group, which the first checkpoint leads."""
    first = median(times[0] for times in groups)
    return [first, *(first * time / times[0] for times in groups for time in times[1:])]
