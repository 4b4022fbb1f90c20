"""Selects the exported build that the TensorRT repository serves, and the rival that it is timed against.

build      the last variant: int8 if it was quantized, its float part in 16 bits where the export chose so
rival      its float model in 16 bits: the graph that int8 has to beat on the same GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foundation.artifacts.artifact import Artifact
from foundation.artifacts.document import read
from foundation.artifacts.exported import Build, Exported, HalfGraph
from foundation.artifacts.triton import TritonModel
from foundation.core.engines import served_on
from foundation.core.errors import InputError
from foundation.measure.answers import load_logits
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor
from triton_repo.gpu.configs import Serving
from triton_repo.gpu.plans import Golden, Plans, Rival, Written, write_gpu_repository
from triton_repo.gpu.settings import Gpu
from triton_repo.layout import EXPORTED

HALVES = ("fp16", "bf16")
GOLDEN_ROWS = 64
ITSELF = "the plan is a float model in halves itself"
NO_RIVAL = "the export has no float model in halves; give export.float_precision auto, fp16 or bf16"


def write_gpu(parent: Artifact, context: Context, folder: Path, gpu: Gpu, serving: Serving) -> tuple[TritonModel, Written]:
    """Writes the repository of the last variant.

    Args:
        parent: The artifact of `export`.
        context: The context of the stage.
        folder: Folder to write into; created.
        gpu: How plans are built.
        serving: How the models are served.

    Returns:
        Its entry of triton.json, and what `write_gpu_repository` returned.

    Raises:
        InputError: The last variant was not evaluated in torch, so that there are no golden logits.
    """
    builds = read(Exported, parent.path / EXPORTED).builds
    build, half = deployed(builds)
    if build.variant not in context.predictions:
        raise InputError(build.variant, "was not evaluated in torch, so there are no golden logits")
    logits = load_logits(context.predictions[build.variant])
    rows = context.data.evaluation.rows
    chosen = np.linspace(0, len(rows) - 1, min(GOLDEN_ROWS, len(rows))).round().astype(np.int64)
    name = f"{build.variant}-{build.precision}"
    written = write_gpu_repository(
        folder,
        Plans(
            onnx=parent.path / (half.plain if half else str(build.onnx)),
            rival=rival(builds, build, parent.path),
            gpu=gpu,
            gemms=next((entry.gemms for entry in build.engines if entry.gemms), {}),
        ),
        Preprocessor.load(parent.path / build.folder),
        Golden([rows[index] for index in chosen], logits[chosen], context.data.evaluation.labels.unit(logits)),
        name=name,
        serving=serving,
    )
    about = {"model": name, "variant": build.variant, "precision": build.precision}
    rest = half.half if half else build.float_precision
    return TritonModel(**about, float_precision=rest, engine=served_on("cuda")[0], mode="static"), written


def deployed(builds: Sequence[Build]) -> tuple[Build, HalfGraph | None]:
    """Returns the build that a GPU serves, and its `half_graph`, None where its float part is fp32.

    It is the build of the last variant. If that variant is float, its fp16 build is served, unless the answers of an engine decide
    otherwise.
    """
    engine = served_on("cuda")[0]
    last = [build for build in builds if build.precision not in HALVES][-1]
    found = [build for build in builds if build.variant == last.variant and build.precision in HALVES]
    for build in [*found, last]:
        first = next((entry for entry in build.engines if entry.engine == engine), None)
        judged = build.precision if build.float_part is None else build.float_part.precision
        if first is not None and first.half_graph is not None and (build is last or judged == build.precision):
            return build, first.half_graph
    return last, None


def rival(builds: Sequence[Build], build: Build, root: Path) -> Rival:
    """Returns the float model in 16 bits that a build is timed against.

    Args:
        builds: The builds in export.json.
        build: The one that is served.
        root: Folder of export.json.
    """
    if build.precision in HALVES:
        return Rival(reason=ITSELF)
    for other in builds:
        graphs = [entry.half_graph for entry in other.engines if entry.half_graph is not None] if other.precision in HALVES else []
        if graphs:
            return Rival(root / graphs[-1].plain, graphs[-1].half)
    return Rival(reason=NO_RIVAL)
