"""The device function that all kernels round with: float32 to int8 codes, as `foundation.schemes.int8.quantize` does it.

    q = clamp(rint(x / s), LOW, 127)        x / s rounded as IEEE division, rint to the nearest integer, ties to even

`/` of the Triton language may be off by two units in the last place and so cross a tie; `div_rn` is rounded once.
The values are clamped first, which changes nothing since the bounds are integers. Then adding and subtracting 1.5 * 2^23, where the spacing
of float32 is 1, rounds half to even: the same two additions on the GPU and in the interpreter.

x must be finite: NaN and infinity have no code, and `foundation.schemes.int8.check_finite` is the check.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundation.schemes.scales import SMALLEST_SCALE

SPACING_ONE = tl.constexpr(1.5 * 2**23)
SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def int8_codes(x: tl.tensor, scale: tl.tensor, LOW: tl.constexpr) -> tl.tensor:
    """Returns the codes of a float32 block, int8 in [LOW, 127]; `scale` is float32, positive, of a shape that broadcasts to the shape of
    `x`."""
    steps = tl.minimum(tl.maximum(tl.div_rn(x, scale), LOW), 127.0)
    return ((steps + SPACING_ONE) - SPACING_ONE).to(tl.int8)


@triton.jit
def scale_of_largest(largest: tl.tensor) -> tl.tensor:
    """Returns the scale that maps the largest |x| of a token to the code 127, as `foundation.schemes.int8.token_scale`; float32."""
    return tl.maximum(tl.div_rn(largest, 127.0), SMALLEST)
