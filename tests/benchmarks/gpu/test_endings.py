"""How an int8 GEMM is ended, in instructions: no division for a code, and GELU in less than half of what erf takes."""

from collections import Counter

import pytest

from benchmarks.gpu.ahead_of_time import LIMITS, count
from benchmarks.gpu.endings import ENDINGS, ended, kinds_of

pytestmark = pytest.mark.whole

SLOW_PATHS = ("FCHK", "CALL")


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)])
def test_gelu_ends_in_about_half_the_instructions_of_erf_and_without_spills(capability: int) -> None:
    exact, fitted, plain = (ended(ENDINGS[name], capability) for name in ("GELU, exact", "GELU, fitted", "requantize"))
    assert fitted.ending.total() < 0.6 * exact.ending.total()
    assert plain.ending.total() < fitted.ending.total()
    for binary in (exact, fitted, plain):
        assert binary.spills == 0
        assert count(binary.instructions, *SLOW_PATHS) <= 4  # for the scale; a division for each of 64 codes would have 128
    assert count(fitted.ending, "MUFU") == 2 * 64 + count(plain.ending, "MUFU")


def test_every_instruction_is_of_one_kind() -> None:
    counts = kinds_of(Counter({"FMUL": 2, "I2FP.F32.S32": 3, "MUFU.EX2": 1, "STG.E.128": 4, "MOV": 5, "IMAD.MOV.U32": 1}))
    assert counts == {"scale": 5, "special": 1, "clamp": 0, "bytes": 0, "branches": 0, "memory": 4, "moves": 6}


@pytest.mark.slow
def test_two_programs_of_float_outputs_share_a_multiprocessor_of_a_hopper() -> None:
    for name in ("float16", "requantize"):
        binary = ended(ENDINGS[name], 90)
        assert 2 * 32 * binary.num_warps * binary.registers <= LIMITS[90].registers
        assert 2 * binary.shared_bytes <= LIMITS[90].shared_bytes
