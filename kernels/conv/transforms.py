"""Winograd's three matrices, and the code that multiplies by them: straight lines of additions, written as LLVM IR.

F(m, r) computes m outputs of a 1-D convolution with r taps in n = m + r - 1 multiplications instead of m r:

    y (m,) = AT [ (G g) * (BT d) ]        g (r,) the taps, d (n,) the inputs, * element by element

It is polynomial multiplication: G and A evaluate two polynomials at n points, BT takes the product's coefficients from
its values there (Toom and Cook; transposed, as Winograd did). In 2-D each matrix is applied along both axes.

The points decide what rounding costs: with 0, +-1, +-2 and infinity, the usual ones for n = 6, errors are twice to four
times those with 0, +-3/4, +-3/2 and infinity, which cost as many instructions (measured in WINOGRAD.md).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from minidl.engine.jit import HAS_FMA, REGISTERS, VECTOR_BYTES

Matrix = list[list[Fraction]]
FOUR_POINTS = [Fraction(0), Fraction(1), Fraction(-1)]  # and infinity
SIX_POINTS = [Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)]  # and infinity
EIGHT_POINTS = [*FOUR_POINTS, Fraction(1, 2), Fraction(-1, 2), Fraction(2), Fraction(-2)]  # and infinity


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


def _parts(matrix: Matrix) -> list[slice]:
    """Rows of the matrix that are applied together. Between the two axes there is a vector for each row of the matrix
    and column of X: if there are more than registers, some rows come after the others. (Rows 1 and 2, 3 and 4 ... may
    be pairs, which stay together.)"""
    rows = len(matrix)
    cuts = range(3, rows - 2, 2) if rows * len(matrix[0]) > REGISTERS else ()
    return [slice(begin, end) for begin, end in zip((0, *cuts), (*cuts, rows), strict=True)]


def make_transform(matrix: Matrix) -> Any:
    """transform(x, x_at, x_row, x_column, rows, columns, zeros, y, y_at, y_row, y_column): Y = matrix X matrix^T

    for one vector of channels: X[i][j] are the numbers from x[x_at + i x_row + j x_column] on, as many as a vector
    holds; Y[i][j] the same in y. X is 0 where i is outside of the range `rows`, or j of `columns`: there x is not
    read, but `zeros`, a whole row of them.
    """

    @intrinsic
    def transform(typing: Any, x: Any, x_at: Any, x_row: Any, x_column: Any, rows: Any, columns: Any, zeros: Any,
                  y: Any, y_at: Any, y_row: Any, y_column: Any) -> Any:  # fmt: skip
        size = types.int64
        pair = types.UniTuple(size, 2)
        signature = types.void(x, size, size, size, pair, pair, zeros, y, size, size, size)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_at, x_row, x_column, rows, columns, zeros, y, y_at, y_row, y_column = arguments
            code = _Writer(context, builder, signature)
            x, zeros, y = (
                builder.gep(code.data(0, x), [x_at]),
                code.data(6, zeros),
                builder.gep(code.data(7, y), [y_at]),
            )
            starts = [
                builder.select(code.within(i, rows), builder.gep(x, [code.times(x_row, i)]), zeros)
                for i in range(len(matrix[0]))
            ]
            for some in _parts(matrix):
                middle = []
                for j in range(len(matrix[0])):
                    begin = code.begin_if(code.within(j, columns))
                    column = [code.load(start, code.times(x_column, j)) for start in starts]
                    middle.append(code.end_if(begin, multiply(matrix[some], column), [code.zero()] * len(matrix[some])))
                for i, row in zip(range(len(matrix))[some], zip(*middle, strict=True), strict=True):
                    for j, vector in enumerate(multiply(matrix, list(row))):
                        code.store(vector, builder.gep(y, [code.times(y_row, i)]), code.times(y_column, j))
            return context.get_dummy_value()

        return signature, generate

    return transform


def make_output_transform(matrix: Matrix) -> Any:
    """The same from planes to an image, or (through) to a patch instead, without borders, and with an end:

    if `finish`, y becomes (y + bias) scale + shift [+ shortcut], then 0 where that is below `floor`; each step is
    rounded. bias lies from end[end_at] on, scale, shift and floor each `end_step` numbers later. The shortcut lies as
    y does (through: in the patch, behind Y), and is added if it `adds`.
    A store waits for its cache line: those of the next tile, from y[next_at] on, are asked for.
    """

    @intrinsic
    def transform(typing: Any, x: Any, x_at: Any, x_row: Any, x_column: Any,
                  y: Any, patch: Any, through: Any, y_at: Any, y_row: Any, y_column: Any, next_at: Any,
                  finish: Any, end: Any, end_at: Any, end_step: Any, shortcut: Any, adds: Any) -> Any:  # fmt: skip
        size, yes = types.int64, types.boolean
        signature = types.void(x, size, size, size, y, patch, yes, size, size, size, size,
                               yes, end, size, size, shortcut, yes)  # fmt: skip

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (x, x_at, x_row, x_column, y, patch, through, y_at, y_row, y_column, next_at,
             finish, end, end_at, end_step, shortcut, adds) = arguments  # fmt: skip
            code = _Writer(context, builder, signature)
            following = builder.gep(code.data(4, y), [next_at])
            patch, tall = code.data(5, patch), code.times(y_row, len(matrix))
            y = builder.gep(builder.select(through, patch, code.data(4, y)), [y_at])
            x, end = (builder.gep(code.data(i, array), [at]) for i, array, at in ((0, x, x_at), (12, end, end_at)))
            other = builder.gep(builder.select(through, builder.gep(patch, [tall]), code.data(15, shortcut)), [y_at])
            n = range(len(matrix[0]))
            starts = [builder.gep(x, [code.times(x_row, i)]) for i in n]

            def write(finished: bool, added: bool) -> None:
                steps = [code.load(end, code.times(end_step, i)).value for i in range(4)] if finished else []
                middle = [multiply(matrix, [code.load(start, code.times(x_column, j)) for start in starts]) for j in n]
                for i, row in enumerate(zip(*middle, strict=True)):
                    for j, vector in enumerate(multiply(matrix, list(row))):
                        at = builder.add(code.times(y_row, i), code.times(y_column, j))
                        vector = code.scale(vector, steps) if finished else vector
                        vector = vector.plus(Fraction(1), code.load(other, at)) if added else vector
                        code.store(code.cut(vector, steps) if finished else vector, y, at)
                        prefetch(builder, builder.gep(following, [at]), write=True)

            # Four straight lines: conditions at each row, or at each vector, would cost a fifth of the time.
            with builder.if_else(finish) as finishing:
                for finished, branch in zip((True, False), finishing, strict=True):
                    with branch, builder.if_else(adds) as adding:
                        for added, inner in zip((True, False), adding, strict=True):
                            with inner:
                                write(finished, added)
            return context.get_dummy_value()

        return signature, generate

    return transform


def prefetch(builder: Any, place: Any, write: bool) -> None:
    """Begin to bring the cache line of a place, to read it (from the second cache) or to write it."""
    small, byte = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, small, small, small])
    call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    near, data = 2, 1
    builder.call(call, [builder.bitcast(place, byte), *(ir.Constant(small, c) for c in (int(write), near, data))])


@intrinsic
def prefetch_to_read(typing: Any, x: Any, at: Any) -> Any:
    """Begin to bring the cache line of x[at]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch(builder, builder.gep(x, [arguments[1]]), write=False)
        return context.get_dummy_value()

    return types.void(x, types.int64), generate


