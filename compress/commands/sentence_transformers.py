"""`compress sentence-transformers`: a folder for the ONNX and OpenVINO backends of sentence-transformers, from a build of a run."""

from __future__ import annotations

from pathlib import Path

from compress.report import evaluations
from compress.run.opened import opened
from export.embedding_folder import write_folder
from foundation.core.errors import InputError, nearest
from foundation.core.named import one_of
from foundation.models.folder import Checkpoint


def write(folder: Path, model: str, out: Path) -> Path:
    """Writes the folder of one build.

    Args:
        folder: A finished run with an export.
        model: The build by its variant and precision, for example quantize-int8.
        out: A folder that does not exist.

    Returns:
        `out`.

    Raises:
        InputError: The run has no such build, or `export.embedding_folder.write_folder` refuses it.
    """
    run = opened(folder)
    exported, variants = run.of_kind("engine"), {build.folder: build.variant for build in evaluations.exported(run).builds}
    if exported is None or not variants:
        raise InputError(f"{folder}", "a run without an export", remedy="add `- export` to its stages")
    if model not in variants:
        raise InputError(model, "not a model of this run", f"{one_of(list(variants))} is allowed{nearest(model, variants)}")
    return write_folder(Checkpoint(run.variants[variants[model]].path), exported.path / model, out)
