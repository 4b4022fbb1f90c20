"""Language models by the tools that a user would reach for instead, each with the settings that its documentation gives.

Needs the packages nncf, onnxruntime-genai, onnx-ir and ctranslate2; `pip install --no-deps` keeps the versions of everything else.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.generation.genai_folder import MODEL
from foundation.artifacts.artifact import writing
from foundation.machine.process import environment

WORKER = Path(__file__).parent / "workers" / "generation_worker.py"
LIBRARIES = ("onnxruntime-genai", "ctranslate2")
GROUP_SIZE = 64
"""Weights of an int4 scale in NNCF: its default of 128 divides no layer of a model that is 576 wide."""


@dataclass(frozen=True)
class PeerJob:
    """How to open an engine of another tool, as `foundation.measure.engine_process` asks for it."""

    library: str
    """onnxruntime-genai or ctranslate2."""
    precision: str
    folder: Path
    threads: int

    @property
    def labels(self) -> dict[str, str]:
        """What its rows are marked with."""
        return {"engine": self.library, "mode": "own", "precision": self.precision, "float_precision": "fp32", "device": "cpu"}

    @property
    def command(self) -> list[str]:
        """Command line of its process."""
        return [sys.executable, "-P", str(WORKER)]

    def message(self) -> dict[str, Any]:
        """Returns the map that opens the engine."""
        return {"library": self.library, "folder": str(self.folder), "threads": self.threads}


def nncf_weights(genai: Path, out: Path, settings: Mapping[str, Any]) -> None:
    """Compresses the weights of a float model for OpenVINO GenAI with NNCF.

    Args:
        genai: A folder that OpenVINO GenAI reads.
        out: Existing empty folder for the new model.
        settings: Arguments of `nncf.compress_weights`; the mode by its name.
    """
    import nncf
    import openvino

    shutil.copytree(genai, out, ignore=shutil.ignore_patterns("openvino_model.*"), dirs_exist_ok=True)
    model = openvino.Core().read_model(genai / MODEL)
    given = {**settings, "mode": getattr(nncf.CompressWeightsMode, settings["mode"])}
    openvino.save_model(nncf.compress_weights(model, **given), out / MODEL, compress_to_fp16=False)


def onnxruntime_genai(checkpoint: Path, out: Path, precision: str, threads: int) -> None:
    """Builds a model for ONNX Runtime GenAI with its own builder.

    Args:
        checkpoint: A float checkpoint.
        out: Existing empty folder.
        precision: fp32, or int4: its own settings, which are groups of 32, and tables and head in int4, too.
        threads: CPU threads.
    """
    given = {"-m": checkpoint, "-o": out, "-p": precision, "-e": "cpu", "-c": out / "cache"}
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *(str(part) for pair in given.items() for part in pair)]
    subprocess.run(command, env=environment(HF_HUB_OFFLINE="1"), check=True, stdout=subprocess.DEVNULL)
    settings = out / "genai_config.json"
    document = json.loads(settings.read_text(encoding="utf-8"))
    document["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    settings.write_text(json.dumps(document), encoding="utf-8")


def ctranslate2(checkpoint: Path, out: Path, precision: str) -> None:
    """Converts a checkpoint for CTranslate2.

    Args:
        checkpoint: A float checkpoint.
        out: Existing empty folder.
        precision: float32 or int8.
    """
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(checkpoint)).convert(str(out), quantization=precision, force=True)


def built(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns a folder, built unless it is there already; a build that fails leaves none."""
    if not folder.exists():
        with writing(folder) as temporary:
            build(temporary)
    return folder


def jobs(checkpoint: Path, out: Path, threads: int, libraries: Sequence[str]) -> dict[str, PeerJob]:
    """Returns the engines of these libraries by the name they have in the table; builds those that are missing."""
    builders: dict[str, tuple[str, str, Callable[[Path], None]]] = {
        "ONNX Runtime GenAI fp32": ("onnxruntime-genai", "fp32", lambda to: onnxruntime_genai(checkpoint, to, "fp32", threads)),
        "ONNX Runtime GenAI int4": ("onnxruntime-genai", "int4", lambda to: onnxruntime_genai(checkpoint, to, "int4", threads)),
        "CTranslate2 float32": ("ctranslate2", "float32", lambda to: ctranslate2(checkpoint, to, "float32")),
        "CTranslate2 int8": ("ctranslate2", "int8", lambda to: ctranslate2(checkpoint, to, "int8")),
    }
    return {
        name: PeerJob(library, precision, built(out / f"{library}-{precision}", build), threads)
        for name, (library, precision, build) in builders.items()
        if library in libraries
    }


NNCF: Mapping[str, Mapping[str, Any]] = {
    "OpenVINO GenAI, NNCF int8": {"mode": "INT8_ASYM"},
    "OpenVINO GenAI, NNCF int4": {"mode": "INT4_ASYM", "group_size": GROUP_SIZE, "ratio": 1.0},
    "OpenVINO GenAI, NNCF int4 symmetric": {"mode": "INT4_SYM", "group_size": GROUP_SIZE, "ratio": 1.0},
}
"""What NNCF makes without data: its defaults, tables and head in int8."""
