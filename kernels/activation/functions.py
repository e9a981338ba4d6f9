"""exp, log, tanh, the logistic function and the normal distribution as polynomials, for loops over vectors.

`math.exp` in a loop is a call for each element. These functions are plain arithmetic without a branch, for float32 and
float64, so LLVM computes 16 or 8 elements simultaneously. All but `log` compute e^x in three steps (Cody, Waite 1980):

1. reduce: x = n * ln 2 + r with an integer n, |r| <= ln(2) / 2; n * ln 2 is subtracted in two parts to keep r's digits;
2. approximate: e^r is a polynomial in r, so accurate that the rounding of float32 or float64 dominates the error
   (README.md says how its coefficients were computed);
3. combine: e^x = 2^n * e^r, where 2^n is obtained by writing n into the exponent's bits.

README.md lists the largest errors. NaN stays NaN. For an infinite x, a function returns its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.engine.jit import HAS_FMA, helper

# -- single instructions without a Python equivalent -------------------------------------------------------------


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    if not HAS_FMA:
        return builder.fadd(builder.fmul(x, y), z)
    name = "llvm.fma.f32" if isinstance(x.type, ir.FloatType) else "llvm.fma.f64"
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z in x's type, rounded only once if the CPU has an instruction for it."""
    return x(x, x, x), lambda context, builder, signature, arguments: _multiply_add(builder, *arguments)


@intrinsic
def choose(typing: Any, x: Any, for_float32: Any, for_float64: Any) -> Any:
    """Return for_float32 if x is a float32, otherwise for_float64, converted to x's type."""
    number = 1 if x == types.float32 else 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[number], signature.args[number], x)

    return x(x, types.float64, types.float64), generate