class _Writer:
    """Short names for what the two transforms write."""

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        self.context, self.builder, self.signature = context, builder, signature
        number = signature.args[0].dtype
        self.size = ir.IntType(64)
        self.bytes = number.bitwidth // 8
        self.vector = ir.VectorType(context.get_data_type(number), VECTOR_BYTES // self.bytes)

    def data(self, i: int, array: Any) -> Any:
        return self.context.make_array(self.signature.args[i])(self.context, self.builder, array).data

    def times(self, step: Any, i: int) -> Any:
        return self.builder.mul(step, ir.Constant(self.size, i))

    def less(self, i: int, end: Any) -> Any:
        return self.builder.icmp_signed("<", ir.Constant(self.size, i), end)

    def within(self, i: int, pair: Any) -> Any:
        first, end = (self.builder.extract_value(pair, k) for k in range(2))
        return self.builder.and_(self.builder.icmp_signed("<=", first, ir.Constant(self.size, i)), self.less(i, end))

    def pointer(self, start: Any, offset: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(start, [offset]), self.vector.as_pointer())

    def load(self, start: Any, offset: Any) -> _Vector:
        return _Vector(self.builder, self.builder.load(self.pointer(start, offset), align=self.bytes))

    def store(self, vector: _Vector, start: Any, offset: Any) -> None:
        self.builder.store(vector.value, self.pointer(start, offset), align=self.bytes)

    def zero(self) -> _Vector:
        return _Vector(self.builder, _constant(self.vector, Fraction(0)))

    def scale(self, v: _Vector, steps: list[Any]) -> _Vector:
        b, (bias, scale, shift, _) = self.builder, steps
        return _Vector(b, b.fadd(b.fmul(b.fadd(v.value, bias), scale), shift))

    def cut(self, v: _Vector, steps: list[Any]) -> _Vector:
        b, floor = self.builder, steps[3]
        return _Vector(b, b.select(b.fcmp_ordered("<", v.value, floor), self.zero().value, v.value))

    def begin_if(self, condition: Any) -> tuple[Any, Any]:
        """What is written from here to end_if runs only if `condition`."""
        before = self.builder.block
        inside, after = (self.builder.append_basic_block(name) for name in ("inside", "after"))
        self.builder.cbranch(condition, inside, after)
        self.builder.position_at_end(inside)
        return before, after

    def end_if(self, begin: tuple[Any, Any], inside: list[_Vector], otherwise: list[_Vector]) -> list[_Vector]:
        """The vectors `inside`, or `otherwise` where the condition did not hold."""
        before, after = begin
        last = self.builder.block
        self.builder.branch(after)
        self.builder.position_at_end(after)
        merged = []
        for yes, no in zip(inside, otherwise, strict=True):
            phi = self.builder.phi(self.vector)
            phi.add_incoming(yes.value, last)
            phi.add_incoming(no.value, before)
            merged.append(_Vector(self.builder, phi))
        return merged
