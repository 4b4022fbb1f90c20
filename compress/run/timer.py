"""Latency of float checkpoints in the first engine of the target, for stages that choose a model shape by latency.

A checkpoint becomes an engine as in `export`, but without evaluation and parity checks. For int8 it is quantized as the recipe says, with
ranges from a few rows and no search or training, because latency does not depend on scales. Each engine runs in its own process; the
processes take turns and discard their warm-up (`compress.measure.latency`).

    T_i = median over the groups of T_0 * (T_i / T_0 in its own group)        for more than `GROUP` + 1 checkpoints, in groups with the
    first

so that few processes are alive at once, and a slow phase of the machine does not bias one group against another. The float part of an int8
engine runs in bf16 wherever `export` may choose bf16. Not supported: layers that the recipe keeps in float, because their name patterns may
not match a model of another depth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.core.errors import InputError
from compress.core.progress import ConsoleProgress
from compress.data.splits import Split
from compress.measure.latency import Shape, measure
from compress.stage.context import Context, TimedPrecision

if TYPE_CHECKING:
    from export.engines.spec import EngineSpec
    from export.export import Export
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
    def settings(self) -> Any:
        """The recipe settings that affect the latency, apart from the target; JSON types."""
        return [self._fast_quantizer().model_dump(mode="json"), self.exporter.float_precision]

    def __call__(self, checkpoints: Sequence[Path], shape: Shape, precision: TimedPrecision) -> list[float]:
        """Returns the median latency of each checkpoint in ms.

        Args:
            checkpoints: Float checkpoints.
            shape: (batch, sequence); the sequence is None for images.
            precision: int8 quantizes the checkpoints first, as in the recipe; fp32 leaves them as they are.

        Raises:
            InputError: The first engine of the target does not run here.
            EngineError: An engine failed.
        """
        context, specs = self.context, []
        with tempfile.TemporaryDirectory(dir=checkpoints[0].parent, prefix="engines-") as folder:
            for number, checkpoint in enumerate(context.progress.track(checkpoints, "building engines to time")):
                work = Path(folder, str(number))
                work.mkdir()
                made = self._quantized(checkpoint, work / "int8") if precision == "int8" else checkpoint
                specs.append(self._engine(made, work))
            groups = [specs[start : start + GROUP] for start in range(1, len(specs), GROUP)] or [[]]
            found = [[float(row["p50_ms"]) for row in measure([specs[0], *group], [shape], context.progress)] for group in groups]
        first = median(times[0] for times in found)
        return [first, *(first * time / times[0] for times in found for time in times[1:])]

    def _fast_quantizer(self) -> Quantize:
        """Returns a quantize stage with the scheme of the recipe, without search or training."""
        from quantize.quantize import Quantize
        from quantize.settings import Calibration, SmoothQuant

        recipe = self.quantizer
        smoothing = recipe.smoothing
        return Quantize(
            scheme=recipe.scheme,
            group_size=recipe.group_size,
            weight_bits=recipe.weight_bits,
            calibration=Calibration(method="minmax" if recipe.scheme in ("w8a8", "fp8") else None, rows=ROWS),
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

    def _engine(self, checkpoint: Path, folder: Path) -> EngineSpec:
        """Builds an engine in `folder` and returns its spec in the recommended mode."""
        from compress.models.preprocessor import preprocessor
        from export.engines.spec import spec_of, torch_spec
        from export.schemes import DYNAMIC, precision_of, refusal, runtime_options, write_graphs

        context = self.context
        engine, precision = context.target.engines[0], precision_of(checkpoint)
        prepared = preprocessor(checkpoint, context.task, context.max_length, context.target)
        prepared.save(folder)
        if engine == "torch":
            return torch_spec(checkpoint, folder, "fp32" if precision == "fp32" else "int8", context.target)
        model = write_graphs(checkpoint, prepared, folder / MODEL, context.target.engines)
        reason = refusal(engine, precision, model)
        mode, file, float_precision = "dynamic", model, "fp32"
        match engine:
            case "openvino" if reason is None:
                from export.engines import openvino

                mode, file = "static", openvino.build(model, folder, runtime_options(precision, model))[0]
                halved = precision == "int8" and self.exporter.float_precision != "fp32" and openvino.computes_bf16()
                float_precision = "bf16" if halved else "fp32"
            case "onnxruntime" if reason is None:
                from export.engines import onnxruntime

                source = model.with_name(DYNAMIC) if precision == "int8-dynamic" else model
                file = onnxruntime.build(source, folder, quantized=precision == "int8")
            case "tensorrt" if reason is None:
                from export.engines import tensorrt

                largest = max(context.target.batch_sizes)
                entries = tensorrt.build(
                    model, folder, precision=precision, buckets=prepared.buckets, max_batch_size=largest, log=lambda _: None
                )
                reason, mode = entries[0]["reason"], entries[0]["mode"]
                file = folder / str(entries[0]["file"]).rpartition("/")[2]
        if reason is not None:
            raise InputError(f"target.engines: the first engine, {engine}, cannot be timed here: {reason}; put another engine first")
        build = {"precision": precision, "float_precision": float_precision, "folder": "."}
        return spec_of(folder, build, {"engine": engine, "mode": mode, "file": file.name}, context.target)
