"""What the machine code of a kernel does before it waits for the kernel before it (`export.kernels.dependent_launch`). Needs no GPU.

    ACQBULK    griddepcontrol.wait
    PREEXIT    griddepcontrol.launch_dependents
    CCTL..PF2  prefetch.global.L2, the only instruction on global memory that may come before the wait
    UTCATOMSWS.FIND    tcgen05.alloc, which blocks until another program of the multiprocessor gives tensor memory back (capability 10.0)

`faults` follows every way through the code from its beginning to a wait. On none of them may a thread load, store, end, let the next kernel
start, or jump where the code does not say. Behind the point where the next kernel may start, no program may ask for tensor memory: programs
of the next kernel could have it, and wait for this one. As the compiler is free to move instructions, it is the machine code that is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.gpu.ahead_of_time import LABEL, Binary
from benchmarks.gpu.cases import EVERY, Case, Make, Maker, gemm_case
from export.kernels.epilogue import Output
from export.kernels.gemm import Tile

CAPABILITIES = (90, 100, 120)
WAIT, LAUNCH, ALLOCATE, PREFETCH = "ACQBULK", "PREEXIT", "UTCATOMSWS.FIND", re.compile(r"CCTL\.E\.PF")
GLOBAL = re.compile(
    r"(LD|LDG|LDGSTS|LDGMC|ST|STG|STGMC|ATOM|ATOMG|RED|REDG|MATCH|QSPC|CCTL|CCTLL|UTMA\w*|UBLK\w*|SU\w+|TEX|TLD4?|TXQ|TMML|FOOTPRINT|ERRBAR)"
    r"(\.|$)"
)
"""Instructions on global memory, those included that no kernel of ours has."""
JUMPS = re.compile(r"(BRX|BRXU|JMP|JMX|JMXU|CALL|RET|RTT|BREAK|KILL|BPT|LEPC|WARPSYNC\.COLLECTIVE|NANOTRAP)(\.|$)")
"""Jumps that are not followed, and what goes with them."""
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)$")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
MORE_REGISTERS = 10
"""By how many registers of a thread a dependent launch may exceed the plain one: addresses of what is prefetched."""
NAMES = (
    "quantize per tensor, 4096 x 768",
    "quantize per token, 16 x 14336",
    "int8 GEMM + GELU + requantize, 4096 x 3072 x 768",
    "int8 GEMM, 64 x 768 x 3072",
    "int8 GEMM + SiLU, 16 x 14336 x 4096",
    "residual + LayerNorm + quantize, 4096 x 768",
    "residual + RMSNorm + quantize, 16 x 4096",
    "embedding + LayerNorm + quantize, 4096 x 768",
    "block-sparse GEMM 64, a quarter left, 4096 x 768 x 3072",
    "block-sparse GEMM 64, a quarter left, 16 x 768 x 3072",
    "w4a16 GEMM, groups of 128, 1 x 14336 x 4096",
    "w8a16 GEMM, 8 x 50257 x 768",
    "packed attention, float16, 32 of 128 rows, 12 x 64",
    "packed attention, float32, 32 of 128 rows, 12 x 64",
    "packed attention, int8 QK, 32 of 128 rows, 12 x 64",
    "packed attention, bias of distances, float16, 32 of 128 rows, 12 x 64",
    "causal attention, float16, 4 of 1024 rows, 12 x 64",
    "attention to pages, float16, 8 of 1024, 12 x 64",
    "attention to pages, float32, 8 of 8192, 32 + 8 x 128",
    "attention to pages, spans combined, 8 of 1024, 12 x 64",
    "int8 QKV, 4096 x 768, 12 x 64",
    "int8 QKV + rotary, QK in int8, 16 x 4096, 32 + 8 x 128",
    "int8 gate and up + SiLU + requantize, 4096 x 1536 x 576",
    "int8 gate and up + SiLU + requantize, 16 x 14336 x 4096",
    "mean of tokens, 32 of 128 rows, 768",
)
"""Launches of every kernel."""
TILES = (Tile(64, 64, 128, 4, 3, persistent=True), Tile(128, 128, 128, 8, 3, True), Tile(128, 128, 128, 8, 3, persistent=True))
"""Tiles of a GEMM whose code is another one."""


def tiled(make: Maker, tile: Tile) -> Case:
    """Returns a GEMM in a tile."""
    case = gemm_case(make, 4096, 3072, 768, Output("gelu", scale=0.1))
    assert case.tiled is not None, "the tile of a GEMM can be chosen"
    return replace(case, launch=case.tiled(tile))


LAUNCHES: dict[str, Make] = {
    **{name: EVERY[name] for name in NAMES},
    **{f"int8 GEMM in {tile}": partial(tiled, tile=tile) for tile in TILES},
}
"""Every kernel in every form, at sizes of models."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    always: bool
    """Whether it runs whatever a predicate says."""
    target: str | None
    """Label that it branches to."""
    jumps_out: bool
    """Whether it is a branch to no label."""


