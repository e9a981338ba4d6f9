"""The tiles of neighbouring pixels (kernels/conv/line.py, line_gradient.py) agree with float64 and, in each bit, with
matmul/tile.py."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.kernels.conv import cpu
from minidl.kernels.conv.line import HEIGHTS, line_panel, pixels_in_tiles, threes_of
from minidl.kernels.conv.line_gradient import HEIGHTS as GRADIENT_HEIGHTS
from minidl.kernels.conv.line_gradient import line_gradient
from minidl.kernels.matmul.tile import panel, panel_width

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
LINES_OF_TAPS, CHANNELS, LINES = 2, 3, 2


def order_of(taps: int) -> list[tuple[int, int, int]]:
    """Return line, column and channel of each product: groups of 3 taps, then groups of 2."""
    threes = (taps - 2 * (-taps % 3)) // 3
    groups = [(3, 3 * g) for g in range(threes)], [(2, 3 * threes + 2 * g) for g in range(-taps % 3)]
    return [
        (s, first + t, k)
        for some in groups
        for s in range(LINES_OF_TAPS)
        for size, first in some
        for k in range(CHANNELS)
        for t in range(size)
    ]


def check(
    dtype: str, length: int, width: int, taps: int, step: int, accumulate: bool, finish: bool, adds: bool
) -> None:
    """Compute `length` pixels in each of LINES lines. The memory around c's rows must not change."""
    random = np.random.default_rng(length * 100 + width)
    columns, pixel, wide = panel_width(np.empty(0, dtype)), CHANNELS + 1, (length - 1) * step + taps
    a = random.standard_normal(3 + (LINES + LINES_OF_TAPS) * wide * pixel).astype(dtype)
    products = order_of(taps)
    assert sorted(products) == [(s, t, k) for s in range(LINES_OF_TAPS) for t in range(taps) for k in range(CHANNELS)]
    a_offsets = np.array([(s * wide + t) * pixel + k for s, t, k in products])
    a_rows = np.array([(line * wide + i * step) * pixel for line in range(LINES) for i in range(length)])
    b = random.standard_normal((len(products) + 1, columns + 1)).astype(dtype)
    c_rows = random.permutation(a_rows.size) * (width + 2)
    before = random.standard_normal(7 + a_rows.size * (width + 2) + columns).astype(dtype)
    end = random.standard_normal((4, columns + 2)).astype(dtype)
    shortcut = random.standard_normal(before.size if adds else 0).astype(dtype)

    expected = before.astype(np.float64)
    for i, c_row in enumerate(c_rows):
        row = expected[7 + c_row :][:width]
        numbers = a[3 + a_rows[i] + a_offsets].astype(np.float64)
        row[:] = numbers @ b[: len(products), 1 : 1 + width] + (row if accumulate else 0)
        if finish:
            bias, scale, shift, least = end[:4, 2 : 2 + width]
            row[:] = np.maximum((row + bias) * scale + shift + (shortcut[7 + c_row :][:width] if adds else 0), least)

    threes = LINES_OF_TAPS * threes_of(taps) * CHANNELS
    rest = a_offsets, a_rows, 3, b.reshape(-1), 1, columns + 1
    last = c_rows, 7, width, finish, end.reshape(-1), 2, shortcut
    c, other = before.copy(), before.copy()
    line_panel(LINES, length, step, threes, (len(products) - 3 * threes) // 2, accumulate, a, *rest[:2], pixel,
               *rest[2:], c, *last)  # fmt: skip
    panel(a_rows.size, len(products), accumulate, a, *rest, other, *last)
    np.testing.assert_allclose(c, expected, rtol=0, atol=TOLERANCE[dtype] * abs(expected).max())
    np.testing.assert_array_equal(c, other)


