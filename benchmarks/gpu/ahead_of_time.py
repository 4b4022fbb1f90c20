"""Compiles a launch for a GPU that is not there, and reads its machine code: registers, spills, shared memory, instructions.

The compiler of the Triton language brings its own assembler (ptxas); `nvdisasm` and `cuobjdump` come from the packages
nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump. Tensors are only asked for shape and type, so those of the device `meta` do. As a launch on
a GPU does, arguments that are multiples of 16 are compiled as such, and numbers that are 1 and absent tensors as constants.

int8 matrix instructions by capability:

    80, 86, 89, 120   IMMA      16 x 8 x 32 a warp; 90 and 100 use it too where a tile has fewer rows than their own instruction
    90                IGMMA     64 x N x 32 a warp group, from shared memory
    100               UTCIMMA   128 x N x 32 a program, into tensor memory

IMMA saturates its sums at the ends of int32, which the sums of K < 2^17 products of two codes do not reach.

The hot loop is the innermost loop with the most matrix instructions, else the innermost loop. Its shortest pass leaves out what branches
skip: slow paths, and waits that have to be repeated. A spill is a load or a store of local memory
(LDL, STL): what the compiler writes when registers do not suffice.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from export.kernels import attention
from export.kernels.launch import Launch
from foundation.core.errors import InputError

CAPABILITIES = (80, 86, 89, 90, 100, 120)
INT8_MATRIX = ("IMMA.", "IGMMA.", "UTCIMMA")
FP16_MATRIX = ("HMMA.", "HGMMA.", "UTCHMMA")
SPILLS = ("LDL", "STL")
POINTERS = {
    "torch.float32": "*fp32", "torch.float16": "*fp16", "torch.bfloat16": "*bf16",
    "torch.int8": "*i8", "torch.uint8": "*u8", "torch.int32": "*i32", "torch.int64": "*i64",
}  # fmt: skip
LABEL = re.compile(r"^(\.L_x_\d+):$")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)(.*)$")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Limits:
    """What one program may use (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    shared_bytes: int
    """Shared memory of a program, with opt-in."""
    registers_per_thread: int = 255
    registers: int = 65536
    """Registers of a program."""
    tensor_memory_columns: int = 512
    """Columns of tensor memory; capability 100 alone has any."""


LIMITS = {
    80: Limits(163 * 1024),
    86: Limits(99 * 1024),
    89: Limits(99 * 1024),
    90: Limits(227 * 1024),
    100: Limits(227 * 1024),
    120: Limits(99 * 1024),
}


@dataclass(frozen=True)
class Binary:
    """A compiled launch."""

    name: str
    capability: int
    cubin: bytes
    ptx: str
    registers: int
    """Of one thread."""
    num_warps: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    instructions: Counter[str]
    """How often each instruction stands in the machine code, by its full name."""
    hot_loop: Counter[str]
    """The same of the hot loop; empty if there is no loop."""
    shortest_pass: Counter[str]
    """The same of the way through the hot loop with the fewest instructions."""
    ending: Counter[str]
    """The same of what follows the last matrix instruction: how the outputs are ended and stored. Empty if there is none."""
    code: tuple[str, ...] = ()
    """Lines of the machine code, as `nvdisasm` prints them."""

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return count(self.instructions, *SPILLS)

    @property
    def hot_loop_spills(self) -> int:
        """Loads and stores of local memory in the hot loop."""
        return count(self.hot_loop, *SPILLS)

    def over_limits(self) -> list[str]:
        """Returns in words which limits of its capability the binary exceeds."""
        limits, registers = LIMITS[self.capability], self.registers * self.num_warps * 32
        checks = {
            "registers of a thread": (self.registers, limits.registers_per_thread),
            "registers of a program": (registers, limits.registers),
            "bytes of shared memory": (self.shared_bytes, limits.shared_bytes),
            "columns of tensor memory": (self.tensor_memory_columns, limits.tensor_memory_columns),
            "spills in the hot loop": (self.hot_loop_spills, 0),
        }
        exceeded = [f"{used} {what}, {most} allowed" for what, (used, most) in checks.items() if used > most]
        return [f"{self.name} on sm_{self.capability}: {problem}" for problem in exceeded]


def count(instructions: Counter[str], *names: str) -> int:
    """Returns how many instructions begin with one of some names."""
    return sum(number for instruction, number in instructions.items() if instruction.startswith(names))


def at_capability(launch: Launch, capability: int) -> Launch:
    """Returns a launch as a GPU of a compute capability (80 for 8.0) starts it: some arguments depend on it by default."""
    if "LAZY" not in launch.arguments:
        return launch
    at, (query, values, out) = (capability // 10, capability % 10), (launch.arguments[name] for name in ("q", "v", "out"))
    arguments = {**launch.arguments, "LAZY": attention.lazy_at(at, query, values)}
    if values.dtype != torch.float32:
        return replace(launch, arguments=arguments)
    return replace(launch, arguments=arguments, num_warps=attention.float32_warps_at(at, query.shape[2], out.dtype))


def compiled(launch: Launch, capability: int) -> Binary:
    """Compiles a launch for a compute capability (80 for 8.0) and reads its machine code.

    Raises:
        InputError: The capability is unknown, or the process runs kernels in the interpreter.
    """
    if capability not in LIMITS:
        raise InputError("capability", f"{capability} given", f"{', '.join(map(str, LIMITS))} is allowed")
    if not isinstance(launch.kernel, JITFunction):
        raise InputError(
            "TRITON_INTERPRET", "set, so that kernels run in the interpreter and cannot be compiled", remedy="unset TRITON_INTERPRET"
        )
    kernel = triton.compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)
    metadata, cubin = kernel.metadata, kernel.asm["cubin"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        lines = _run("nvdisasm", "-c", str(path)).splitlines()
        usage = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", _run("cuobjdump", "-res-usage", str(path))))
    loop = _hot_loop(lines)
    return Binary(
        name=metadata.name,
        capability=capability,
        cubin=cubin,
        ptx=kernel.asm["ptx"],
        registers=int(usage["REG"]),
        num_warps=metadata.num_warps,
        stack_bytes=int(usage["STACK"]),
        shared_bytes=metadata.shared + int(usage["SHARED"]),
        tensor_memory_columns=metadata.tmem_size or 0,
        instructions=Counter(name for _, name, _ in _instructions(lines)),
        hot_loop=Counter(loop.names),
        shortest_pass=Counter(_shortest_pass(loop)),
        ending=_ending(lines),
        code=tuple(lines),
    )


def _source(launch: Launch) -> ASTSource:
    """Returns the kernel specialized to its arguments, as a launch on a GPU specializes it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for at, parameter in enumerate(launch.kernel.params):
        value = launch.given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):  # torch aligns memory to 16 bytes and more
            attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _type(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return POINTERS[str(value.dtype)]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def _run(tool: str, *arguments: str) -> str:
    """Returns what a tool of NVIDIA's packages prints."""
    files = importlib.metadata.files(f"nvidia-cuda-{tool}") or []
    path = next(str(file.locate()) for file in files if file.stem == tool)
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def _instructions(lines: list[str]) -> list[tuple[int, str, str]]:
    """Returns address, name and operands of every instruction."""
    found = [INSTRUCTION.match(line) for line in lines]
    return [(int(match[1], 16), match[2], match[3]) for match in found if match]


def _ending(lines: list[str]) -> Counter[str]:
    """Returns the instructions behind the last matrix instruction, without padding (NOP)."""
    names = [name for _, name, _ in _instructions(lines)]
    matrix = [at for at, name in enumerate(names) if name.startswith((*INT8_MATRIX, *FP16_MATRIX))]
    return Counter(name for name in names[matrix[-1] + 1 :] if not name.startswith("NOP")) if matrix else Counter()


@dataclass(frozen=True)
class _Loop:
    """The instructions from the target of a backward branch to the branch."""

    names: tuple[str, ...] = ()
    followers: tuple[tuple[int, ...], ...] = ()
    """Where in `names` each instruction may continue, forwards within the loop."""


def _hot_loop(lines: list[str]) -> _Loop:
    """Returns the hot loop; one without instructions where there is none."""
    instructions, labels, waiting, jumps = _instructions(lines), {}, [], []
    for line in lines:
        if label := LABEL.match(line):
            waiting.append(label[1])
        elif match := INSTRUCTION.match(line):
            labels.update(dict.fromkeys(waiting, int(match[1], 16)))
            waiting = []
            target = TARGET.search(match[3]) if match[2].startswith("BRA") else None
            always = "@" not in match[0].partition(match[2])[0] and "," not in match[3]  # a uniform predicate is an operand
            jumps.append((target[1], always) if target else None)
    place = {address: at for at, (address, _, _) in enumerate(instructions)}
    targets = [(place[labels[jump[0]]], jump[1]) if jump and jump[0] in labels else None for jump in jumps]
    loops = []
    for end, backwards in enumerate(targets):
        if backwards is None or backwards[0] >= end:
            continue
        start, followers = backwards[0], []
        for at, jump in enumerate(targets[start:end], start):
            ways = [at + 1] if jump is None or not jump[1] else []
            ways += [jump[0]] if jump is not None and at < jump[0] <= end else []
            followers.append(tuple(way - start for way in ways))
        loops.append(_Loop(tuple(name for _, name, _ in instructions[start : end + 1]), tuple(followers)))
    innermost = sorted(loops, key=lambda loop: len(loop.names))  # a loop around another has more instructions
    return max(innermost, key=lambda loop: count(Counter(loop.names), *INT8_MATRIX, *FP16_MATRIX), default=_Loop())


def _shortest_pass(loop: _Loop) -> list[str]:
    """Returns the instructions of the shortest way from the first to the last one."""
    last = len(loop.names) - 1
    if last < 0:
        return []
    length, follower = {last: 1}, {}  # from an instruction to the last one
    for at in range(last - 1, -1, -1):  # branches go forwards
        ways = [(length[other] + 1, other) for other in loop.followers[at] if other in length]
        if ways:
            length[at], follower[at] = min(ways)
    way = [0]
    while way[-1] in follower:
        way.append(follower[way[-1]])
    return [loop.names[at] for at in way]
