"""Machine code without a GPU: int8 matrix instructions, registers, spills and shared memory within the limits, no approximate division."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from benchmarks.gpu.ahead_of_time import (
    CAPABILITIES,
    FP16_MATRIX,
    INT8_MATRIX,
    LIMITS,
    Binary,
    _ending,
    _hot_loop,
    _shortest_pass,
    at_capability,
    compiled,
    count,
)
from benchmarks.gpu.cases import (
    CASES,
    EVERY,
    META,
    Case,
    attention_case,
    embedding_case,
    gemm_case,
    norm_case,
    qkv_case,
    sparse_case,
    tensor_case,
    w4a16_case,
)
from benchmarks.kernels import row
from export.kernels import qkv, quantize
from export.kernels.epilogue import Output
from export.kernels.launch import Cost, Launch
from foundation.core.errors import InputError
from tests.export.kernels.calls import quantize_tensor

pytestmark = pytest.mark.whole

GEMM = "int8 GEMM, 4096 x 768 x 3072"
INT8_ON_100 = "UTCIMMA" if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else "IMMA.16832.S8.S8"
INT8 = dict.fromkeys((80, 86, 89, 120), "IMMA.16832.S8.S8") | {90: "IGMMA.64x128x32.S8.S8", 100: INT8_ON_100}
"""The int8 matrix instruction of a large tile; older releases of the language have none of their own for capability 100."""
ONCE = {name: CAPABILITIES[at % len(CAPABILITIES)] for at, name in enumerate(CASES)}
"""The capability at which a row of the table is compiled in every test run; the others, and larger shapes of the same kernels, are slow."""
OWN = (80, 90, 100)
"""Capabilities whose matrix instructions differ."""
APPROXIMATE = ("SiLU",)
"""Kernels whose bounds allow an approximate division; the others quantize, and must not have one."""
MATRIX = [
    pytest.param(name, capability, marks=[] if capability == ONCE.get(name) or (name == GEMM and capability in OWN) else pytest.mark.slow)
    for name in EVERY
    for capability in CAPABILITIES
]


@pytest.mark.first(4)
@pytest.mark.parametrize(("name", "capability"), MATRIX)
def test_code_is_within_the_limits(name: str, capability: int) -> None:
    launch = EVERY[name](META).launch
    binary = compiled(at_capability(launch, capability), capability)
    assert binary.over_limits() == []
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.registers > 0
    assert 0 < float(row(name, launch, binary)[-2]) <= 1
    instructions = {"int8": INT8_MATRIX, "fp16": FP16_MATRIX, "fp32": ()}[launch.cost.unit]
    assert not instructions or count(binary.hot_loop, *instructions) > 0
    assert "div.full.f32" not in binary.ptx or any(kind in name for kind in APPROXIMATE)
    assert "tf32" not in binary.ptx
    if name == GEMM:
        assert count(binary.hot_loop, INT8[capability]) == (64 if INT8[capability].startswith("IMMA") else 4)
        assert count(binary.instructions, *FP16_MATRIX) == 0
        assert "fma.rn.f32" not in binary.ptx  # each operation is rounded on its own, as in the reference


ONES: dict[str, Callable[[], Case]] = {
    "quantize per tensor": lambda: tensor_case(META, 1, 1),
    "gemm": lambda: gemm_case(META, 1, 1, 1, Output("gelu", scale=0.1)),
    "block-sparse": lambda: sparse_case(META, 1, 32, 32, 32, 1),
    "norm": lambda: norm_case(META, 1, 1, True),
    "embedding": lambda: embedding_case(META, 1, 1),
    "w4a16": lambda: w4a16_case(META, 1, 1, 2, 1),
    "attention": lambda: attention_case(META, 1, 1, 1, 1, torch.float16),
    "qkv": lambda: qkv_case(META, 1, qkv.Heads(1, 1, 32), 1, True),
}
"""Lengths of 1 are compiled as constants, which are no tensors in the kernel."""


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ONES)
def test_lengths_of_one_compile(name: str) -> None:
    assert compiled(ONES[name]().launch, 90).over_limits() == []


@pytest.mark.slow
def test_compiling_and_interpreting_go_together(interpreted: Callable[..., Any]) -> None:
    codes = interpreted(quantize_tensor, torch.ones(3), 0.5)
    binary = compiled(quantize.tensor_launch(META.empty(3), 0.5, META.empty(3, dtype=torch.int8)), 90)
    assert codes.tolist() == [2, 2, 2]
    assert "div.rn.f32" in binary.ptx


def test_a_process_that_interprets_does_not_compile(interpreted: Callable[..., Any]) -> None:
    launch = quantize.tensor_launch(META.empty(3), 0.5, META.empty(3, dtype=torch.int8))
    with pytest.raises(InputError, match="unset TRITON_INTERPRET"):
        interpreted(compiled_again, launch.arguments, 90)
    with pytest.raises(InputError, match="80, 86"):
        compiled(launch, 75)


def compiled_again(arguments: dict[str, Tensor], capability: int) -> Binary:
    return compiled(Launch(quantize.quantize_tensor_kernel, (1,), arguments, Cost(1, 1, "fp32")), capability)


@pytest.mark.slow
def test_too_few_registers_spill_and_are_told() -> None:
    launch = CASES[GEMM](META).launch
    starved = compiled(replace(launch, arguments={**launch.arguments, "TILE_O": 64, "TILE_I": 32}, num_warps=1), 90)
    assert starved.hot_loop_spills > 0
    assert any("spills in the hot loop, 0 allowed" in problem for problem in starved.over_limits())


def test_limits_are_told() -> None:
    binary = Binary("k", 86, b"", "", 256, 16, 0, LIMITS[86].shared_bytes + 1, 513, Counter(), Counter(), Counter(), Counter())
    assert binary.over_limits() == [
        "k on sm_86: 256 registers of a thread, 255 allowed",
        "k on sm_86: 131072 registers of a program, 65536 allowed",
        "k on sm_86: 101377 bytes of shared memory, 101376 allowed",
        "k on sm_86: 513 columns of tensor memory, 512 allowed",
    ]


def test_the_hot_loop_is_the_innermost_with_matrix_instructions() -> None:
    code = """
