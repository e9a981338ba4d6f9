"""The micro-kernel and the products that run on it agree with float64, for each instruction set of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.engine.environment import isa
from minidl.engine.jit import VECTOR_BYTES
from minidl.kernels.matmul import cpu
from minidl.kernels.matmul.blocks import LANES, MR, PANELS, tile_rows
from minidl.kernels.matmul.product import tile_columns
from minidl.kernels.matmul.tile import MOST_VECTORS, columns_of, panel, panel_width, panels_of

TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
EDGES = (2, 1), (3, 0), (4, 1), (15, 1), (16, -1), (30, 1), (32, -1)  # vectors, and numbers more or less
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def widest(dtype: str) -> int:
    """Return the largest number of columns of a tile."""
    return int(MOST_VECTORS * panel_width(np.empty(0, dtype)) // 2)


def run_panel(
    dtype: str, rows: int, width: int, depth: int, accumulate: bool, finish: bool = False, adds: bool = False
) -> None:
    """Compare `panel`, which computes a column of tiles (kernels/matmul/tile.py), with float64. Rows and products have
    random offsets in a. The memory around c's rows must not change. finish, adds: apply the end of a layer, and add a
    shortcut."""
    random = np.random.default_rng(rows * 1000 + width)
    columns = widest(dtype)
    a, b = (random.standard_normal(4000).astype(dtype) for _ in range(2))
    a_at, b_at, c_at, b_step = 3, 5, 7, columns + 1
    a_offsets, a_rows = random.integers(0, 500, depth), random.integers(0, 500, rows)
    c_rows = random.permutation(rows) * (width + 2)
    c = random.standard_normal(c_at + rows * (width + 2) + columns).astype(dtype)
    end = random.standard_normal((4, columns + 2)).astype(dtype)
    shortcut = random.standard_normal(c.size if adds else 0).astype(dtype)
    expected = c.astype(np.float64)
    for i in range(rows):
        row = expected[c_at + c_rows[i] :][:width]
        if not accumulate:
            row[:] = 0
        for k in range(depth):
            row += np.float64(a[a_at + a_rows[i] + a_offsets[k]]) * b[b_at + k * b_step :][:width]
        if finish:
            bias, scale, shift, least = end[:4, 2 : 2 + width]
            other = shortcut[c_at + c_rows[i] :][:width] if adds else 0.0
            row[:] = np.maximum((row + bias) * scale + shift + other, least)
    panel(rows, depth, accumulate, a, a_offsets, a_rows, a_at, b, b_at, b_step, c, c_rows, c_at, width,
          finish, end.reshape(-1), 2, shortcut)  # fmt: skip
    np.testing.assert_allclose(c, expected, rtol=0, atol=TOLERANCE[dtype] * abs(expected).max())


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, MR - 1, MR, MR + 1, 2 * MR + 1, 17])
def test_any_number_of_rows(dtype: str, rows: int) -> None:
    run_panel(dtype, rows, width=3, depth=14, accumulate=True)
    run_panel(dtype, rows, width=widest(dtype), depth=14, accumulate=True)


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
def test_any_width(dtype: str, accumulate: bool) -> None:
    for width in range(1, widest(dtype) + 1):
        run_panel(dtype, rows=MR + 3, width=width, depth=12, accumulate=accumulate)


@DTYPES
@pytest.mark.parametrize("adds", [False, True])
def test_the_end_of_a_layer(dtype: str, adds: bool) -> None:
    for width in range(1, widest(dtype) + 1):
        for accumulate in (False, True):
            run_panel(dtype, MR + 3, width, 3, accumulate, True, adds)


@DTYPES
def test_panels_cover_all_columns_and_only_a_single_one_is_narrow(dtype: str) -> None:
    array = np.empty(0, dtype)
    vector = panel_width(array) // 2
    for columns in range(1, 10 * vector):
        widths = [columns_of(p, columns, array) for p in range(panels_of(columns, array))]
        assert sum(widths) == columns
        assert all(width == 2 * vector for width in widths[:-1])
        assert widths[-1] <= 3 * vector
        assert len(widths) == 1 or widths[-1] > vector


@DTYPES
@pytest.mark.parametrize("depth", [1, 2, 9, 50])
def test_any_sum(dtype: str, depth: int) -> None:
    run_panel(dtype, rows=3, width=3, depth=depth, accumulate=False)


SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 250, 257, 300]))


@DTYPES
@settings(deadline=None, max_examples=30)
@given(m=SIZES, n=SIZES, k=st.one_of(SIZES, st.sampled_from([1023, 1500])), relu=st.booleans(), biased=st.booleans())
def test_products_of_any_shape(dtype: str, m: int, n: int, k: int, relu: bool, biased: bool) -> None:
    random = np.random.default_rng(m * n * k)
    a, b = random.standard_normal((m, k)).astype(dtype), random.standard_normal((k, n)).astype(dtype)
    bias = random.standard_normal(n if biased else 0).astype(dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    # The scratch is filled with NaN: a kernel must write before it reads, and must not touch the guard after it.
    size = cpu.nn_scratch(m, n, k)
    raw = np.full(size + 64, np.nan, dtype)
    scratch = raw[:size]

    def check(out: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype] * abs(exact).max())
        assert np.isnan(raw[size:]).all()

    out = np.full((m, n), np.nan, dtype)
    cpu.nn(a, b, bias, relu, scratch[:0], scratch, out)
    expected = exact + bias if biased else exact
    check(out, np.maximum(expected, 0) if relu else expected)
    cpu.nt(a, np.ascontiguousarray(b.T), scratch, out)
    check(out, exact)
    cpu.tn(np.ascontiguousarray(a.T), b, scratch, out)
    check(out, exact)


@DTYPES
def test_each_height_and_width_of_a_tile(dtype: str) -> None:
    """nn reads rows of a, tn reads them side by side; 13 rows are two strips, so b is copied."""
    vector = panel_width(np.empty(0, dtype)) // 2
    random = np.random.default_rng(0)
    for rows in range(1, 14):
        for columns in (1, *range(vector - 1, 9 * vector, vector), *range(vector + 1, 9 * vector, 2 * vector)):
            a, b = (random.standard_normal(shape).astype(dtype) for shape in ((rows, 9), (9, columns)))
            exact = a.astype(np.float64) @ b
            out, scratch = np.empty((rows, columns), dtype), np.empty(cpu.nn_scratch(rows, columns, 9), dtype)
            cpu.nn(a, b, scratch[:0], False, scratch[:0], scratch, out)
            np.testing.assert_allclose(out, exact, rtol=0, atol=TOLERANCE[dtype] * 10)
            cpu.tn(np.ascontiguousarray(a.T), b, scratch, out)
            np.testing.assert_allclose(out, exact, rtol=0, atol=TOLERANCE[dtype] * 10)


@DTYPES
def test_tiles_cover_all_rows_and_columns(dtype: str) -> None:
    array = np.empty(0, dtype)
    vector = panel_width(array) // 2
    for columns in range(1, 20 * vector):
        left, widths = columns, []
        while left:
            widths.append(tile_columns(left, array))
            left -= widths[-1]
        assert all(width % (2 * vector) == 0 for width in widths[:-1])  # the next tile begins with a panel
        assert len(widths) == 1 or widths[-1] > vector or PANELS == 1  # none has a single vector
    for panels, heights in ((1, {12, 6}), (2, {6, 4})):
        for rows in range(1, 30):
            left, found = rows, []
            while left:
                found.append(tile_rows(left, panels))
                left -= found[-1]
            assert sum(found) == rows and set(found[:-1]) <= heights


@DTYPES
@pytest.mark.parametrize("columns", [f * LANES + d for f, d in EDGES])
@pytest.mark.parametrize("depth", [4, 65, 100])  # short sums; one thread if there are few columns; two
def test_scratch_suffices_for_copies_of_a(dtype: str, columns: int, depth: int) -> None:
    a, b = np.ones((depth, 57), dtype), np.ones((depth, columns), dtype)
    size = cpu.tn_scratch(57, columns, depth)
    raw, out = np.full(size + 8192, np.nan, dtype), np.empty((57, columns), dtype)
    cpu.tn(a, b, raw[:size], out)
    assert np.isnan(raw[size:]).all() and (out == depth).all()


@pytest.mark.parametrize("shape", [(300, 1100, 300), (100, 1040, 40)])
def test_products_large_enough_to_copy_a(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    random = np.random.default_rng(0)
    a, b = random.standard_normal((k, m)).astype(np.float32), random.standard_normal((k, n)).astype(np.float32)
    out = np.empty((m, n), np.float32)
    cpu.tn(a, b, np.empty(cpu.tn_scratch(m, n, k), np.float32), out)
    np.testing.assert_allclose(out, a.T.astype(np.float64) @ b, rtol=0, atol=1e-3)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks for x86 instructions")
def test_the_tile_is_multiply_adds_on_whole_vectors() -> None:
    run_panel("float32", 1, 1, 1, False)
    kinds = next(kinds for kinds in panel.kernel.signatures if kinds[3].dtype.name == "float32")
    fresh = numba.njit(panel.py_func)  # code from the cache has no assembly to inspect
    fresh.compile(kinds)
    assembly = fresh.inspect_asm(kinds)
    register = {64: "zmm", 32: "ymm"}.get(VECTOR_BYTES)
    instruction = rf"vfmadd\w+ps.*%{register}" if register else r"mulps.*%xmm"
    assert len(re.findall(instruction, assembly)) >= 3 * MR  # 2 * MR for a tile two vectors wide, MR for one vector


@pytest.mark.skipif(bool(isa()), reason="this run already selects an instruction set")
@pytest.mark.slow  # .ci/run runs these tests, too
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_other_instruction_sets(isa: str) -> None:
    if isa == "avx512" and VECTOR_BYTES < 64:
        pytest.skip("this CPU has no AVX-512")
    tests = [f"{__file__}::{name}" for name in (
        "test_any_width", "test_products_of_any_shape", "test_the_tile_is_multiply_adds_on_whole_vectors",
    )]  # fmt: skip
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "not float64"]  # .ci/run tests float64 as well
    run = subprocess.run([sys.executable, "-m", "pytest", *options, *tests],
                         env={**os.environ, "MINIDL_ISA": isa}, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
