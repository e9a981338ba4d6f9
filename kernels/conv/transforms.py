"""Winograd's three matrices, and the code that multiplies by them: straight lines of additions, written as LLVM IR.

F(m, r) computes m outputs of a 1-D convolution with r taps in n = m + r - 1 multiplications instead of m r:

    y (m,) = AT [ (G g) * (BT d) ]        g (r,) the taps, d (n,) the inputs, * element by element

It is polynomial multiplication: G and A evaluate two polynomials at n points, BT takes the product's coefficients from
its values there (Toom and Cook; transposed, as Winograd did). In 2-D each matrix is applied along both axes.

The points decide what rounding costs: 0, +-1, +-2 and infinity, the usual ones for n = 6, lose four times as many digits as
0, +-3/4, +-3/2 and infinity, which cost as many instructions (measured in WINOGRAD.md).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.jit import HAS_FMA, VECTOR_BYTES

Matrix = list[list[Fraction]]
FOUR_POINTS = [Fraction(0), Fraction(1), Fraction(-1)]  # and infinity
SIX_POINTS = [Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)]  # and infinity


def matrices(points: list[Fraction], m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    """AT (m, n), G (n, r), BT (n, n) for these n - 1 points and infinity."""
    at_infinity = [Fraction(0)]
    a = [[p**i for i in range(m)] for p in points] + [at_infinity * (m - 1) + [Fraction(1)]]
    g, bt = [], []
    for i, p in enumerate(points):
        others = points[:i] + points[i + 1 :]
        bt.append([*_product(others), Fraction(0)])
        scale = _value(bt[i], p)
        g.append([p**k / scale for k in range(r)])
    g.append(at_infinity * (r - 1) + [Fraction(1)])
    bt.append(_product(points))
    return transposed(a), g, bt


def _product(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients, constant first, of the product of (x - root)."""
    c = [Fraction(1)]
    for root in roots:
        c = [x - root * y for x, y in zip([Fraction(0), *c], [*c, Fraction(0)], strict=True)]
    return c


def _value(coefficients: list[Fraction], x: Fraction) -> Fraction:
    return sum((c * x**i for i, c in enumerate(coefficients)), Fraction(0))


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


# -- a matrix times a column of vectors, as few instructions as one finds by hand ----------------------------


def multiply(matrix: Matrix, x: list[_Vector]) -> list[_Vector]:
    """matrix @ x, where each x[k] is a vector register.

    Points come as p and -p, so rows (of BT, G and A) or columns (of AT and GT) come in pairs that agree but for signs:
    two such rows share an even and an odd part, E + O and E - O; two such columns only meet as a sum or a difference.
    """
    matrix, x = _pair_columns(matrix, x)
    result: list[Any] = [None] * len(matrix)
    for i, row in enumerate(matrix):
        if result[i] is not None:
            continue
        j = next((j for j in range(i + 1, len(matrix)) if _paired(row, matrix[j])), None)
        if j is None:
            result[i] = _combine(list(zip(row, x, strict=True)))
            continue
        even = _combine([(c, v) for c, d, v in zip(row, matrix[j], x, strict=True) if c == d])
        odd = [(c, v) for c, d, v in zip(row, matrix[j], x, strict=True) if c == -d != 0]
        factor = min((c for c, _ in odd), key=lambda f: sum(not _exact(c / f) for c, _ in odd))
        part = _combine([(c / factor, v) for c, v in odd])
        result[i], result[j] = even.plus(factor, part), even.plus(-factor, part)
    return result


def _exact(x: Fraction) -> bool:
    """Whether binary numbers hold it: the denominator is a power of two."""
    return x.denominator & (x.denominator - 1) == 0


def _paired(row: list[Fraction], other: list[Fraction]) -> bool:
    same = any(c == d != 0 for c, d in zip(row, other, strict=True))
    opposite = any(c == -d != 0 for c, d in zip(row, other, strict=True))
    return same and opposite and all(abs(c) == abs(d) for c, d in zip(row, other, strict=True))


def _pair_columns(matrix: Matrix, x: list[_Vector]) -> tuple[Matrix, list[_Vector]]:
    columns, values = transposed(matrix), list(x)
    for j in range(len(columns)):
        for k in range(j + 1, len(columns)):
            if _paired(columns[j], columns[k]):
                plus = [c if c == d else Fraction(0) for c, d in zip(columns[j], columns[k], strict=True)]
                minus = [c if c == -d else Fraction(0) for c, d in zip(columns[j], columns[k], strict=True)]
                columns[j], columns[k] = plus, minus
                one = Fraction(1)
                values[j], values[k] = values[j].plus(one, values[k]), values[j].plus(-one, values[k])
                break
    return transposed(columns), values


def _combine(terms: list[tuple[Fraction, _Vector]]) -> _Vector:
    """The sum of coefficient x vector; one that needs no multiplication begins."""
    (first, total), *rest = sorted(((c, v) for c, v in terms if c), key=lambda term: term[0] != 1)
    total = total.times(first)
    for coefficient, vector in rest:
        total = total.plus(coefficient, vector)
    return total


