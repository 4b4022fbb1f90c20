"""How long a checkpoint takes in the first engine of the target, before it is worth exporting: what stages that choose a shape ask.

A float checkpoint becomes an engine as it does in `export`, without evaluation and parity: ONNX, for int8 quantized as the recipe says but
with the ranges of a handful of rows and nothing searched or learned (time does not depend on scales), built, opened in a process of its
own. Processes take turns and throw their warm-up away (`compress.measure.latency`).

    T_i = median over the groups of T_0 * (T_i / T_0 in its own group)        of more than `GROUP` + 1 checkpoints, in groups with the first

so that few processes are alive at once, and what slows the machine for a while does not tell one group from the next. The float part of an
int8 engine is in bf16 wherever `export` may choose that. Left out: layers that a recipe keeps in float, whose patterns name layers that a
model of another depth need not have.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.core.engines import ENGINES
from compress.core.errors import InputError
from compress.core.progress import ConsoleProgress
from compress.data.splits import Split
from compress.measure.latency import Shape, measure
from compress.schemes.table import SCHEMES, of_precision
from compress.stage.context import Context, TimedPrecision

if TYPE_CHECKING:
    from export.engines.spec import EngineSpec
    from export.export import Export
    from quantize.quantize import Quantize

GROUP = 4
ROWS = 8
"""Rows that the ranges of int8 are taken of."""
MODEL = "model.onnx"


@dataclass(frozen=True)
class Timer:
    """How checkpoints are timed in one run."""

    context: Context
    """Data, task and target."""
    quantizer: Quantize
    """The first stage of the recipe that quantizes, or one of default settings."""
    exporter: Export
    """The stage that exports, or one of default settings."""

    @property
    def settings(self) -> Any:
        """What of the recipe a time depends on, beside the target: JSON types."""
        return [self._shortest().model_dump(mode="json"), self.exporter.float_precision]

    def __call__(self, checkpoints: Sequence[Path], shape: Shape, precision: TimedPrecision) -> list[float]:
        """Returns the median milliseconds of each checkpoint.

        Args:
            checkpoints: Float checkpoints.
            shape: (batch, sequence); the sequence is None for images.
            precision: int8: as the recipe quantizes; fp32: as they are.

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

    def _shortest(self) -> Quantize:
        """Returns the stage that quantizes to what the recipe asks for, without a search."""
        from quantize.quantize import Quantize
        from quantize.settings import Calibration, SmoothQuant

        asked = self.quantizer
        smoothing = asked.smoothing
        return Quantize(
            scheme=asked.scheme,
            group_size=asked.group_size,
            weight_bits=asked.weight_bits,
            calibration=Calibration(method="minmax" if SCHEMES[asked.scheme].activations == "static" else None, rows=ROWS),
            smoothquant=False if smoothing is None else SmoothQuant(alpha=0.5, prescale=smoothing.prescale),
            attention=asked.attention is True,
            residual=asked.residual is True,
            stream=False,
        )

    def _quantized(self, checkpoint: Path, out: Path) -> Path:
        """Quantizes a checkpoint; returns the folder of what came of it."""
        context, selection = self.context, self.context.data.selection
        data = replace(context.data, selection=Split(selection.rows[:0], selection.labels[:0]))
        out.mkdir()
        silent = ConsoleProgress("silent")  # what is quantized only to be timed is no news
        self._shortest().run(Artifact(checkpoint, {"id": "timed", "digest": ""}), replace(context, progress=silent, data=data), out)
        return out

    def _engine(self, checkpoint: Path, folder: Path) -> EngineSpec:
        """Builds one engine in `folder`; returns how to open it, in the mode that is recommended."""
        from export.engines.registry import engine_module
        from export.engines.spec import BuildRequest, spec_of, torch_spec
        from export.graph.quantized import precision_of, write_graphs

        context = self.context
        engine, precision = context.target.engines[0], precision_of(checkpoint)
        prepared = context.preprocessor(checkpoint)
        prepared.save(folder)
        if not ENGINES[engine].builds:
            return torch_spec(checkpoint, folder, "fp32" if precision == "fp32" else "int8", context.target)
        model = write_graphs(checkpoint, prepared, folder / MODEL, context.target.engines)
        request = BuildRequest(
            engine=engine,
            checkpoint=checkpoint,
            model=model,
            root=folder.parent,
            folder=folder,
            shared=folder,
            precision=precision,
            float_precision="fp32",
            bf16_float_part=False,
            buckets=prepared.buckets,
            target=context.target,
            log=lambda line: None,
        )
        module = engine_module(engine)
        reason = module.refusal(precision, model)
        entry = next(iter(module.build(request))) if reason is None else {}
        reason = reason or entry["reason"]
        if reason is not None:
            raise InputError(f"target.engines: {engine} given first, in which nothing can be timed here: {reason}")
        scheme = of_precision(precision)
        static_int8 = scheme is not None and scheme.integer and scheme.activations == "static"
        halved = static_int8 and self.exporter.float_precision != "fp32" and ENGINES[engine].bf16_float_part and module.computes_bf16()
        build = {"precision": precision, "float_precision": "bf16" if halved else "fp32", "folder": folder.name}
        return spec_of(folder.parent, build, {"engine": engine, "mode": entry["mode"], "file": entry["file"]}, context.target)
