"""Operations on numbers that Numba does not offer in CUDA kernels.

    like(x, value)            value as a number of x's type: `1 - x` would compute in float64, `like(x, 1) - x` does not
    rounded_product(x, y)     x * y, rounded: the compiler would merge x * y + z to one multiply-add, which rounds once
    bits_of(x)                the bits of a float32, as int32
    of_bits(bits)             the float32 with these bits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from minidl.engine import cuda as _cuda  # noqa: F401  (explains a missing numba-cuda)

I32, F32 = ir.IntType(32), ir.FloatType()
Generated = tuple[Any, Callable[..., Any]]  # a signature, and the function that generates its LLVM instructions


@intrinsic
def like(typing: Any, x: Any, value: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.cast(builder, args[1], sig.args[1], sig.args[0])

    return x(x, value), generate


@intrinsic
def rounded_product(typing: Any, x: Any, y: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number, register = ("f64", "d") if sig.args[0] == types.float64 else ("f32", "f")
        function = ir.FunctionType(args[0].type, [args[0].type] * 2)
        text, constraints = f"mul.rn.{number} $0, $1, $2;", f"={register},{register},{register}"
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), args)

    return x(x, x), generate


@intrinsic
def bits_of(typing: Any, x: Any) -> Generated:
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], I32)


@intrinsic
def of_bits(typing: Any, bits: Any) -> Generated:
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)
