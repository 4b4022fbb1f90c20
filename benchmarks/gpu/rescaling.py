"""Instructions of attention's loop over keys, with sums that every tile scales and sums scaled where a maximum grows. Needs no GPU.

    python -m benchmarks.gpu.rescaling [--capability 80 ...] [--case ...]

`a tile` counts the shortest pass through the loop (`ahead_of_time`): with lazy scaling, a tile in which no largest score has grown. On
capability 10.0 a loop holds two tiles. Registers and spills are those of the whole kernel.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.gpu.ahead_of_time import CAPABILITIES, Binary, compiled, count
from benchmarks.gpu.cases import META, attention_case

CASES = {
    "float16, heads of 64": (32, 384, 16, 64, torch.float16),
    "float16, heads of 128": (8, 2048, 32, 128, torch.float16),
    "int8 QK, heads of 64": (32, 384, 16, 64, torch.int8),
    "int8 QK, heads of 128": (8, 2048, 32, 128, torch.int8),
}
"""Arguments of `attention_case`."""


def scaled(case: str, lazy: bool, capability: int) -> Binary:
    """Compiles the attention of a case."""
    launch = attention_case(META, *CASES[case]).launch
    return compiled(replace(launch, arguments={**launch.arguments, "LAZY": lazy}), capability)


def of_a_tile(binary: Binary, scores: int) -> dict[str, int]:
    """Returns the instructions of one tile of keys, and some kinds of them.

    Args:
        binary: Attention.
        scores: Scores of a tile that a thread holds: each takes one MUFU.
    """
    tiles = count(binary.shortest_pass, "MUFU") // scores
    kinds = {"FMUL": ("FMUL",), "barriers": ("BAR",), "shuffles": ("SHFL",)}
    counts = {name: count(binary.shortest_pass, *names) for name, names in kinds.items()}
    return {name: number // tiles for name, number in {"a tile": binary.shortest_pass.total(), **counts}.items()}


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.rescaling", description="Instructions of attention's loop over keys.")
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=[80, 89, 90, 100])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    header = ["attention", "sm", "sums scaled", "a tile", "FMUL", "barriers", "shuffles", "registers", "spills"]
    print(f"| {' | '.join(header)} |\n| {' | '.join(['---'] * len(header))} |")
    for case in arguments.case:
        for capability in arguments.capability:
            for lazy in (False, True):
                binary = scaled(case, lazy, capability)
                counts = [*of_a_tile(binary, 32).values(), binary.registers, binary.spills]
                when = "where a maximum grows" if lazy else "in every tile"
                print(f"| {case} | {capability} | {when} | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