.L_x_0:
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/                   IMMA.16832.S8.S8.SAT R4, R8.ROW, R10.COL, R4 ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   IADD3 R1, R1, R2, RZ ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/                   BRA.U UP0, `(.L_x_0) ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
""".splitlines()
    assert _hot_loop(code).names == ("IMMA.16832.S8.S8.SAT", "STL", "BRA")
    assert _hot_loop(code[-2:]).names == ()
    assert _shortest_pass(_hot_loop(code[-2:])) == []
    assert _ending(code) == Counter({"STL": 1, "BRA": 4, "IADD3": 1, "BRA.U": 1})
    assert _ending(code[6:]) == Counter()


def test_the_shortest_pass_leaves_out_what_branches_skip() -> None:
    code = """
.L_x_0:
        /*0010*/                   MOV R1, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   FMUL R4, R4, R5 ;
        /*0040*/                   FMUL R5, R5, R5 ;
.L_x_1:
        /*0050*/                   BRA.U !UP0, `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0080*/               @P2 BRA `(.L_x_4) ;
.L_x_3:
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/               @P1 BRA `(.L_x_0) ;
.L_x_4:
        /*00b0*/                   EXIT ;
""".splitlines()
    assert _shortest_pass(_hot_loop(code)) == ["MOV", "BRA", "BRA.U", "BRA", "STL", "BRA"]
    assert _shortest_pass(_hot_loop([line for line in code if "0060" not in line]))[3:] == ["HMMA.16816.F32", "BRA", "STL", "BRA"]
