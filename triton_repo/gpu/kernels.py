"""Writes the repository of the engine that runs on our own kernels: one Python model, without the training environment.

    model_repository_kernels/
      README.md
      <variant>-<precision>/
        config.pbtxt
        warmup/<bucket>.TEXT, or warmup/image.IMAGE
        1/  model.py  settings.json  cpu_model.py  preprocess.py  long_text.py  preprocess.json  tokenizer.json  response.py
            engine.py  plan.safetensors  (image.py)
            compress/  export/          the modules that engine.py imports, and those that they import

What a server needs of ours is found by following the imports of `export/fused/served.py`; all of it is copied into the folder of the model.
Kernels are compiled, tiles measured and passes recorded where the model starts, on its GPU: there is nothing to build, and nothing fits one
GPU only.

Language models are written by `triton_repo.generation.layout`.

Left out: AOTInductor packages for Triton's PyTorch backend, which is beta there; starting the server, which is done where the GPU is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from foundation.artifacts.document import read
from foundation.artifacts.exported import Build, Engine, Exported
from foundation.artifacts.triton import TritonModel
from foundation.core.engines import ENGINES
from foundation.standalone import long_text, preprocess, response, windows
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES
from triton_repo.config import ModelSettings, Scheduling
from triton_repo.layout import EXPORTED, beside, warm_up_rows
from triton_repo.own_modules import ROOT, modules, write_model

SERVED = "export/fused/served.py"
PLAN = "plan.safetensors"
PACKAGES = "torch triton safetensors tokenizers pillow 'numpy<2'"
NOT_RUN = "written, not run: it is served in NVIDIA's container, where there is a GPU"


def build_on_kernels(exported: Path) -> tuple[Build, Engine] | None:
    """Returns the last build that an engine on our own kernels runs, and the recommended mode of this engine; None without one.

    Args:
        exported: Folder of export.json.
    """
    for build in reversed(read(Exported, exported / EXPORTED).builds):
        for entry in build.engines:
            if entry.runnable and ENGINES[entry.engine].serves == "kernels":
                return build, entry
    return None


def write_kernel_repository(
    out: Path,
    exported: Path,
    build: Build,
    entry: Engine,
    *,
    pairs: bool,
    batch_sizes: tuple[int, ...],
    max_batch_size: int,
    scheduling: Scheduling,
) -> TritonModel:
    """Writes the repository; returns its entry of triton.json.

    Args:
        out: Folder to write into; created.
        exported: Folder of export.json.
        build: The build, of export.json.
        entry: Its engine.
        pairs: Whether rows are pairs of texts.
        batch_sizes: Rows that passes are recorded for; 1 is added.
        max_batch_size: Most rows of merged requests; passes are recorded for it, too.
        scheduling: How requests come to the model; its processes are those on each GPU.
    """
    name, folder = f"{build.variant}-{build.precision}", exported / build.folder
    preprocessor = Preprocessor.load(folder)
    rows = dict(warm_up_rows(preprocessor, pairs))
    settings = ModelSettings(
        name=name,
        modality=preprocessor.modality,  # type: ignore[arg-type]
        pairs=pairs,
        width=preprocessor.width,
        response=preprocessor.response,
        engine=entry.engine,
        max_batch_size=max_batch_size,
        batch_sizes=tuple(sorted({1, max_batch_size, *(size for size in batch_sizes if size <= max_batch_size)})),
        mode=entry.mode,
        properties={"float_precision": str(entry.float_precision), "lengths": " ".join(map(str, preprocessor.buckets))},
        warm_up=tuple(rows),
        scheduling=scheduling,
    )
    decoding = ((Path(file), Path(file).name) for file in beside(preprocessor))
    version = write_model(out, settings, preprocessor, "KIND_GPU", (*files(ROOT), *decoding), rows)
    shutil.copyfile(exported / str(entry.file), version / PLAN)
    outputs = ", ".join(f"`{output.name}`" for output in RESPONSES[preprocessor.response].outputs(preprocessor.width))
    (out / "README.md").write_text(_README.format(name=name, packages=PACKAGES, outputs=outputs), encoding="utf-8")
    about = {"model": name, "variant": build.variant, "precision": build.precision}
    return TritonModel(**about, engine=entry.engine, mode=entry.mode, float_precision=entry.float_precision)


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the Python files of a model, and their places in its folder.

    Args:
        root: Folder of the packages.
    """
    yield Path(__file__).with_name("kernels_model.py"), "model.py"
    yield root / "triton_repo" / "cpu_model.py", "cpu_model.py"
    yield Path(preprocess.__file__), "preprocess.py"
    yield Path(long_text.__file__), "long_text.py"
    yield Path(response.__file__), "response.py"
    yield Path(windows.__file__), "windows.py"
    yield root / SERVED, "engine.py"
    for path in modules(root / SERVED, root):
        yield path, str(path.relative_to(root))


_README = """\
# Model repository for Triton Inference Server: `{name}` on fused int8 kernels

One Python model that tokenizes the text or decodes the image, runs the encoder without padding on the GPU of its instance, and returns
{outputs}. The kernels are written in the Triton language and compiled when the model starts; that takes a minute for
the first time. Which tiles are fastest is measured then, and remembered in `$XDG_CACHE_HOME/compress`: mount a folder there to keep it.

In a Triton container with the Python backend, whose Python needs `numpy` below 2, and a C compiler for the launchers of kernels:

    pip install {packages}
    tritonserver --model-repository=/models --disable-auto-complete-config

This repository was written on a machine that did not serve it: check the answers before you rely on it.
"""
