"""Instructions that end an int8 GEMM, from the machine code: everything behind the last matrix instruction. Needs no GPU.

    python -m benchmarks.gpu.endings [--capability 80 ...] [--ending fitted ...]

The product is BERT-large's first feed-forward layer, 4096 x 4096 x 1024, with one scale for the input, in a tile of 128 x 128 x 128 with 8
warps: a thread ends 64 sums. Rows are ways to end it, columns the kinds of instructions:

    scale      I2F, FMUL, FADD, FFMA of all kinds        special   MUFU: 2^x, 1 / x, tanh
    clamp      FMNMX                                     bytes     PRMT, LOP3, SGXT, F2I, I2I
    branches   BRA, CALL, BSSY, BSYNC, FCHK: the slow paths of a division
    memory     LDG, STS, LDS, LDSM, STG, BAR             moves     MOV, IMAD.MOV and whatever is left
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import get_args

from benchmarks.gpu.ahead_of_time import CAPABILITIES, Binary, compiled
from benchmarks.gpu.cases import META
from export.kernels import gemm
from export.kernels.activation_codes import Method
from export.kernels.epilogue import Output
from export.kernels.gemm import Tile

SHAPE = (4096, 4096, 1024)
"""Rows, outputs, inputs."""
TILE = Tile(128, 128, 128, 8, 3)
ENDINGS: dict[str, Output] = {
    "float16": Output(),
    "requantize": Output(scale=0.1),
    **{f"GELU, {method}": Output("gelu", scale=0.1, method=method) for method in get_args(Method)},
}
KINDS = {
    "scale": ("I2F", "FMUL", "FADD", "FFMA"),
    "special": ("MUFU",),
    "clamp": ("FMNMX",),
    "bytes": ("PRMT", "LOP3", "SGXT", "F2I", "I2I", "F2FP"),
    "branches": ("BRA", "CALL", "BSSY", "BSYNC", "FCHK", "RET"),
    "memory": ("LDG", "STS", "LDS", "STG", "BAR"),
}


def ended(output: Output, capability: int, tile: Tile = TILE) -> Binary:
    """Compiles the product with an ending."""
    rows, outputs, inputs = SHAPE
    x, weight, out = META.codes(rows, inputs), META.weight(outputs, inputs), META.empty(rows, outputs, dtype=output.stored)
    return compiled(gemm.launch(x, 0.02, weight, output, out, tile), capability)


def kinds_of(instructions: Counter[str]) -> dict[str, int]:
    """Returns how many instructions are of each kind; `moves` is the rest."""
    counts = dict.fromkeys((*KINDS, "moves"), 0)
    for name, number in instructions.items():
        counts[next((kind for kind, names in KINDS.items() if name.startswith(names)), "moves")] += number
    return counts


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.endings", description="Instructions that end an int8 GEMM.")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=[80, 89, 90, 100])
    parser.add_argument("--ending", nargs="+", choices=ENDINGS, default=list(ENDINGS))
    arguments = parser.parse_args()
    header = ["ending", "sm", "instructions", *KINDS, "moves", "registers", "spills", "in halves"]
    print(f"| {' | '.join(header)} |\n| {' | '.join(['---'] * len(header))} |")
    halves = Tile(TILE.rows, TILE.outputs, TILE.inputs, TILE.num_warps, TILE.num_stages, True)
    for name in arguments.ending:
        for capability in arguments.capability:
            binary, other = ended(ENDINGS[name], capability), ended(ENDINGS[name], capability, halves)
            counts = [binary.ending.total(), *kinds_of(binary.ending).values(), binary.registers, binary.spills, other.registers]
            print(f"| {name} | {capability} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
