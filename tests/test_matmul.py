"""Products of vectors, matrices and batches of matrices; the linear layer."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst
from ops_helper import check_op, torch

from minidl import nn, ops
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.kernels.matmul import cpu
from minidl.kernels.matmul.amx_product import uses_amx
from minidl.kernels.matmul.share import share_scratch
from minidl.program.replay import Gradient

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 5), (5, 7)),
        ((1, 1), (1, 1)),
        ((5,), (5,)),
        ((5,), (5, 7)),
        ((3, 5), (5,)),
        ((2, 3, 5), (5,)),
        ((5,), (2, 5, 3)),
        ((2, 3, 5), (2, 5, 4)),
        ((3, 5), (2, 5, 4)),
        ((2, 1, 3, 5), (4, 5, 1)),
        ((0, 5), (5, 3)),  # no rows
        ((2, 0), (0, 3)),  # empty sums
        ((0, 2, 3), (3, 4)),
        ((67, 33), (33, 65)),  # several blocks of rows
        ((3, 7, 2, 5), (5, 4)),  # the rows of 21 matrices
    ],
)
def test_matmul(a: Shape, b: Shape) -> None:
    check_op(lambda a, b: a @ b, None, a, b, loops=a != (67, 33))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("depth, columns", [(70, 522), (1100, 290), (3, 1024)])
def test_products_of_few_rows_have_the_bits_of_many(depth: int, columns: int, dtype: type) -> None:
    """Up to 4 rows have tiles of their own (kernels/matmul/few.py), up to 72 read b in place, and the products of 300
    rows and depth 3 have another order of tiles: any number of threads, sums of several pieces. Only products on AMX
    have other bits."""
    random = np.random.default_rng(0)
    a, b, bias = (random.standard_normal(shape).astype(dtype) for shape in ((300, depth), (depth, columns), (columns,)))

    def product(rows: int, parts: int) -> np.ndarray:
        scratch = np.empty(parts * share_scratch(rows, columns, depth), dtype)
        out = np.full((rows, columns), np.nan, dtype)
        cpu.nn(a[:rows].copy(), b, bias, True, scratch[:0], scratch, out)
        return out

    vectors = dtype is np.float64 or not uses_amx(300, columns, depth)
    many = product(300 if vectors else 60, 1)
    tolerance = 1e-4 if dtype is np.float32 else 1e-12
    exact = np.maximum(a[: len(many)].astype(np.float64) @ b + bias, 0)
    np.testing.assert_allclose(many, exact, rtol=0, atol=tolerance)
    for rows in (*range(1, 9), 40, *((100, 300) if vectors else ())):
        for parts in (1, 2, 3):
            assert product(rows, parts).tobytes() == many[:rows].tobytes()


@pytest.mark.parametrize("rows, depth, columns", [(301, 270, 144), (150, 70, 33), (97, 300, 96), (20, 300, 9)])
def test_bits_of_high_products_do_not_depend_on_the_number_of_threads(rows: int, depth: int, columns: int) -> None:
    """A thread computes rows of all columns."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for shape in ((rows, depth), (depth, columns)))
    bias, exact = random.standard_normal(columns, np.float32), a.astype(np.float64) @ b
    each = (cpu._memory_on_amx if uses_amx(rows, columns, depth) else share_scratch)(rows, columns, depth)
    for transposed in ("neither", "a", "b"):
        found = []
        for parts in (1, 2, 3, 7):
            scratch = np.empty(parts * each, np.float32)
            out, none = np.full((rows, columns), np.nan, np.float32), scratch[:0]
            if transposed == "neither":
                cpu.nn(a, b, bias, False, none, scratch, out)
                out -= bias
            elif transposed == "a":
                cpu.tn(a.T.copy(), b, scratch, out)
            else:
                cpu.nt(a, b.T.copy(), scratch, out)
            found.append(out.tobytes())
            np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4)
        assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "count, rows, depth, columns",
    [(7, 49, 32, 50), (5, 150, 70, 33), (3, 4, 300, 17), (6, 300, 7, 9), (2, 130, 129, 150)],
)
def test_a_batch_has_the_bits_of_its_products(count: int, rows: int, depth: int, columns: int, dtype: type) -> None:
    """Threads divide the matrices, except large ones, which they compute together: the last case, on AMX if it is
    float32. Batches of any stored form, on any number of threads."""
    random = np.random.default_rng(0)
    a = random.standard_normal((count, rows, depth)).astype(dtype)
    b = random.standard_normal((count, depth, columns)).astype(dtype)
    size = cpu.nt_scratch(rows, columns, depth)
    none, scratch = np.empty(0, dtype), np.empty(size, dtype)
    one_by_one = np.full((count, rows, columns), np.nan, dtype)
    for i in range(count):
        cpu.nn(a[i], b[i], none, False, none, scratch, one_by_one[i])
    exact = a.astype(np.float64) @ b
    np.testing.assert_allclose(one_by_one, exact, rtol=0, atol=1e-4 if dtype is np.float32 else 1e-12)
    large = rows * depth * columns >= cpu.LARGE
    assert large == (count == 2)
    for a_transposed, b_transposed in itertools.product((False, True), repeat=2):
        left, right = (
            x.swapaxes(1, 2).copy() if transposed else x for x, transposed in ((a, a_transposed), (b, b_transposed))
        )
        for parts in (1, 2, 3, 8):
            memory = np.empty(size if large else parts * share_scratch(rows, columns, depth), dtype)
            out = np.full_like(one_by_one, np.nan)
            cpu.batched(left, a_transposed, right, b_transposed, memory, out)
            assert out.tobytes() == one_by_one.tobytes()