def widths(dtype: str) -> list[int]:
    """Return widths of tiles: more than half a vector, one vector, more, and two."""
    vector = panel_width(np.empty(0, dtype)) // 2
    return [vector // 2 + 1, vector, vector + 1, 2 * vector]


@DTYPES
@pytest.mark.parametrize("step", [1, 2])
def test_each_height_and_width(dtype: str, step: int) -> None:
    for width in widths(dtype):
        heights = HEIGHTS[1 if width <= widths(dtype)[1] else 2]
        for length in {*heights, heights[0] + heights[2], 2 * heights[2], 3 * heights[0]}:
            check(dtype, length, width, 3, step, accumulate=False, finish=False, adds=False)


@DTYPES
@pytest.mark.parametrize("taps", [2, 3, 4, 5, 7])
def test_groups_of_taps(dtype: str, taps: int) -> None:
    for width in widths(dtype):
        check(dtype, 8, width, taps, 1, accumulate=True, finish=False, adds=False)


@DTYPES
@pytest.mark.parametrize("adds", [False, True])
def test_the_end_of_a_layer(dtype: str, adds: bool) -> None:
    for width in widths(dtype):
        check(dtype, 8, width, 3, 2, accumulate=True, finish=True, adds=adds)


@DTYPES
def test_tiles_compute_as_many_pixels_of_a_line_as_possible(dtype: str) -> None:
    """For each length, the highest sum of heights that is not larger; none for lines below the middle height."""
    array = np.empty(0, dtype)
    for width in widths(dtype):
        heights = HEIGHTS[1 if width <= widths(dtype)[1] else 2]
        sums = {0}
        for length in range(100):
            sums |= {length} if any(length - height in sums for height in heights) else set()
            assert pixels_in_tiles(length, width, array) == (max(sums) if length >= heights[1] else 0)
    assert pixels_in_tiles(50, widths(dtype)[1] // 2, array) == 0  # half a vector
    assert pixels_in_tiles(50, widths(dtype)[3] + 1, array) == 0


@pytest.mark.parametrize(
    ("kernel", "channels", "outputs", "stride", "padding"),
    [
        ((3, 3), 48, 24, 1, 1),  # sums longer than KC: 288 products in groups of 3 taps, and 144 more
        ((3, 5), 32, 16, 1, 2),  # groups of 3 and of 2 taps, cut apart
        ((3, 3), 48, 20, 2, 1),
        ((2, 4), 70, 30, 1, 0),  # in place
        ((3, 3), 5, 64, 1, 1),
    ],
)
def test_a_pixel_has_the_same_bits_in_a_line_of_any_length(
    kernel: tuple[int, int], channels: int, outputs: int, stride: int, padding: int
) -> None:
    """A pixel in a tile of line.py has the bits that it has in matmul/tile.py, where a shorter line puts it."""
    random = np.random.default_rng(5)
    image = random.standard_normal((2, 9, 41, channels)).astype(np.float32)
    weight, none = random.standard_normal((*kernel, channels, outputs)).astype(np.float32), np.empty(0, np.float32)
    options = 1, (stride, stride), (padding, padding), (1, 1), False
    found = []
    for wide in (41, 40, 37, 34):
        x = np.ascontiguousarray(image[:, :, :wide])
        out = [(size + 2 * padding - k) // stride + 1 for size, k in zip(x.shape[1:3], kernel)]
        y = np.empty((2, *out, outputs), np.float32)
        scratch = np.empty(cpu.forward_scratch(x.shape, weight.shape, *options), np.float32)
        cpu.forward(x, weight, none, none, none, none, False, *options, none, scratch, y)
        found.append(y[:, :, : (34 - kernel[1]) // stride])
        windows = np.lib.stride_tricks.sliding_window_view(
            np.pad(x.astype(np.float64), [(0, 0), (padding, padding), (padding, padding), (0, 0)]), kernel, (1, 2)
        )[:, ::stride, ::stride]
        np.testing.assert_allclose(y, np.einsum("nijcuv,uvco->nijo", windows, weight), rtol=0, atol=1e-5 * abs(y).max())
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("taps", "step"), [(2, 1), (3, 1), (3, 2), (5, 1), (7, 1)])
def test_the_gradient_of_all_taps(dtype: str, taps: int, step: int, accumulate: bool) -> None:
    """The memory around the sums must not change; lines of at least 3 pixels; any number of rows."""
    for width in widths(dtype)[: 2 * len(GRADIENT_HEIGHTS) - 2]:
        high, low = GRADIENT_HEIGHTS[1 if width <= widths(dtype)[1] else 2]
        for lines, length, rows in ((1, 3, 1), (2, 4, high), (3, 9, high + 1), (1, 30, low), (2, 5, 3 * high)):
            random = np.random.default_rng(rows * 100 + length)
            pixel, wide = rows + 1, (length - 1) * step + taps  # a row is a channel of the only line of the window
            a = random.standard_normal(3 + lines * wide * pixel).astype(dtype)
            b = random.standard_normal((lines * length + 1, width + 2 + panel_width(a))).astype(dtype)
            a_rows, c_rows, c_tap = np.arange(rows), random.permutation(rows) * (width + 2), rows * (width + 2)
            a_lines = np.array([(line * wide + i * step) * pixel for line in range(lines) for i in range(length)])
            before = random.standard_normal(7 + taps * c_tap + panel_width(a)).astype(dtype)
            x, dy = a[3:].reshape(lines, wide, pixel).astype(np.float64), b[:-1, 1 : 1 + width]
            expected = before.astype(np.float64)
            for q, c_row in enumerate(c_rows):
                for t in range(taps):
                    row = expected[7 + c_row + t * c_tap :][:width]
                    numbers = x[:, t : t + (length - 1) * step + 1 : step, q].reshape(-1)
                    row[:] = numbers @ dy + (row if accumulate else 0)
            c, other = before.copy(), before.copy()
            b_step, b = b.shape[1], b.reshape(-1)
            line_gradient(taps, step, lines, length, accumulate, a, a_rows, a_lines, pixel, 3, b, 1, b_step, c, c_rows,
                          c_tap, 7, width, 0)  # fmt: skip
            pairs = [(t, q) for t in range(taps) for q in range(rows)]
            places, sums = np.array([(t * pixel + q, c_rows[q] + t * c_tap) for t, q in pairs]).T.copy()
            panel(len(pairs), a_lines.size, accumulate, a, a_lines, places, 3, b, 1, b_step, other, sums, 7, width,
                  False, b, 0, b)  # fmt: skip
            np.testing.assert_allclose(c, expected, rtol=0, atol=TOLERANCE[dtype] * abs(expected).max())
            np.testing.assert_array_equal(c, other)
