"""The device functions that all kernels round with: float32 to int8 codes as in `foundation.schemes.int8.quantize`, without a division.

    q = clamp(rint(x / s), LOW, 127)        x / s rounded as IEEE division, rint to the nearest integer, ties to even

`/` of the Triton language may be off by two units in the last place and so cross a tie; `div_rn` is rounded once, by a branch and a call
for every number. Here one reciprocal serves a whole tile, and each quotient is corrected once (Markstein 1990, IBM J. Res. Dev. 34(1)):

    r = 1 / s,   q0 = x r,   q1 = q0 + r (x - q0 s)          each rounded once: 3 instructions a number

The codes equal the codes of the division, for every finite x and every s from 2^-63 to 2^120 (`launch.check_step`):

    1. x is clamped to [LOW s, 127 s] first, which changes no code and keeps x r finite.
    2. q0 is within 1.5 units in the last place of x / s, so that q1 and the rounded x / s are both within 1 of it. Where x is more than 2
       units away from a tie (k + 1/2) s, both round to the same integer.
    3. Near a tie, every case is computed: powers of two cancel, as nothing underflows, and minus signs too. 2^23 significands of s, 128
       ties and the 7 floats around each: 7,516,192,768 quotients, no code differs (`python -m benchmarks.gpu.requantization`). Without
       the correction 290,476,358 do.

Adding 1.5 * 2^23, where the spacing of float32 is 1, rounds half to even and leaves the code in the lowest byte: the same addition on the
GPU and in the interpreter.

x must be finite: NaN and infinity have no code, and `foundation.schemes.int8.check_finite` is the check.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from foundation.schemes.scales import SMALLEST_SCALE

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter knows no PTX instructions."""
SPACING_ONE = tl.constexpr(1.5 * 2**23)
SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def int8_codes(x: tl.tensor, scale: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """Returns the codes of a float32 block, int8 in [LOW, 127]; `scale` is float32, from 2^-63 to 2^120, of a shape that broadcasts to the
    shape of `x`."""
    x = tl.minimum(tl.maximum(x, LOW * scale), 127.0 * scale)
    reciprocal = tl.div_rn(1.0, scale)
    steps = x * reciprocal
    return lowest_bytes(tl.fma(tl.fma(-steps, scale, x), reciprocal, steps) + SPACING_ONE)


@triton.jit
def int8_of_shifted(shifted: tl.tensor) -> tl.tensor:
    """Returns the integers that were rounded by adding 1.5 * 2^23, clamped to int8."""
    return lowest_bytes(tl.minimum(tl.maximum(shifted, SPACING_ONE - 128.0), SPACING_ONE + 127.0))


@triton.jit
def lowest_bytes(shifted: tl.tensor) -> tl.tensor:
    """Returns the lowest bytes of float32 numbers as int8."""
    if INTERPRETED or shifted.numel % 4 != 0:
        return shifted.to(tl.int32, bitcast=True).to(tl.int8)
    else:  # three instructions for four codes
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040; prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [shifted.to(tl.int32, bitcast=True)],
            tl.int8,
            True,
            4,
        )


@triton.jit
def scale_of_largest(largest: tl.tensor) -> tl.tensor:
    """Returns the scale that maps the largest |x| of a token to the code 127, as `foundation.schemes.int8.token_scale`; float32."""
    return tl.maximum(tl.div_rn(largest, 127.0), SMALLEST)