def faults(binary: Binary) -> list[str]:
    """Returns in words what a dependent launch does before its wait that it must not, and where it asks for tensor memory too late."""
    instructions, labels = _parsed(binary.code)
    starts = [at for at, one in enumerate(instructions) if one.name.startswith(LAUNCH)]
    before, waited = _reached(instructions, labels, [0], WAIT)
    behind, _ = _reached(instructions, labels, starts)
    problems = ((at, _problem(instructions[at])) for at in sorted(before))
    found = [f"{instructions[at].name} at instruction {at}: {problem} before the wait" for at, problem in problems if problem is not None]
    late = sorted(at for at in behind if instructions[at].name.startswith(ALLOCATE))
    found += [f"{instructions[at].name} at instruction {at}: it asks for tensor memory behind {LAUNCH}" for at in late]
    found += [] if starts else [f"it never lets the next kernel start ({LAUNCH})"]
    found += [] if waited else [f"it never waits ({WAIT})"]
    return [f"{binary.name} on sm_{binary.capability}: {problem}" for problem in found]


def _reached(
    instructions: Sequence[_Instruction], labels: Mapping[str, int], starts: Sequence[int], end: str | None = None
) -> tuple[set[int], bool]:
    """Returns the instructions on all ways from some of them until those with a name, and whether any of these was met."""
    waiting, seen, met = list(starts), set[int](), False
    while waiting:
        at = waiting.pop()
        if at in seen or at >= len(instructions):
            continue
        one = instructions[at]
        if end is not None and one.name.startswith(end) and one.always:
            met = True
            continue
        seen.add(at)
        if one.name.startswith("BRA") and one.target in labels:
            waiting.append(labels[str(one.target)])
        if not (one.always and one.name.startswith(("BRA", "EXIT", "RET"))):
            waiting.append(at + 1)
    return seen, met


def costs(plain: Binary, dependent: Binary) -> list[str]:
    """Returns in words what a dependent launch takes more than the plain one and may not: spills, and registers beyond `MORE_REGISTERS`."""
    more, found = dependent.registers - plain.registers, list[str]()
    if dependent.spills > plain.spills:
        found.append(f"{dependent.spills} spills, {plain.spills} in a plain launch")
    if more > MORE_REGISTERS:
        found.append(f"{more} registers more than a plain launch, {MORE_REGISTERS} allowed")
    return [f"{dependent.name} on sm_{dependent.capability}: {problem}" for problem in found]


def machine_code(binary: Binary) -> list[str]:
    """Returns the instructions with their addresses and operands, without names of sections and files."""
    return [line.strip() for line in binary.code if LINE.match(line)]


def _problem(one: _Instruction) -> str | None:
    if one.name.startswith(LAUNCH):
        return "it lets the next kernel start"
    if one.name.startswith("EXIT"):
        return "a thread ends"
    if JUMPS.match(one.name) or one.jumps_out:
        return "a jump that is not followed"
    if GLOBAL.match(one.name) and not PREFETCH.match(one.name):
        return "it is on global memory"
    return None


def _parsed(code: Sequence[str]) -> tuple[list[_Instruction], Mapping[str, int]]:
    """Returns the instructions, and the instruction behind each label."""
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in code:
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := LINE.match(line):
            name, target, branches = match[3], TARGET.search(match[4]), match[3].startswith("BRA")
            always = match[2] is None and not (branches and "," in match[4])  # a uniform predicate is an operand
            instructions.append(_Instruction(name, always, target[1] if target else None, branches and target is None))
    return instructions, labels