def polynomial(float32: Sequence[float], float64: Sequence[float]) -> Any:
    """Return a function p(x) = c0 + c1 * x + c2 * x^2 + ... by Horner's rule, with the coefficients for x's type."""

    @intrinsic
    def evaluate(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = context.get_value_type(x)
            total, *rest = (ir.Constant(kind, c) for c in reversed(float32 if x == types.float32 else float64))
            for c in rest:
                total = _multiply_add(builder, total, arguments[0], c)
            return total

        return x(x), generate

    return evaluate


class _Layout:
    """The bit layout of a float: size of the fraction, bias of the exponent, and an integer type of the same size."""

    def __init__(self, kind: Any) -> None:
        wide = kind == types.float64
        self.fraction, self.bias = (52, 1023) if wide else (23, 127)
        self.integer = ir.IntType(64 if wide else 32)
        self.float: Any = ir.DoubleType() if wide else ir.FloatType()

    def constant(self, value: int) -> Any:
        return ir.Constant(self.integer, value)


@intrinsic
def _times_power_of_2(typing: Any, y: Any, shifted: Any) -> Any:
    """Return y * 2^n. `shifted` is n + 1.5 * 2^(number of fraction bits), a float whose last bits contain n.

    y is multiplied by two powers of two, since 2^n alone may overflow or underflow where y * 2^n does not.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        bits = _Layout(y)
        zero = b.bitcast(ir.Constant(bits.float, 1.5 * 2.0**bits.fraction), bits.integer)
        n = b.sub(b.bitcast(arguments[1], bits.integer), zero)
        half = b.ashr(n, bits.constant(1))
        result = arguments[0]
        for exponent in (half, b.sub(n, half)):
            factor = b.shl(b.add(exponent, bits.constant(bits.bias)), bits.constant(bits.fraction))
            result = b.fmul(result, b.bitcast(factor, bits.float))
        return result

    return y(y, y), generate


@intrinsic
def _power_of_2(typing: Any, shifted: Any) -> Any:
    """Return 2^n in two instructions; `shifted` as in _times_power_of_2.

    In float32, n must be between -127 and 128; in float64, between -1023 and 1024. The result for the smallest n is 0,
    for the largest n infinity, and for all others exactly 2^n.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        bits = _Layout(shifted)
        n = b.shl(b.bitcast(arguments[0], bits.integer), bits.constant(bits.fraction))  # shifts the higher bits out
        return b.bitcast(b.add(n, bits.constant(bits.bias << bits.fraction)), bits.float)

    return shifted(shifted), generate


@intrinsic
def _split(typing: Any, x: Any) -> Any:
    """Return (m, n) with x = m * 2^n and sqrt(1/2) <= m < sqrt(2), for positive normal x."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        bits = _Layout(x)
        root = b.bitcast(ir.Constant(bits.float, 0.5**0.5), bits.integer)
        above = b.sub(b.bitcast(arguments[0], bits.integer), root)
        n = b.ashr(above, bits.constant(bits.fraction))
        m = b.add(b.and_(above, bits.constant(2**bits.fraction - 1)), root)
        return context.make_tuple(b, signature.return_type, [b.bitcast(m, bits.float), b.sitofp(n, bits.float)])

    return types.UniTuple(x, 2)(x), generate


# -- the functions -----------------------------------------------------------------------------------------------

# (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2
_exp_rest = polynomial(
    float32=(0.5, 0.16666576666119928, 0.04166655421298415, 0.008363232883682618, 0.0013926250831497611),
    float64=(
        0.5000000000000001, 0.16666666666666669, 0.041666666666623824, 0.008333333333330039, 0.0013888888917367081,
        0.00019841269863171557, 2.4801521057868204e-05, 2.7557268276905696e-06, 2.7620201591031547e-07,
        2.5100472505694996e-08,
    ),
)  # fmt: skip


@helper
def _nearest(x: float) -> tuple[float, float]:
    """Return the integer n nearest to x / ln 2, as a number and in the form that `_power_of_2` expects."""
    shift = choose(x, 1.5 * 2.0**23, 1.5 * 2.0**52)  # adding it rounds to an integer
    shifted = multiply_add(x, choose(x, 1.4426950408889634, 1.4426950408889634), shift)
    return shifted - shift, shifted


@helper
def _rise(r: float, n: float) -> float:
    """Subtract the second part of n * ln 2 from r (the caller subtracted the first). Return e^r - 1 for the new r."""
    r = multiply_add(n, choose(r, 2.12194440e-4, -1.42860682030941723212e-6), r)
    return multiply_add(r * r, _exp_rest(r), r)


@helper
def _reduce(x: float) -> tuple[float, float]:
    """For x = n * ln 2 + r, return e^r - 1, and n in the form that `_power_of_2` expects."""
    n, shifted = _nearest(x)
    return _rise(multiply_add(n, choose(x, -0.693359375, -0.693145751953125), x), n), shifted


@helper
def exp(x: float) -> float:
    low, high, one = choose(x, -104.0, -746.0), choose(x, 89.0, 710.0), choose(x, 1.0, 1.0)
    x = low if x < low else x  # beyond these limits, e^x is 0 or infinity
    x = high if x > high else x
    small, shifted = _reduce(x)
    return _times_power_of_2(small + one, shifted)


@helper
def logistic(x: float) -> float:
    """1 / (1 + e^-x)"""
    one, low, high = choose(x, 1.0, 1.0), choose(x, -88.0, -709.0), choose(x, 89.0, 710.0)  # for `_power_of_2`
    x = -x
    x = low if x < low else x
    x = high if x > high else x
    small, shifted = _reduce(x)
    return one / multiply_add(small + one, _power_of_2(shifted), one)


@helper
def tanh(x: float) -> float:
    """E / (E + 2), E = e^(2x) - 1. E is computed from e^r - 1: near 0, subtracting 1 from e^(2x) would lose digits."""
    one, two, limit = choose(x, 1.0, 1.0), choose(x, 2.0, 2.0), choose(x, 10.0, 20.0)  # beyond it, tanh is -1 or 1
    x = -limit if x < -limit else x
    x = limit if x > limit else x
    small, shifted = _reduce(two * x)
    power = _power_of_2(shifted)
    e = multiply_add(power, small, power - one)
    return e / (e + two)


# P is the standard normal distribution function. _tail_above(u) / _tail_below(u) approximates P(-u) * e^(u^2 / 2).
# README.md shows how the coefficients are computed. All of them are positive, so no sum loses digits.
_tail_above = polynomial(
    float32=(0.5000000026791287, 0.4377798046359855, 0.1828697304016904, 0.04051402462003528, 0.004099452920310062),
    float64=(
        0.5, 0.815437962450901, 0.6600974408631782, 0.34227221121093354, 0.12464767351188423, 0.03314871917015663,
        0.006508204847243955, 0.0009322050386497382, 9.352385641269547e-05, 5.970290510720498e-06,
        1.8606965235591383e-07,
    ),
)  # fmt: skip
_tail_below = polynomial(
    float32=(
        1.0, 1.6734445657524146, 1.200950433949132, 0.46850795035603787, 0.10156035625223239, 0.010275676133342338
    ),
    float64=(
        1.0, 2.4287604857046676, 2.7580653751581785, 1.9367434803608372, 0.9365172118040542, 0.32829482589999176,
        0.0853982781734723, 0.01654714699785379, 0.0023516568070517316, 0.00023489595028134547, 1.4965299002002441e-05,
        4.6640745164577704e-07,
    ),
)  # fmt: skip


@helper
def _normal_tail(x: float) -> tuple[float, float, float]:
    """Return (u, P(-u), e^(-u^2 / 2)) for u = min(|x|, limit)."""
    limit = choose(x, 13.26, 37.66)  # from here on, 2^n and the result are 0
    u = abs(x)
    u = limit if u > limit else u
    half = choose(x, -0.5, -0.5) * u
    n, shifted = _nearest(half * u)
    # A rounded u^2 / 2 is good enough to choose n. But r must be computed from the exact u^2 / 2: the rounding error of
    # a large u^2 / 2 would change e^r.
    r = multiply_add(half, u, choose(x, -0.693359375, -0.693145751953125) * n)
    power = _power_of_2(shifted)
    density = multiply_add(_rise(r, n), power, power)
    return u, density * (_tail_above(u) / _tail_below(u)), density


@helper
def normal_distribution(x: float) -> float:
    """P(x), the integral of the density from minus infinity to x; equal to (1 + erf(x / sqrt(2))) / 2."""
    _, tail, _ = _normal_tail(x)
    return tail if x < choose(x, 0.0, 0.0) else choose(x, 1.0, 1.0) - tail


@helper
def gelu_slope(x: float) -> float:
    """P(x) + x * p(x), the derivative of x * P(x), where p is the density."""
    u, tail, density = _normal_tail(x)
    below = multiply_add(choose(x, -0.3989422804014327, -0.3989422804014327) * density, u, tail)
    return below if x < choose(x, 0.0, 0.0) else choose(x, 1.0, 1.0) - below


# log(1 + f) = f - f^2 / 2 + s * (f^2 / 2 + s^2 * q(s^2)), s = f / (2 + f); q is from fdlibm (Sun Microsystems 1993)
_log_rest = polynomial(
    float32=(0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841),
    float64=(
        6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
        1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
    ),
)  # fmt: skip


@helper
def log(x: float) -> float:
    zero, half, two = choose(x, 0.0, 0.0), choose(x, 0.5, 0.5), choose(x, 2.0, 2.0)
    infinity = choose(x, float("inf"), float("inf"))
    small = x < choose(x, 2.0**-126, 2.0**-1022)  # a subnormal x is multiplied by 2^64, and 64 is subtracted from n
    m, n = _split(x * choose(x, 2.0**64, 2.0**64) if small else x)
    n = n - choose(x, 64.0, 64.0) if small else n
    f = m - choose(x, 1.0, 1.0)
    s = f / (two + f)
    square = s * s
    half_square = half * f * f
    rest = s * (half_square + square * _log_rest(square))
    low = multiply_add(n, choose(x, -2.12194440e-4, 1.42860682030941723212e-6), rest)
    y = multiply_add(n, choose(x, 0.693359375, 0.693145751953125), low - half_square + f)
    y = y if x < infinity else x  # infinity and NaN
    y = -infinity if x == zero else y
    return choose(x, float("nan"), float("nan")) if x < zero else y
