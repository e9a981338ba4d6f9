"""Winograd's three matrices, and straight-line code that multiplies by them, written as LLVM instructions.

F(m, r) computes m outputs of a 1-D convolution with r taps in n = m + r - 1 multiplications instead of m * r:

    y (m,) = AT [ (G g) * (BT d) ]        g (r,) the taps, d (n,) the inputs, * element by element

Toom and Cook multiply two polynomials: G and A evaluate them at n points, and B computes the coefficients of the
product from its values at the points. Winograd transposed this method. In 2-D, there is a matrix for each axis.

The points determine the rounding error. Usual points for n = 6 are 0, +-1, +-2 and infinity. With 0, +-3/4, +-3/2 and
infinity, the error is two to five times smaller, and the number of instructions is the same (WINOGRAD.md).

With stride 2, the even and the odd taps are two convolutions of stride 1, of the even and the odd inputs. F applies to
both, and y is their sum (`strided`). The gradient of the inputs consists of two convolutions, too (`spaced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial, reduce
from typing import Any

from minidl.engine.jit import REGISTERS
from minidl.kernels.matmul.emitter import Emitter, Offset, Value, instructions

from .choice import FREQUENT

Matrix = list[list[Fraction]]
Both = tuple[Matrix, Matrix]  # a matrix for the vertical axis, and one for the horizontal axis
Matrices = dict[int, Both]  # form (choice.py) -> matrices
Load = Callable[[int, Value, Offset], Value]  # load X[i][j]: i, the pointer to row i, the offset of column j
FOUR_POINTS = [Fraction(0), Fraction(1), Fraction(-1)]  # and infinity
FIVE_POINTS = [*FOUR_POINTS, Fraction(2)]  # and infinity
SIX_POINTS = [Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2)]  # and infinity
EIGHT_POINTS = [*FOUR_POINTS, Fraction(1, 2), Fraction(-1, 2), Fraction(2), Fraction(-2)]  # and infinity
TEN_POINTS = [Fraction(k, 8) for k in (0, 3, -3, 6, -6, 10, -10, 20, -20)]  # and infinity
POINTS = {len(points) + 1: points for points in (FOUR_POINTS, FIVE_POINTS, SIX_POINTS, EIGHT_POINTS)}


def matrices(points: list[Fraction], m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return AT (m, n), G (n, r) and BT (n, n) for these n - 1 points and infinity."""
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


def _side_by_side(m: int, taps: tuple[int, int]) -> tuple[Matrix, ...]:
    """Return AT (2m, n), G (n, all taps) and BT (n, n) of two convolutions. Each has a block in each matrix."""
    forms = [matrices(POINTS[m + r - 1], m, r) if r > 1 else one_tap(m) for r in taps]
    return tuple(_blocks(*both) for both in zip(*forms, strict=True))


