"""The engine that benchmarks compare with others: OpenVINO, static shapes, without the rest of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.recipe import Recipe
from export.engines.openvino import convert, files
from export.engines.spec import EngineSpec, spec_of
from export.graph.quantized import precision_of, write_graphs
from foundation.artifacts.artifact import writing
from foundation.artifacts.exported import Build, Engine
from foundation.data.splits import Data
from foundation.measure.engine_process import EngineProcess
from foundation.models.folder import Checkpoint


def built(checkpoint: Path, folder: Path, recipe: Recipe) -> EngineSpec:
    """Exports a checkpoint to a folder and builds it for OpenVINO, unless the folder exists; returns the spec of its static mode."""
    if not folder.is_dir():
        with writing(folder) as temporary:
            processor = Checkpoint(checkpoint).preprocessor(recipe.model.task, recipe.data.max_length, recipe.target)
            processor.save(temporary)
            convert(write_graphs(Checkpoint(checkpoint), processor, temporary / "model.onnx", ["openvino"]), temporary)
    build = Build(precision=precision_of(Checkpoint(checkpoint)), float_precision="fp32", folder=".")
    return spec_of(folder, build, Engine(engine="openvino", mode="static", file=files(folder)[0].name), recipe.target)


def answers_of_engine(spec: EngineSpec, data: Data) -> Any:
    """Returns what an engine answers to the whole evaluation split, float32."""
    with EngineProcess(spec) as process:
        return process.predict(data.evaluation.rows, spec.evaluation_batch)
