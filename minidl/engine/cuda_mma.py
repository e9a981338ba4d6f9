"""Instructions of tensor cores, which multiply small matrices. All 32 threads of a warp execute them together.

    ldmatrix(shared, i)         four matrices of 8 x 4 words; each thread passes the index of the first word of a row
    to_tf32(x)                  x rounded to TF32: a float32 with 10 bits of fraction; ties away from 0
    to_bf16(low, high)          two float32 rounded to BF16 (7 bits of fraction, ties to even), in one word
    multiply_tf32(c, a, b)      c (16 x 8) + a (16 x 8) @ b (8 x 8)
    multiply_bf16(c, a, b)      c (16 x 8) + a (16 x 16) @ b (16 x 8)

Words are uint32, c contains float32. A matrix is distributed over the threads: with g = lane // 4 and t = lane % 4,

    ldmatrix       word m is element (g, t) of matrix m; threads 8 m to 8 m + 7 pass the rows of matrix m
    c              (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
    a in TF32      (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)          b in TF32      (t, g), (t + 4, g)

In BF16, a word of a or b contains two elements: k = 2t and 2t + 1 instead of t, 2t + 8 and 2t + 9 instead of t + 4.
Source: "Parallel Thread Execution ISA", section on warp-level matrix instructions. Compute capability 8.0 or higher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .cuda_memory import I32, SHARED, Generated, _pointer

F32 = ir.FloatType()
FOUR_FLOATS, FOUR_WORDS, TWO_WORDS = (
    types.UniTuple(types.float32, 4), types.UniTuple(types.uint32, 4), types.UniTuple(types.uint32, 2)
)  # fmt: skip


def _assembly(builder: Any, text: str, constraints: str, args: list[Any], result: Any, effect: bool = False) -> Any:
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), args)


def _tuple(context: Any, builder: Any, sig: Any, value: Any) -> Any:
    parts = [builder.extract_value(value, i) for i in range(sig.return_type.count)]
    return context.make_tuple(builder, sig.return_type, parts)


@intrinsic
def ldmatrix(typing: Any, shared: Any, index: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        at = builder.ptrtoint(builder.addrspacecast(at, at.type.pointee.as_pointer(SHARED)), I32)
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        words = ir.LiteralStructType([I32] * 4)
        return _tuple(
            context, builder, sig, _assembly(builder, text, "=r,=r,=r,=r,r,~{memory}", [at], words, effect=True)
        )

    return FOUR_WORDS(shared, index), generate


@intrinsic
def to_tf32(typing: Any, x: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _assembly(builder, "cvt.rna.tf32.f32 $0, $1;", "=r,f", list(args), I32)

    return types.uint32(types.float32), generate


@intrinsic
def to_bf16(typing: Any, low: Any, high: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _assembly(builder, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", list(args), I32)

    return types.uint32(types.float32, types.float32), generate


def _multiply(shape: str, number: str) -> Callable[..., Any]:
    """Return the code generator of c + a @ b."""
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{number}.{number}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        c, a, b = ([builder.extract_value(t, i) for i in range(n)] for t, n in zip(args, (4, 4, 2)))
        result = ir.LiteralStructType([F32] * 4)
        value = _assembly(builder, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *c], result)
        return _tuple(context, builder, sig, value)

    return generate


@intrinsic
def multiply_tf32(typing: Any, c: Any, a: Any, b: Any) -> Generated:
    return FOUR_FLOATS(FOUR_FLOATS, FOUR_WORDS, TWO_WORDS), _multiply("m16n8k8", "tf32")


@intrinsic
def multiply_bf16(typing: Any, c: Any, a: Any, b: Any) -> Generated:
    return FOUR_FLOATS(FOUR_FLOATS, FOUR_WORDS, TWO_WORDS), _multiply("m16n8k16", "bf16")
