"""Engines that answer prompts, of a run without an export stage: files and settings are those of an export, without its gates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import generation_peers

from compress.recipe import Recipe
from export.engines.registry import engine_module
from export.engines.spec import BuildRequest, EngineSpec, spec_of
from export.graph.quantized import precision_of
from foundation.artifacts.artifact import write_json
from foundation.artifacts.exported import Build, Engine
from foundation.artifacts.run_folder import Run
from foundation.core.engines import ENGINES, EngineName
from foundation.models.folder import Checkpoint

ENTRY = "entry.json"


def built_here(run: Run, recipe: Recipe, out: Path) -> Iterator[tuple[str, EngineSpec]]:
    """Writes every variant for every engine of the target that takes it, once; yields the variant and how to open it."""
    for variant, artifact in run.variants.items():
        checkpoint = Checkpoint(artifact.path)
        precision = precision_of(checkpoint)
        for engine in recipe.target.engines:
            if ENGINES[engine].generates and engine_module(engine).refusal(precision, Path()) is None:
                yield variant, _spec(engine, checkpoint, recipe, out / f"ours-{variant}-{artifact.path.name}-{engine}")


def _spec(engine: EngineName, checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> EngineSpec:
    precision = precision_of(checkpoint)

    def write(temporary: Path) -> None:
        processor = checkpoint.preprocessor(recipe.model.task, recipe.data.max_length, recipe.target)
        processor.save(temporary)
        request = BuildRequest(
            engine=engine,
            checkpoint=checkpoint,
            model=Path(),
            root=temporary,
            folder=temporary,
            shared=temporary,
            precision=precision,
            float_precision="fp32",
            bf16_float_part=False,
            buckets=processor.buckets,
            target=recipe.target,
            log=print,
        )
        entry = next(entry for entry in engine_module(engine).build(request) if entry.runnable)
        write_json(temporary / ENTRY, entry.written())

    generation_peers.built(folder, write)
    entry = Engine.model_validate_json((folder / ENTRY).read_text(encoding="utf-8"))
    return spec_of(folder, Build(precision=precision, float_precision="fp32", folder="."), entry, recipe.target)
