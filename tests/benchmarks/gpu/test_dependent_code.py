"""Dependent launches in machine code: no load, store or end before the wait, on any way; without them the code is what it was.

A kernel as it was is made of the source of its module, from which everything about dependent launches is removed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import launch_kinds
from benchmarks.gpu.ahead_of_time import Binary, at_capability, compiled
from benchmarks.gpu.cases import EVERY, META
from benchmarks.gpu.dependent_code import CAPABILITIES, GLOBAL, LAUNCHES, PREFETCH, costs, faults, machine_code
from export.kernels import (
    attention,
    block_sparse,
    embedding,
    gated,
    gemm,
    norm,
    paged_attention,
    pooling,
    qkv,
    quantize,
    w4a16,
    w8a16,
)  # fmt: skip
from export.kernels.launch import Launch

pytestmark = pytest.mark.whole

MODULES = (attention, block_sparse, embedding, gated, gemm, norm, paged_attention, pooling, qkv, quantize, w4a16, w8a16)
ATTENTION = "packed attention, float16, 32 of 128 rows, 12 x 64"
TENSOR = "quantize per tensor, 4096 x 768"
MATRIX = [
    pytest.param(name, capability, marks=[] if (name, capability) == (TENSOR, 90) else pytest.mark.slow)
    for name in LAUNCHES
    for capability in CAPABILITIES
]
PLAIN = (
    (r"^from export\.kernels\.dependent_launch import .*\n", ""),
    (r"^    if DEPENDENT:\n(        .*\n)+", ""),
    (r"^    wait_for_inputs\(DEPENDENT\)\n", ""),
    (r",?\s*DEPENDENT: tl\.constexpr", ""),
)
"""Edits that make a module what it was."""
NEVER = ((r"^    wait_for_inputs\(DEPENDENT\)\n", ""),)
AFTER_RETURN = ((r"(?s)    wait_for_inputs\(DEPENDENT\)\n(.*?        return\n)", r"\1    wait_for_inputs(DEPENDENT)\n"),)
AFTER_LOADS = ((r"^    wait_for_inputs\(DEPENDENT\)\n((    .*\n){2})", r"\1    wait_for_inputs(DEPENDENT)\n"),)


def edited(launch: Launch, edits: tuple[tuple[str, str], ...], folder: Path) -> Launch:
    """Returns the launch of a kernel whose module is edited."""
    module = sys.modules[launch.kernel.fn.__module__]
    text = Path(str(module.__file__)).read_text()
    for pattern, new in edits:
        text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert count > 0 or pattern == PLAIN[1][0], pattern
    path = folder / f"{module.__name__.rpartition('.')[2]}_edited.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return replace(launch, kernel=getattr(made, launch.kernel.fn.__name__))


def launch_of(name: str, capability: int = 90) -> Launch:
    return at_capability(LAUNCHES[name](META).launch, capability)


def dependent(launch: Launch, capability: int = 90) -> Binary:
    return compiled(replace(launch, dependent=True), capability)


@pytest.mark.parametrize(("name", "capability"), MATRIX)
def test_every_kernel_waits_first_and_costs_nothing_in_plain_launches(name: str, capability: int, tmp_path: Path) -> None:
    launch = launch_of(name, capability)
    plain, waiting = compiled(launch, capability), dependent(launch, capability)
    assert faults(waiting) == []
    assert (waiting.ptx.count("griddepcontrol.wait"), waiting.ptx.count("griddepcontrol.launch_dependents")) == (1, 1)
    assert costs(plain, waiting) == []
    assert waiting.over_limits() == []
    assert "griddepcontrol" not in plain.ptx
    assert machine_code(plain) == machine_code(compiled(edited(launch, PLAIN, tmp_path), capability))


def test_every_kernel_is_among_them() -> None:
    kernels = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
    assert {make(META).launch.kernel.fn.__name__ for make in LAUNCHES.values()} == kernels
    assert {make(META).launch.kernel.fn.__name__ for make in EVERY.values()} == kernels
    source = "".join(Path(str(module.__file__)).read_text() for module in MODULES)
    assert source.count("wait_for_inputs(DEPENDENT)\n") == source.count("DEPENDENT: tl.constexpr") == len(kernels) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "edits", "wanted"),
    [
        (ATTENTION, NEVER, ["LDG.E", "EXIT", "never lets the next kernel start (PREEXIT)", "never waits (ACQBULK)"]),
        (ATTENTION, AFTER_RETURN, ["LDG.E", "a thread ends"]),
        ("int8 GEMM, 64 x 768 x 3072", NEVER, ["LDGSTS", "never lets"]),
        ("mean of tokens, 32 of 128 rows, 768", AFTER_LOADS, ["LDG.E"]),
    ],
)
def test_a_wait_that_is_missing_or_late_is_found(name: str, edits: tuple[tuple[str, str], ...], wanted: list[str], tmp_path: Path) -> None:
    found = faults(dependent(edited(launch_of(name), edits, tmp_path)))
    assert all(any(word in fault for fault in found) for word in wanted), found


def test_a_missing_wait_is_found(tmp_path: Path) -> None:
    found = faults(dependent(edited(launch_of(TENSOR), NEVER, tmp_path)))
    assert any("LDG" in fault and "on global memory before the wait" in fault for fault in found)
    assert any("never lets" in fault for fault in found)


CODE = """
k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ISETP.NE.AND P0, PT, R4, RZ, PT ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   PREEXIT ;
.L_x_2:
        /*0050*/                   LDG.E R0, desc[UR28][R2.64] ;
        /*0060*/                   EXIT ;