class _Vector:
    """One vector register while code is being written."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def times(self, factor: Fraction) -> _Vector:
        if factor == 1:
            return self
        return _Vector(self.builder, self.builder.fmul(self.value, _constant(self.value.type, factor)))

    def plus(self, factor: Fraction, other: _Vector) -> _Vector:
        """self + factor other, rounded once where the CPU can."""
        b, kind = self.builder, self.value.type
        if factor == 1:
            return _Vector(b, b.fadd(self.value, other.value))
        if factor == -1:
            return _Vector(b, b.fsub(self.value, other.value))
        if not HAS_FMA:
            return self.plus(Fraction(1), other.times(factor))
        suffix = f"v{kind.count}f{32 if isinstance(kind.element, ir.FloatType) else 64}"
        fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{suffix}")
        return _Vector(b, b.call(fma, [other.value, _constant(kind, factor), self.value]))


def _constant(kind: Any, value: Fraction) -> Any:
    return ir.Constant(kind, [float(value)] * kind.count)


# -- in two dimensions, from memory to memory -------------------------------------------------------------------


def make_transform(matrix: Matrix) -> Any:
    """transform(x, x_at, x_row, x_column, y, y_at, y_row, y_column): Y = matrix X matrix^T, for one vector of channels

    X[i][j] are the numbers from x[x_at + i x_row + j x_column] on, as many as a vector holds; Y[i][j] the same in y.
    """

    @intrinsic
    def transform(typing: Any, x: Any, x_at: Any, x_row: Any, x_column: Any,
                  y: Any, y_at: Any, y_row: Any, y_column: Any) -> Any:  # fmt: skip
        size = types.int64
        signature = types.void(x, size, size, size, y, size, size, size)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _Transform(context, builder, signature, arguments)
            code.emit(matrix, lambda row: row)
            return context.get_dummy_value()

        return signature, generate

    return transform


def make_output_transform(matrix: Matrix) -> Any:
    """The same with an end: if `finish`, y is (y + bias) scale + shift, then 0 where that is below `floor`.

    The four lie in `end`: bias from end[end_at] on, the others each `end_step` numbers later. Each step is rounded.
    """

    @intrinsic
    def transform(typing: Any, x: Any, x_at: Any, x_row: Any, x_column: Any,
                  y: Any, y_at: Any, y_row: Any, y_column: Any,
                  finish: Any, end: Any, end_at: Any, end_step: Any) -> Any:  # fmt: skip
        size = types.int64
        signature = types.void(x, size, size, size, y, size, size, size, types.boolean, end, size, size)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _Transform(context, builder, signature, arguments[:8])
            finish, end, end_at, end_step = arguments[8:]
            start = builder.gep(code.data(9, end), [end_at])

            def finished(row: list[_Vector]) -> list[_Vector]:
                before = builder.block
                with builder.if_then(finish):
                    bias, scale, shift, floor = (
                        code.load(start, builder.mul(end_step, ir.Constant(code.size, i))) for i in range(4)
                    )
                    after = []
                    for v in row:
                        value = builder.fadd(builder.fmul(builder.fadd(v.value, bias), scale), shift)
                        below = builder.fcmp_ordered("<", value, floor)
                        after.append(builder.select(below, ir.Constant(code.vector, [0.0] * code.lanes), value))
                    inside = builder.block
                merged = []
                for v, value in zip(row, after, strict=True):
                    phi = builder.phi(code.vector)
                    phi.add_incoming(v.value, before)
                    phi.add_incoming(value, inside)
                    merged.append(_Vector(builder, phi))
                return merged

            code.emit(matrix, finished)
            return context.get_dummy_value()

        return signature, generate

    return transform


class _Transform:
    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        x, x_at, self.x_row, self.x_column, y, y_at, self.y_row, self.y_column = arguments
        number = signature.args[0].dtype.bitwidth
        self.size = ir.IntType(64)
        self.bytes = number // 8
        self.lanes = VECTOR_BYTES // self.bytes
        self.vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), self.lanes)
        self.x, self.y = builder.gep(self.data(0, x), [x_at]), builder.gep(self.data(4, y), [y_at])

    def data(self, i: int, array: Any) -> Any:
        return self.context.make_array(self.signature.args[i])(self.context, self.builder, array).data

    def emit(self, matrix: Matrix, end: Callable[[list[_Vector]], list[_Vector]]) -> None:
        """Along the columns, then along each row."""
        b, n = self.builder, len(matrix[0])
        columns = []
        for j in range(n):
            x = [self.load(self.x, self.offset(i, self.x_row, j, self.x_column)) for i in range(n)]
            columns.append(multiply(matrix, [_Vector(b, v) for v in x]))
        for i in range(len(matrix)):
            row = end(multiply(matrix, [columns[j][i] for j in range(n)]))
            for j, vector in enumerate(row):
                pointer = self.pointer(self.y, self.offset(i, self.y_row, j, self.y_column))
                b.store(vector.value, pointer, align=self.bytes)

    def offset(self, i: int, row: Any, j: int, column: Any) -> Any:
        b = self.builder
        return b.add(b.mul(row, ir.Constant(self.size, i)), b.mul(column, ir.Constant(self.size, j)))

    def pointer(self, start: Any, offset: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(start, [offset]), self.vector.as_pointer())

    def load(self, start: Any, offset: Any) -> Any:
        return self.builder.load(self.pointer(start, offset), align=self.bytes)