def one_tap(m: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return AT, G and BT for m outputs of one tap: m products."""
    identity = [[Fraction(int(i == j)) for j in range(m)] for i in range(m)]
    return identity, [[Fraction(1)] for _ in range(m)], identity


def _blocks(a: Matrix, b: Matrix) -> Matrix:
    """Return the matrix with a at the upper left and b at the lower right."""
    zero = [Fraction(0)]
    return [row + zero * len(b[0]) for row in a] + [zero * len(a[0]) + row for row in b]


def _placed(matrix: Matrix, columns: list[int]) -> Matrix:
    """Return a matrix with column j of `matrix` at columns[j]. Columns at the same place are added; others are 0."""
    placed = [[Fraction(0)] * (max(columns) + 1) for _ in matrix]
    for row, new in zip(matrix, placed, strict=True):
        for value, column in zip(row, columns, strict=True):
            new[column] += value
    return placed


def strided(m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return AT (m, n), G (n, r) and BT (n, n) for m outputs of r taps with stride 2, from n = 2m + r - 2 inputs.

    y[i] = sum over the taps u of g[u] d[2i + u]
    """
    taps = (r + 1) // 2, r // 2
    inputs = [m + k - 1 for k in taps]
    a, g, bt = _side_by_side(m, taps)
    return (
        [[x + y for x, y in zip(even, odd, strict=True)] for even, odd in zip(a[:m], a[m:], strict=True)],
        _placed(g, [2 * k + odd for odd in (0, 1) for k in range(taps[odd])]),
        _placed(bt, [2 * i + odd for odd in (0, 1) for i in range(inputs[odd])]),
    )


def spaced(m: int, r: int, padding: int) -> tuple[Matrix, Matrix, Matrix]:
    """Return AT (2m, n), G (n, r) and BT (n, inputs) for 2m outputs of r taps, whose inputs are two pixels apart.

    y[p] = sum of g[u] d[i - first] over the taps u and the inputs i with 2i = p + u - (r - 1 - padding)

    first: the least such i for p >= 0. Each input i belongs to two outputs, so the even and the odd outputs are one
    convolution each.
    """
    s = r - 1 - padding
    taps = [list(range((s - odd) % 2, r, 2)) for odd in (0, 1)]
    firsts = [(odd + some[0] - s) // 2 for odd, some in enumerate(taps)]
    a, g, bt = _side_by_side(m, (len(taps[0]), len(taps[1])))
    return (
        [a[odd * m + i] for i in range(m) for odd in (0, 1)],
        _placed(g, [*taps[0], *taps[1]]),
        _placed(bt, [firsts[odd] - min(firsts) + i for odd in (0, 1) for i in range(m + len(taps[odd]) - 1)]),
    )


def _product(roots: list[Fraction]) -> list[Fraction]:
    """Return the coefficients, constant first, of the product of (x - root) over all roots."""
    c = [Fraction(1)]
    for root in roots:
        c = [x - root * y for x, y in zip([Fraction(0), *c], [*c, Fraction(0)], strict=True)]
    return c


def _value(coefficients: list[Fraction], x: Fraction) -> Fraction:
    return sum((c * x**i for i, c in enumerate(coefficients)), Fraction(0))


def distinct(matrix: Matrix) -> Matrix:
    """Return the rows of the matrix, without the repetitions of a row."""
    return [row for i, row in enumerate(matrix) if row not in matrix[:i]]


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


# -- a matrix times a column of vectors, in few instructions ---------------------------------------------------


def multiply(e: Emitter, matrix: Matrix, x: list[Value]) -> list[Value]:
    """Write the instructions for matrix @ x, where x is a list of vectors.

    Most points come in pairs p, -p. So most rows of BT, G and A, and most columns of AT and GT, come in pairs that
    differ only in signs (with five points, only those of A and AT do). Two such rows are E + O and E - O: E @ x and
    O @ x are computed once for both. Two such columns need only the sum and the difference of their vectors.
    """
    matrix, x = _pair_columns(e, matrix, x)
    result: list[Any] = [None] * len(matrix)
    for i, row in enumerate(matrix):
        if result[i] is not None:
            continue
        j = next((j for j in range(i + 1, len(matrix)) if _paired(row, matrix[j])), None)
        if j is None:
            result[i] = _combine(e, list(zip(row, x, strict=True)))
            continue
        even = _combine(e, [(c, v) for c, d, v in zip(row, matrix[j], x, strict=True) if c == d])
        odd = [(c, v) for c, d, v in zip(row, matrix[j], x, strict=True) if c == -d != 0]
        factor = min((c for c, _ in odd), key=lambda f: sum(not _exact(c / f) for c, _ in odd))
        part = _combine(e, [(c / factor, v) for c, v in odd])
        result[i], result[j] = _plus(e, even, factor, part), _plus(e, even, -factor, part)
    return result


def _exact(x: Fraction) -> bool:
    """Return whether the denominator of x is a power of two: then a binary number holds x exactly."""
    return x.denominator & (x.denominator - 1) == 0


def _paired(row: list[Fraction], other: list[Fraction]) -> bool:
    same = any(c == d != 0 for c, d in zip(row, other, strict=True))
    opposite = any(c == -d != 0 for c, d in zip(row, other, strict=True))
    return same and opposite and all(abs(c) == abs(d) for c, d in zip(row, other, strict=True))


def _pair_columns(e: Emitter, matrix: Matrix, x: list[Value]) -> tuple[Matrix, list[Value]]:
    columns, values = transposed(matrix), list(x)
    for j in range(len(columns)):
        for k in range(j + 1, len(columns)):
            if _paired(columns[j], columns[k]):
                plus = [c if c == d else Fraction(0) for c, d in zip(columns[j], columns[k], strict=True)]
                minus = [c if c == -d else Fraction(0) for c, d in zip(columns[j], columns[k], strict=True)]
                columns[j], columns[k] = plus, minus
                one = Fraction(1)
                values[j], values[k] = _plus(e, values[j], one, values[k]), _plus(e, values[j], -one, values[k])
                break
    return transposed(columns), values


def _combine(e: Emitter, terms: list[tuple[Fraction, Value]]) -> Value:
    """Write the sum of coefficient * vector; a term with coefficient 1, which needs no multiplication, comes first."""
    (first, total), *rest = sorted(((c, v) for c, v in terms if c), key=lambda term: term[0] != 1)
    total = _times(e, first, total)
    for coefficient, vector in rest:
        total = _plus(e, total, coefficient, vector)
    return total


def _times(e: Emitter, factor: Fraction, x: Value) -> Value:
    return x if factor == 1 else e.builder.fmul(x, e.filled(float(factor)))


def _plus(e: Emitter, x: Value, factor: Fraction, y: Value) -> Value:
    """Write x + factor * y, rounded once if the CPU can."""
    if factor == 1:
        return e.builder.fadd(x, y)
    if factor == -1:
        return e.builder.fsub(x, y)
    return e.multiply_add(y, e.filled(float(factor)), x)


# -- in two dimensions, from memory to memory -------------------------------------------------------------------


def _parts(matrix: Matrix, columns: int) -> list[slice]:
    """Return the ranges of rows of the matrix that are applied together to X, which has this many columns.

    matrix @ X has a vector for each row of the matrix and each column of X. If the registers cannot hold them all, the
    rows are applied in several parts. Rows 1 and 2, 3 and 4 ... stay together, because most are pairs (`multiply`).
    """
    rows = len(matrix)
    cuts = range(3, rows - 2, 2) if rows * columns > REGISTERS else ()
    return [slice(begin, end) for begin, end in zip((0, *cuts), (*cuts, rows), strict=True)]


def _for_form(e: Emitter, form: Value, matrices: Matrices) -> Iterator[tuple[Both, Callable[[Value], Value]]]:
    """Yield each different pair of matrices. What the caller writes for a pair runs if it belongs to the form.

    Also yield a function for the integers that the caller uses. For a rare form, it makes them opaque. Otherwise LLVM
    would compute all addresses of all forms before the loop over the tiles, and keep them in registers. That would take
    3% of the time of layers with 16 channels.
    """
    both = next(iter(matrices.values()))
    others = {form: other for form, other in matrices.items() if other != both}
    mine = [each for each in matrices if each not in others]
    found = both, e.opaque if set(mine).isdisjoint(FREQUENT) else _unchanged
    if not others:
        yield found
        return
    belongs = [e.builder.icmp_signed("==", form, e.integer(each)) for each in mine]
    with e.builder.if_else(reduce(e.builder.or_, belongs)) as (then, otherwise):
        with then:
            yield found
        with otherwise:
            yield from _for_form(e, form, others)


def _unchanged(value: Value) -> Value:
    return value


def make_transform(matrices: Matrices) -> Any:
    """Return a function for kernels that computes Y = M X N^T for one vector of channels; the form selects M and N.

    X[i][j] is the vector at x[x_at + i * x_row + j * x_column], and Y[i][j] is at y[y_at + i * y_row + j * y_column].
    If i is outside the range `rows`, X[i][j] is read from `zeros`, a row of zeros. If j is outside the range `columns`,
    X[i][j] is 0, and nothing is read.
    """

    @instructions
    def transform(
        e: Emitter, form: Value, x: Value, x_at: Value, x_row: Value, x_column: Value, rows: Value, columns: Value,
        zeros: Value, y: Value, y_at: Value, y_row: Value, y_column: Value,
    ) -> None:  # fmt: skip
        x, y = e.at(x, x_at), e.at(y, y_at)

        def load(i: int, start: Value, offset: Offset) -> Value:
            return e.load(start, offset)

        for both, hidden in _for_form(e, form, matrices):
            _write(e, both, load, x, hidden(x_row), hidden(x_column), _hide(e, rows, hidden),
                   _hide(e, columns, hidden), zeros, y, hidden(y_row), hidden(y_column))  # fmt: skip

    return transform


def make_normalizing_transform(both: Both) -> Any:
    """Return a function like make_transform's that first replaces each X[i][j] within the ranges by

        max((X[i][j] - mean) * scale + bias, 0)        each step rounded

    mean begins at before[before_at]; scale and bias follow at intervals of before_step.
    """

    @instructions
    def transform(
        e: Emitter, x: Value, x_at: Value, x_row: Value, x_column: Value, rows: Value, columns: Value, zeros: Value,
        y: Value, y_at: Value, y_row: Value, y_column: Value, before: Value, before_at: Value, before_step: Value,
    ) -> None:  # fmt: skip
        b, x, y, before, zero = e.builder, e.at(x, x_at), e.at(y, y_at), e.at(before, before_at), e.filled(0.0)
        mean, scale, bias = (e.load(before, e.times(before_step, i)) for i in range(3))
        inside = [e.broadcast(_within(e, i, rows)) for i in range(len(both[0][0]))]

        def load(i: int, start: Value, offset: Offset) -> Value:
            z = b.fadd(b.fmul(b.fsub(e.load(start, offset), mean), scale), bias)
            return b.select(inside[i], e.at_least(z, zero), zero)

        _write(e, both, load, x, x_row, x_column, rows, columns, zeros, y, y_row, y_column)

    return transform


def _write(
    e: Emitter, both: Both, load: Load, x: Value, x_row: Value, x_column: Value, rows: Value, columns: Value,
    zeros: Value, y: Value, y_row: Value, y_column: Value,
) -> None:  # fmt: skip
    """Write the instructions of make_transform for two matrices."""
    left, right = both
    starts = [e.builder.select(_within(e, i, rows), e.at(x, e.times(x_row, i)), zeros) for i in range(len(left[0]))]
    for some in _parts(left, len(right[0])):
        part, sides = left[some], range(len(right[0]))
        middle = [_column(e, part, load, starts, e.times(x_column, j), _within(e, j, columns)) for j in sides]
        for i, row in zip(range(len(left))[some], zip(*middle, strict=True), strict=True):
            for j, vector in enumerate(multiply(e, right, list(row))):
                e.store(vector, e.at(y, e.times(y_row, i)), e.times(y_column, j))


def _column(
    e: Emitter, matrix: Matrix, load: Load, starts: list[Value], offset: Offset, inside: Value
) -> list[Value]:
    """Write matrix @ c, or 0 if c is not `inside`. c is a column of X: the vectors at `offset` in each row."""

    def product() -> dict[int, Value]:
        return dict(enumerate(multiply(e, matrix, [load(i, start, offset) for i, start in enumerate(starts)])))

    return list(e.when(inside, product, {i: e.filled(0.0) for i in range(len(matrix))}).values())


def _hide(e: Emitter, pair: Value, hidden: Callable[[Value], Value]) -> Value:
    """Apply `hidden` to both integers of a pair."""
    for k in range(2):
        pair = e.builder.insert_value(pair, hidden(e.builder.extract_value(pair, k)), k)
    return pair


def _within(e: Emitter, i: int, pair: Value) -> Value:
    """Return whether first <= i < end, for a pair (first, end)."""
    b, (first, end) = e.builder, (e.builder.extract_value(pair, k) for k in range(2))
    return b.and_(b.icmp_signed("<=", first, e.integer(i)), b.icmp_signed("<", e.integer(i), end))


def make_output_transform(matrices: Matrices) -> Any:
    """Return a function like make_transform's. It reads all of X from planes, and writes Y to an image y or, if
    `through`, to `patch`.

    If `finish`, Y becomes (Y + bias) * scale + shift. Then, if `adds`, the shortcut is added. Then, if `finish`, values
    below `floor` become `floor`. Each step is rounded. bias begins at end[end_at]; scale, shift and floor follow at
    intervals of end_step. The shortcut has the layout of y; if `through`, it is in the patch, after Y.
    A store waits for its cache line, so the lines of the next tile, from y[next_at] on, are prefetched.
    """

    @instructions
    def transform(
        e: Emitter, form: Value, x: Value, x_at: Value, x_row: Value, x_column: Value, y: Value, patch: Value,
        through: Value, y_at: Value, y_row: Value, y_column: Value, next_at: Value, finish: Value, end: Value,
        end_at: Value, end_step: Value, shortcut: Value, adds: Value,
    ) -> None:  # fmt: skip
        b, following, x, end = e.builder, e.at(y, next_at), e.at(x, x_at), e.at(end, end_at)

        def write(
            matrices: Both, starts: list[Value], steps: list[Value], y: Value, other: Value, finished: bool, added: bool
        ) -> None:
            left, right = matrices
            x_column, y_row, y_column = steps
            bias, scale, shift, floor = (e.load(end, e.times(end_step, i)) for i in range(4))
            middle = [
                multiply(e, left, [e.load(start, e.times(x_column, j)) for start in starts])
                for j in range(len(right[0]))
            ]
            for i, row in enumerate(zip(*middle, strict=True)):
                for j, vector in enumerate(multiply(e, right, list(row))):
                    at = b.add(e.times(y_row, i), e.times(y_column, j))
                    vector = e.scale_shift(vector, bias, scale, shift) if finished else vector
                    vector = b.fadd(vector, e.load(other, at)) if added else vector
                    e.store(e.at_least(vector, floor) if finished else vector, y, at)
                    e.prefetch(following, at, write=True)

        def both(condition: Value, write: Callable[[bool], None]) -> None:
            with b.if_else(condition) as (yes, no):
                with yes:
                    write(True)
                with no:
                    write(False)

        for left_right, hidden in _for_form(e, form, matrices):
            row, *steps = (hidden(step) for step in (x_row, x_column, y_row, y_column))
            behind = e.at(patch, e.times(steps[1], len(left_right[0])))
            target, other = (e.at(b.select(through, p, q), y_at) for p, q in ((patch, y), (behind, shortcut)))
            starts = [e.at(x, e.times(row, i)) for i in range(len(left_right[0][0]))]
            version = partial(write, left_right, starts, steps, target, other)
            # Four versions without branches: a condition at each row or each vector would cost a fifth of the time.
            # Rare forms have two, to compile less: without `finish`, the steps of the end change nothing.
            if hidden is _unchanged:
                both(finish, lambda finished, version=version: both(adds, partial(version, finished)))  # type: ignore[misc]
            else:
                both(adds, partial(version, True))

    return transform
