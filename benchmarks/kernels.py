"""Prints what the machine code of every kernel uses, and how near to the limits of a GPU its work can come. Needs no GPU.

    python benchmarks/kernels.py [--capability 80 ...] [--kernel NAME ...]

Each kernel in `export/kernels` is compiled ahead of time at shapes of BERT-base (512 or 4096 rows of 768, 12 heads of 64, feed-forward of
3072), of BERT-large (4096 rows of 1024, also with 80 % of the blocks of its feed-forward zero) and of Llama-3-8B (batches of 16 or fewer
rows, 4096 inputs), for one GPU per compute capability. Columns:

    registers, spills, shared    of a thread, of the whole code, of a program in bytes
    hot loop                     matrix instructions, loads from shared memory (LDSM), copies into it, all others
    MB, Gop                      bytes of inputs and outputs, each once; operations
    op / byte                    intensity = operations / bytes
    share                        of the peak of the unit that memory allows: min(1, intensity * bandwidth / peak)
    floor, us                    max(bytes / bandwidth, operations / peak): no kernel is faster; no time was measured

The launches are those of `benchmarks.gpu.cases`, the peaks those of `benchmarks.gpu.peaks`. `make gpu-check` times the same launches.
"""

from __future__ import annotations

import argparse

from benchmarks.gpu.ahead_of_time import CAPABILITIES, FP16_MATRIX, INT8_MATRIX, Binary, at_capability, compiled, count
from benchmarks.gpu.cases import EVERY, META
from benchmarks.gpu.peaks import GPUS
from export.kernels.launch import Launch

HEADER = ["kernel", "sm", "registers", "spills", "shared", "hot loop", "MB", "Gop", "op / byte", "share", "floor, us"]


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES, help="compute capabilities")
    parser.add_argument("--kernel", nargs="+", choices=EVERY, default=list(EVERY), help="rows of the table")
    arguments = parser.parse_args()
    print(table(HEADER))
    print(table(["---"] * len(HEADER)))
    for name in arguments.kernel:
        launch = EVERY[name](META).launch
        for capability in arguments.capability:
            print(table(row(name, launch, compiled(at_capability(launch, capability), capability))), flush=True)


def row(name: str, launch: Launch, binary: Binary) -> list[str]:
    """Returns a row of the table."""
    gpu, cost = GPUS[binary.capability], launch.cost
    intensity = cost.operations / cost.num_bytes
    reached = min(1.0, intensity * gpu.bandwidth * 1e12 / gpu.peak(cost.unit))
    return [
        name, str(binary.capability), str(binary.registers), str(binary.spills), str(binary.shared_bytes), mix(binary),
        f"{cost.num_bytes / 1e6:.2f}", f"{cost.operations / 1e9:.3f}", f"{intensity:.1f}", f"{reached:.2f}",
        f"{1e6 * gpu.floor_s(cost):.1f}",
    ]  # fmt: skip


def mix(binary: Binary) -> str:
    """Returns the instructions of the hot loop in words."""
    loop = binary.hot_loop
    counts = {"int8": INT8_MATRIX, "fp16": FP16_MATRIX, "ldsm": ("LDSM",), "copy": ("LDGSTS", "UTMALDG")}
    found = {kind: count(loop, *names) for kind, names in counts.items()}
    return ", ".join(f"{number} {kind}" for kind, number in [*found.items(), ("other", loop.total() - sum(found.values()))] if number)


def table(cells: list[str]) -> str:
    """Returns a line of Markdown."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
