"""llama.cpp as a peer: a checkpoint in its formats, and the process that reads them.

The file in float16 is written by `export.gguf`; the library's own quantizer makes the others of it, with its defaults: no importance
matrix, in Q4_K_M some matrices in Q6_K, and where a row has no whole blocks of 256 another format in place of Q4_K or Q6_K.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generation_peers

from export.gguf.write import write_gguf
from foundation.models.folder import Checkpoint

WORKER = Path(__file__).parents[1] / "workers" / "llama_generation_worker.py"
FLOAT, FORMATS = "F16", ("Q4_0", "Q4_K_M", "IQ4_NL", "Q8_0")


@dataclass(frozen=True)
class LlamaJob:
    """How to open a file in llama.cpp, as `foundation.measure.engine_process` asks for it."""

    python: str
    """Interpreter of an environment with llama-cpp-python."""
    file: Path
    precision: str
    threads: int

    @property
    def labels(self) -> dict[str, str]:
        """What its rows are marked with."""
        return {"engine": "llama.cpp", "mode": "own", "precision": self.precision, "float_precision": "fp32", "device": "cpu"}

    @property
    def command(self) -> list[str]:
        """Command line of its process."""
        return [self.python, "-P", str(WORKER)]

    def message(self) -> dict[str, Any]:
        """Returns the map that opens the file."""
        return {"file": str(self.file), "threads": self.threads}


def jobs(checkpoint: Path, out: Path, python: str, threads: int) -> dict[str, LlamaJob]:
    """Returns the formats by the name they have in the table; writes the files that are missing."""

    def write(folder: Path) -> None:
        source = folder / f"{FLOAT}.gguf"
        write_gguf(Checkpoint(checkpoint), source)
        quantize(source, python)

    folder = generation_peers.built(out / "llama-cpp", write)
    return {f"llama.cpp {name}": LlamaJob(python, folder / f"{name}.gguf", name, threads) for name in (FLOAT, *FORMATS)}


def quantize(source: Path, python: str) -> None:
    """Writes a file in float16 once more in each format, next to it.

    Raises:
        RuntimeError: The library refuses a format.
    """
    asked = [{"op": "quantize", "source": str(source), "target": str(source.with_stem(name)), "format": name} for name in FORMATS]
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    done = subprocess.run([python, "-P", str(WORKER)], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    for name, line in zip(FORMATS, done.stdout.splitlines(), strict=True):
        if "error" in (answer := json.loads(line)):
            raise RuntimeError(f"{name}: {answer['error']}")