def test_a_batch_times_one_matrix_is_one_product() -> None:
    """x (N, S, C) @ w (C, K) neither copies w for each of the N matrices nor sums N gradients of it."""
    x, w = (Parameter(np.random.default_rng(0).standard_normal(shape, np.float32)) for shape in ((37, 49, 16), (16, 8)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.w = x, w

        def forward(self, _: object) -> Tensor:
            return ops.reshape(self.x @ self.w, (1, -1))

    gradient = Gradient(Model(), ops.cross_entropy)
    for _ in range(2):
        gradient(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
    (program,) = gradient.programs.values()
    products = [name for name in program.calls if name.startswith("matmul.")]
    assert sorted(products) == ["matmul.nn", "matmul.nt", "matmul.tn"]


@given(npst.mutually_broadcastable_shapes(signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, max_side=3))
def test_any_shapes_that_numpy_multiplies(shapes: npst.BroadcastableShapes) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape) for shape in shapes.input_shapes)
    y = Tensor(a) @ Tensor(b)
    assert y.shape == shapes.result_shape
    np.testing.assert_allclose(y.numpy(), a @ b, atol=1e-13)


def test_arrays_on_both_sides() -> None:
    x, integers = np.random.default_rng(0).standard_normal((3, 3)), np.arange(9).reshape(3, 3)
    for dtype in (np.float32, np.float64):
        for y, expected in (
            (Tensor(x.astype(dtype)) @ integers, x @ integers),
            (integers @ Tensor(x.astype(dtype)), integers @ x),
        ):
            assert y.dtype == dtype
            np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b"), [((3, 5), (4, 7)), ((3, 5), (3,)), ((5,), (3, 5)), ((), (3,)), ((2, 2, 3), (3, 3, 2))]
)
def test_shapes_that_do_not_fit_are_both_named(a: Shape, b: Shape) -> None:
    with pytest.raises(ShapeError, match=re.escape(f"matmul: {a} @ {b}")):
        Tensor(np.zeros(a)) @ Tensor(np.zeros(b))


@pytest.mark.parametrize("x", [(3, 5), (1, 5), (2, 3, 5), (5,), (0, 5), (2, 0, 5), (65, 5)])
def test_linear(x: Shape) -> None:
    check_op(ops.linear, lambda x, w, b: torch.nn.functional.linear(x, w.T, b), x, (5, 4), (4,))
    check_op(ops.linear, lambda x, w: torch.nn.functional.linear(x, w.T), x, (5, 1))


def test_linear_skips_gradients_that_are_not_required() -> None:
    x, w, b = (Tensor(np.ones(shape)) for shape in ((3, 5), (5, 4), (4,)))
    w.requires_grad = True
    ops.linear(x, w, b).sum().backward()
    assert x.grad is None and b.grad is None
    np.testing.assert_array_equal(w.grad, np.full((5, 4), 3.0))


@pytest.mark.parametrize(
    ("x", "w", "b"),
    [
        ((3, 4), (5, 4), (4,)),
        ((), (5, 4), (4,)),
        ((3, 5), (5,), (4,)),
        ((3, 5), (5, 4), (5,)),
        ((3, 5), (5, 4), (1, 4)),
    ],
)
def test_linear_names_the_shapes_that_do_not_fit(x: Shape, w: Shape, b: Shape) -> None:
    with pytest.raises(ShapeError, match="linear: "):
        ops.linear(Tensor(np.zeros(x)), Tensor(np.zeros(w)), Tensor(np.zeros(b)))
