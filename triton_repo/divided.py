"""Writes the repository of a divided model that is not a language model: a Python model whose ranks answer every batch together.

    model_repository_ranks/
      README.md
      <variant>-tensor-parallel-<N>/
        config.pbtxt                 KIND_MODEL: the ranks take their devices themselves
        warmup/<bucket>.TEXT
        1/  model.py  settings.json  preprocess.py  long_text.py  windows.py  response.py  image.py  sound.py  preprocess.json
            tokenizer.json
            engine.py                `export.divided.served`
            rank-0-of-N/ ...         what `export.tensor_parallel` wrote
            foundation/  export/     the modules that the ranks import, and those that they import

Language models are divided by vLLM (`triton_repo.vllm`). Left out: starting the server, which is done where the devices are.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from foundation.artifacts.exported import Build, DividedVariant
from foundation.artifacts.triton import TritonModel
from foundation.core.engines import REFERENCE
from foundation.standalone import image, long_text, preprocess, response, sound, windows
from foundation.standalone.preprocess import Preprocessor
from triton_repo.config import ModelSettings, Scheduling
from triton_repo.layout import warm_up_rows
from triton_repo.own_modules import ROOT, modules, write_model

ENGINE, WORKER = "export/divided/served.py", "export/divided/worker.py"
PACKAGES = "torch transformers safetensors tokenizers pydantic psutil pillow"
NOT_RUN = "written, not run: it is served where its devices are"
STANDALONE = (preprocess, long_text, windows, response, image, sound)


def write_divided_repository(
    out: Path,
    exported: Path,
    divided: DividedVariant,
    build: Build,
    *,
    pairs: bool,
    max_batch_size: int,
    scheduling: Scheduling,
    threads: int,
) -> TritonModel:
    """Writes the repository; returns its entry of triton.json.

    Args:
        out: Folder to write into; created.
        exported: Folder of export.json.
        divided: The entry `divided` of export.json.
        build: A build of the same variant, for its preprocessing.
        pairs: Whether rows are pairs of texts.
        max_batch_size: Most rows of merged requests.
        scheduling: How requests come to the model.
        threads: CPU threads that the ranks share where they run on the CPU.
    """
    name, ranks, preprocessor = str(divided.folder), divided.ranks, Preprocessor.load(exported / build.folder)
    assert ranks is not None, "the export writes it"
    rows = dict(warm_up_rows(preprocessor, pairs))
    settings = ModelSettings(
        name=name,
        modality=preprocessor.modality,  # type: ignore[arg-type]
        pairs=pairs,
        width=len(preprocessor.labels),
        response=preprocessor.response,
        engine=REFERENCE,
        max_batch_size=max_batch_size,
        batch_sizes=(1,),
        mode="dynamic",
        properties={"ranks": str(ranks), "threads": str(max(1, threads // ranks))},
        warm_up=tuple(rows),
        scheduling=scheduling,
    )
    version = write_model(out, settings, preprocessor, "KIND_MODEL", files(ROOT), rows)
    for folder in sorted((exported / name).iterdir()):
        shutil.copytree(folder, version / folder.name)
    (out / "README.md").write_text(_README.format(name=name, ranks=ranks, packages=PACKAGES), encoding="utf-8")
    about = {"model": name, "variant": divided.variant, "precision": build.precision}
    return TritonModel(**about, engine=REFERENCE, mode="dynamic", float_precision="fp32")


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the Python files of a model, and their places in its folder.

    Args:
        root: Folder of the packages.
    """
    yield root / "triton_repo" / "cpu_model.py", "model.py"
    yield root / ENGINE, "engine.py"
    for module in STANDALONE:
        path = Path(str(module.__file__))
        yield path, path.name
    schemes = root / "foundation" / "schemes"  # the table of schemes imports their files by name
    needed = {path for start in (root / ENGINE, root / WORKER, *schemes.glob("*.py")) for path in modules(start, root)}
    for path in sorted({*needed, root / WORKER, *schemes.glob("*.py")}):
        yield path, str(path.relative_to(root))


_README = """\
# Model repository for Triton Inference Server: `{name}` on {ranks} devices

One Python model that starts {ranks} processes, one for each device. Each holds its part of every layer; they answer every batch together
and add up after the attention and the FFN of every block: by NCCL where there are {ranks} GPUs, by gloo on the CPU otherwise. It returns
what the undivided model returns.

In a Triton container with the Python backend:

    pip install {packages}
    tritonserver --model-repository=/models --disable-auto-complete-config

Give the container all {ranks} GPUs (`--gpus all`) and shared memory for NCCL (`--shm-size 1g`). Where a rank ends, the request that it
was at gets the error, and the next one starts all of them again.

This repository was written on a machine that did not serve it: check the answers before you rely on it.
"""
