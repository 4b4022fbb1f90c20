"""GELU, its tanh form, SiLU and ReLU that end in int8 codes: y in, clamp(rint(f(y) / s), -128, 127) out. The method trades accuracy for
speed.

ReLU(y) = max(y, 0) is exact by every method. The others are y times a share of y: GELU(y) = y Phi(y), SiLU(y) = y sigmoid(y), and Phi is a
sigmoid too, of an odd polynomial:

    exact       erf of CUDA; the quotient as by IEEE division (`rounding`)
    fitted      share = 1 / (1 + 2^e),          e = -log2(e) y (c0 + c1 y^2 + .. + c6 y^12)
    logistic    the same with c0 to c4 of its own
    tanh        share = 1/2 + tanh(t) / 2,      t = y (d0 + d1 y^2) / 2
                then code = rint(y (1 / s) share), rounded once: one fused multiply-add onto 1.5 * 2^23

The polynomials are minimax fits of log(Phi / (1 - Phi)), weighted by the effect of an error on y Phi(y): at most 7.0e-8 with seven
coefficients (and 1.1e-7 of the share), 3.1e-6 with five and 2.8e-4 with two. All grow with |y| without an end, so that the share is 0 or 1
far out. SiLU needs none: e = -log2(e) y. The tanh form of GELU (`gelu_new`) is by definition y sigmoid(y (t0 + t1 y^2)) with
t0 = 2 sqrt(2 / pi) and t1 = 0.044715 t0.

Bounds, in steps of s, on how far the value that is rounded lies from the exact f(y) / s: a code differs from the correctly rounded one
only where f(y) / s lies that near to a tie, and then by 1. ex2.approx and rcp.approx are good to 2^-22 relative, tanh.approx to 2^-10.987
(PTX ISA, floating point instructions).

    exact, fitted   2^-20 |y| / s + 2^-16                                  see `epilogue`
    logistic        (3.1e-6 + 2^-19 |f(y)|) / s + 2^-16                    SiLU, tanh form without the 3.1e-6
    tanh            (2.8e-4 + 2^-12 |y|) / s + 2^-15                       SiLU, tanh form without the 2.8e-4

So `fitted` has the bound of `exact` with half of its instructions, and is the default. Its error: the share is off by 1.1e-7 by the fit,
2^-24 by rounding e (|e| 2^e / (1 + 2^e)^2 is at most 0.33, times 4 roundings), 2^-24 by ex2, and relatively 2^-22 by rcp and 2^-24 by
the sum below it; 1 / s and y (1 / s) are off by 2^-24 each: together less than 2^-20.
"""

from __future__ import annotations

import math
from typing import Literal

import triton
import triton.language as tl

from export.kernels.rounding import INTERPRETED, SPACING_ONE, int8_codes, int8_of_shifted

Activation = Literal["none", "gelu", "gelu_tanh", "silu", "relu"]
Method = Literal["exact", "fitted", "logistic", "tanh"]
METHOD: Method = "fitted"
"""Default of the kernels."""
HALF_ROOT = tl.constexpr(0.5**0.5)
LOG2_E = math.log2(math.e)
FITTED_LOGIT = (1.59576845, 7.26685673e-2, -6.62600214e-5, -1.10480309e-4, 7.93821710e-6, -2.66892727e-7, 3.61123087e-9)
"""c0 to c6; the interpreter has exact functions instead of instructions, and smaller errors."""
LOGIT = (1.59565627, 7.29375821e-2, -2.49723371e-4, -6.11619929e-5, 2.23816323e-6)
"""c0 to c4 of `logistic`."""
SHORT_LOGIT = (1.60031416, 6.940179e-2)
"""d0 and d1."""
C0, C1, C2, C3, C4 = (tl.constexpr(-LOG2_E * c) for c in LOGIT)
F0, F1, F2, F3, F4, F5, F6 = (tl.constexpr(-LOG2_E * c) for c in FITTED_LOGIT)
D0, D1 = (tl.constexpr(d / 2) for d in SHORT_LOGIT)
SILU_EXPONENT = tl.constexpr(-LOG2_E)
TANH_LOGIT = (2 * math.sqrt(2 / math.pi), 2 * 0.044715 * math.sqrt(2 / math.pi))
"""t0 and t1."""
T0, T1 = (tl.constexpr(-LOG2_E * t) for t in TANH_LOGIT)
H0, H1 = (tl.constexpr(t / 2) for t in TANH_LOGIT)
N0, N1 = (tl.constexpr(-t) for t in TANH_LOGIT)


@triton.jit
def activated(y: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Returns f(y) for a block of float32."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * HALF_ROOT))
    if ACTIVATION == "gelu_tanh":
        y = y / (1.0 + tl.exp(y * (N0 + N1 * (y * y))))
    if ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    return y


@triton.jit
def activation_codes(y: tl.tensor, scale: tl.tensor, ACTIVATION: tl.constexpr, METHOD: tl.constexpr) -> tl.tensor:
    """Returns the codes of f(y), int8 in [-128, 127]; y is a block of float32, `scale` one positive float32."""
    if METHOD == "exact" or ACTIVATION == "none" or ACTIVATION == "relu":
        return int8_codes(activated(y, ACTIVATION), scale, -128)
    else:
        share = share_by_tanh(y, ACTIVATION) if METHOD == "tanh" else share_logistic(y, ACTIVATION, METHOD)
        return int8_of_shifted(tl.fma(y * tl.div_rn(1.0, scale), share, SPACING_ONE))


@triton.jit
def share_logistic(y: tl.tensor, ACTIVATION: tl.constexpr, METHOD: tl.constexpr) -> tl.tensor:
    """Returns f(y) / y by a power of two and a reciprocal."""
    square = y * y
    if ACTIVATION == "gelu" and METHOD == "fitted":
        terms = tl.fma(tl.fma(tl.fma(square, F6, F5), square, F4), square, F3)
        exponent = y * tl.fma(tl.fma(tl.fma(terms, square, F2), square, F1), square, F0)
    elif ACTIVATION == "gelu":
        exponent = y * tl.fma(tl.fma(tl.fma(tl.fma(square, C4, C3), square, C2), square, C1), square, C0)
    elif ACTIVATION == "gelu_tanh":
        exponent = y * tl.fma(square, T1, T0)
    else:
        exponent = y * SILU_EXPONENT
    return reciprocal_approximate(1.0 + exp2_approximate(exponent))


@triton.jit
def share_by_tanh(y: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Returns f(y) / y by a hyperbolic tangent."""
    if ACTIVATION == "gelu":
        angle = y * tl.fma(y * y, D1, D0)
    elif ACTIVATION == "gelu_tanh":
        angle = y * tl.fma(y * y, H1, H0)
    else:
        angle = 0.5 * y
    return tl.fma(tanh_approximate(angle), 0.5, 0.5)


@triton.jit
def exp2_approximate(x: tl.tensor) -> tl.tensor:
    """Returns 2^x for float32 by one instruction."""
    if INTERPRETED:
        return tl.exp2(tl.minimum(x, 127.0))
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def reciprocal_approximate(x: tl.tensor) -> tl.tensor:
    """Returns 1 / x for float32 by one instruction."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def tanh_approximate(x: tl.tensor) -> tl.tensor:
    """Returns tanh x for float32 by one instruction."""
    if INTERPRETED:
        return 1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * x, 80.0)))
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
