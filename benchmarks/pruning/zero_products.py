"""What a product of matrices takes without its zero inputs and outputs: as `export: {zeros: auto}` times it, size by size.

    python benchmarks/pruning/zero_products.py [--engine openvino] [--rows 1024] [--threads N]

Each size is built twice as an engine of one layer, whole and without zero slices, and both take turns (export/product_times.py). Prints
the time without as a multiple of the time whole, for MiniLM's matrices in int8 and float32, with the share of the inputs that are read
and of the outputs that are written. Measurements are kept in the user's cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from export.graph.zero_slices import Extent
from export.product_times import ProductTimes, rounded
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.classes import ClassIds
from foundation.machine.environment import fingerprint
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context

SIZES = ((384, 384), (384, 1536), (1536, 384))
SHARES = ((0.75, 1.0), (1.0, 0.75), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.25))


def main() -> None:
    """Measures, and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="openvino", choices=("openvino", "onnxruntime"))
    parser.add_argument("--rows", type=int, default=1024, help="rows of the input: batch x tokens")
    parser.add_argument("--threads", type=int, help="threads of the engine; default: the cores of this machine")
    arguments = parser.parse_args()
    target = Target(engines=(arguments.engine,), batch_sizes=(1,), threads=arguments.threads)
    nothing = Split([], ClassIds(np.zeros(0, np.int64)))
    with tempfile.TemporaryDirectory() as folder:
        data, known = Data(nothing, nothing, nothing, ("no", "yes")), fingerprint()
        context = Context("text-classification", data, 128, target, 0, ConsoleProgress("quiet"), Path(folder), fingerprint=known)
        times = ProductTimes(context, Checkpoint(Path(folder)), Path(folder))
        print(table(times, arguments.rows))
    print(json.dumps(known, default=str))


def table(times: ProductTimes, rows: int) -> str:
    """Returns the Markdown table."""
    lines = ["| inputs x outputs | read | written | int8 | float32 |", "|" + " --- |" * 5]
    for inputs, outputs in SIZES:
        for read, written in SHARES:
            found = []
            for integer in (True, False):
                extent = rounded(Extent(inputs, outputs, int(read * inputs), int(written * outputs), integer))
                whole, without = times.of(extent, rows)
                found.append(f"{without / whole:.2f}x")
            lines.append(f"| {inputs} x {outputs} | {read:.0%} | {written:.0%} | {' | '.join(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