.L_x_0:
        /*0070*/                   CCTL.E.PF2 [R6] ;
        /*0080*/                   ACQBULK ;
        /*0090*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*00a0*/                   BRA `(.L_x_1);
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("@P0 BRA", "@P0 EXIT", "EXIT at instruction 2: a thread ends before the wait"),
        ("        /*0080*/                   ACQBULK ;\n", "", "LDG.E at instruction 5: it is on global memory before the wait"),
        ("/*0080*/                   ACQBULK", "/*0080*/               @P1 ACQBULK", "LDG.E at instruction 5"),
        ("CCTL.E.PF2", "CCTL.IVALL", "CCTL.IVALL at instruction 7: it is on global memory before the wait"),
        ("CCTL.E.PF2 [R6]", "CALL.REL.NOINC R6", "CALL.REL.NOINC at instruction 7: a jump that is not followed before the wait"),
        ("LDC R1, c[0x0][0x28]", "PREEXIT", "PREEXIT at instruction 0: it lets the next kernel start before the wait"),
        ("PREEXIT", "NOP", "it never lets the next kernel start (PREEXIT)"),
        ("ACQBULK", "NOP", "it never waits (ACQBULK)"),
        ("CCTL.E.PF2 [R6]", "UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR7", None),
        ("LDG.E R0", "UTCATOMSWS.FIND_AND_SET.ALIGN R0", "at instruction 5: it asks for tensor memory behind PREEXIT"),
        ("ISETP.NE.AND P0, PT, R4, RZ, PT", "REDG.E.ADD desc[UR4][R2.64], R4", "REDG.E.ADD at instruction 1"),
    ],
)
def test_every_way_is_followed(binary: Callable[..., Binary], old: str, new: str, fault: str | None) -> None:
    found = faults(binary(CODE.replace(old, new) if old else CODE))
    assert (found == []) if fault is None else any(fault in one for one in found), found


def test_what_is_on_global_memory() -> None:
    touching = [
        "LDG.E.128",
        "LD.E",
        "ST.E",
        "STG.E",
        "LDGSTS.E.BYPASS.128",
        "ATOMG.E.ADD",
        "RED.E.ADD",
        "UTMALDG.2D",
        "UBLKCP",
        "CCTL.IVALL",
    ]
    others = [
        "LDC",
        "LDCU",
        "ULDC",
        "LDS",
        "LDSM.16",
        "LDL",
        "STS",
        "STL",
        "ATOMS.ADD",
        "REDUX.MAX",
        "LDTM.x32",
        "STTM",
        "LDGDEPBAR",
        "SHFL",
    ]
    assert [name for name in touching if not GLOBAL.match(name)] == []
    assert [name for name in others if GLOBAL.match(name)] == []
    assert PREFETCH.match("CCTL.E.PF2")


@pytest.fixture
def binary() -> Callable[..., Binary]:
    def made(code: str = "", registers: int = 30, spills: int = 0) -> Binary:
        from collections import Counter

        counts: Any = Counter({"STL": spills})
        return Binary("k", 90, b"", "", registers, 4, 0, 0, 0, counts, Counter(), Counter(), Counter(), tuple(code.splitlines()))

    return made


def test_costs(binary: Callable[..., Binary]) -> None:
    plain = binary(registers=30)
    assert costs(plain, binary(registers=40)) == []
    assert costs(plain, binary(registers=41, spills=2)) == [
        "k on sm_90: 2 spills, 0 in a plain launch",
        "k on sm_90: 11 registers more than a plain launch, 10 allowed",
    ]


@pytest.mark.slow
def test_the_rehearsal_of_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "launches.json"
    command = [sys.executable, "-m", "benchmarks.gpu.figures", str(file), "--only", "launches", "--rehearse"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True)
    found = json.loads(file.read_text())
    assert [row["shape"] for row in found["rows"]] == [f"{rows} x {length}" for rows, length in launch_kinds.TINY_SHAPES]
    assert all(row["differs"] is None and row["plain_ms"] > 0 and row["dependent_ms"] > 0 for row in found["rows"])
    assert done.stdout.count("all bits equal") == 2
